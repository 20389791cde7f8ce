"""The order in which waiting prefill jobs start.

Jobs wait in lanes, one for each priority class and length bucket. Rules:

1. Within a lane the job with the lowest rank is first: `submitted_s + uncached_tokens /
   ageing_tokens_per_s`. That is fewest uncached tokens first with ageing, in one number that never
   changes: of two jobs the shorter is first unless the longer has waited longer by what the
   difference in tokens is worth. A job is only passed by shorter ones that came at most
   `uncached_tokens / ageing_tokens_per_s` after it. Tokens count for no more than `max_length_s`.
2. A job is due `patience_s` for its own and for each more urgent class after its rank. Whatever is
   due goes before all that is not, by the time since which it is due, whatever class or bucket. So
   no job waits for ever: once due, only jobs that were due before it are started.
3. Else the lowest priority value (the most urgent class) goes first.
4. Within a class the buckets share: each counts the uncached tokens that it started, divided by its
   share, and the one that is least ahead goes next. Long prompts keep their share and never more
   while shorter ones wait, so that they do not hold those up; a lane that was empty starts level
   with the others and cannot save up.

Pure: time is an argument. It may not know instances, engines or why a job exists. What cannot start
now (no instance may take it) is passed over by asking with `may_start`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


NUM_CLASSES: Final = 3


def priority_class(priority: int) -> int:
    """The class of a priority as vLLM has it: any integer, 0 if a client says nothing, the lower
    the earlier. Below 0 is urgent (0), 0 is normal (1), above 0 is background (2).

    Few classes, because what is in the last one is due only after `patience_s` for each of them.
    """
    return 1 + (priority > 0) - (priority < 0)


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Jobs with up to `max_tokens` uncached (and more than the bucket before), and their share."""

    max_tokens: float
    share: float


DEFAULT_BUCKETS = (
    LengthBucket(64 * 1024, 0.6),
    LengthBucket(256 * 1024, 0.25),
    LengthBucket(math.inf, 0.15),
)
"""Up to 64K tokens, up to 256K, longer. Shares are of the uncached tokens started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """How long jobs are patient, and who shares with whom."""

    buckets: tuple[LengthBucket, ...] = DEFAULT_BUCKETS
    ageing_tokens_per_s: float = 32768.0
    """How many uncached tokens a second of waiting is worth: a prompt that is longer by so many
    starts first if it has waited longer by a second. About what a cluster prefills in a second;
    with less, long prompts wait too long at high load.
    """
    patience_s: float = 30.0
    """How long a job may be passed by others, for each class of priority, seconds."""
    max_length_s: float = math.inf
    """Of jobs for which length makes more of a difference, the one that came first is first."""
    _edges: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges = [bucket.max_tokens for bucket in self.buckets]
        object.__setattr__(self, "_edges", tuple(edges))
        if not edges or edges != sorted(set(edges)) or edges[-1] != math.inf or edges[0] <= 0:
            raise ValueError(f"bucket edges are {edges}; they must ascend from above 0 to infinity")
        if not all(0 < bucket.share < math.inf for bucket in self.buckets):
            shares = [bucket.share for bucket in self.buckets]
            raise ValueError(f"bucket shares are {shares}; each must be above 0")
        if not (self.ageing_tokens_per_s > 0 and self.patience_s > 0):
            raise ValueError(
                f"ageing_tokens_per_s {self.ageing_tokens_per_s!r} and patience_s "
                f"{self.patience_s!r} must be above 0"
            )
        if not self.max_length_s >= 0:
            raise ValueError(f"max_length_s {self.max_length_s!r} must not be negative")

    def bucket_of(self, uncached_tokens: int) -> int:
        """The position of the bucket that a job of this length waits in."""
        return bisect_left(self._edges, uncached_tokens)


@dataclass(frozen=True, slots=True)
class WaitingJob(Generic[KeyT]):
    """A job as its order sees it. `key` is unique; a lower `priority` is more urgent, 0 the most.

    A job that is tried again keeps its `submitted_s`, and with it its place.
    """

    key: KeyT
    priority: int
    uncached_tokens: int
    submitted_s: float

    def __post_init__(self) -> None:
        if self.priority < 0 or self.uncached_tokens < 0:
            raise ValueError(
                f"priority {self.priority} and uncached_tokens {self.uncached_tokens} of job "
                f"{self.key} must not be negative"
            )


class _Place(NamedTuple, Generic[KeyT]):
    """Where a job stands: in its lane by rank, equal ranks by arrival. Compares like that, because
    no two have one `order`.
    """

    rank_s: float
    order: int
    job: WaitingJob[KeyT]


class _Lane(Generic[KeyT]):
    """The jobs of one class and bucket, by rank, and the tokens started per share."""

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


class QueueOrder(Generic[KeyT]):
    """Waiting jobs in their order. See the module text. Single-threaded.

    `add` and `remove` a job as it comes and goes; `next` says which starts, without starting it;
    `started` takes it away and counts it against its bucket's share.
    """

    def __init__(self, config: OrderConfig | None = None) -> None:
        self._config = config or OrderConfig()
        self._places: dict[KeyT, _Place[KeyT]] = {}
        self._lanes: dict[tuple[int, int], _Lane[KeyT]] = {}
        self._level: dict[int, float] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._places

    @property
    def uncached_tokens(self) -> int:
        """Uncached tokens of all jobs that wait."""
        return sum(place.job.uncached_tokens for place in self._places.values())

    def rank_s(self, job: WaitingJob[KeyT]) -> float:
        """Rule 1: the lower the earlier, within a lane. On the clock of `submitted_s`."""
        length_s = job.uncached_tokens / self._config.ageing_tokens_per_s
        return job.submitted_s + min(length_s, self._config.max_length_s)

    def due_s(self, job: WaitingJob[KeyT]) -> float:
        """Rule 2: from then on only what was due before goes first."""
        return self.rank_s(job) + self._config.patience_s * (job.priority + 1)

    def add(self, job: WaitingJob[KeyT]) -> None:
        """ValueError for a job that waits already."""
        if job.key in self._places:
            raise ValueError(f"job {job.key} waits already")
        self._num_added += 1
        place = _Place(self.rank_s(job), self._num_added, job)
        self._places[job.key] = place
        lane = self._lane(job)
        if not lane.places:
            # An empty lane has saved up nothing: it would hold up the others to catch up.
            lane.served = max(lane.served, self._level.get(job.priority, 0.0))
        insort(lane.places, place)

    def remove(self, key: KeyT) -> bool:
        """Forget a job that will not start; False for one that does not wait."""
        place = self._places.pop(key, None)
        if place is None:
            return False
        places = self._lane(place.job).places
        del places[bisect_left(places, place)]
        return True

    def started(self, key: KeyT) -> None:
        """The job was given to an instance. KeyError for one that does not wait."""
        job = self._places[key].job
        self.remove(key)
        lane = self._lane(job)
        self._level[job.priority] = max(self._level.get(job.priority, 0.0), lane.served)
        lane.served += max(1, job.uncached_tokens) / lane.share

    def next(
        self, now_s: float, may_start: Callable[[KeyT], bool] | None = None
    ) -> WaitingJob[KeyT] | None:
        """Which job starts next, of those that `may_start`; None when there is none."""
        heads = [(lane, place) for lane in self._lanes.values() if (place := lane.first(may_start))]
        if not heads:
            return None
        due = [place for _, place in heads if self.due_s(place.job) <= now_s]
        if due:
            return min(due, key=lambda place: (self.due_s(place.job), place.order)).job
        _, place = min(heads, key=lambda head: (head[0].priority, head[0].served, head[0].bucket))
        return place.job

    def ahead_of(self, job: WaitingJob[KeyT], now_s: float) -> Iterator[WaitingJob[KeyT]]:
        """The waiting jobs that will start before `job` (which may wait or be about to), if nothing
        else comes: what its predicted wait adds up. Shares between buckets are taken as even
        progress: of another bucket goes first what its share carries until the job's turn.
        """
        mine, rank_s, tokens = self._config.bucket_of(job.uncached_tokens), self.rank_s(job), 0
        same = self._in(job.priority, mine)
        for place in same:
            if place.rank_s > rank_s:
                break
            tokens += place.job.uncached_tokens
            if place.job.key != job.key:
                yield place.job
        if len(same) < len(self._places):
            yield from self._ahead_elsewhere(job, mine, tokens, now_s)

    def _ahead_elsewhere(
        self, job: WaitingJob[KeyT], mine: int, tokens: int, now_s: float
    ) -> Iterator[WaitingJob[KeyT]]:
        """In other lanes than its own, where `tokens` go before it."""
        due_s = self.due_s(job)
        if job.key not in self._places:
            tokens += job.uncached_tokens
        for lane in self._lanes.values():
            if not lane.places or (lane.priority, lane.bucket) == (job.priority, mine):
                continue
            budget = math.inf if lane.priority < job.priority else 0.0
            if lane.priority == job.priority:
                budget = tokens * lane.share / self._config.buckets[mine].share
            for place in lane.places:
                if budget <= 0 and not self.due_s(place.job) <= min(now_s, due_s):
                    break
                budget -= place.job.uncached_tokens
                yield place.job

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. Tests use it."""
        inside = [place for lane in self._lanes.values() for place in lane.places]
        assert len(inside) == len(self._places)
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
