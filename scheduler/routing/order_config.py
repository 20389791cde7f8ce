"""Settings of the order in which waiting prefill jobs start (`scheduler.routing.queue_order`)."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Jobs with at most `max_tokens` uncached tokens, above the bucket before, and their share."""

    max_tokens: float
    share: float


DEFAULT_BUCKETS = (
    LengthBucket(64 * 1024, 0.6),
    LengthBucket(256 * 1024, 0.25),
    LengthBucket(math.inf, 0.15),
)
"""Up to 64K tokens, up to 256K, longer. A share is a part of the uncached tokens started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """How long jobs wait for others, and how length buckets share the cluster."""

    buckets: tuple[LengthBucket, ...] = DEFAULT_BUCKETS
    ageing_tokens_per_s: float = 32768.0
    """How many uncached tokens a second of waiting is worth: a prompt that is longer by so many
    starts first if it has waited longer by a second. About what a cluster prefills in a second;
    with a lower value, long prompts wait too long at high load.
    """
    patience_s: float = 30.0
    """How long a job may be passed by others, for each class of priority, seconds."""
    max_length_s: float = math.inf
    """The most that length counts, seconds. Beyond it the job that came first is first."""
    # Worked out once: each look at the queue asks for the bucket of every job ahead.
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
