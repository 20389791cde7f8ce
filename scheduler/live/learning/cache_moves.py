"""Moves of cached prefixes between clusters: those under way, and what those that ended measured.

A pair of clusters (from, to) where a move failed, or takes longer than any request waits, is left
alone for a while. Pure; time is an argument. Does not know prefixes, nodes or routes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from netmon.region_link import LinkView
from scheduler.routing.candidates import MAX_MOVE_S

RETRY_S: Final = 60.0
"""Between clusters where a move failed none is made for so long."""
HALF_LIFE_S: Final = 60.0
KEPT_S: Final = 600.0
"""A rate that no move has confirmed for so long is not known any more."""

Pair = tuple[str, str]


@dataclass(slots=True)
class _Measured:
    """What the moves between two clusters sent and how long it took, older ones counting less."""

    nbytes: float
    seconds: float
    rtt_s: float
    at_s: float


class CacheMoveLedger:
    """See the module text."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Pair, float]] = {}
        self._last_key = 0
        self._measured: dict[Pair, _Measured] = {}
        self._failed_s: dict[Pair, float] = {}

    def begun(self, pair: Pair, now_s: float) -> int:
        """A move has begun; the key for `over`."""
        self._last_key += 1
        self._begun[self._last_key] = pair, now_s
        return self._last_key

    def over(self, key: int, sent: tuple[int, float, float], now_s: float, *, failed: bool) -> None:
        """A move has ended. `sent`: so many bytes in so many seconds, and the round trip, s; what
        took no time was not measured.
        """
        found = self._begun.pop(key, None)
        if found is None:
            return
        (pair, _), (nbytes, seconds, rtt_s) = found, sent
        if nbytes and seconds > 0:
            seen = self._measured.get(pair) or _Measured(0.0, 0.0, 0.0, now_s)
            faded = 0.5 ** ((now_s - seen.at_s) / HALF_LIFE_S)
            self._measured[pair] = _Measured(
                seen.nbytes * faded + nbytes, seen.seconds * faded + seconds, rtt_s, now_s
            )
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
        seen, rate = self._measured.get(pair), link.available_bytes_per_s
        if seen is None or now_s - seen.at_s > KEPT_S or (rate is not None and not link.is_floor):
            return link
        return replace(
            link,
            available_bytes_per_s=max(seen.nbytes / seen.seconds, rate or 0.0),
            is_floor=False,
            rtt_s=link.rtt_s or seen.rtt_s,
        )
