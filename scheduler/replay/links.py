"""Links that change while the replay runs: a schedule of rates, and the fluid queue before it.

A link sends first what was emitted first, at its present rate while there is anything to send
(`scheduler.planning.load.queueing`, rule 2). So the landing time of a transfer is known once all of
it was emitted, because later bytes cannot delay it. Loss lowers the rate by what is sent again, and
by more if the congestion control reduces its rate because of it. Other traffic takes its bytes
first.

Links may share an uplink, which is a queue of the same kind. A byte has landed when its link and
its uplinks have carried it; all of them begin with it at once.

This file knows no requests and no observers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """The state of a link from `at_s` on. What is None stays as it was.

    `rate_factor` is the part of the rate that is left under random loss, besides what is sent
    again. It is 1 for BBR, which does not reduce its rate because of loss.
    """

    at_s: float
    bytes_per_s: float | None = None
    loss: float | None = None
    rate_factor: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ValueError(f"at_s is {self.at_s!r}; it must be finite and not negative")
        if self.bytes_per_s is not None and not 0 <= self.bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s!r}; it must not be negative")
        if self.loss is not None and not 0 <= self.loss < 1:
            raise ValueError(f"loss is {self.loss!r}; it must be a share below 1")
        if self.rate_factor is not None and not 0 < self.rate_factor <= 1:
            raise ValueError(f"rate_factor is {self.rate_factor!r}; it must be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTraffic:
    """Other senders use `bytes_per_s` of the link from `from_s` until `until_s`."""

    from_s: float
    until_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.from_s < self.until_s and self.bytes_per_s >= 0):
            raise ValueError(
                f"other traffic from {self.from_s:g} to {self.until_s:g} s at "
                f"{self.bytes_per_s:g} bytes/s: times must ascend, the rate not be negative"
            )


@dataclass(frozen=True)
class RateSchedule:
    """What a link carries over time: piece i holds from `times_s[i]` until the next piece begins.

    `rates` are what its transfers get together, bytes/s; 0 is an outage.
    """

    times_s: Sequence[float]
    """Ascending from 0."""
    rates: Sequence[float]
    losses: Sequence[float]
    base_bytes_per_s: float = field(init=False)
    """The rate at the start."""
    is_constant: bool = field(init=False)

    def __post_init__(self) -> None:
        if not self.times_s or self.times_s[0] != 0 or list(self.times_s) != sorted(self.times_s):
            raise ValueError(f"times_s {list(self.times_s)!r} must ascend from 0")
        if not len(self.times_s) == len(self.rates) == len(self.losses):
            raise ValueError("times_s, rates and losses must be of one length")
        object.__setattr__(self, "base_bytes_per_s", self.rates[0])
        object.__setattr__(self, "is_constant", len(self.times_s) == 1)

    @classmethod
    def of(
        cls,
        bytes_per_s: float,
        changes: Iterable[LinkChange] = (),
        others: Iterable[OtherTraffic] = (),
        outages: Iterable[tuple[float, float]] = (),
    ) -> RateSchedule:
        """A link with this rate, its changes, other traffic on it, and its outages as (from,
        until).

        Other traffic leaves at least a hundredth of the rate: fair sharing never takes everything.
        """
        steps = sorted(changes, key=lambda change: change.at_s)
        taken, cuts = list(others), list(outages)
        edges = {0.0, *(c.at_s for c in steps), *(at_s for cut in cuts for at_s in cut)}
        edges |= {at_s for o in taken for at_s in (o.from_s, o.until_s)}
        times = sorted(edges)
        rates, losses = [], []
        for at_s in times:
            rate, loss = _present(bytes_per_s, steps, at_s)
            used = sum(o.bytes_per_s for o in taken if o.from_s <= at_s < o.until_s)
            is_cut = any(begin_s <= at_s < end_s for begin_s, end_s in cuts)
            rates.append(0.0 if is_cut else max(rate - used * (1 - loss), 0.01 * rate))
            losses.append(loss)
        return cls(tuple(times), tuple(rates), tuple(losses))

    def rate_at(self, at_s: float) -> float:
        """The rate at one moment, bytes/s; before 0 it is that at 0."""
        return self.rates[max(0, bisect_right(self.times_s, at_s) - 1)]

    def loss_at(self, at_s: float) -> float:
        return self.losses[max(0, bisect_right(self.times_s, at_s) - 1)]

    def lowest(self, from_s: float, until_s: float) -> float:
        """The lowest rate in a span, bytes/s."""
        first = max(0, bisect_right(self.times_s, from_s) - 1)
        last = max(first, bisect_right(self.times_s, until_s) - 1)
        return min(self.rates[first : last + 1])

    def since_change_s(self, at_s: float) -> float:
        """How long the present piece has lasted; infinite in the first piece."""
        piece = bisect_right(self.times_s, at_s) - 1
        return at_s - self.times_s[piece] if piece > 0 else math.inf


Emitted = tuple[float, ...]
"""The bytes that had been emitted altogether at some moment: at the link, and at each uplink."""


class ReplayLink:
    """The fluid queue of one link, updated from event to event. Time must not go back."""

    __slots__ = (
        "_clock_s",
        "_piece",
        "backlog_bytes",
        "delay_s",
        "expected_inflow",
        "inflow",
        "schedule",
        "sent_bytes",
        "skipped_bytes",
        "uplinks",
    )

    def __init__(
        self,
        schedule: RateSchedule,
        delay_s: float = 0.0,
        uplinks: Sequence[ReplayLink] = (),
    ) -> None:
        self.schedule = schedule
        self.uplinks = uplinks
        """Its bytes cross these as well, together with those of other links."""
        self.delay_s = delay_s
        """How long a byte is in flight, seconds."""
        self.inflow = 0.0
        """What prefills emit now, bytes/s."""
        self.expected_inflow = 0.0
        """The same, with what they emit at their ends spread over them, bytes/s."""
        self.backlog_bytes = 0.0
        self.sent_bytes = 0.0
        self.skipped_bytes = 0.0
        """Bytes of transfers that were given up and never sent."""
        self._clock_s = 0.0
        self._piece = 0

    @property
    def rate(self) -> float:
        """The rate at the time of the last update, bytes/s."""
        return self.schedule.rates[self._piece]

    def advance(self, now_s: float) -> None:
        """Let time pass until `now_s`, also at uplinks."""
        for uplink in self.uplinks:
            uplink.advance(now_s)
        if now_s <= self._clock_s:
            return
        times, rates = self.schedule.times_s, self.schedule.rates
        # The rate changes within the span, so each piece is worked out by itself.
        while self._piece + 1 < len(times) and times[self._piece + 1] <= now_s:
            self._flow(times[self._piece + 1], rates[self._piece])
            self._piece += 1
        self._flow(now_s, rates[self._piece])

    def change(self, now_s: float, inflow_change: float, burst_bytes: float = 0.0) -> None:
        """Change the rate at which KVCache is emitted from now on, and emit `burst_bytes` at
        once.
        """
        self.advance(now_s)
        # Sums of floats may end a little below 0.
        self.inflow = max(0.0, self.inflow + inflow_change)
        self.backlog_bytes += burst_bytes
        for uplink in self.uplinks:
            uplink.change(now_s, inflow_change, burst_bytes)

    def expect(self, inflow_change: float) -> None:
        """Change `expected_inflow`."""
        self.expected_inflow = max(0.0, self.expected_inflow + inflow_change)
        for uplink in self.uplinks:
            uplink.expect(inflow_change)

    def available(self, rate: float) -> float:
        """The part of its `rate` that others leave it at its uplinks: what they do not emit, or a
        fair part where all emit more than an uplink carries. Bytes/s.
        """
        own = self.expected_inflow
        for uplink in self.uplinks:
            total = uplink.expected_inflow
            fair = uplink.rate * own / total if total > 0 else uplink.rate
            rate = min(rate, max(uplink.rate - (total - own), fair))
        return rate

    @property
    def waiting_bytes(self) -> float:
        """The backlog before new bytes. What waits at an uplink counts as the bytes that would take
        as long at the link's rate.
        """
        waiting = self.backlog_bytes
        for uplink in self.uplinks:
            if uplink.rate > 0:
                waiting = max(waiting, uplink.backlog_bytes * self.rate / uplink.rate)
        return waiting

    def skip(self, now_s: float, transfer: Emitted, num_bytes: float) -> None:
        """Drop what was not sent of a transfer of `num_bytes` that was given up."""
        for queue, emitted in zip((self, *self.uplinks), transfer, strict=True):
            queue.advance(now_s)
            unsent = emitted - queue.sent_bytes - queue.skipped_bytes
            queue._drop(max(0.0, min(num_bytes, unsent)))

    def _drop(self, num_bytes: float) -> None:
        skipped = min(self.backlog_bytes, num_bytes)
        self.backlog_bytes -= skipped
        self.skipped_bytes += skipped

    @property
    def emitted_bytes(self) -> Emitted:
        """All bytes emitted so far. With this value at its last byte, `landed_s` says when a
        transfer lands.
        """
        return tuple(
            q.sent_bytes + q.skipped_bytes + q.backlog_bytes for q in (self, *self.uplinks)
        )

    def landed_s(self, emitted: Emitted) -> float:
        """When the first `emitted` of all bytes have arrived; infinite if they never do."""
        queues = zip((self, *self.uplinks), emitted, strict=True)
        return max(queue._carried_s(number) for queue, number in queues) + self.delay_s

    def _carried_s(self, emitted_bytes: float) -> float:
        left = emitted_bytes - self.sent_bytes - self.skipped_bytes
        at_s = self._clock_s
        times, rates = self.schedule.times_s, self.schedule.rates
        for piece in range(self._piece, len(times)):
            rate = rates[piece]
            end_s = times[piece + 1] if piece + 1 < len(times) else math.inf
            if left <= 0:
                return at_s
            if rate > 0 and at_s + left / rate <= end_s:
                return at_s + left / rate
            left -= rate * (end_s - at_s) if rate else 0.0
            at_s = end_s
        return math.inf

    def _flow(self, until_s: float, rate: float) -> None:
        passed_s = until_s - self._clock_s
        if passed_s <= 0:
            return
        before = self.backlog_bytes
        came = self.inflow * passed_s
        after = before + came - rate * passed_s
        self.backlog_bytes = after if after > 0 else 0.0
        self.sent_bytes += before + came - self.backlog_bytes
        self._clock_s = until_s


def _present(bytes_per_s: float, steps: Sequence[LinkChange], at_s: float) -> tuple[float, float]:
    """(bytes/s that arrive, loss) at one moment, without other traffic."""
    loss, factor = 0.0, 1.0
    for step in steps:
        if step.at_s > at_s:
            break
        bytes_per_s = bytes_per_s if step.bytes_per_s is None else step.bytes_per_s
        loss = loss if step.loss is None else step.loss
        factor = factor if step.rate_factor is None else step.rate_factor
    return bytes_per_s * (1 - loss) * factor, loss
