"""The deciders that the live scheduler is compared with, and the choice of one.

`StaticDecider` routes by the paper's threshold alone. `OracleDecider` shows links as they will be,
and t follows their rates by the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from scheduler.live.core import Event, R
from scheduler.live.events import ThresholdPlanned
from scheduler.planning.solve import is_pair, plan_at
from scheduler.replay.deciding import Decider, PdPlans
from scheduler.replay.jobs import Decided, Job
from scheduler.replay.model import Policy, ReplayModel, Routing
from scheduler.replay.parts import Parts
from scheduler.routing.threshold import ThresholdConfig

_FOLLOWS_NO_LINK: Final = ThresholdConfig(rising_factor=1.0, congested_factor=1.0, max_factor=1.0)


class StaticDecider(Decider):
    """The paper's rule: a prompt with more than t uncached tokens goes to a prefill cluster.

    Of several, to the one with the fewest tokens to compute for it, then to the least busy.
    """

    def __init__(self, parts: Parts, model: ReplayModel, policy: Policy, planned: PdPlans) -> None:
        super().__init__(parts, model, replace(policy, admission=None), planned)
        if not self.live.plans:
            self.report_every_s = None

    def place(self, job: Job, kv_bytes: float, now_s: float) -> bool:
        hits, home = self._parts.hits(job), self.pds[job.home]
        uncached = job.num_tokens - hits[0]
        best, least = 0, (0, 0.0)
        for index, station in enumerate(self._parts.sources, 1):
            if (index, job.home) not in self._parts.watches:
                continue
            if uncached > self.live.thresholds.plan_tokens(station.name, home):
                busy = (station.num_queued + station.num_running) / max(1, station.num_usable)
                cost = job.num_tokens - hits[index], busy
                if best == 0 or cost < least:
                    best, least = index, cost
        job.place, job.cached_tokens = best, hits[best]
        job.decided = Decided(self._target(job), pd=home)
        self._begun(job, hits[0], kv_bytes, now_s)
        return True

    def looked(self, now_s: float) -> None:
        """t follows no link."""

    def tell(self, event: Event[Any], now_s: float) -> None:
        # Only plans use what is learnt here, and learning would take most of the run time.
        if self.live.plans:
            super().tell(event, now_s)


class OracleDecider(Decider):
    """Runs the live scheduler with links as they will be, and with the best t for them."""

    def __init__(self, parts: Parts, model: ReplayModel, policy: Policy, planned: PdPlans) -> None:
        super().__init__(parts, model, replace(policy, threshold=_FOLLOWS_NO_LINK), planned)
        self._region = model.region
        self._num_prefill = len(parts.pds[0].station.instances)
        self._best: dict[float, float] = {}
        self._planned = {name: dict(plan.tokens) for name, plan in planned.items()}

    def looked(self, now_s: float) -> None:
        self._set(self._foreseen(now_s), now_s)
        super().looked(now_s)

    def plan(self, event: Event[R], now_s: float) -> R:
        # Plans do not know what is foreseen, so they must find the t that they set themselves.
        self._set(self._planned, now_s)
        answer = super().plan(event, now_s)
        self._planned = {pd: dict(self.live.thresholds.base_tokens(pd)) for pd in self.pds}
        self._set(self._foreseen(now_s), now_s)
        return answer

    def _set(self, thresholds: Mapping[str, Mapping[str, float]], now_s: float) -> None:
        for pd, of_pd in thresholds.items():
            for cluster, tokens in of_pd.items():
                if tokens != self.live.thresholds.plan_tokens(cluster, pd):
                    self.tell(ThresholdPlanned(cluster, tokens, 0.0, pd), now_s)

    def _foreseen(self, now_s: float) -> Mapping[str, Mapping[str, float]]:
        region, watch = self._region, self._parts.watches.get((1, 0))
        # The search for the best t is for one prefill cluster and one PD cluster.
        if not is_pair(region) or watch is None:
            return self._planned
        rate = watch.view(now_s).available_bytes_per_s or 0.0
        # The plan was made for this rate, so its t is the best one already.
        if rate >= region.links[0].bytes_per_s:
            return self._planned
        # A schedule has few rates, and a search takes long.
        if rate not in self._best:
            self._best[rate] = self._solve(rate)
        return {self.pds[0]: {region.prefill_clusters[0].name: self._best[rate]}}

    def _solve(self, rate: float) -> float:
        region = self._region
        if rate <= 0:
            # Nothing crosses a link that is down, and no prompt is longer than this t.
            return region.traffic.lengths.max_tokens
        there = replace(region, links=(replace(region.links[0], bytes_per_s=rate),))
        (tokens,) = plan_at(there, {self.pds[0]: self._num_prefill}).thresholds().values()
        return tokens


def decider_of(parts: Parts, model: ReplayModel, policy: Policy, planned: PdPlans) -> Decider:
    """The policy's decider."""
    kinds = {Routing.STATIC: StaticDecider, Routing.ORACLE: OracleDecider, Routing.ROUTER: Decider}
    return kinds[policy.routing](parts, model, policy, planned)
