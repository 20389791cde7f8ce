"""`peer_ours` that also tells what its CPU time was spent on: `hello` has it, in seconds so far.

`kernel` is the calls that send and receive, `checksum` the sums over bodies. Both run without the
GIL, so threads share them among cores. What is left of a process's CPU time is Python, which holds
the GIL: a second of it for a second of time is all that one process has.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import peer_ours
from peer_end import Place

from transport.sockets import PlainStream
from transport.wire import frame_reader, frames

_counters: list[Counter[str]] = []  # of all threads, so that none waits for another
_own = threading.local()


def _counter() -> Counter[str]:
    found: Counter[str] | None = getattr(_own, "counter", None)
    if found is None:
        found = _own.counter = Counter()
        _counters.append(found)
    return found


def _timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        begin_ns = time.thread_time_ns()
        try:
            return function(*arguments, **options)
        finally:
            _counter()[part] += time.thread_time_ns() - begin_ns

    return call


def parts() -> dict[str, float]:
    """CPU seconds by part, of all threads since the start."""
    total: Counter[str] = Counter()
    for counter in list(_counters):
        total.update(counter)
    return {part: 1e-9 * total[part] for part in ("kernel", "checksum")}


class Receiving(peer_ours.Receiving):
    def hello(self) -> dict[str, Any]:
        return {**super().hello(), "parts": parts()}


class Sending(peer_ours.Sending):
    def hello(self) -> dict[str, Any]:
        return {"parts": parts()}


def open_end(place: Place) -> Receiving | Sending:
    for name in ("send", "send_some", "receive", "try_receive"):
        setattr(PlainStream, name, _timed("kernel", getattr(PlainStream, name)))
    checksum = _timed("checksum", frames.checksum)
    for module in (frames, frame_reader):
        vars(module)["checksum"] = checksum
    return Sending(place) if place.side == "sender" else Receiving(place)
