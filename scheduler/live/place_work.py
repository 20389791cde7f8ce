"""The prefills of one place: the jobs of its latest report, and the legs sent there since.

To go through every job and instance for every request would take most of a routing decision. So a
`PlaceWork` is made once for each report and model. After that it changes only where the ledger has
changed, and the time of day enters last, in `free_s`. All that it keeps follows from the report,
the ledger and the profile. It may be forgotten at any time: the next one gives the same numbers.

Pure; time is an argument. This file knows no links and decides nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from scheduler.live.ledger import Ledger, PrefillLeg
from scheduler.reports import ClusterReport, InstanceReport, JobReport, serves
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.routing.queue_order import QueueOrder, WaitingJob, priority_class

_LEAST_PREFILL_S: Final = 1e-3
"""The least time of a prefill, seconds. Its length is divided by its time."""


class _Running(NamedTuple):
    """The prefills of an instance: what all of them take, what the oldest takes, and its begin."""

    instance: str
    total_s: float
    first_s: float
    begun_s: float


class PlaceWork:
    """The prefills of one place, as a request for one model finds them. Single-threaded.

    Legs that no report has yet count as waiting. Call `follow` before anything is asked.
    """

    def __init__(
        self,
        report: ClusterReport,
        at_s: float,
        instances: Sequence[InstanceReport],
        *,
        place: str,
        model: str,
        first_pd: str,
        order: OrderConfig,
    ) -> None:
        """`report` was asked for at `at_s`. `instances` are those of it that prefill here.

        Jobs that name no PD cluster belong to `first_pd`: their gateway knows only one.
        """
        self.order = order
        self._place, self._at_s, self._first_pd = place, at_s, first_pd
        self._usable = [i.name for i in instances if serves(i, model) and i.role_ready]
        # Jobs of a model with instances of its own wait for those.
        prefilling = [item for item in report.instances if item.role != "encode"]
        self._others = {item.model for item in prefilling} - {"", model}
        self._model = model
        self._places = {name: _num_places(instances, name) for name in {model, *self._others}}
        self._jobs = {job.transfer_id: job for job in report.jobs}
        self._legs: dict[str, PrefillLeg] = {}
        self._prefill_s: dict[str, float] = {}
        # The jobs that wait for the same instances as a request for this model.
        self._waiting: set[str] = set()
        self._others_waiting: dict[str, str] = {}  # for other instances: the models by job
        self._queue: QueueOrder[str] = QueueOrder(order)
        self._num_running: Counter[str] = Counter()  # by the model of the instances
        self._running: list[_Running] = []
        # Of each busy instance: the seconds of all it runs, those of its oldest prefill, and when
        # that one got the instance for itself.
        self._busy: list[tuple[float, float, float]] = []
        self._emitted: dict[str, tuple[float, float]] = {}
        self._followed_legs = self._followed_ends = -1
        # Between these two, any `since_s` gives the same legs.
        self._same_legs_s = math.inf, -math.inf
        self._profile: PrefillProfile | None = None

    @property
    def is_usable(self) -> bool:
        """Whether an instance may be given jobs."""
        return bool(self._usable)

    @property
    def num_places(self) -> int:
        """How many jobs the instances of the model run at once."""
        return self._places[self._model]

    @property
    def num_jobs(self) -> int:
        """The jobs that run or wait on the instances of the model."""
        return self._num_running[self._model] + len(self._waiting)

    @property
    def num_queued(self) -> int:
        """The jobs of all models that wait, without those that free instances will take at once.
        The queue of a cluster and its limit are for all models together.
        """
        num_waiting = Counter(self._others_waiting.values())
        num_waiting[self._model] = len(self._waiting)
        return sum(
            max(0, num - max(0, self._places[model] - self._num_running[model]))
            for model, num in num_waiting.items()
        )

    @property
    def num_busy(self) -> int:
        """The usable instances that have a prefill, or will be given one at once."""
        return min(len(self._usable), len(self._busy) + len(self._waiting))

    @property
    def waiting_s(self) -> tuple[float, ...]:
        """What the jobs take that wait for the instances of the model, as they came."""
        waiting = self._waiting
        if not waiting:
            return ()
        return tuple(s for name, s in self._prefill_s.items() if name in waiting)

    def follow(self, ledger: Ledger, profile: PrefillProfile, since_s: float) -> None:
        """Take over what the ledger knows now. Unreported legs count if begun at `since_s` or
        later. `profile` turns work into seconds.
        """
        has_new_times = profile is not self._profile and profile != self._profile
        legs, ends = ledger.leg_version(self._place), ledger.end_version(self._place)
        after_s, until_s = self._same_legs_s
        has_run = False
        if has_new_times or legs != self._followed_legs or not after_s < since_s <= until_s:
            self._followed_legs = legs
            has_run = self._follow_jobs(ledger, profile, since_s, has_new_times=has_new_times)
        if has_run or ends != self._followed_ends:
            self._followed_ends = ends
            self._busy = [
                (total_s, first_s, ledger.alone_since_s(self._place, instance, begun_s))
                for instance, total_s, first_s, begun_s in self._running
            ]

    def free_s(self, now_s: float) -> tuple[float, ...]:
        """The times until each usable instance has finished what it runs, ascending."""
        found = [0.0] * (len(self._usable) - len(self._busy))
        # However late the first job is, the later ones are still to be computed.
        found += [
            total_s - (spent_s if spent_s < first_s else first_s)
            if (spent_s := now_s - since_s) > 0
            else total_s
            for total_s, first_s, since_s in self._busy
        ]
        found.sort()
        return tuple(found)

    def ahead_s(
        self, priority: int, uncached_tokens: int, pd: str, now_s: float
    ) -> tuple[float, ...]:
        """What the jobs take that start before a request that comes now, if `pd` decodes it."""
        if not self._waiting:
            return ()
        new = WaitingJob("", priority_class(priority), uncached_tokens, now_s, pd)
        return tuple([self._prefill_s[job.key] for job in self._queue.ahead_of(new, now_s)])

    def emitted_bytes_per_s(self, pd: str, kv: KvProfile) -> float:
        """How fast running prefills emit the KVCache that `pd` decodes. What leaves at the end of a
        prefill counts as if it left all the time.
        """
        tokens_per_s, prefills_per_s = self._emitted.get(pd, (0.0, 0.0))
        return kv.token_bytes * tokens_per_s + kv.fixed_bytes * prefills_per_s

    def _follow_jobs(
        self, ledger: Ledger, profile: PrefillProfile, since_s: float, *, has_new_times: bool
    ) -> bool:
        """Take over what came and went. True if what instances run has changed."""
        is_first, self._profile = self._profile is None, profile
        over = ledger.over(self._jobs.keys())
        has_ended = any(self._jobs[name].instance for name in over)
        self._remove(over)
        if is_first:
            self._add(self._jobs)
        self._follow_legs(ledger, since_s)
        if has_new_times and not is_first:
            work: dict[str, JobReport | PrefillLeg] = {**self._jobs, **self._legs}
            self._prefill_s = {name: self._seconds(item) for name, item in work.items()}
        if has_new_times or has_ended:
            self._run()
        return has_new_times or has_ended

    def _remove(self, names: Iterable[str]) -> None:
        """Forget jobs and legs that are over."""
        for name in names:
            self._jobs.pop(name, None)
            self._legs.pop(name, None)
            self._prefill_s.pop(name, None)
            self._others_waiting.pop(name, None)
            if name in self._waiting:
                self._waiting.remove(name)
                self._queue.remove(name)

    def _follow_legs(self, ledger: Ledger, since_s: float) -> None:
        # A reported leg never counts as unreported again: a later report without it means its end.
        ledger.legs_reported(self._place, self._jobs.keys())
        # No report can have a request whose landing is not reserved yet, however long that takes.
        taken = ledger.taken().items()
        legs = {f"request {number}": leg for number, leg in taken if leg.place == self._place}
        after_s, until_s = -math.inf, math.inf
        for name, leg in ledger.unreported(self._place).items():
            if leg.begun_s >= since_s:
                legs[name], until_s = leg, min(until_s, leg.begun_s)
            else:
                after_s = max(after_s, leg.begun_s)
        self._same_legs_s = after_s, until_s
        self._remove([name for name, leg in self._legs.items() if legs.get(name) is not leg])
        new = {name: leg for name, leg in legs.items() if name not in self._legs}
        self._legs |= new
        self._add(new)

    def _add(self, items: Mapping[str, JobReport | PrefillLeg]) -> None:
        """Time jobs and legs, and let those wait that do not run."""
        for name, item in items.items():
            self._prefill_s[name] = self._seconds(item)
            if isinstance(item, PrefillLeg):
                submitted_s = item.begun_s
            elif item.instance:
                continue
            else:
                submitted_s = self._at_s - item.for_s
            if item.model in self._others:
                self._others_waiting[name] = item.model
                continue
            owner, priority = item.pd or self._first_pd, priority_class(item.priority)
            self._waiting.add(name)
            self._queue.add(WaitingJob(name, priority, item.uncached_tokens, submitted_s, owner))

    def _run(self) -> None:
        """Work out what instances run."""
        by_instance: dict[str, list[JobReport]] = {}
        for job in self._jobs.values():
            if job.instance:
                by_instance.setdefault(job.instance, []).append(job)
        self._num_running = Counter(
            job.model if job.model in self._others else self._model
            for job in self._jobs.values()
            if job.instance
        )
        self._emitted = self._emission(by_instance.values())
        self._running = []
        for name in self._usable:
            if jobs := by_instance.get(name):
                first = max(jobs, key=_age_s)
                total_s = sum(self._prefill_s[job.transfer_id] for job in jobs)
                first_s, begun_s = self._prefill_s[first.transfer_id], self._at_s - first.for_s
                self._running.append(_Running(name, total_s, first_s, begun_s))

    def _emission(self, instances: Iterable[Sequence[JobReport]]) -> dict[str, tuple[float, float]]:
        """Tokens/s and prefills/s by the PD cluster that decodes."""
        rates: dict[str, tuple[float, float]] = {}
        for jobs in instances:
            # An instance runs prefills one after the other, so only the oldest for each PD cluster
            # emits now.
            heads: dict[str, JobReport] = {}
            for job in jobs:
                pd = job.pd or self._first_pd
                if pd not in heads or job.for_s > heads[pd].for_s:
                    heads[pd] = job
            for pd, job in heads.items():
                seconds = max(self._prefill_s[job.transfer_id], _LEAST_PREFILL_S)
                tokens_per_s, prefills_per_s = rates.get(pd, (0.0, 0.0))
                rates[pd] = (
                    tokens_per_s + job.uncached_tokens / seconds,
                    prefills_per_s + 1 / seconds,
                )
        return rates

    def _seconds(self, job: JobReport | PrefillLeg) -> float:
        assert self._profile is not None
        return self._profile.prefill_s(job.num_tokens, job.num_tokens - job.uncached_tokens)


def _num_places(instances: Iterable[InstanceReport], model: str) -> int:
    return sum(item.max_concurrent for item in instances if serves(item, model))


def _age_s(job: JobReport) -> float:
    return job.for_s
