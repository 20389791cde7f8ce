"""Every address that an engine would fetch is found, and nothing else of a body changes."""

import json
from typing import Any

import pytest
from steps import at_once

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.inbound import InboundRequest, parsing_request, with_fetched_media
from deploy.gateway.intake.media_urls import Medium

URL = "https://example.org/a.png"
DATA = "data:image/png;base64,AAAA"


def parse(body: Any) -> InboundRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    kinds: dict[str, Kind] = {"query": "rerank", "messages": "chat", "input": "embeddings"}
    kind = next((kinds[name] for name in kinds if name in json.loads(raw)), "completion")
    return at_once(parsing_request(kind, raw, template_tokens=0))


def found(body: Any) -> list[tuple[str, str, str]]:
    return [(one.place, one.kind, one.url) for one in parse(body).media_addresses]


def filled(request: InboundRequest, medium: Medium) -> bytes:
    media = dict.fromkeys(request.media_addresses, medium)
    return at_once(with_fetched_media(request, media)).body


def turn(*parts: Any, name: str = "messages") -> dict[str, Any]:
    return {name: [{"role": "user", "content": list(parts)}]}


PARTS: list[tuple[Any, str, str]] = [
    ({"type": "image_url", "image_url": {"url": URL}}, "image_url", "image"),
    ({"type": "image_url", "image_url": URL}, "image_url", "image"),
    ({"type": "input_image", "image_url": URL, "detail": "auto"}, "image_url", "image"),
    ({"type": "video_url", "video_url": {"url": URL}}, "video_url", "video"),
    ({"type": "audio_url", "audio_url": {"url": URL}}, "audio_url", "audio"),
    ({"type": "image", "source": {"type": "url", "url": URL}}, "source", "image"),
    ({"image_url": URL}, "image_url", "image"),
    # With a name, engines take a field for a medium whatever the type says.
    ({"type": "text", "text": "x", "uuid": "y", "image_url": URL}, "image_url", "image"),
]


@pytest.mark.parametrize(("part", "field", "kind"), PARTS)
@pytest.mark.parametrize("name", ["messages", "input"])
def test_each_kind_of_part(part: Any, field: str, kind: str, name: str) -> None:
    said = {"type": "text", "text": f"{URL} image_url"}
    body = turn(said, part, name=name)
    assert found(body) == [(f"{name}[0].content[1].{field}", kind, URL)]
    escaped = (
        json.dumps(body)
        .replace("image_url", "\\u0069mage_url")
        .replace('"source"', '"sou\\u0072ce"')
    )
    assert found(escaped.encode()) == found(body)


def test_addresses_in_what_tools_answered() -> None:
    image = {"type": "image", "source": {"type": "url", "url": URL}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
    assert found(turn(result)) == [("messages[0].content[0].content[0].source", "image", URL)]
    output = {"type": "function_call_output", "call_id": "1"}
    output["output"] = [{"type": "input_image", "image_url": URL}]  # type: ignore[assignment]
    assert found({"input": [output]}) == [("input[0].output[0].image_url", "image", URL)]


def test_addresses_in_what_is_embedded_or_ranked() -> None:
    image = {"type": "image_url", "image_url": {"url": URL}}
    body = {
        "query": {"content": [image]},
        "documents": ["a text", {"content": [image]}],
    }
    assert found({"input": [[{"role": "user", "content": [image]}]]}) == [
        ("input[0][0].content[0].image_url", "image", URL)
    ]
    assert sorted(place for place, _, _ in found(body)) == [
        "documents[1].content[0].image_url",
        "query.content[0].image_url",
    ]


@pytest.mark.parametrize(
    "body",
    [
        turn({"type": "image_url", "image_url": {"url": DATA}}),
        turn({"type": "image_url", "image_url": {"url": "DATA:image/png;base64,AAAA"}}),
        turn({"type": "image_url", "image_url": None, "uuid": "x"}),
        turn({"type": "image", "source": {"type": "base64", "data": "AAAA"}}),
        turn({"type": "text", "text": URL}, "image_url"),
        # What a tool was called with, and what tools there are, is text for the model.
        turn({"type": "tool_use", "input": {"image_url": URL}}),
        turn({"type": "text", "text": ""}) | {"tools": [{"image_url": URL}]},
        {"prompt": f"image_url {URL}"},
        {"input": [1, 2, 3], "user": "image_url"},
        {"input": "image_url"},
    ],
)
def test_what_is_no_address(body: Any) -> None:
    assert found(body) == []


@pytest.mark.parametrize(
    "body",
    [
        turn({"type": "image_url", "image_url": {"url": 5}}),
        turn({"type": "image_url", "image_url": [URL]}),
        turn({"type": "image", "source": URL}),
        turn(5, {"type": "image_url", "image_url": URL}),
        {"messages": 5},
        {"messages": [5, {"content": [{"image_url": URL}]}]},
        {"messages": [{"content": [[{"image_url": URL}]]}]},
        {"input": [1, {"content": [{"image_url": URL}]}]},
    ],
)
def test_what_cannot_be_read_is_refused(body: Any) -> None:
    with pytest.raises(ApiError, match="must be"):
        found(body)


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "ftp://a/b", "data", "DAT:x", "http://"])
def test_whatever_is_no_data_uri_is_an_address(url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    assert found(turn(part)) == [("messages[0].content[0].image_url", "image", url)]


def test_media_take_the_place_of_their_addresses() -> None:
    parts = [part for part, _, _ in PARTS]
    body = turn({"type": "text", "text": "é"}, *parts) | {"seed": 1}
    raw = json.dumps(body, indent=1).encode().replace(b'"seed": 1', b'"seed": 1.0e0')
    full = filled(parse(raw), Medium("image/png", b"AAAA"))
    assert b"1.0e0" in full
    assert b"\\u00e9" in full
    assert found(full) == []
    text = json.dumps(body["messages"]).replace(URL, DATA)
    expected = json.loads(text)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    expected[0]["content"][6]["source"] = source
    expected[0]["content"][8]["uuid"] = json.loads(full)["messages"][0]["content"][8]["uuid"]
    assert json.loads(full)["messages"] == expected


def test_media_within_the_result_of_a_tool() -> None:
    image = {"type": "image", "source": {"type": "url", "url": URL}}
    body = turn({"type": "tool_result", "tool_use_id": "1", "content": [image, image]})
    (result,) = json.loads(filled(parse(body), Medium("image/gif", b"BBBB")))["messages"][0][
        "content"
    ]
    assert result["tool_use_id"] == "1"
    assert [one["source"]["data"] for one in result["content"]] == ["BBBB", "BBBB"]


def test_deep_nesting_is_left_to_engines() -> None:
    part: Any = {"type": "image_url", "image_url": {"url": URL}}
    for _ in range(100):
        part = {"type": "tool_result", "content": [part]}
    assert found(turn(part)) == []
    lists: Any = [part]
    for _ in range(100):
        lists = [lists]
    with pytest.raises(ApiError, match="must be"):
        found({"messages": lists})
