"""Moves of cached prefixes between clusters: those under way, and what those that ended measured.

A pair of clusters (from, to) where a move failed, or takes longer than any request waits, is left
alone for a while. Pure; time is an argument. Does not know prefixes, nodes or routes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from netmon.region_link import LinkView
from scheduler.routing.candidates import MAX_MOVE_S

RETRY_S: Final = 60.0
"""Between clusters where a move failed none is made for so long."""
HALF_LIFE_S: Final = 60.0
KEPT_S: Final = 600.0
"""A rate that no move has confirmed for so long is not known any more."""

Pair = tuple[str, str]


class RateMeter:
    """A rate as it was measured: amounts and the time they took, older ones counting less."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._at_s = -math.inf

    def observe(self, amount: float, seconds: float, now_s: float) -> None:
        """`amount` took `seconds`; nothing that took no time is counted."""
        if amount <= 0 or seconds <= 0:
            return
        faded = 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S)
        self._amount = self._amount * faded + amount
        self._seconds = self._seconds * faded + seconds
        self._at_s = now_s

    def per_s(self, now_s: float) -> float | None:
        """None when nothing was measured within `KEPT_S`."""
        return self._amount / self._seconds if now_s - self._at_s <= KEPT_S else None


class CacheMoveLedger:
    """See the module text."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Pair, float]] = {}
        self._last_key = 0
        self._rates: dict[Pair, RateMeter] = {}
        self._rtts: dict[Pair, float] = {}
        self._failed_s: dict[Pair, float] = {}

    def begun(self, pair: Pair, now_s: float) -> int:
        """A move has begun; the key for `over`."""
        self._last_key += 1
        self._begun[self._last_key] = pair, now_s
        return self._last_key

    def over(
        self, key: int, now_s: float, *, nbytes: int, seconds: float, rtt_s: float, failed: bool
    ) -> None:
        """A move has ended, having sent `nbytes` in `seconds`. 0: that was not measured."""
        found = self._begun.pop(key, None)
        if found is None:
            return
        pair, _ = found
        self._rates.setdefault(pair, RateMeter()).observe(nbytes, seconds, now_s)
        if rtt_s > 0:
            self._rtts[pair] = rtt_s
        if failed:
            self._failed_s[pair] = now_s

    def moving(self) -> frozenset[Pair]:
        """Between which clusters a prefix is under way."""
        return frozenset(pair for pair, _ in self._begun.values())

    def failed_lately(self, now_s: float) -> frozenset[Pair]:
        """Between which clusters nothing is moved now."""
        failed = [pair for pair, at_s in self._failed_s.items() if now_s - at_s <= RETRY_S]
        late = [pair for pair, at_s in self._begun.values() if now_s - at_s > MAX_MOVE_S]
        return frozenset(failed + late)

    def completed(self, link: LinkView, pair: Pair, now_s: float) -> LinkView:
        """The link with what moves measured of it, where nobody else has: an idle link's rate, or
        more than the floor of one that nobody has filled.
        """
        rate = link.available_bytes_per_s
        if pair not in self._rates or (rate is not None and not link.is_floor):
            return link
        measured = self._rates[pair].per_s(now_s)
        if measured is None:
            return link
        return replace(
            link,
            available_bytes_per_s=max(measured, rate or 0.0),
            is_floor=False,
            rtt_s=link.rtt_s or self._rtts.get(pair, 0.0),
        )
