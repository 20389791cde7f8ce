"""Reading request bodies: what routing sees, and bodies that are only appended to."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import at_once

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.inbound import (
    parsing_request,
    with_fetched_media,
    with_kv_transfer_params,
)
from deploy.gateway.intake.media_urls import Medium
from kvmanager.token_ids import TokenIds
from scheduler.live.learning.prompt_length import Media, PromptContent
from scheduler.routing.decision import Reason, one_engine_reason

PARAMS = {"prfaas": {"role": "consumer", "runs": [[0, 4]]}}


def parse(body: Any, kind: Kind = "completion") -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return at_once(parsing_request(kind, raw, template_tokens=10))


def test_a_text_prompt_is_bounded_by_its_bytes() -> None:
    raw = b'{"prompt": "hello, world"}'
    request = parse(raw)
    assert request.shape.bound_tokens == len(raw) + 10
    assert request.shape.num_prompt_tokens == 4
    assert request.content == PromptContent(text_bytes=14)
    assert not request.shape.is_exact
    assert request.token_ids is None
    assert request.body is raw


def test_a_prompt_of_ids_is_counted() -> None:
    request = parse({"prompt": [5, 6, 7], "cache_salt": "s", "priority": -2, "request_id": "r"})
    assert request.token_ids == TokenIds.of([5, 6, 7])
    assert request.shape.is_exact
    assert request.shape.num_prompt_tokens == 3
    assert request.content == PromptContent(num_ids=3)
    assert (request.cache_salt, request.priority, request.request_id) == ("s", -2, "r")


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 2},
        {"prompt": [[5, 6, 7]]},
        {"prompt": [5, -6]},
        {"prompt": [5, 6.5]},
        {"prompt": [5, "x"]},
        {"prompt": [1 << 40]},
        {"prompt": []},
    ],
)
def test_ids_the_engine_would_change_or_judge_are_left_to_it(fields: dict[str, Any]) -> None:
    assert parse({"prompt": [5, 6, 7]} | fields).token_ids is None


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "is_unusual"),
    [
        ("x", 1, False),
        (["x"], 1, False),
        (["x", "y"], 2, False),
        ([[1, 2]], 1, False),
        ([[1], [2], [3]], 3, False),
        ([], 1, True),
        ([{"a": 1}], 1, True),
        (None, 1, True),
        (7, 1, True),
    ],
)
def test_prompts_are_counted(prompt: Any, num_prompts: int, is_unusual: bool) -> None:
    shape = parse({"prompt": prompt}).shape
    assert (shape.num_prompts, shape.is_unusual) == (num_prompts, is_unusual)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"echo": True, "logprobs": 1}, "has_prompt_logprobs"),
        ({"echo": "true"}, "has_echo"),
        ({"prompt_logprobs": 0}, "has_prompt_logprobs"),
        ({"use_beam_search": True}, "has_beam_search"),
        ({"prompt_embeds": "AAAA"}, "has_prompt_embeds"),
    ],
)
def test_fields_that_keep_a_request_on_one_engine(fields: dict[str, Any], flag: str) -> None:
    plain = getattr(parse({"prompt": "x"}).shape, flag)
    odd = getattr(parse({"prompt": "x"} | fields).shape, flag)
    assert (plain, odd) == (False, True)


@pytest.mark.parametrize(
    ("n", "num_choices"), [(None, 1), (1, 1), (3, 3), ("3", 0), (2.0, 0), (-1, 0), (0, 0), ([], 0)]
)
def test_choices_are_counted_where_their_number_is_plain(n: Any, num_choices: int) -> None:
    assert parse({"prompt": "x", "n": n}).shape.num_choices == num_choices
    assert one_engine_reason(parse({"prompt": [1, 2, 3], "n": n}).shape) is (
        None if num_choices else Reason.SEVERAL_CHOICES
    )


@pytest.mark.parametrize("kind", ["chat", "responses", "messages", "tokenize"])
def test_only_completions_have_a_prompt_of_ids(kind: Kind) -> None:
    asked = {"prompt": [5, 6, 7], "messages": [], "input": "x"}
    assert parse(asked, kind).token_ids is None


def test_only_completions_and_chats_have_choices() -> None:
    asked = {"model": "m", "n": 3, "input": "x"}
    assert parse(asked, "responses").shape.num_choices == 1


def test_null_fields_are_absent_fields() -> None:
    nulls = dict.fromkeys(
        ["n", "echo", "prompt_logprobs", "use_beam_search", "prompt_embeds", "model", "cache_salt"]
    )
    request = parse({"prompt": [1, 2], "truncate_prompt_tokens": None} | nulls)
    assert request.shape == parse({"prompt": [1, 2]}).shape
    assert request.model == ""


@pytest.mark.parametrize(
    ("content", "has_bound_media"),
    [
        ("text", False),
        (None, False),
        ([{"type": "text", "text": "x"}], False),
        (["plain"], False),
        ([{"type": "text", "text": "image_url"}, {"type": "refusal"}], False),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], False),
        ([{"type": "image_url", "image_url": "data:"}], False),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}], False),
        ([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}], True),
        ([{"type": "image_url", "image_url": {"url": "data:"}, "uuid": "mine"}], True),
        ([{"type": "image_url", "image_url": {"url": "data:"}, "video_url": "data:"}], True),
        ([{"type": "image_url", "image_url": None}], True),
        ([{"type": "image_embeds", "image_embeds": "AAAA"}], True),
        ([{"type": "input_audio"}], True),
        ([{"image_url": "x"}], True),
        ([], False),
        ([{"text": "x", "type": "text"}], False),
        ([{"url": "x", "type": "audio_url"}], True),
        ({"type": "text"}, True),
    ],
)
def test_chat_content_other_than_text(content: Any, has_bound_media: bool) -> None:
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
    assert parse(body, "chat").shape.has_bound_media is has_bound_media


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}, Media.IMAGE),
        ({"type": "input_image", "image_url": "A" * 100_000}, Media.IMAGE),
        ({"type": "input_audio", "input_audio": {"data": "A" * 100_000}}, Media.AUDIO),
        ({"type": "audio_url", "audio_url": {"url": "http://a"}}, Media.AUDIO),
        ({"type": "video_url", "video_url": {"url": "http://a"}}, Media.VIDEO),
        ({"data": "A" * 100_000}, Media.IMAGE),
    ],
)
def test_media_count_by_part_and_not_by_bytes(part: Any, kind: Media) -> None:
    text = {"type": "text", "text": "x" * 400}
    plain, request = parse(chat(text), "chat"), parse(chat(text, part, part), "chat")
    assert request.content.media == {kind: 2}
    assert abs(request.content.text_bytes - plain.content.text_bytes) < 100
    # However few bytes name an image, it may become thousands of tokens.
    assert request.shape.bound_tokens is None
    assert request.shape.num_prompt_tokens > 2 * 700


def test_embeddings_count_by_their_vectors() -> None:
    vectors = "A" * (4096 * 2 * 4 // 3 * 50)
    request = parse({"prompt": "", "prompt_embeds": vectors})
    assert request.content.media == {Media.EMBEDS: len(vectors) + 2}
    assert request.shape.num_prompt_tokens == 50
    assert not request.shape.has_bound_media


@pytest.mark.parametrize(
    ("prompt", "num_ids"), [([[1, 2], [3]], 3), ([[111_111, 222_222]], 2), ([5, 6.5, 7], 3)]
)
def test_ids_that_only_the_engine_may_judge_are_still_counted(prompt: Any, num_ids: int) -> None:
    request = parse({"prompt": prompt})
    assert request.content == PromptContent(num_ids=num_ids)
    assert (request.shape.num_prompt_tokens, request.shape.is_exact) == (num_ids, False)


def test_only_what_a_template_shows_the_model_counts() -> None:
    plain = parse(chat("hi"), "chat").content.text_bytes
    tools = [{"type": "function", "function": {"name": "f" * 300}}]
    assert parse(chat("hi", tools=tools), "chat").content.text_bytes > plain + 300
    schema = {"response_format": {"json_schema": {"a": "x" * 900}}, "logit_bias": {"1": 2}}
    assert parse(chat("hi", **schema), "chat").content.text_bytes == plain


def test_characters_count_as_many_bytes_however_json_spells_them() -> None:
    body = chat("".join(chr(0x4E00 + i) for i in range(500)))
    escaped = parse(json.dumps(body).encode(), "chat").content.text_bytes
    plain = parse(json.dumps(body, ensure_ascii=False).encode(), "chat").content.text_bytes
    assert escaped == plain


@pytest.mark.parametrize(
    ("most", "num_tokens"), [(50, 50), (5000, 1000), (-1, 1000), ("x", 1000), (None, 1000)]
)
def test_a_prompt_that_the_engine_cuts_is_no_longer_than_that(most: Any, num_tokens: int) -> None:
    request = parse({"prompt": "x" * 3998, "truncate_prompt_tokens": most})
    assert request.shape.num_prompt_tokens == num_tokens


def test_chat_knows_no_echo_of_prompts_but_needs_messages() -> None:
    assert not parse({"messages": [], "echo": True}, "chat").shape.has_echo
    assert parse({"prompt": "x"}, "chat").shape.is_unusual


def test_tools_that_speak_of_images_are_no_images() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "image_url", "function": {"parameters": {"image_url": {}}}}],
    }
    assert not parse(body, "chat").shape.has_bound_media


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    body=st.dictionaries(st.text(), json_values, max_size=5),
    indent=st.none() | st.integers(0, 2),
    tail=st.sampled_from(["", " ", "\r\n\t "]),
)
def test_params_are_appended_and_win(body: dict[str, Any], indent: int | None, tail: str) -> None:
    raw = (json.dumps(body, indent=indent) + tail).encode()
    appended = with_kv_transfer_params(raw, PARAMS)
    assert json.loads(appended) == body | {"kv_transfer_params": PARAMS}
    assert appended.startswith(raw.rstrip()[:-1].rstrip())


@given(raw=st.binary(max_size=200))
def test_random_bytes_are_an_api_error_or_an_object(raw: bytes) -> None:
    with contextlib.suppress(ApiError):
        at_once(parsing_request("chat", raw, template_tokens=0))
        assert raw.strip().startswith(b"{")


@given(
    body=st.dictionaries(
        st.sampled_from(
            ["model", "prompt", "messages", "n", "echo", "prompt_logprobs", "priority", "x"]
        ),
        json_values,
    ),
    kind=st.sampled_from(["completion", "chat"]),
)
def test_fields_of_any_type_do_not_break_parsing(body: dict[str, Any], kind: Kind) -> None:
    with contextlib.suppress(ApiError):
        assert parse(body, kind).shape.num_prompt_tokens >= 0


def test_a_plain_echo_may_be_prefilled_elsewhere() -> None:
    shape = parse({"prompt": "x", "echo": True}).shape
    assert not shape.has_echo
    assert not shape.has_prompt_logprobs


@pytest.mark.parametrize(
    ("fields", "is_unusual"),
    [
        ({"input": "x"}, False),
        ({"input": [{"role": "user", "content": "x"}]}, False),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}]}, False),
        ({"input": "x", "tools": [{"type": "web_search_preview"}]}, True),
        ({"input": "x", "tools": 7}, True),
        ({"input": 7}, True),
        ({}, True),
        ({"input": "x", "previous_input_messages": [{}]}, True),
    ],
)
def test_responses_that_one_engine_must_serve(fields: dict[str, Any], is_unusual: bool) -> None:
    assert parse(fields, "responses").shape.is_unusual is is_unusual


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "background"])
def test_responses_that_need_a_memory_are_refused(field: str) -> None:
    with pytest.raises(ApiError, match="whole conversation") as caught:
        parse({"input": "x", field: "r1"}, "responses")
    assert (caught.value.status, caught.value.param) == (400, field)
    assert not parse({"input": "x", "background": False}, "responses").shape.is_unusual


def test_media_in_the_answer_of_a_tool_is_seen() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
    turns = [{"role": "user", "content": [result]}]
    assert parse({"messages": turns}, "messages").shape.has_bound_media
    result["content"] = "text"
    assert not parse({"messages": turns}, "messages").shape.has_bound_media
    output = {"type": "function_call_output", "output": [{"type": "input_image"}]}
    assert parse({"input": [output]}, "responses").shape.has_bound_media


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "uuid"}], "\xff": 1}',
        b'{"messages": [{"role": "user", "content": [{"uuid": 1, "\xff": 1}]}]}',
    ],
)
def test_a_name_beside_bytes_that_are_no_text_is_a_client_error(body: bytes) -> None:
    with pytest.raises(ApiError, match="not UTF-8") as refused:
        parse(body, "chat")
    assert refused.value.status == 400


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def tenants_request(salt: str | None, *parts: Any) -> Any:
    body = {"cache_salt": "own", "messages": [{"role": "user", "content": list(parts)}]}
    raw = json.dumps(body).encode()
    return at_once(parsing_request("chat", raw, template_tokens=10, salt_of=lambda own: salt))


@pytest.mark.parametrize("part", [IMAGE, IMAGE | {"uuid": "logo"}])
def test_names_and_the_salt_are_those_of_the_tenant(part: Any) -> None:
    names = set()
    for salt in ("ann", "bob"):
        request = tenants_request(salt, part)
        body = json.loads(request.body)
        assert request.cache_salt == body["cache_salt"] == salt
        names.add(body["messages"][0]["content"][0]["uuid"])
    assert len(names) == 2
    assert "logo" not in names


def test_a_medium_has_one_name_whether_the_client_or_the_gateway_brought_its_bytes() -> None:
    request = tenants_request("ann", {"type": "image_url", "image_url": {"url": "http://a"}})
    media = dict.fromkeys(request.media_addresses, Medium("image/png", b"AAAA"))
    fetched = at_once(with_fetched_media(request, media))
    assert json.loads(fetched.body) == json.loads(tenants_request("ann", IMAGE).body)


def test_megabytes_of_media_are_looked_at_in_steps() -> None:
    def num_steps(part: Any) -> int:
        raw = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
        return sum(1 for _ in parsing_request("chat", raw, template_tokens=10))

    assert num_steps({"type": "text", "text": "short"}) == 0
    assert num_steps(IMAGE) > 0
