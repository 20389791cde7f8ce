"""Names of media in a body are mixed with a salt; everything else stays."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from steps import at_once

from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.inbound import parsing_request

KINDS: dict[str, Kind] = {
    "messages": "chat",
    "query": "rerank",
    "input": "responses",
    "queries": "score",
    "text_1": "score",
    "data_1": "score",
}


def chat(*content: Any) -> dict[str, Any]:
    return {"seed": 1, "messages": [{"role": "user", "content": part} for part in content]}


def parsed(raw: bytes, salt: str | None) -> Any:
    """The request, whose `cache_salt` is `salt` already."""
    kind = next(kind for name, kind in KINDS.items() if f'"{name}"'.encode() in raw)
    return at_once(parsing_request(kind, raw, template_tokens=0, salt_of=lambda own: salt))


def renamed(body: Any, salt: str = "salt") -> Any:
    request = parsed(json.dumps(body | {"cache_salt": salt}).encode(), salt)
    changed = json.loads(request.body)
    del changed["cache_salt"]
    return changed


@pytest.mark.parametrize(
    "body",
    [
        chat("a uuid"),
        chat(["a uuid", {"type": "text", "text": "uuid"}]),
        chat([{"type": "image_url", "image_url": {"url": "x", "uuid": "y"}, "uuid": None}]),
        chat(None, {"uuid": None}),
        {"uuid": "x", "messages": [{"role": "tool", "uuid": "x"}]},
        {"uuid": 1, "messages": "x"},
        {"query": "q", "documents": [{"uuid": "x", "text": "y", "content": "z"}, "uuid"]},
    ],
)
def test_nothing_else_changes(body: Any) -> None:
    assert renamed(body) == body


def test_a_body_without_names_keeps_its_bytes() -> None:
    raw = b' {"messages": [ {"content":[{"type" : "image_url"}]}]}\n'
    assert parsed(raw, None).body is raw


@pytest.mark.parametrize("name", ["logo", "", 5, 1.5, ["a"], False])
def test_every_name_depends_on_the_salt(name: Any) -> None:
    body = chat("first", [{"type": "image_url", "uuid": name, "image_url": None}, "then"])
    names = set()
    for salt in ("a" * 64, "b" * 64):
        once, again = renamed(body, salt), renamed(body, salt)
        assert once == again
        part = once["messages"][1]["content"][0]
        names.add(part.pop("uuid"))
        expected = chat("first", [{"type": "image_url", "image_url": None}, "then"])
        assert once == expected
    assert len(names) == 2
    assert str(name) not in names


@pytest.mark.parametrize(
    "place",
    [
        lambda compared: {"query": compared, "documents": ["a", compared]},
        lambda compared: {"queries": [compared, "a"], "items": compared},
        lambda compared: {"data_1": compared, "data_2": [compared]},
        lambda compared: {"text_1": compared, "text_2": [compared]},
        lambda compared: {"input": [compared]},
    ],
)
def test_names_in_what_is_compared_depend_on_the_salt_as_well(
    place: Callable[[Any], Any],
) -> None:
    medium = {"type": "image_url", "image_url": {"url": "data:"}, "uuid": "logo"}
    own = renamed(chat([medium]))["messages"][0]["content"][0]
    assert own["uuid"] != "logo"
    assert renamed(place({"content": [medium]})) == place({"content": [own]})


def test_names_in_what_tools_answered_depend_on_the_salt_as_well() -> None:
    """A name of another's picture, beside a picture of one's own, would change their answers."""
    medium = {"type": "input_image", "image_url": "data:", "uuid": "content-" + "0" * 64}
    places: list[Any] = [
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [medium]}]},
        chat([{"type": "tool_result", "tool_use_id": "1", "content": [medium]}]),
        {"input": [[{"role": "user", "content": [medium]}]]},
    ]
    for body in places:
        assert "content-" not in json.dumps(renamed(body)), body


def test_of_two_names_the_last_one_counts() -> None:
    body = chat([{"uuid": "a"}]) | {"cache_salt": "s"}
    raw = json.dumps(body).replace('"uuid": "a"', '"uuid": "b", "\\u0075uid": "a"')
    told = json.loads(parsed(raw.encode(), "s").body)
    assert told["messages"] == renamed(chat([{"uuid": "a"}]), "s")["messages"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def named(*parts: Any, salt: str | None = None) -> tuple[list[Any], bool]:
    request = parsed(json.dumps(chat(list(parts))).encode(), salt)
    content = json.loads(request.body)["messages"][0]["content"]
    return content, not request.shape.has_bound_media


def test_a_medium_is_named_by_its_bytes_and_kind() -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}
    video = {"type": "video_url", "video_url": IMAGE["image_url"]}
    said = {"type": "text", "text": "what is it?"}
    (text, *media), is_named = named(said, IMAGE, other, video, IMAGE)
    assert text == said
    assert is_named
    names = [part.pop("uuid") for part in media]
    assert media == [IMAGE, other, video, IMAGE]
    assert names[0] == names[3]
    assert len(set(names)) == 3


def test_the_same_medium_has_another_name_with_another_salt() -> None:
    names = {named(IMAGE, salt=salt)[0][0]["uuid"] for salt in (None, "a", "b")}
    assert len(names) == 3
    # Neither does a salt count for a part of what it is put before.
    assert renamed(chat([{"uuid": "bc"}]), "a") != renamed(chat([{"uuid": "c"}]), "ab")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}},
        {"type": "image_url", "image_url": {"url": None}},
        IMAGE | {"video_url": "data:"},
        {"type": "input_audio", "input_audio": "data:"},
        {"type": "image_pil", "image_pil": "data:"},
        {"image_url": "data:"},
    ],
)
def test_a_medium_that_cannot_be_named_leaves_all_as_they_are(part: Any) -> None:
    assert named(IMAGE, part) == ([IMAGE, part], False)


def test_no_name_of_a_client_is_one_made_of_content() -> None:
    parts, _ = named(IMAGE)
    (mixed,) = renamed(chat([IMAGE | {"uuid": parts[0]["uuid"]}]))["messages"][0]["content"]
    assert mixed["uuid"] not in (parts[0]["uuid"], "")
    assert not mixed["uuid"].startswith("content-")
