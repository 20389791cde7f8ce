"""Moves of cached prefixes between clusters: those under way, and what ended ones measured.

Where a move between two clusters failed, or takes longer than any request waits, nothing is moved
between them for a while. Pure; time is an argument. This file does not know prefixes, nodes or
routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from netmon.region_link import LinkView
from scheduler.routing.candidates import MAX_MOVE_S

RETRY_S: Final = 60.0
"""How long nothing is moved between two clusters after a failed move, seconds."""
HALF_LIFE_S: Final = 60.0
KEPT_S: Final = 600.0
"""A rate is forgotten after this time without a move, seconds."""

Pair = tuple[str, str]


@dataclass(slots=True)
class _Measured:
    """What moves between two clusters sent and how long they took. Older moves count less."""

    nbytes: float
    seconds: float
    rtt_s: float
    at_s: float


class MeasuredMoves(msgspec.Struct, frozen=True, array_like=True):
    """The measurement of moves between two clusters; 0 bytes: there is none. `failed_age_s` is the
    time since one failed.
    """

    source: str
    target: str
    nbytes: float = 0.0
    seconds: float = 0.0
    rtt_s: float = 0.0
    age_s: float = 0.0
    failed_age_s: float | None = None


class CacheMoveLedger:
    """The moves of one gateway. A pair is (from, to)."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Pair, float]] = {}
        self._last_key = 0
        self._measured: dict[Pair, _Measured] = {}
        self._failed_s: dict[Pair, float] = {}

    def begun(self, pair: Pair, now_s: float) -> int:
        """A move has begun. Returns the key for `over`."""
        self._last_key += 1
        self._begun[self._last_key] = pair, now_s
        return self._last_key

    def over(self, key: int, sent: tuple[int, float, float], now_s: float, *, failed: bool) -> None:
        """A move has ended. `sent` is (bytes, seconds, round trip in seconds); 0 seconds if not
        measured.
        """
        found = self._begun.pop(key, None)
        if found is None:
            return
        (pair, _), (nbytes, seconds, rtt_s) = found, sent
        if nbytes and seconds > 0:
            seen = self._measured.get(pair) or _Measured(0.0, 0.0, 0.0, now_s)
            # Bytes and seconds fade alike, so that their ratio is a mean rate weighted by time
            # and size.
            faded = 0.5 ** ((now_s - seen.at_s) / HALF_LIFE_S)
            self._measured[pair] = _Measured(
                seen.nbytes * faded + nbytes, seen.seconds * faded + seconds, rtt_s, now_s
            )
        if failed:
            self._failed_s[pair] = now_s

    def state(self, now_s: float) -> list[MeasuredMoves]:
        """The argument of `restore`: all measurements, without the moves that are under way."""
        found = []
        for pair in sorted(self._measured.keys() | self._failed_s.keys()):
            seen = self._measured.get(pair) or _Measured(0.0, 0.0, 0.0, now_s)
            failed_s = self._failed_s.get(pair)
            failed_age_s = None if failed_s is None else now_s - failed_s
            age_s = now_s - seen.at_s
            found.append(
                MeasuredMoves(*pair, seen.nbytes, seen.seconds, seen.rtt_s, age_s, failed_age_s)
            )
        return found

    def restore(self, state: Iterable[MeasuredMoves], now_s: float) -> None:
        """Take over what moves measured."""
        for kept in state:
            pair = kept.source, kept.target
            if kept.nbytes > 0 and kept.seconds > 0:
                at_s = now_s - kept.age_s
                self._measured[pair] = _Measured(kept.nbytes, kept.seconds, kept.rtt_s, at_s)
            if kept.failed_age_s is not None:
                self._failed_s[pair] = now_s - kept.failed_age_s

    def moving(self) -> frozenset[Pair]:
        """The pairs of clusters between which a prefix is under way."""
        return frozenset(pair for pair, _ in self._begun.values())

    def failed_lately(self, now_s: float) -> frozenset[Pair]:
        """The pairs of clusters between which nothing may be moved now."""
        failed = [pair for pair, at_s in self._failed_s.items() if now_s - at_s <= RETRY_S]
        # A move that hangs bars its pair too: a second one would hang beside it.
        late = [pair for pair, at_s in self._begun.values() if now_s - at_s > MAX_MOVE_S]
        return frozenset(failed + late)

    def completed(self, link: LinkView, pair: Pair, now_s: float) -> LinkView:
        """The link with the rate that moves measured, where nothing else has measured it.

        It gives a rate to an idle link, and more than the floor to a link that nobody has filled.
        """
        seen, rate = self._measured.get(pair), link.available_bytes_per_s
        if seen is None or now_s - seen.at_s > KEPT_S or (rate is not None and not link.is_floor):
            return link
        return msgspec.structs.replace(
            link,
            available_bytes_per_s=max(seen.nbytes / seen.seconds, rate or 0.0),
            is_floor=False,
            rtt_s=link.rtt_s or seen.rtt_s,
        )
