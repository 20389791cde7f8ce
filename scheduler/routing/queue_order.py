"""The order in which waiting prefill jobs start.

The PD clusters that wait for jobs share the prefill cluster: each counts the uncached tokens of its
jobs that were started, and the one with the lowest count goes next. So a burst of one cannot starve
another, whatever the priorities, lengths and ages of its jobs. A PD cluster without waiting jobs
starts level with the others when its next one comes: it cannot save up its share.

The jobs of one PD cluster wait in lanes, one for each pair of priority class and length bucket.
Rules:

1. Within a lane the job with the lowest rank is first, where the rank is `submitted_s +
   uncached_tokens / ageing_tokens_per_s`. This is "fewest uncached tokens first" with ageing, in
   one number that never changes: the shorter of two jobs goes first, unless the longer one has
   waited longer by what the difference in tokens is worth. Only shorter jobs that came at most
   `uncached_tokens / ageing_tokens_per_s` later can pass a job. The length counts for no more than
   `max_length_s`.
2. A job is due `patience_s` after its rank, plus another `patience_s` for each more urgent class.
   Jobs that are due go before all others, in the order in which they became due, whatever their
   class or bucket. So no job waits for ever: once it is due, only jobs that were due earlier start
   before it.
3. Otherwise the lowest priority value, the most urgent class, goes first.
4. Within a class the buckets share. Each counts the uncached tokens that it has started, divided by
   its share, and the bucket with the lowest count goes next. Long prompts thus get their share, and
   no more while shorter ones wait. A lane that was empty starts level with the others: it cannot
   save up its share.

Pure: time is an argument. This file may not know instances, engines or why a job exists. A caller
passes over jobs that cannot start now (no instance may take them) by asking with `may_start`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from scheduler.routing.order_config import OrderConfig

KeyT = TypeVar("KeyT", bound=Hashable)


NUM_CLASSES: Final = 3
MAX_KNOWN_PDS: Final = 1024
"""Beyond so many PD clusters, the counts of those without waiting jobs are forgotten."""


def priority_class(priority: int) -> int:
    """The class of a priority. vLLM accepts any integer, the lower the earlier, 0 by default.

    Below 0 is urgent (0), 0 is normal (1), above 0 is background (2). There are few classes,
    because a job is due only after `patience_s` for its own and for each more urgent class.
    """
    return 1 + (priority > 0) - (priority < 0)


class WaitingJob(msgspec.Struct, Generic[KeyT], frozen=True):
    """A job as its order sees it. `key` is unique. The lower `priority`, the more urgent; 0 is
    most.

    A job that is tried again keeps its `submitted_s`, and so its place. `pd` is the PD cluster that
    will decode it.
    """

    key: KeyT
    priority: int
    uncached_tokens: int
    submitted_s: float
    pd: str = ""

    def __post_init__(self) -> None:
        if self.priority < 0 or self.uncached_tokens < 0:
            raise ValueError(
                f"priority {self.priority} and uncached_tokens {self.uncached_tokens} of job "
                f"{self.key} must not be negative"
            )


class _Place(NamedTuple, Generic[KeyT]):
    """The place of a job in its lane: by rank, then by arrival.

    No two places have the same `order`, so a comparison never reaches `job`.
    """

    rank_s: float
    order: int
    job: WaitingJob[KeyT]


class _Lane(Generic[KeyT]):
    """The jobs of one class and bucket by rank, and the tokens started divided by the share."""

    __slots__ = ("bucket", "places", "priority", "served", "share")

    def __init__(self, priority: int, bucket: int, share: float) -> None:
        self.priority, self.bucket, self.share = priority, bucket, share
        self.places: list[_Place[KeyT]] = []
        self.served = 0.0

    def first(self, may_start: Callable[[KeyT], bool] | None) -> _Place[KeyT] | None:
        """The first job that may start."""
        if may_start is None:
            return self.places[0] if self.places else None
        return next((place for place in self.places if may_start(place.job.key)), None)


def _tokens(job: WaitingJob[KeyT]) -> int:
    # A job with everything cached still occupies an instance, so it counts as one token.
    return max(1, job.uncached_tokens)


class QueueOrder(Generic[KeyT]):
    """Waiting jobs, in the order of the rules above. Single-threaded.

    `add` and `remove` a job as it comes and goes. `next` says which job starts, without starting
    it; `started` takes the job away and counts it against the shares of its PD cluster and bucket.
    """

    def __init__(self, config: OrderConfig | None = None) -> None:
        self._config = config or OrderConfig()
        self._orders: dict[str, _PdOrder[KeyT]] = {}
        self._waiting: dict[KeyT, WaitingJob[KeyT]] = {}
        self._level = 0
        """Tokens that the PD cluster served last had started before its last job."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._waiting

    @property
    def uncached_tokens(self) -> int:
        """Uncached tokens of all jobs that wait."""
        return sum(job.uncached_tokens for job in self._waiting.values())

    def due_s(self, job: WaitingJob[KeyT]) -> float:
        """Rule 2: from this time on, only jobs of its PD cluster that were due earlier go before
        it.
        """
        return self._order(job.pd).due_s(job)

    def add(self, job: WaitingJob[KeyT]) -> None:
        """Let a job wait. ValueError if it waits already."""
        if job.key in self._waiting:
            raise ValueError(f"job {job.key} waits already")
        self._waiting[job.key] = job
        order = self._order(job.pd)
        if not len(order):
            order.started_tokens = max(order.started_tokens, self._level)
        order.add(job)

    def remove(self, key: KeyT) -> bool:
        """Forget a job that will not start. False if it does not wait."""
        job = self._waiting.pop(key, None)
        if job is None:
            return False
        self._order(job.pd).remove(key)
        return True

    def started(self, key: KeyT) -> None:
        """Take away a job that was given to an instance. KeyError if it does not wait."""
        job = self._waiting.pop(key)
        order = self._order(job.pd)
        order.started(key)
        self._level = max(self._level, order.started_tokens)
        order.started_tokens += _tokens(job)

    def next(
        self, now_s: float, may_start: Callable[[KeyT], bool] | None = None
    ) -> WaitingJob[KeyT] | None:
        """The job that starts next among those that `may_start`, or None."""
        waiting = [(o.started_tokens, pd, o) for pd, o in self._orders.items() if len(o)]
        # The name decides between equals, so that the same input gives the same order.
        for *_, order in sorted(waiting, key=lambda item: item[:2]):
            if (job := order.next(now_s, may_start)) is not None:
                return job
        return None

    def ahead_of(self, job: WaitingJob[KeyT], now_s: float) -> list[WaitingJob[KeyT]]:
        """The waiting jobs that will start before `job`, if no other job comes.

        `job` may wait already or be about to. Its predicted wait is their sum.
        """
        own, turn = self._order(job.pd), 0
        found = []
        if num_own := len(own):
            found = own.ahead_of(job, now_s)
            if num_own == len(self._waiting):
                return found
            turn = own.started_tokens + sum(map(_tokens, found))
        else:
            turn = max(own.started_tokens, self._level)
        # Another PD cluster starts jobs until its count has passed the one at which `job` starts.
        for pd, order in self._orders.items():
            started_tokens = order.started_tokens
            is_empty = not order.waiting_tokens
            if is_empty or order is own or (started_tokens, pd) > (turn, job.pd):
                continue
            # The order matters only if not all of them start before `job`.
            if len(order) == 1 or started_tokens + order.waiting_tokens <= turn:
                found += order.jobs()
                continue
            for other in order.in_order(now_s):
                if (started_tokens, pd) > (turn, job.pd):
                    break
                started_tokens += _tokens(other)
                found.append(other)
        return found

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. Tests use it."""
        assert sum(len(order) for order in self._orders.values()) == len(self._waiting)
        for pd, order in self._orders.items():
            order.check_invariants()
            assert all(self._waiting[job.key] is job for job in order.in_order(0.0))
            assert all(job.pd == pd for job in order.in_order(0.0))

    def _order(self, pd: str) -> _PdOrder[KeyT]:
        order = self._orders.get(pd)
        if order is None:
            # Jobs bring the names of their PD clusters, and names must not pile up in a front.
            if len(self._orders) >= MAX_KNOWN_PDS:
                self._orders = {name: known for name, known in self._orders.items() if len(known)}
            order = self._orders[pd] = _PdOrder(self._config)
        return order


class _PdOrder(Generic[KeyT]):
    """The waiting jobs of one PD cluster, in the order of the numbered rules."""

    def __init__(self, config: OrderConfig) -> None:
        self._config = config
        self.started_tokens = 0
        """Uncached tokens of its jobs that were started."""
        self.waiting_tokens = 0
        """Uncached tokens of its waiting jobs, at least one each."""
        self._places: dict[KeyT, _Place[KeyT]] = {}
        self._lanes: dict[tuple[int, int], _Lane[KeyT]] = {}
        self._level: dict[int, float] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._places)

    def rank_s(self, job: WaitingJob[KeyT]) -> float:
        """Rule 1: within a lane the lower rank is earlier. It is on the clock of `submitted_s`."""
        length_s = job.uncached_tokens / self._config.ageing_tokens_per_s
        return job.submitted_s + min(length_s, self._config.max_length_s)

    def due_s(self, job: WaitingJob[KeyT]) -> float:
        """Rule 2: from this time on, only jobs that were due earlier go before it."""
        return self.rank_s(job) + self._config.patience_s * (job.priority + 1)

    def _due_s(self, place: _Place[KeyT]) -> float:
        # A place knows its rank, and each look at the queue asks for many.
        return place.rank_s + self._config.patience_s * (place.job.priority + 1)

    def add(self, job: WaitingJob[KeyT]) -> None:
        """Let a job wait."""
        self._num_added += 1
        self.waiting_tokens += _tokens(job)
        place = _Place(self.rank_s(job), self._num_added, job)
        self._places[job.key] = place
        lane = self._lane(job)
        if not lane.places:
            # An empty lane must not save up its share: it would hold up the others to catch up.
            lane.served = max(lane.served, self._level.get(job.priority, 0.0))
        insort(lane.places, place)

    def remove(self, key: KeyT) -> None:
        """Forget a job that will not start."""
        place = self._places.pop(key)
        self.waiting_tokens -= _tokens(place.job)
        places = self._lane(place.job).places
        del places[bisect_left(places, place)]

    def started(self, key: KeyT) -> None:
        """Take away a job that was given to an instance."""
        job = self._places[key].job
        self.remove(key)
        lane = self._lane(job)
        # The level before this job: a lane that wakes up starts where the last one served stood.
        self._level[job.priority] = max(self._level.get(job.priority, 0.0), lane.served)
        lane.served += _tokens(job) / lane.share

    def next(
        self, now_s: float, may_start: Callable[[KeyT], bool] | None = None
    ) -> WaitingJob[KeyT] | None:
        """The job that starts next among those that `may_start`, or None."""
        heads = [(lane, place) for lane in self._lanes.values() if (place := lane.first(may_start))]
        if not heads:
            return None
        due = [place for _, place in heads if self._due_s(place) <= now_s]
        if due:
            return min(due, key=lambda place: (self._due_s(place), place.order)).job
        _, place = min(heads, key=lambda head: (head[0].priority, head[0].served, head[0].bucket))
        return place.job

    def ahead_of(self, job: WaitingJob[KeyT], now_s: float) -> list[WaitingJob[KeyT]]:
        """The waiting jobs that will start before `job`, if no other job comes.

        Buckets are taken to progress evenly by their shares: as many tokens of another bucket go
        first as its share carries until the turn of `job`.
        """
        mine, rank_s, tokens = self._config.bucket_of(job.uncached_tokens), self.rank_s(job), 0
        same = self._in(job.priority, mine)
        found = []
        for place in same:
            if place.rank_s > rank_s:
                break
            tokens += place.job.uncached_tokens
            if place.job.key != job.key:
                found.append(place.job)
        if len(same) < len(self._places):
            found += self._ahead_elsewhere(job, mine, tokens, now_s)
        return found

    def _ahead_elsewhere(
        self, job: WaitingJob[KeyT], mine: int, tokens: int, now_s: float
    ) -> Iterator[WaitingJob[KeyT]]:
        """The jobs of other lanes that go first. In the job's own lane, `tokens` go before it."""
        due_s = self.due_s(job)
        if job.key not in self._places:
            tokens += job.uncached_tokens
        for lane in self._lanes.values():
            if not lane.places or (lane.priority, lane.bucket) == (job.priority, mine):
                continue
            # A more urgent class goes first whole, a less urgent one only with jobs that are due
            # earlier.
            budget = math.inf if lane.priority < job.priority else 0.0
            if lane.priority == job.priority:
                budget = tokens * lane.share / self._config.buckets[mine].share
            for place in lane.places:
                if budget <= 0 and not self._due_s(place) <= min(now_s, due_s):
                    break
                budget -= place.job.uncached_tokens
                yield place.job

    def jobs(self) -> list[WaitingJob[KeyT]]:
        """All jobs, in no particular order."""
        return [place.job for place in self._places.values()]

    def in_order(self, now_s: float) -> list[WaitingJob[KeyT]]:
        """All jobs, about in the order in which they will start: those that are due, then by class
        and rank.
        """

        def turn(place: _Place[KeyT]) -> tuple[int, float, int]:
            due_s = self._due_s(place)
            if due_s <= now_s:
                return -1, due_s, place.order
            return place.job.priority, place.rank_s, place.order

        lanes = [lane for lane in self._lanes.values() if lane.places]
        if len(lanes) == 1:
            # Of one lane, the jobs with the lowest ranks are due first.
            return [place.job for place in lanes[0].places]
        return [place.job for place in sorted(self._places.values(), key=turn)]

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. Tests use it."""
        inside = [place for lane in self._lanes.values() for place in lane.places]
        assert len(inside) == len(self._places)
        assert self.waiting_tokens == sum(_tokens(place.job) for place in inside)
        for (priority, bucket), lane in self._lanes.items():
            assert lane.places == sorted(lane.places)
            for place in lane.places:
                assert self._places[place.job.key] is place
                assert place.job.priority == priority
                assert self._config.bucket_of(place.job.uncached_tokens) == bucket

    def _in(self, priority: int, bucket: int) -> list[_Place[KeyT]]:
        lane = self._lanes.get((priority, bucket))
        return lane.places if lane else []

    def _lane(self, job: WaitingJob[KeyT]) -> _Lane[KeyT]:
        at = job.priority, self._config.bucket_of(job.uncached_tokens)
        lane = self._lanes.get(at)
        if lane is None:
            share = self._config.buckets[at[1]].share
            lane = self._lanes[at] = _Lane(*at, share)
        return lane
