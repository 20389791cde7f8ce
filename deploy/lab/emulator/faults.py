"""What can go wrong with an emulated link, as commands, and the plan that says when they strike.

The commands are the control protocol of the relay (one JSON object a line, the field `op` names
the command). `FaultPlan` holds those that wait for a byte count. No sockets and no clock here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Direction = Literal["forward", "backward"]
"""forward: from whoever connected to the relay towards its target; backward: the replies."""
Scope = Literal["forward", "backward", "both"]


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    pass


class _Fault(_Command, frozen=True):
    """`after_bytes`: strike when so many more bytes entered the link (0: at once), counted in
    `direction` (forward where that is "both"). `for_s`: heal by itself after that time (0: stay).
    """

    direction: Scope = "both"
    after_bytes: int = 0
    for_s: float = 0.0


class Cut(_Fault, frozen=True, tag="cut"):
    """Close every connection, lose what is inside, refuse new ones until healed."""


class Reset(_Fault, frozen=True, tag="reset"):
    """Every open connection gets a TCP reset, once; new ones are welcome."""


class Blackhole(_Fault, frozen=True, tag="blackhole"):
    """Accept and swallow: senders see success, nothing arrives. Connections that lost bytes
    this way are reset when the link heals, since their streams have a hole."""


class Stall(_Fault, frozen=True, tag="stall"):
    """Freeze: nothing is read, delivered or lost; after healing everything goes on."""


class Flip(_Fault, frozen=True, tag="flip"):
    """Invert the bits of the byte that enters after `after_bytes` more in `direction` ("both"
    means forward)."""


class Configure(_Command, frozen=True, tag="configure"):
    """Change the shape of the link; None keeps what is set."""

    rate_bytes_per_s: float | None = None
    rtt_s: float | None = None
    jitter_s: float | None = None


class Heal(_Command, frozen=True, tag="heal"):
    """End every fault and forget those still planned."""


class Report(_Command, frozen=True, tag="report"):
    """Ask for the counters; every command is answered with them."""


class Quit(_Command, frozen=True, tag="quit"):
    """Close everything and exit."""


Fault = Cut | Reset | Blackhole | Stall | Flip
Command = Cut | Reset | Blackhole | Stall | Flip | Configure | Heal | Report | Quit


class DirectionReport(msgspec.Struct, frozen=True):
    """One direction so far. Instants are CLOCK_MONOTONIC seconds, comparable across processes
    of one machine; None before the first byte."""

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
    """The whole relay at `now_s` (CLOCK_MONOTONIC)."""

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
    """Answer to a command: a report, or what was wrong with it."""

    report: LinkReport | None = None
    error: str = ""


class FaultPlan:
    """Faults waiting for a byte count, per direction."""

    def __init__(self) -> None:
        self._waiting: dict[Direction, list[tuple[int, Fault]]] = {"forward": [], "backward": []}

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def add(self, fault: Fault, counted_bytes: dict[Direction, int]) -> None:
        """Plan `fault` from the bytes counted so far; ValueError for a negative `after_bytes`."""
        if fault.after_bytes < 0 or fault.for_s < 0:
            raise ValueError("after_bytes and for_s cannot be negative")
        direction: Direction = "backward" if fault.direction == "backward" else "forward"
        waiting = self._waiting[direction]
        waiting.append((counted_bytes[direction] + fault.after_bytes, fault))
        waiting.sort(key=lambda planned: planned[0])

    def bytes_until_next(self, direction: Direction, counted_bytes: int) -> int | None:
        """Bytes that may enter before the next fault of `direction`; None if none waits."""
        waiting = self._waiting[direction]
        return max(0, waiting[0][0] - counted_bytes) if waiting else None

    def pop_due(self, direction: Direction, counted_bytes: int) -> list[Fault]:
        """The faults whose count is reached; they are the caller's now."""
        waiting = self._waiting[direction]
        due = [fault for at_bytes, fault in waiting if at_bytes <= counted_bytes]
        self._waiting[direction] = waiting[len(due) :]
        return due

    def clear(self) -> None:
        for waiting in self._waiting.values():
            waiting.clear()
