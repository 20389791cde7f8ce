"""When media of a request are encoded apart from its prefill, and how long that takes.

The instance that prefills can encode too. It begins with that when the prefill's turn comes, and
prefills nothing else meanwhile. To encode apart is of use if it ends not much later:

    apart <= wait + own_cost * own

`apart` is the time until the encode instances have encoded all media that wait and these, `wait`
the time that the prefill waits anyway, and `own` what the prefill instance takes to encode.

Pure: reports go in. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heapreplace
from typing import Final

import msgspec

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.values import EncodeReason
from scheduler.reports import EncodeInstanceReport, EncodeReport, same_model

_MOST_PASSES: Final = 256
"""The passes that are looked at one by one."""


class EncodePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until media are encoded apart, and in one pass on an instance that prefills; None:
    too little is known. `reason` is not None if they should be left to that one.
    """

    apart_s: float | None = None
    own_s: float | None = None
    reason: EncodeReason | None = None


def predict(
    report: EncodeReport,
    model: str,
    num_tokens: int,
    *,
    wait_s: float = 0.0,
    own_cost: float = 2.0,
    own: EncodeLine | None = None,
) -> EncodePrediction:
    """What encoding `num_tokens` apart takes from now on, and whether it is of use. `own`: the
    passes of the instance that prefills; None: it encodes as fast as the encode instances.
    """
    usable = [item for item in report.instances if item.healthy and same_model(item.model, model)]
    if not usable:
        return EncodePrediction(reason=EncodeReason.NO_INSTANCE)
    apart_s = encoded_in_s(usable, report.waiting_tokens + num_tokens)
    own = own or _fastest(usable, num_tokens)
    if apart_s is None or own is None:
        return EncodePrediction()  # to encode there is how it becomes known
    own_s = own.seconds(num_tokens)
    is_late = apart_s > wait_s + own_cost * own_s
    reason = EncodeReason.WAIT_TOO_LONG if is_late else None
    return EncodePrediction(apart_s=apart_s, own_s=own_s, reason=reason)


def encoded_in_s(instances: Iterable[EncodeInstanceReport], num_tokens: int) -> float | None:
    """Seconds until these instances have encoded media of `num_tokens`, each pass within the budget
    of its instance, on the one that is free first. None if the times of none are known.
    """
    known = [(item, item.line) for item in instances if item.line is not None]
    if not known:
        return None
    free = [
        (item.busy_s, number, line, item.budget_tokens or num_tokens)
        for number, (item, line) in enumerate(known)
    ]
    heapify(free)
    done_s, left = 0.0, num_tokens
    for _ in range(_MOST_PASSES):
        if left <= 0:
            return done_s
        free_s, number, line, budget = free[0]
        taken = min(left, budget)
        free_s += line.seconds(taken)
        left -= taken
        done_s = max(done_s, free_s)
        heapreplace(free, (free_s, number, line, budget))
    # The rest of a deep queue is spread by the rates of the instances.
    rate = sum(budget / max(line.seconds(budget), 1e-9) for _, _, line, budget in free)
    return done_s + left / rate


def _fastest(instances: Iterable[EncodeInstanceReport], num_tokens: int) -> EncodeLine | None:
    """The line of the fastest instance; None: none is known."""
    lines = [item.line for item in instances if item.line is not None]
    return min(lines, key=lambda line: line.seconds(num_tokens), default=None)
