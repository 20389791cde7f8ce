"""Recordings of a live scheduler: their format, and playing one to the same object again.

A recording file is self-contained. It begins with a `Header`, which holds the scheduler's state at
that time, and goes on with an `Entry` for each event and its answer. Every frame is a little-endian
32-bit length and that many bytes of msgpack. Where events are lost, a `Gap` says how many, and a
new file begins with the state of the scheduler after them.

Playing lets the scheduler of the header take the events. Its answers must equal the recorded ones,
number by number, because an answer depends on nothing but the events before it. This file does not
know how files are named or rotated.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from scheduler.live.core import Event, LiveScheduler
from scheduler.live.events import DecisionEvent, FactEvent
from scheduler.live.feedback import FeedbackEvent
from scheduler.live.long_term.events import PlanDecisionEvent, PlanEvent
from scheduler.live.settings import LiveSettings
from scheduler.live.sharing.events import SharingEvent
from scheduler.replay.state import Node, StateError, nodes_of, object_of

FORMAT: Final = 9
# A longer frame is no recording, so it must not make the reader allocate its length.
LENGTH: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 1 << 30


class RecordingError(ValueError):
    """This version cannot play what was read; the message says why."""


class Header(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The start of a file.

    `state` is the scheduler before the first entry, `settings` its settings, `version` that of the
    program, and `started_at` the wall clock in seconds since 1970. In files it is packed.
    """

    format: int
    version: str
    started_at: float
    settings: LiveSettings
    state: bytes

    def packed(self) -> Header:
        """The header with its state compressed. It is mostly zeros: empty counts of traffic."""
        return msgspec.structs.replace(self, state=zlib.compress(self.state, 1))


class _Preface(msgspec.Struct, frozen=True, tag="Header", array_like=True):
    """The first fields of a header, which all formats have."""

    format: int
    version: str


class Entry(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An event, when it was taken, and its answer."""

    now_s: float
    event: DecisionEvent | FactEvent | FeedbackEvent | PlanEvent | SharingEvent
    answer: msgspec.Raw


class Gap(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`num_lost` events were taken before this and are in no file: the recorder had to drop
    them.
    """

    num_lost: int


Frame: TypeAlias = Header | Entry | Gap


def plain(value: object) -> object:
    """The value that msgspec writes for a read-only mapping of an event."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be recorded")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_frames: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Header | Entry | Gap)


def frame_of(value: Header | Gap) -> bytes:
    """The frame of a header or a gap."""
    return _framed(_encoder.encode(value))


def entry_frame(event: Event[Any], answer: object, now_s: float) -> bytes:
    """The frame of one event and its answer."""
    # Written as msgspec would encode an `Entry`, without making one: this runs at every event.
    return _framed(_encoder.encode(("Entry", now_s, event, answer)))


def header_of(live: LiveScheduler, version: str, started_at: float) -> Header:
    """The header of a new file, not packed: the scheduler as it is now."""
    # Views are worked out anew from reports.
    fields = {name: value for name, value in vars(live).items() if name != "_views"}
    state = _encoder.encode(nodes_of(fields))
    return Header(FORMAT, version, started_at, live.settings, state)


def frames_in(stream: io.BufferedIOBase) -> Iterator[Frame]:
    """All whole frames of a file. A frame that a crash cut off at the end is left out.

    Raises `RecordingError` for bytes that no recorder wrote.
    """
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        (nbytes,) = LENGTH.unpack(head)
        if nbytes > MAX_FRAME_BYTES:
            raise RecordingError(f"a frame of {nbytes} bytes: this is no recording")
        body = stream.read(nbytes)
        if len(body) < nbytes:
            return
        try:
            yield _frames.decode(body)
        except msgspec.MsgspecError as error:
            _check_format(body)
            raise RecordingError(f"a frame that cannot be read: {error}") from error


def scheduler_of(header: Header) -> LiveScheduler:
    """The scheduler in a packed header. Raises `RecordingError`."""
    _check_format(_encoder.encode(header))
    try:
        # Bounded, since a small file could unpack to more than the memory there is.
        state = zlib.decompressobj().decompress(header.state, MAX_FRAME_BYTES)
        fields = object_of(msgspec.msgpack.decode(state, type=list[Node]))
    except (zlib.error, msgspec.MsgspecError, StateError) as error:
        message = f"written by version {header.version}, whose state cannot be read: {error}"
        raise RecordingError(message) from error
    live = LiveScheduler(header.settings)
    expected = vars(live).keys() - {"_views"}
    if not isinstance(fields, dict) or fields.keys() != expected:
        raise RecordingError(
            f"written by version {header.version}, whose scheduler has other fields than this one's"
        )
    vars(live).update(fields)
    return live


def _check_format(body: bytes) -> None:
    """Raise `RecordingError` for a header of another format. Only the release that wrote it can
    play it: the state is that of its classes, and another release need not decide the same.
    """
    try:
        found = msgspec.msgpack.decode(body, type=_Preface)
    except msgspec.MsgspecError:
        return
    if found.format != FORMAT:
        raise RecordingError(
            f"format {found.format}, written by prfaas {found.version}: play it with that release; "
            f"this one plays format {FORMAT}"
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of an answer that differs from the recorded one. `number` counts events from 1."""

    number: int
    now_s: float
    event: str
    field: str
    recorded: object
    replayed: object


@dataclass(slots=True)
class Played:
    """The result of one or more files.

    `outcomes` counts the answers to each kind of question as pairs (recorded, replayed), in words.
    """

    num_events: int = 0
    num_decisions: int = 0
    num_lost: int = 0
    differences: list[Difference] = field(default_factory=list)
    outcomes: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)


def play(live: LiveScheduler, frames: Iterable[Frame], played: Played) -> None:
    """Let `live` take all events of one file, and note its answers in `played`."""
    for frame in frames:
        if isinstance(frame, Gap):
            played.num_lost += frame.num_lost
        elif isinstance(frame, Entry):
            played.num_events += 1
            _play_one(live, frame, played)


def _play_one(live: LiveScheduler, entry: Entry, played: Played) -> None:
    event: Event[Any] = entry.event
    name = type(event).__name__
    answer = _encoder.encode(live.take(event, entry.now_s))
    recorded = bytes(entry.answer)
    # Most events are no decisions and equal: comparing their bytes is enough.
    is_decision = isinstance(event, DecisionEvent | PlanDecisionEvent)
    if not is_decision and answer == recorded:
        return
    before, now = msgspec.msgpack.decode(recorded), msgspec.msgpack.decode(answer)
    if is_decision:
        played.num_decisions += 1
        words = _in_words(before), _in_words(now)
        played.outcomes.setdefault(name, Counter())[words] += 1
    if answer != recorded:
        played.differences += [
            Difference(played.num_events, entry.now_s, name, where, a, b)
            for where, a, b in _unequal("", before, now)
        ]


def _unequal(where: str, a: object, b: object) -> Iterator[tuple[str, object, object]]:
    """All leaves that differ, with their paths."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys(), key=str):
            yield from _unequal(f"{where}.{key}".lstrip("."), a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _unequal(f"{where}[{index}]", one, other)
    elif a != b and not (_is_nan(a) and _is_nan(b)):
        yield where or "answer", a, b


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _in_words(answer: Any) -> str:
    """A decision without its numbers."""
    match answer:
        case None:
            return "count it first"
        case {"target": target, "reason": reason}:
            return f"{target} ({reason})"
        case {"verdict": {"admitted": admitted, "reason": reason}}:
            return f"{'admitted' if admitted else 'refused'} ({reason})"
        case _:
            return ", ".join(_item_in_words(item) for item in answer) or "nothing"


def _item_in_words(item: dict[str, Any]) -> str:
    """A threshold, or the step of a plan, in words."""
    if "tokens" in item:
        return f"{item['cluster']} {item['tokens']:.0f}"
    return f"{item['model']} ({item['reason']})"


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body
