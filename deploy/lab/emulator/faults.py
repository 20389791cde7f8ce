"""Faults of an emulated link as commands, and the plan of when they happen.

The commands are the control protocol of the relay: one JSON object per line, whose field `op` names
the command. `FaultPlan` has the faults that wait for a byte count. No sockets and no clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Direction = Literal["forward", "backward"]
"""forward: from the client of the relay to its target; backward: the replies."""
Scope = Literal["forward", "backward", "both"]


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    pass


class _Fault(_Command, frozen=True):
    """When a fault begins and ends.

    It begins when `after_bytes` more have entered the link (0: at once), counted in `direction`
    (forward if that is "both"). It heals by itself after `for_s` (0: never).
    """

    direction: Scope = "both"
    after_bytes: int = 0
    for_s: float = 0.0


class Cut(_Fault, frozen=True, tag="cut"):
    """Close every connection, lose what is inside, and refuse new connections until healed."""


class Reset(_Fault, frozen=True, tag="reset"):
    """Send a TCP reset on every open connection, once. New connections are accepted."""


class Blackhole(_Fault, frozen=True, tag="blackhole"):
    """Accept and swallow: senders see success, and nothing arrives.

    Connections that lost bytes in this way are reset when the link heals, since their streams have
    a hole.
    """


class Stall(_Fault, frozen=True, tag="stall"):
    """Freeze: nothing is read, delivered or lost. After healing everything goes on."""


class Flip(_Fault, frozen=True, tag="flip"):
    """Invert the bits of the byte that enters after `after_bytes` more in `direction` ("both" means
    forward).
    """


class Configure(_Command, frozen=True, tag="configure"):
    """Change the shape of the link. None keeps a value."""

    rate_bytes_per_s: float | None = None
    rtt_s: float | None = None
    jitter_s: float | None = None


class Heal(_Command, frozen=True, tag="heal"):
    """End every fault, and forget planned ones."""


class Report(_Command, frozen=True, tag="report"):
    """Ask for the counters, with which every command is answered."""


class Quit(_Command, frozen=True, tag="quit"):
    """Close everything and exit."""


Fault = Cut | Reset | Blackhole | Stall | Flip
Command = Cut | Reset | Blackhole | Stall | Flip | Configure | Heal | Report | Quit


class DirectionReport(msgspec.Struct, frozen=True):
    """The counters of one direction.

    Instants are CLOCK_MONOTONIC seconds, comparable across processes of one machine; None before
    the first byte.
    """

    in_bytes: int
    out_bytes: int
    held_bytes: int
    swallowed_bytes: int
    flipped_bytes: int
    first_in_s: float | None
    last_in_s: float | None
    first_out_s: float | None
    last_out_s: float | None


class LinkReport(msgspec.Struct, frozen=True):
    """The counters of the whole relay at `now_s` (CLOCK_MONOTONIC)."""

    now_s: float
    rate_bytes_per_s: float
    rtt_s: float
    jitter_s: float
    is_cut: bool
    stalled: list[Direction]
    swallowing: list[Direction]
    planned: int
    open_connections: int
    accepted_connections: int
    failed_connections: int
    forward: DirectionReport
    backward: DirectionReport
    cpu_s: float


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a command: a report, or what was wrong with it."""

    report: LinkReport | None = None
    error: str = ""


class FaultPlan:
    """Faults that wait for a byte count, by direction."""

    def __init__(self) -> None:
        self._waiting: dict[Direction, list[tuple[int, Fault]]] = {"forward": [], "backward": []}

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def add(self, fault: Fault, counted_bytes: dict[Direction, int]) -> None:
        """Plan `fault`, counted from the present bytes. ValueError for negative numbers."""
        if fault.after_bytes < 0 or fault.for_s < 0:
            raise ValueError("after_bytes and for_s cannot be negative")
        direction: Direction = "backward" if fault.direction == "backward" else "forward"
        waiting = self._waiting[direction]
        waiting.append((counted_bytes[direction] + fault.after_bytes, fault))
        waiting.sort(key=lambda planned: planned[0])

    def bytes_until_next(self, direction: Direction, counted_bytes: int) -> int | None:
        """Bytes that may enter before the next fault of `direction`; None if no fault waits."""
        waiting = self._waiting[direction]
        return max(0, waiting[0][0] - counted_bytes) if waiting else None

    def pop_due(self, direction: Direction, counted_bytes: int) -> list[Fault]:
        """Remove and return the faults whose count is reached."""
        waiting = self._waiting[direction]
        due = [fault for at_bytes, fault in waiting if at_bytes <= counted_bytes]
        self._waiting[direction] = waiting[len(due) :]
        return due

    def clear(self) -> None:
        for waiting in self._waiting.values():
            waiting.clear()
