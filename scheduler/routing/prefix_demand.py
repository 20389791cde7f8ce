"""Which cached prefixes requests have lately resumed from, and how often, in bounded memory.

Counts decay by half every `half_life_s`. The space-saving rule (Metwally, Agrawal, El Abbadi 2005)
keeps the most frequent of many prefixes: a new one takes the place of the least frequent and
inherits its count as a possible error. A count is therefore never too small, and the error says by
how much it may be too large. Pure. It knows no nodes and does not know what follows from demand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvmanager.hashing import KEY_BYTES, split_keys

# Weights are rescaled this early so that old counts stay exact beside new ones in a double
# (2**53).
_MAX_WEIGHT: Final = 2.0**40


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix that requests resume from: the joined keys of its blocks, and the root key before
    them (`kvmanager.hashing`). `model` names the model of the KVCache.
    """

    model: str
    root: bytes
    keys: bytes

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) % KEY_BYTES:
            raise ValueError(f"{len(self.keys)} bytes are no keys of {KEY_BYTES} bytes each")

    @property
    def key(self) -> bytes:
        """The key of the last block, which names the whole prefix."""
        return self.keys[-KEY_BYTES:]

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def first(self, num_blocks: int) -> CachedPrefix:
        """Its first blocks, at least one."""
        return CachedPrefix(self.model, self.root, self.keys[: num_blocks * KEY_BYTES])

    @property
    def block_keys(self) -> list[bytes]:
        """The keys, one for each block."""
        return split_keys(self.keys)


@dataclass(frozen=True, slots=True)
class Demand:
    """How often a prefix was resumed lately, at the least."""

    prefix: CachedPrefix
    per_s: float


@dataclass(slots=True)
class _Counter:
    prefix: CachedPrefix
    count: float
    error: float


class DemandTracker:
    """Counts which prefixes requests resume from. Single-threaded; time must not go back."""

    def __init__(self, capacity: int = 256, half_life_s: float = 300.0) -> None:
        if capacity < 1 or half_life_s <= 0:
            raise ValueError(f"cannot track {capacity} prefixes with half-life {half_life_s} s")
        self._capacity = capacity
        self._half_life_s = half_life_s
        self._counters: dict[bytes, _Counter] = {}
        self._origin_s: float | None = None

    def __len__(self) -> int:
        return len(self._counters)

    def observe(self, prefix: CachedPrefix, now_s: float) -> None:
        """Count a request that resumes from `prefix`."""
        weight = self._weight(now_s)
        counter = self._counters.get(prefix.key)
        if counter is not None:
            counter.count += weight
            return
        inherited = 0.0
        if len(self._counters) >= self._capacity:
            least = min(self._counters.values(), key=lambda other: other.count)
            inherited = least.count
            del self._counters[least.prefix.key]
        self._counters[prefix.key] = _Counter(prefix, inherited + weight, inherited)

    def hottest(self, limit: int, now_s: float) -> list[Demand]:
        """The prefixes with the highest rates, less their possible errors, highest first."""
        # A steady rate r accumulates a decayed count of r * half-life / ln 2.
        per_count = math.log(2) / (self._half_life_s * self._weight(now_s))
        demands = [
            Demand(counter.prefix, (counter.count - counter.error) * per_count)
            for counter in self._counters.values()
        ]
        demands.sort(key=lambda demand: (-demand.per_s, demand.prefix.key))
        return demands[:limit]

    def _weight(self, now_s: float) -> float:
        """What a request counts now.

        Weights grow with time, which has the effect of decay without touching all counters.
        """
        if self._origin_s is None:
            self._origin_s = now_s
        age = (now_s - self._origin_s) / self._half_life_s
        if age > math.log2(_MAX_WEIGHT):
            self._rescale(2.0**-age)
            self._origin_s = now_s
            age = 0.0
        return float(2.0**age)

    def _rescale(self, factor: float) -> None:
        for counter in self._counters.values():
            counter.count *= factor
            counter.error *= factor
