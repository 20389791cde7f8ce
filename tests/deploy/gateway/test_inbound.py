"""Reading request bodies: what routing sees, and bodies that are only appended to."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.gateway.errors import ApiError
from deploy.gateway.inbound import Kind, parse_request, with_kv_transfer_params

PARAMS = {"prfaas": {"role": "consumer", "runs": [[0, 4]]}}


def parse(body: Any, kind: Kind = "completion") -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(kind, raw, template_tokens=10)


def test_a_text_prompt_is_bounded_by_its_bytes() -> None:
    raw = b'{"prompt": "hello"}'
    request = parse(raw)
    assert request.shape.num_prompt_tokens == len(raw) + 10
    assert not request.shape.is_exact
    assert request.token_ids is None
    assert request.body is raw


def test_a_prompt_of_ids_is_counted() -> None:
    request = parse({"prompt": [5, 6, 7], "cache_salt": "s", "priority": -2, "request_id": "r"})
    assert request.token_ids == [5, 6, 7]
    assert request.shape.is_exact
    assert request.shape.num_prompt_tokens == 3
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
        ({"n": 2}, "num_choices"),
        ({"n": "1"}, "num_choices"),
        ({"echo": True}, "has_echo"),
        ({"echo": "true"}, "has_echo"),
        ({"prompt_logprobs": 0}, "has_prompt_logprobs"),
        ({"use_beam_search": True}, "has_beam_search"),
        ({"prompt_embeds": "AAAA"}, "has_prompt_embeds"),
    ],
)
def test_fields_that_keep_a_request_on_one_engine(fields: dict[str, Any], flag: str) -> None:
    plain = getattr(parse({"prompt": "x"}).shape, flag)
    odd = getattr(parse({"prompt": "x"} | fields).shape, flag)
    assert (plain, odd) in ((False, True), (1, 2))


def test_null_fields_are_absent_fields() -> None:
    nulls = dict.fromkeys(
        ["n", "echo", "prompt_logprobs", "use_beam_search", "prompt_embeds", "model", "cache_salt"]
    )
    request = parse({"prompt": [1, 2], "truncate_prompt_tokens": None} | nulls)
    assert request.shape == parse({"prompt": [1, 2]}).shape
    assert request.model == ""


@pytest.mark.parametrize(
    ("content", "is_multimodal"),
    [
        ("text", False),
        (None, False),
        ([{"type": "text", "text": "x"}], False),
        (["plain"], False),
        ([{"type": "text", "text": "image_url"}, {"type": "refusal"}], False),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], True),
        ([{"type": "input_audio"}], True),
        ([{"image_url": "x"}], True),
        (7, True),
        ({"type": "text"}, True),
    ],
)
def test_chat_content_other_than_text(content: Any, is_multimodal: bool) -> None:
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
    assert parse(body, "chat").shape.is_multimodal is is_multimodal


def test_chat_knows_no_echo_of_prompts_but_needs_messages() -> None:
    assert not parse({"messages": [], "echo": True}, "chat").shape.has_echo
    assert parse({"prompt": "x"}, "chat").shape.is_unusual


def test_tools_that_speak_of_images_are_no_images() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "image_url", "function": {"parameters": {"image_url": {}}}}],
    }
    assert not parse(body, "chat").shape.is_multimodal


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
        parse_request("chat", raw, template_tokens=0)
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
    if isinstance(body.get("model"), str | None):
        assert parse(body, kind).shape.num_prompt_tokens >= 0
    else:
        with pytest.raises(ApiError, match="model must be a string"):
            parse(body, kind)
