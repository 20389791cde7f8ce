"""Names of media in a body are mixed with a salt; everything else stays."""

import json
from typing import Any

import pytest

from deploy.gateway.intake.media_names import with_own_names


def chat(*content: Any) -> dict[str, Any]:
    return {"seed": 1, "messages": [{"role": "user", "content": part} for part in content]}


def renamed(body: Any, salt: str = "salt") -> Any:
    return json.loads(with_own_names(json.dumps(body).encode(), salt))


@pytest.mark.parametrize(
    "body",
    [
        chat("a uuid"),
        chat(["a uuid", {"type": "text", "text": "uuid"}]),
        chat([{"type": "image_url", "image_url": {"url": "x", "uuid": "y"}, "uuid": None}]),
        chat(None, 5, {"uuid": "x"}),
        {"uuid": "x", "messages": [{"role": "tool", "uuid": "x"}]},
        {"uuid": 1, "messages": "x"},
        {"uuid": 1, "messages": [1]},
        {"uuid": 1},
    ],
)
def test_nothing_else_changes(body: Any) -> None:
    assert renamed(body) == body


def test_a_body_without_names_keeps_its_bytes() -> None:
    raw = b' {"messages": [ {"content":[{"type" : "image_url"}]}]}\n'
    assert with_own_names(raw, "salt") is raw


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


def test_of_two_names_the_last_one_counts() -> None:
    raw = json.dumps(chat([{"uuid": "a"}])).replace('"uuid": "a"', '"uuid": "b", "\\u0075uid": "a"')
    assert json.loads(with_own_names(raw.encode(), "s")) == renamed(chat([{"uuid": "a"}]), "s")
