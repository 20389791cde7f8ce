"""Which instance of a cluster takes a request: what it has cached against how busy it is.

    score = match weight x hit share - normalised load

The hit share is the part of the prompt that the instance has cached. The load is the work ahead of
the request, in units of the time that this prompt takes to prefill from its first token. With a
weight of 1 the best score is about the earliest end of the prefill. A greater weight accepts a
little waiting to save compute.

Pure. It knows no queue order, no links and no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

# Above 1, since compute that a cache hit saves is also saved for the requests behind this one.
MATCH_WEIGHT: Final = 1.25
_NO_HITS: Mapping[str, int] = MappingProxyType({})


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that may be given the request. `node` is another name by which its cached prefixes
    may be known.

    `running_s` is the time until it has finished the prefills it runs, when a new one could begin.
    """

    name: str
    node: str = ""
    running_s: float = 0.0
    num_requests: int = 0

    def __post_init__(self) -> None:
        for name in ("running_s", "num_requests"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be finite and not negative")


class ChoiceReason(StrEnum):
    """Why this instance. Values are stable: they are metric labels."""

    CACHED = "cached"
    """It has the longest cached prefix."""
    LEAST_LOADED = "least_loaded"
    """No instance has anything of the prompt."""
    HOLDER_BUSY = "holder_busy"
    """Another instance has a longer prefix, and too much work ahead."""
    NO_INSTANCE = "no_instance"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen instance (None: there is none) and why."""

    instance: str | None
    reason: ChoiceReason
    cached_tokens: int = 0
    numbers: Mapping[str, int | float] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return str(self.reason) + "".join(f"; {key}={value}" for key, value in self.numbers.items())


class _Scored(NamedTuple):
    """One instance with the values that decide its rank."""

    name: str
    score: float
    num_requests: int
    hit: int
    wait_s: float

    @property
    def rank(self) -> tuple[float, int, str]:
        """The lowest wins. The name comes last, so that the choice is the same each time."""
        return -self.score, self.num_requests, self.name


_NOBODY: Final = _Scored("", 0.0, 0, 0, 0.0)


def choose_instance(
    instances: Sequence[InstanceView],
    num_tokens: int,
    prefill_s: float,
    hits: Mapping[str, int] = _NO_HITS,
) -> Choice:
    """Choose an instance for a prompt of `num_tokens` that takes `prefill_s` from its first token.

    `hits` gives cached tokens by instance or node name. Equal scores go to the instance with the
    fewest requests, then by name, so that the same input gives the same choice.
    """
    best = holder = _NOBODY
    whole_s = max(prefill_s, 1e-9)
    for instance in instances:
        hit = min(_hit(hits, instance), num_tokens) if hits else 0
        wait_s = instance.running_s
        score = MATCH_WEIGHT * hit / max(1, num_tokens) - wait_s / whole_s
        found = _Scored(instance.name, score, instance.num_requests, hit, wait_s)
        if best is _NOBODY or found.rank < best.rank:
            best = found
        if hit and (hit, -wait_s) > (holder.hit, -holder.wait_s):
            holder = found
    if not instances:
        return Choice(None, ChoiceReason.NO_INSTANCE)
    best_hit, longest = best.hit, holder.hit
    numbers: dict[str, int | float] = {
        "score": best.score,
        "cached_tokens": best_hit,
        "wait_s": best.wait_s,
        "instances": len(instances),
    }
    if longest <= best_hit:
        reason = ChoiceReason.CACHED if best_hit else ChoiceReason.LEAST_LOADED
        return Choice(best.name, reason, best_hit, MappingProxyType(numbers))
    numbers |= {
        "holder_score": holder.score,
        "holder_cached_tokens": longest,
        "holder_wait_s": holder.wait_s,
    }
    return Choice(best.name, ChoiceReason.HOLDER_BUSY, best_hit, MappingProxyType(numbers))


def _hit(hits: Mapping[str, int], instance: InstanceView) -> int:
    """The longest prefix known under either name of the instance."""
    by_name = hits.get(instance.name, 0)
    return max(by_name, hits.get(instance.node, 0)) if instance.node else by_name
