import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.encoding.chats import chat_of, named_media

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "uuid": "a"}
SOUND = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}, "uuid": "s"}


def chat(*parts: object, **fields: object) -> bytes:
    message = {"role": "user", "content": list(parts)}
    return msgspec.json.encode({"model": "m", "messages": [message], **fields})


def test_media_are_found_in_their_order_and_once() -> None:
    other = IMAGE | {"uuid": "b", "image_url": "data:image/png;base64,BB=="}
    text = {"type": "text", "text": "?"}
    found = named_media(chat(text, IMAGE, other, SOUND, IMAGE))
    assert list(found) == ["a", "b", "s"]
    assert msgspec.json.decode(found["a"]) == IMAGE


def test_a_part_is_passed_on_byte_for_byte() -> None:
    part = b'{"uuid":"a",  "type":"image_url","image_url":{"url":"data:x,\\u0041"}}'
    body = b'{"messages":[{"role":"user","content":[' + part + b"]}]}"
    found = named_media(body)["a"]
    assert found == part
    assert part in chat_of(found)
    assert msgspec.json.decode(chat_of(found)).keys() == {"messages"}


def test_a_response_becomes_a_chat() -> None:
    url = "data:image/png;base64,AA=="
    image = {"type": "input_image", "image_url": url, "detail": "auto", "uuid": "a"}
    answer = {"type": "function_call_output", "output": [image | {"uuid": "b"}]}
    message = {"role": "user", "content": [{"type": "input_text", "text": "?"}, image]}
    found = named_media(msgspec.json.encode({"input": [message, answer, {"role": "user"}]}))
    part = {"type": "image_url", "image_url": {"url": url}}
    assert {name: msgspec.json.decode(one) for name, one in found.items()} == {
        "a": part | {"uuid": "a"},
        "b": part | {"uuid": "b"},
    }
    assert named_media(b'{"input": "a text"}') == named_media(b'{"input": [1, 2]}') == {}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "data:", "uuid": "a"},
        IMAGE | {"uuid": None},
        IMAGE | {"uuid": 7},
        IMAGE | {"uuid": ""},
        IMAGE | {"type": ["image_url"]},
        IMAGE | {"type": None},
        IMAGE | {"image_url": {"url": "https://example.com/a.png"}},
        IMAGE | {"image_url": None},
        SOUND | {"input_audio": {"format": "wav"}},
        "a text",
        None,
        7,
    ],
)
def test_what_cannot_be_encoded_apart_is_left_out(part: object) -> None:
    assert named_media(chat(part, SOUND)) == {
        "s": msgspec.json.encode(SOUND),
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"messages": 1}',
        b'{"messages": [1]}',
        b'{"messages": [{"content": "a text"}, {}, {"content": null}]}',
        b'{"messages": [{"content": [{"type": "\\ud800", "uuid": "a"}]}]}',
    ],
)
def test_what_is_no_chat_has_no_media(body: bytes) -> None:
    assert named_media(body) == {}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.lists(values | st.fixed_dictionaries({"type": values, "uuid": values}), max_size=4))
def test_no_part_raises(parts: list[object]) -> None:
    named_media(chat(*parts))
