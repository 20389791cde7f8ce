"""The turns of a request and their parts, wherever the APIs have them: one walk over a body.

Whatever else is to be known of the parts is asked of what the walk found. What has a form that is
not known here is refused and not passed over: an engine that can read it would find media in it
that nobody has looked at. All values that are not changed keep their bytes, but for texts in lists.

Pure; does not know what is done with a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Raw

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.body_checks import MOST_ITEMS, too_many
from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.fields import TURNS, Body
from deploy.gateway.intake.raw_fields import is_set, num_bytes, optional, starts_with
from kvmanager.token_ids import Steps

STEP_ITEMS: Final = 128
"""Turns or parts of one step, which takes about a millisecond."""
_CONTENTS: Final = ("content", "output")
"""The fields of a turn with its parts: `output` is what a tool answered, in OpenAI's responses."""
_TOOL_RESULT: Final = "tool_result"
_TEXTS: Final = frozenset(
    {
        "text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning_text",
        "summary_text",
        "input_text",
        "output_text",
        "tool_reference",
        "tool_use",
        _TOOL_RESULT,
    }
)
"""Types of parts that are no medium."""
_Object: TypeAlias = dict[str, Raw]
Path: TypeAlias = tuple[str | int, ...]
"""The names and indexes that lead to a part."""


_turns_decoder: Final = msgspec.json.Decoder(_Object | list[_Object | list[_Object] | str])
"""Engines take several conversations, in lists, in one request for embeddings."""
_parts_decoder: Final = msgspec.json.Decoder(_Object | list[_Object | str])
_object_decoder: Final = msgspec.json.Decoder(_Object)
_str_decoder: Final = msgspec.json.Decoder(str)


class Part(msgspec.Struct, frozen=True):
    """One part. `fields` may be changed; `type` is "" if it has none, and `nbytes` its length."""

    path: Path
    type: str
    fields: dict[str, Any]
    is_text: bool
    nbytes: int

    @property
    def place(self) -> str:
        """Where it is in the body, such as "messages[0].content[1]"."""
        return place_of(self.path)


@dataclass(slots=True)
class Conversation:
    """What a walk found. `text_bytes` are those of its texts, and of what is no part of a turn;
    `sizes` are the items and bytes of each field.
    """

    parts: list[Part] = field(default_factory=list)
    text_bytes: int = 0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    _turns: dict[str, Any] = field(default_factory=dict)
    _num_turns: int = 0
    _num_parts: int = 0

    def written(self, body: bytes) -> bytes:
        """`body`, of which it is, with its parts as they are now."""
        fields: dict[str, Any] = _object_decoder.decode(body)
        return msgspec.json.encode(fields | self._turns)

    def walk(self, name: str, value: Raw) -> Steps[None]:
        """Add what is in the field `name` of the body."""
        if starts_with(value, b'"'):
            self.text_bytes += num_bytes(value)
            self.sizes[name] = 1, num_bytes(value)
            return
        turns = optional(_turns_decoder, value)
        if turns is None:
            # Prompts of ids, which have no media. Embeddings may be asked of them.
            ids = bytes(value) if name == "input" else b"{"
            if b"{" in ids:
                raise unreadable(name, "a text, or a list of texts or objects")
            self.sizes[name] = max(1, ids.count(b"[") - 1), len(ids)
            return
        if len(turns) > MOST_ITEMS:
            raise too_many(name, MOST_ITEMS, "items", name)
        self._turns[name] = turns
        self.sizes[name] = len(turns) if isinstance(turns, list) else 1, num_bytes(value)
        for path, turn in _each_turn((name,), turns):
            self._num_turns += 1
            if self._num_turns > MOST_ITEMS:
                raise too_many(name, MOST_ITEMS, "items", name)
            if not self._num_turns % STEP_ITEMS:
                yield
            if isinstance(turn, str):
                continue
            for key, inner in turn.items():
                self.text_bytes += num_bytes(inner)
                if key in _CONTENTS and is_set(inner) and not starts_with(inner, b'"'):
                    yield from self._content(path, turn, key)

    def _content(
        self, path: Path, holder: dict[str, Any], key: str, *, is_inner: bool = False
    ) -> Steps[None]:
        """Add the parts in the field `key` of a turn, or of a part of one."""
        path = (*path, key)
        parts = optional(_parts_decoder, holder[key])
        if parts is None:
            raise unreadable(place_of(path), "a text, or a list of texts or objects")
        holder[key] = parts
        is_object = isinstance(parts, dict)
        for index, part in enumerate([parts] if is_object else parts):
            self._num_parts += 1
            if self._num_parts > MOST_ITEMS:
                raise too_many(str(path[0]), MOST_ITEMS, "parts", str(path[0]))
            if not self._num_parts % STEP_ITEMS:
                yield
            if isinstance(part, str):
                continue
            at = path if is_object else (*path, index)
            kind, nbytes = _type(part), sum(map(num_bytes, part.values()))
            # No API has text in the form of one object, but engines may know media in it.
            is_text = kind in _TEXTS and not is_object
            self.parts.append(Part(at, kind, part, is_text, nbytes))
            if not is_text:
                self.text_bytes -= nbytes
            # Engines look for media one level down, and no further.
            inner = part.get("content") if kind == _TOOL_RESULT and not is_inner else None
            if is_set(inner) and not starts_with(inner, b'"'):
                yield from self._content(at, part, "content", is_inner=True)


def walking(kind: Kind, fields: Body) -> Steps[Conversation]:
    """The conversation of a request, found in short steps. Raises `ApiError` 400 for more turns or
    parts than are taken, and for those that cannot be read.
    """
    found = Conversation()
    for name in TURNS[kind]:
        value = getattr(fields, name)
        if is_set(value):
            yield from found.walk(name, value)
    return found


def unreadable(place: str, what: str) -> ApiError:
    """The error for a value whose form is not known here."""
    return ApiError(400, "invalid_type", f"{place} must be {what}.", param=place)


def place_of(path: Path) -> str:
    """Such as "messages[0].content[1]"."""
    inner = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path[1:])
    return f"{path[0]}{''.join(inner)}"


def _each_turn(path: Path, turns: Any) -> Iterator[tuple[Path, Any]]:
    """Every turn or text in `turns`, with its path."""
    if not isinstance(turns, list):
        yield path, turns
        return
    for index, turn in enumerate(turns):
        if isinstance(turn, list):
            yield from _each_turn((*path, index), turn)
        else:
            yield (*path, index), turn


def _type(part: dict[str, Any]) -> str:
    # It may be written with escapes.
    return optional(_str_decoder, part.get("type")) or ""
