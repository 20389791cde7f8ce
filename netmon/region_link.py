"""One link between two clusters, made from the reports that agents at its sending end give of their
paths.

A path is one agent's connections to one receiving agent. All paths from cluster to cluster are
assumed to share one link:

- Achieved rates, backlogs and transfers add up.
- The available rate is known only while somebody fills the link. It is then the sum of the rates of
  the paths that are being measured, plus what the other paths carry beside them. It stays when they
  stop, and ages. Paths that were measured one after the other do not add up, since each saw the
  whole link or a part of it. A floor may raise the rate, not lower it.
- Round trip, queueing delay and loss are those of the worst path with traffic.
- The condition is the worst of the paths that are not down. The link is down when all its paths
  are, or all that have something to send: the link is not to blame for one receiver that died.

Pure; time is an argument. Does not know how reports arrive, nor what follows from them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from netmon.estimate import MAX_BACKLOG_S, LinkCondition, PathReport, backlog_s
from netmon.rates import CONFIRMING

STALE_S: Final = 5.0
"""A path counts no longer when its last report is older than this. Chosen: agents answer at least
every 2 s, also without news.
"""
RATE_KEPT_S: Final = 600.0
"""A measured rate holds until something contradicts it. From this age on it counts for routing as a
floor: the link may be faster by now, and only prompts that are sent can show it where nobody
probes. Chosen: several times the two minutes between the largest probes (`netmon.probing`).
"""
MEASURING_S: Final = 1.5
"""A path is being measured when it was full within this time. Chosen: reports of busy links are 0.5
s apart, and one may be late.
"""
STEP_S: Final = 0.5
NUM_STEPS: Final = 120
"""Chosen: a minute of a busy link, more than a line of a terminal shows."""

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class LinkPath(msgspec.Struct, frozen=True):
    """One agent's connections to one endpoint.

    `agent` and `to` are nodes, "cluster/node"; `to` is "" when the node there is not known.
    `heard_age_s`: time since the agent gave this report.
    """

    agent: str
    to: str
    report: PathReport = msgspec.field(name="view")
    heard_age_s: float

    @property
    def wants_to_send(self) -> bool:
        return self.report.num_transfers > 0 or self.report.estimate.backlog_bytes > 0

    @property
    def is_busy(self) -> bool:
        return self.wants_to_send or self.report.estimate.achieved_bytes_per_s > 0


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two clusters, as routing sees it. All numbers are finite and none is
    negative.

    `available_bytes_per_s` is the rate that all its transfers get together when they ask for more;
    None before the first measurement. `backlog_bytes` wait at the sender and go first.
    `inflow_bytes_per_s` is the rate at which running prefills will go on to emit KVCache into it.
    `age_s` is the time since the link's last sample; an old sample says nothing about its state.
    `is_floor`: nobody asked for more than the link carried, or not for long, so it may be faster.
    """

    state: LinkCondition = LinkCondition.CLEAR
    available_bytes_per_s: float | None = None
    rtt_s: float = 0.0
    backlog_bytes: float = 0.0
    inflow_bytes_per_s: float = 0.0
    age_s: float = 0.0
    is_floor: bool = False


class LinkNow(msgspec.Struct, frozen=True, kw_only=True):
    """A link between clusters. Rates count bytes before coding.

    `available_bytes_per_s` None: never measured. `is_floor`: the real rate may be higher.
    `rate_age_s`: time since the rate was measured or confirmed. `age_s`: time since any sender of
    the link reported; None: none has. `lately_bytes_per_s`: what it carried at each report of its
    last minute, oldest first.
    """

    source: str
    target: str
    name: str = ""
    condition: LinkCondition = LinkCondition.CLEAR
    reason: str = ""
    condition_s: float = 0.0
    available_bytes_per_s: float | None = None
    is_floor: bool = False
    rate_age_s: float | None = None
    achieved_bytes_per_s: float = 0.0
    utilisation: float = 0.0
    rtt_s: float = 0.0
    base_rtt_s: float = 0.0
    queueing_delay_s: float = 0.0
    loss: float = 0.0
    backlog_bytes: int = 0
    backlog_s: float = 0.0
    num_transfers: int = 0
    oldest_queued_s: float | None = None
    num_paths: int = 0
    age_s: float | None = None
    lately_bytes_per_s: list[float] = []

    def view(self) -> LinkView:
        """The link as routing sees it. A link without any report gets the greatest age."""
        rate, age_s = self.available_bytes_per_s, self.rate_age_s
        is_clear = self.condition is LinkCondition.CLEAR
        is_old = is_clear and age_s is not None and age_s > RATE_KEPT_S
        return LinkView(
            state=self.condition,
            available_bytes_per_s=rate,
            rtt_s=self.rtt_s,
            backlog_bytes=self.backlog_bytes,
            age_s=MAX_BACKLOG_S if self.age_s is None else self.age_s,
            is_floor=rate is not None and (self.is_floor or is_old),
        )


class LinkRate(msgspec.Struct, frozen=True, array_like=True):
    """A link's rate as it is kept over a restart: what it was `age_s` ago."""

    source: str
    target: str
    bytes_per_s: NotNegative
    is_floor: bool
    age_s: NotNegative


class RegionLink:
    """Remembers one link's rate and past. Call `observe` whenever an agent reports a path."""

    def __init__(self, source: str, target: str, name: str = "") -> None:
        """`name`: the operators' name for the link."""
        self.source = source
        self.target = target
        self.name = name
        self._paths: Sequence[LinkPath] = ()
        self._observed_s = 0.0
        self._bytes_per_s: float | None = None  # stays while the link is idle or down
        self._is_floor = False
        self._rate_at_s = 0.0
        self._lately: deque[float] = deque(maxlen=NUM_STEPS)
        self._stepped_s = -math.inf

    def observe(self, paths: Sequence[LinkPath], now_s: float) -> None:
        """Take in all paths of the link with their last reports, and their ages at `now_s`."""
        self._paths, self._observed_s = paths, now_s
        fresh = self._fresh(now_s)
        self._measure([path for path in fresh if path.report.estimate.is_up], now_s)
        if now_s - self._stepped_s >= STEP_S:
            self._lately.append(_achieved(fresh))
            self._stepped_s = now_s

    def rate(self, now_s: float) -> LinkRate | None:
        """The rate for `remember`; None before one was found."""
        if self._bytes_per_s is None:
            return None
        age_s = max(0.0, now_s - self._rate_at_s)
        return LinkRate(self.source, self.target, self._bytes_per_s, self._is_floor, age_s)

    def remember(self, rate: LinkRate, now_s: float) -> None:
        """Start from a rate that was known before. What is measured replaces it."""
        if self._bytes_per_s is None:
            self._set_rate(rate.bytes_per_s, now_s - rate.age_s, is_floor=rate.is_floor)

    def now(self, now_s: float, heard_age_s: float | None = None) -> LinkNow:
        """The link's state. `heard_age_s`: time since any sender reported, even without paths."""
        fresh, rate = self._fresh(now_s), self._bytes_per_s
        condition, condition_s, reason = LinkCondition.CLEAR, 0.0, "nothing was sent lately"
        if fresh:
            worst = _worst(fresh)
            condition, reason = worst.report.condition, worst.report.reason
            condition_s = self._aged_s(worst, worst.report.condition_s, now_s)
            if len(fresh) > 1:
                reason = f"{worst.agent} to {worst.to or worst.report.endpoint}: {reason}"
        estimates = [path.report.estimate for path in fresh]
        ages_s = [self._aged_s(path, path.report.estimate.sample_age_s, now_s) for path in fresh]
        age_s = min(ages_s if heard_age_s is None else [*ages_s, heard_age_s], default=None)
        if age_s is not None and age_s > STALE_S:
            reason = f"none of its senders has reported for {age_s:.1f} s"
        # An idle path still reports the round trip of its last traffic, which says little now.
        busy = [path.report.estimate for path in fresh if path.is_busy] or estimates
        available = 0.0 if condition is LinkCondition.DOWN else rate
        achieved = _achieved(fresh)
        backlog_bytes = sum(item.backlog_bytes for item in estimates)
        oldest_s = [s for path in fresh if (s := path.report.oldest_queued_s) is not None]
        return LinkNow(
            source=self.source,
            target=self.target,
            name=self.name,
            condition=condition,
            reason=reason,
            condition_s=condition_s,
            available_bytes_per_s=available,
            is_floor=self._is_floor,
            rate_age_s=None if rate is None else max(0.0, now_s - self._rate_at_s),
            achieved_bytes_per_s=achieved,
            utilisation=min(1.0, achieved / available) if available else 0.0,
            rtt_s=max((item.rtt_s for item in busy), default=0.0),
            base_rtt_s=min((item.base_rtt_s for item in busy), default=0.0),
            queueing_delay_s=max((item.queueing_delay_s for item in busy), default=0.0),
            loss=max((item.loss for item in busy), default=0.0),
            backlog_bytes=backlog_bytes,
            backlog_s=0.0 if available is None else backlog_s(backlog_bytes, available),
            num_transfers=sum(path.report.num_transfers for path in fresh),
            oldest_queued_s=max(oldest_s, default=None),
            num_paths=len(fresh),
            age_s=age_s,
            lately_bytes_per_s=list(self._lately),
        )

    def _fresh(self, now_s: float) -> list[LinkPath]:
        def age_s(path: LinkPath) -> float:
            return self._aged_s(path, path.report.estimate.sample_age_s, now_s)

        return [path for path in self._paths if age_s(path) <= STALE_S]

    def _aged_s(self, path: LinkPath, age_s: float | None, now_s: float) -> float:
        """The age at `now_s` of what was `age_s` old in the agent's report; infinite for None."""
        if age_s is None:
            return math.inf
        return age_s + path.heard_age_s + max(0.0, now_s - self._observed_s)

    def _measure(self, paths: list[LinkPath], now_s: float) -> None:
        """Take the link's rate from the paths that are up."""

        def is_measured(path: LinkPath) -> bool:
            return self._aged_s(path, path.report.estimate.full_age_s, now_s) <= MEASURING_S

        measured = [path for path in paths if is_measured(path)]
        if measured:
            rate = sum(path.report.estimate.available_bytes_per_s for path in measured)
            beside = _achieved([path for path in paths if not is_measured(path)])
            self._set_rate(rate + beside, now_s, is_floor=False)
            return
        # One that was measured earlier, or is a floor, can only raise the rate or confirm it.
        for path in paths:
            estimate, before = path.report.estimate, self._bytes_per_s
            if estimate.age_s is None:
                continue
            rate = estimate.available_bytes_per_s
            at_s = now_s - self._aged_s(path, estimate.age_s, now_s)
            if before is None or (rate > before and at_s > self._rate_at_s):
                self._set_rate(rate, at_s, is_floor=estimate.is_floor)
            elif rate >= CONFIRMING * before:
                self._rate_at_s = max(self._rate_at_s, at_s)

    def _set_rate(self, bytes_per_s: float, at_s: float, *, is_floor: bool) -> None:
        self._bytes_per_s, self._rate_at_s, self._is_floor = bytes_per_s, at_s, is_floor


def _worst(paths: list[LinkPath]) -> LinkPath:
    """The path whose condition is the link's."""
    down = [path for path in paths if path.report.condition is LinkCondition.DOWN]
    wanting = [path for path in paths if path.wants_to_send]
    if len(down) == len(paths) or (wanting and all(path in down for path in wanting)):
        return down[0]
    others = [path for path in paths if path not in down]
    return max(others, key=lambda path: path.report.condition.severity)


def _achieved(paths: list[LinkPath]) -> float:
    return sum(path.report.estimate.achieved_bytes_per_s for path in paths)
