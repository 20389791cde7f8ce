"""Which PD cluster decodes a request: its home, or another one that it spills to.

Every request has a home, the PD cluster that it belongs to. The home's policy says when another one
may decode it:

- `never`: it stays at home, whatever happens there.
- `overflow`: it leaves a home that cannot serve it or would refuse it. If it would wait for a
  decode slot at home, it goes to any cluster that is predicted sooner. Otherwise another cluster
  must be predicted sooner by more than the routing margin.
- `nearest`: like `overflow`, but the fixed part of the margin is enough, and of the clusters that
  are within it of the soonest one, the nearest is taken.

A first token that is computed elsewhere travels one round trip further, which counts as part of its
time. Pure. This file knows neither how a time is predicted nor what a cluster consists of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

Spill = Literal["never", "overflow", "nearest"]


class PdReason(StrEnum):
    """Why this PD cluster decodes. Values are stable: they are metric labels and header values."""

    HOME = "home"
    HOME_UNABLE = "home_unable"
    """No instance at home can serve the request."""
    HOME_REFUSES = "home_refuses"
    HOME_FULL = "home_full"
    """The request would wait for a decode slot at home."""
    SOONER = "sooner"


class PdOffer(NamedTuple):
    """The offer of a PD cluster to serve a request.

    `ttft_s` is infinite where no instance can serve it. `rtt_s` is the round trip from its home.
    """

    pd: str
    ttft_s: float
    is_refused: bool = False
    is_full: bool = False
    rtt_s: float = 0.0

    @property
    def is_able(self) -> bool:
        """Whether the request would be served there."""
        return self.ttft_s < math.inf and not self.is_refused

    @property
    def total_s(self) -> float:
        """The time to first token as the request's home sees it."""
        return self.ttft_s + self.rtt_s


class SpillRule(NamedTuple):
    """The policy of a home, and the routing margin."""

    spill: Spill
    margin_s: float
    margin_share: float

    def lead_s(self, home: PdOffer) -> float:
        """How much sooner another cluster must be."""
        if home.is_full:
            return 0.0
        share = self.margin_share if self.spill == "overflow" else 0.0
        return self.margin_s + share * home.ttft_s

    def may_leave(self, home: PdOffer) -> bool:
        """Whether any offer of another cluster could be better: only then are others asked."""
        if self.spill == "never":
            return False
        return not home.is_able or home.ttft_s > self.lead_s(home)


def choose_pd(
    home: PdOffer, others: Sequence[PdOffer], rule: SpillRule
) -> tuple[PdOffer, PdReason]:
    """The PD cluster that decodes, and why. With equal times the nearer one, then by name."""
    able = [offer for offer in others if offer.is_able]
    if rule.spill == "never" or not able:
        return home, PdReason.HOME
    if not home.is_able:
        reason = PdReason.HOME_REFUSES if home.ttft_s < math.inf else PdReason.HOME_UNABLE
        return _best(able, rule), reason
    lead_s = rule.lead_s(home)
    sooner = [offer for offer in able if offer.total_s + lead_s < home.ttft_s]
    if not sooner:
        return home, PdReason.HOME
    return _best(sooner, rule), PdReason.HOME_FULL if home.is_full else PdReason.SOONER


def _best(offers: Sequence[PdOffer], rule: SpillRule) -> PdOffer:
    if rule.spill == "nearest":
        latest_s = min(offer.total_s for offer in offers) + rule.margin_s
        return min(
            (offer for offer in offers if offer.total_s <= latest_s),
            key=lambda offer: (offer.rtt_s, offer.total_s, offer.pd),
        )
    return min(offers, key=lambda offer: (offer.total_s, offer.rtt_s, offer.pd))
