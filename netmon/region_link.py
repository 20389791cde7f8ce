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
from dataclasses import dataclass
from typing import Final

import msgspec

from netmon.estimate import MAX_BACKLOG_S, LinkCondition, PathReport

STALE_S: Final = 5.0
"""A path counts no longer when its last report is older than this."""
RATE_KEPT_S: Final = 600.0
"""A measured rate counts as measured up to this age, which is several times the time between two
probes of an idle link (`netmon.probing.ProbeConfig`). After that the link may be faster.
"""
MEASURING_S: Final = 1.5
"""A path is being measured when it was full within this time."""
STEP_S: Final = 0.5
NUM_STEPS: Final = 120


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


class LinkStep(msgspec.Struct, frozen=True):
    """A link's state at a moment in the past."""

    age_s: float
    achieved_bytes_per_s: float
    available_bytes_per_s: float | None
    condition: LinkCondition


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two clusters, as routing sees it.

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

    def __post_init__(self) -> None:
        # One look at all of them, since every route makes some.
        if (
            0 <= (self.available_bytes_per_s or 0.0) < math.inf
            and 0 <= self.inflow_bytes_per_s < math.inf
            and 0 <= self.rtt_s < math.inf
            and 0 <= self.backlog_bytes < math.inf
            and 0 <= self.age_s < math.inf
        ):
            return
        for name in ("rtt_s", "backlog_bytes", "inflow_bytes_per_s", "age_s"):
            _check(name, getattr(self, name))
        _check("available_bytes_per_s", self.available_bytes_per_s or 0.0)


class LinkNow(msgspec.Struct, frozen=True, kw_only=True):
    """A link between clusters. Rates count bytes before coding.

    `available_bytes_per_s` None: never measured. `is_floor`: the real rate may be higher.
    `rate_age_s`: time since the rate was measured or confirmed. `age_s`: time since any sender of
    the link reported; None: none has. `steps`: its past, oldest first, where that was asked for.
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
    steps: list[LinkStep] = []

    def view(self) -> LinkView:
        """The link as routing sees it. A link without any report gets the greatest age."""
        rate, age_s = self.available_bytes_per_s, self.rate_age_s
        is_clear = self.condition is LinkCondition.CLEAR
        # A measurement does not hold for ever: otherwise a link that was slow once, and that nobody
        # probes, would never be tried again.
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
    bytes_per_s: float
    is_floor: bool
    age_s: float


@dataclass(slots=True)
class _Rate:
    """The link's available rate, and when it was found."""

    bytes_per_s: float
    at_s: float
    is_floor: bool


class RegionLink:
    """Remembers one link's rate and past. Call `observe` whenever an agent reports a path."""

    def __init__(self, source: str, target: str, name: str = "") -> None:
        """`name`: the operators' name for the link."""
        self.source = source
        self.target = target
        self.name = name
        self._paths: Sequence[LinkPath] = ()
        self._observed_s = 0.0
        self._rate: _Rate | None = None
        self._condition = LinkCondition.CLEAR
        self._since_s: float | None = None
        self._steps: deque[tuple[float, LinkStep]] = deque(maxlen=NUM_STEPS)

    def observe(self, paths: Sequence[LinkPath], now_s: float) -> None:
        """Take in all paths of the link with their last reports, and their ages at `now_s`."""
        self._paths, self._observed_s = paths, now_s
        fresh = self._fresh(now_s)
        self._measure(fresh, now_s)
        condition, _ = _judged(fresh)
        if condition is not self._condition or self._since_s is None:
            self._condition, self._since_s = condition, now_s
        if not self._steps or now_s - self._steps[-1][0] >= STEP_S:
            self._steps.append((now_s, self._step(fresh)))

    def rate(self, now_s: float) -> LinkRate | None:
        """The rate for `remember`; None before one was found."""
        rate = self._rate
        if rate is None:
            return None
        age_s = now_s - rate.at_s
        return LinkRate(self.source, self.target, rate.bytes_per_s, rate.is_floor, age_s)

    def remember(self, rate: LinkRate, now_s: float) -> None:
        """Start from a rate that was known before. What is measured replaces it."""
        if self._rate is None:
            self._rate = _Rate(rate.bytes_per_s, now_s - rate.age_s, rate.is_floor)

    def now(self, now_s: float, heard_age_s: float | None = None) -> LinkNow:
        """The link's state. `heard_age_s`: time since any sender reported, even without paths."""
        fresh, rate = self._fresh(now_s), self._rate
        condition, reason = _judged(fresh)
        # An idle path still reports the round trip of its last traffic, which says little about
        # now.
        busy = [path for path in fresh if _is_busy(path)] or fresh
        estimates = [path.report.estimate for path in busy]
        available = None if rate is None else rate.bytes_per_s
        # The rate is remembered for when the link is up again.
        if condition is LinkCondition.DOWN:
            available = 0.0
        achieved = sum(path.report.estimate.achieved_bytes_per_s for path in fresh)
        backlog_bytes = sum(path.report.estimate.backlog_bytes for path in fresh)
        oldest = [s for path in fresh if (s := path.report.oldest_queued_s) is not None]
        ages = [s for path in fresh if (s := self._sample_age_s(path, now_s)) is not None]
        ages += [] if heard_age_s is None else [heard_age_s]
        age_s = min(ages, default=None)
        if age_s is not None and age_s > STALE_S:
            reason = f"none of its senders has reported for {age_s:.1f} s"
        return LinkNow(
            source=self.source,
            target=self.target,
            name=self.name,
            condition=condition,
            reason=reason,
            condition_s=0.0 if self._since_s is None else max(0.0, now_s - self._since_s),
            available_bytes_per_s=available,
            is_floor=rate is not None and rate.is_floor,
            rate_age_s=None if rate is None else max(0.0, now_s - rate.at_s),
            achieved_bytes_per_s=achieved,
            utilisation=min(1.0, achieved / available) if available else 0.0,
            rtt_s=max((item.rtt_s for item in estimates), default=0.0),
            base_rtt_s=min((item.base_rtt_s for item in estimates), default=0.0),
            queueing_delay_s=max((item.queueing_delay_s for item in estimates), default=0.0),
            loss=max((item.loss for item in estimates), default=0.0),
            backlog_bytes=backlog_bytes,
            backlog_s=_backlog_s(backlog_bytes, available),
            num_transfers=sum(path.report.num_transfers for path in fresh),
            oldest_queued_s=max(oldest, default=None),
            num_paths=len(fresh),
            age_s=age_s,
        )

    def steps(self, now_s: float) -> list[LinkStep]:
        """Its past, oldest first."""
        return [msgspec.structs.replace(step, age_s=now_s - s) for s, step in self._steps]

    def _fresh(self, now_s: float) -> list[LinkPath]:
        def is_fresh(path: LinkPath) -> bool:
            age_s = self._sample_age_s(path, now_s)
            return age_s is not None and age_s <= STALE_S

        return [path for path in self._paths if is_fresh(path)]

    def _sample_age_s(self, path: LinkPath, now_s: float) -> float | None:
        return self._aged_s(path, path.report.estimate.sample_age_s, now_s)

    def _aged_s(self, path: LinkPath, age_s: float | None, now_s: float) -> float | None:
        """The age at `now_s` of a measurement that was `age_s` old in the agent's report."""
        if age_s is None:
            return None
        return age_s + path.heard_age_s + max(0.0, now_s - self._observed_s)

    def _measure(self, paths: list[LinkPath], now_s: float) -> None:
        """Take the link's rate from the paths."""
        paths = [path for path in paths if path.report.estimate.is_up]

        def is_measuring(path: LinkPath) -> bool:
            age_s = self._aged_s(path, path.report.estimate.full_age_s, now_s)
            return age_s is not None and age_s <= MEASURING_S

        measuring = [path for path in paths if is_measuring(path)]
        if measuring:
            together = sum(path.report.estimate.available_bytes_per_s for path in measuring)
            beside = sum(
                path.report.estimate.achieved_bytes_per_s for path in paths if path not in measuring
            )
            self._rate = _Rate(together + beside, now_s, is_floor=False)
            return
        for path in paths:
            self._raise(path, now_s)

    def _raise(self, path: LinkPath, now_s: float) -> None:
        """Raise the link's rate to that of one path, if it is higher and newer."""
        estimate = path.report.estimate
        age_s = self._aged_s(path, estimate.age_s, now_s)
        if age_s is None:
            return
        rate, at_s = self._rate, now_s - age_s
        if rate is None or (estimate.available_bytes_per_s > rate.bytes_per_s and at_s > rate.at_s):
            self._rate = _Rate(estimate.available_bytes_per_s, at_s, estimate.is_floor)
        elif estimate.available_bytes_per_s >= 0.9 * rate.bytes_per_s:
            rate.at_s = max(rate.at_s, at_s)

    def _step(self, paths: list[LinkPath]) -> LinkStep:
        rate = self._rate
        achieved = sum(path.report.estimate.achieved_bytes_per_s for path in paths)
        available = None if rate is None else rate.bytes_per_s
        return LinkStep(0.0, achieved, available, self._condition)


def _judged(paths: list[LinkPath]) -> tuple[LinkCondition, str]:
    """The link's condition and why."""
    if not paths:
        return LinkCondition.CLEAR, "nothing was sent lately"
    down = [path for path in paths if path.report.condition is LinkCondition.DOWN]
    wanting = [path for path in paths if path.wants_to_send]
    is_down = len(down) == len(paths) or (wanting and all(path in down for path in wanting))
    if is_down:
        worst = down[0]
    else:
        others = [path for path in paths if path not in down]
        worst = max(others, key=lambda path: path.report.condition.severity)
    where = f"{worst.agent} to {worst.to or worst.report.endpoint}: " if len(paths) > 1 else ""
    return worst.report.condition, where + worst.report.reason


def _is_busy(path: LinkPath) -> bool:
    return path.wants_to_send or path.report.estimate.achieved_bytes_per_s > 0


def _backlog_s(backlog_bytes: int, available: float | None) -> float:
    if not backlog_bytes or available is None:
        return 0.0
    return min(MAX_BACKLOG_S, backlog_bytes / available) if available > 0 else MAX_BACKLOG_S


def _check(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be finite and not negative")
