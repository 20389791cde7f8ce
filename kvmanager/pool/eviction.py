"""Chooses the cached part that is evicted first: a score for each part, and queues by score.

Knows neither chains nor memory: the pool says which parts may go.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

Score = tuple[float, ...]


class EvictionCandidate(Protocol):
    """The properties of a cached part that a policy may use."""

    @property
    def last_used(self) -> int:
        """Number of the pool's use that touched it last; later uses have higher numbers."""

    @property
    def num_hits(self) -> int:
        """How often a prompt was served from it."""

    @property
    def index(self) -> int:
        """Position of its block in the prompt, from 0."""

    @property
    def nbytes(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def recompute_tokens(self) -> int:
        """Tokens to prefill again if only this part were missing."""


class EvictionPolicy(Protocol):
    """Scores entries. Among those that may go, the entry with the lowest score goes first.

    The score of an entry must not fall while the entry stays, or the entry would go too late.
    """

    def score(self, entry: EvictionCandidate) -> Score: ...


class Lru:
    """Evicts the least recently used part first; among parts of one use, the prompt's end first."""

    def score(self, entry: EvictionCandidate) -> Score:
        return entry.last_used, -entry.index


class Lfu:
    """Evicts the part that served the fewest prompts; among equals the least recently used one."""

    def score(self, entry: EvictionCandidate) -> Score:
        return entry.num_hits, entry.last_used, -entry.index


class LongestFirst:
    """Evicts the ends of the longest prefixes first, so that shared beginnings and short prompts
    stay (Mooncake's LengthAwareCache).
    """

    def score(self, entry: EvictionCandidate) -> Score:
        return -entry.index, entry.last_used


class CheapestFirst:
    """Evicts the part first that costs the least time to recompute for each byte that it holds.

    The cost of recomputing n tokens behind p others is taken as n * (1 + p / q): a linear part, and
    attention, whose cost grows with the position and equals the linear part at `quadratic_tokens`
    (q). An entry's worth halves with every `half_life_uses` uses of the pool that do not touch it;
    otherwise expensive parts would never leave.
    """

    def __init__(self, quadratic_tokens: float = 65536.0, half_life_uses: float = 1000.0) -> None:
        self._quadratic_tokens = quadratic_tokens
        self._half_life_uses = half_life_uses

    def score(self, entry: EvictionCandidate) -> Score:
        position_tokens = entry.index * entry.block_tokens
        cost = entry.recompute_tokens * (1 + position_tokens / self._quadratic_tokens)
        return (
            # In log2 a worth that halves falls by 1. Instead, each use raises the scores of what
            # it touches, so that the score of an idle part needs no update.
            math.log2(cost / entry.nbytes) + entry.last_used / self._half_life_uses,
            -entry.index,
        )


POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {
    "lru": Lru,
    "lfu": Lfu,
    "length": LongestFirst,
    "cost": CheapestFirst,
}


def eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name in `POLICIES`; raises ValueError for another name."""
    if name not in POLICIES:
        raise ValueError(f"eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()


E = TypeVar("E", bound=EvictionCandidate)


class EvictionQueue(Generic[E]):
    """Entries that may go, lowest score first.

    An entry is offered when it becomes free to go, and stays queued through later uses. Its score,
    and whether it may still go, are checked again when it comes to the head. So a use costs
    nothing. Because scores only rise, the head always has the lowest score.
    """

    def __init__(self, score: Callable[[E], Score], may_go: Callable[[E], bool]) -> None:
        self._score = score
        self._may_go = may_go
        self._heap: list[tuple[Score, int, E]] = []
        self._queued: set[E] = set()
        # Decides between equal scores, because entries have no order.
        self._ticks = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, entry: E) -> bool:
        return entry in self._queued

    def offer(self, entry: E) -> None:
        """Queue an entry that may go now. Does nothing if it is queued already."""
        if entry not in self._queued:
            self._queued.add(entry)
            heapq.heappush(self._heap, (self._score(entry), next(self._ticks), entry))

    def head(self) -> tuple[Score, E] | None:
        """The entry that goes first, with its score; None when nothing may go."""
        while self._heap:
            score, _, entry = self._heap[0]
            if not self._may_go(entry):
                self.pop()
            elif (score_now := self._score(entry)) != score:
                heapq.heapreplace(self._heap, (score_now, next(self._ticks), entry))
            else:
                return score, entry
        return None

    def pop(self) -> None:
        """Take the head out."""
        _, _, entry = heapq.heappop(self._heap)
        self._queued.discard(entry)

    def prune(self, num_entries: int) -> None:
        """Remove entries that may not go any more, if they may be most of the queue. Each of the
        `num_entries` that exist is queued at most once.
        """
        # Rarely, because it visits the whole queue. The constant spares small queues.
        if len(self._heap) > 2 * num_entries + 1024:
            self._heap = [item for item in self._heap if self._may_go(item[2])]
            heapq.heapify(self._heap)
            self._queued = {entry for _, _, entry in self._heap}
