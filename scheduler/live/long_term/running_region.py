"""The running region as the planner takes it: from reports, links and what requests have taught.

What lasts for seconds must not move instances. So rates and health are means over a period, and an
instance counts that was healthy for half of it. Pure; does not know the plan, nor requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.learning.learned_profile import MIN_SEEN, LearnedProfile
from scheduler.live.long_term.conversion import Conversion, never_converted
from scheduler.live.snapshots import LinkPair, Reported
from scheduler.planning.allocation import Allocation
from scheduler.planning.curves import Curve
from scheduler.planning.region_model import (
    KvSize,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
)
from scheduler.reports import InstanceReport, Role
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE
from scheduler.routing.profiles import KvProfile

HEALTHY_SHARE: Final = 0.5
"""Of a period, from which on an instance counts."""

UNFILLED_BYTES_PER_S: Final = 12.5e9
"""What a link is planned with that nobody filled: it is not what limits the region now. Should a
plan fill it, the next period knows what it carries."""


@dataclass(frozen=True, slots=True)
class LinkMean:
    """A link over a period. `bytes_per_s` is None where nobody measured it; the round trip is the
    last one seen.
    """

    bytes_per_s: float | None
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PeriodMeans:
    """What a period was like. `healthy`: the share of it, by cluster, and instance with model."""

    links: Mapping[LinkPair, LinkMean] = field(default_factory=dict)
    healthy: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)

    def lasting(self, cluster: str, model: str) -> set[str]:
        """The instances of a cluster that were healthy for long enough, for this model."""
        shares = self.healthy.get(cluster, {})
        return {
            name
            for (name, served), share in shares.items()
            if share >= HEALTHY_SHARE and served in ("", model)
        }

    def models(self, cluster: str) -> set[str]:
        """What the instances of a cluster serve; "": an instance named no model."""
        return {served for _, served in self.healthy.get(cluster, {})}


class PeriodMeter:
    """Makes the means of a period out of looks at even intervals."""

    def __init__(self) -> None:
        self._once_measured: set[LinkPair] = set()
        self._clear()

    def see(self, reports: Iterable[Reported], links: Mapping[LinkPair, LinkView]) -> None:
        """One look. A cluster without a report has no healthy instance now."""
        self._num_looks += 1
        for source in reports:
            counts = self._healthy.setdefault(source.name, {})
            for item in source.report.instances if source.report is not None else ():
                if item.healthy:
                    key = item.name, item.model
                    counts[key] = counts.get(key, 0) + 1
        for pair, link in links.items():
            self._see_link(pair, link)

    def take(self) -> PeriodMeans:
        """The means since the last call."""
        links = {pair: LinkMean(self._rate(pair), rtt_s) for pair, rtt_s in self._rtts.items()}
        healthy = {
            cluster: {key: num / self._num_looks for key, num in counts.items()}
            for cluster, counts in self._healthy.items()
        }
        self._clear()
        return PeriodMeans(links, healthy)

    def _see_link(self, pair: LinkPair, link: LinkView) -> None:
        self._rtts[pair] = link.rtt_s
        rate = link.available_bytes_per_s
        if rate is None:
            if self._is_forgotten(pair, link):
                self._floors.setdefault(pair, [])
        elif link.is_floor:
            self._floors.setdefault(pair, []).append(rate)
        else:
            self._rates.setdefault(pair, []).append(rate)
            self._once_measured.add(pair)

    def _is_forgotten(self, pair: LinkPair, link: LinkView) -> bool:
        """Whether a rate was known and is too old now. Were such a link not planned with, one that
        no prompt is long enough for would never be used again.
        """
        return link.state is LinkCondition.CLEAR and pair in self._once_measured

    def _rate(self, pair: LinkPair) -> float | None:
        """While nobody filled it, a link carried at least the most that was measured: else seconds
        of congestion would stand for a period in which it had nothing to carry.
        """
        rates, floors = self._rates.get(pair, []), self._floors.get(pair, [])
        if not rates:
            return UNFILLED_BYTES_PER_S if pair in self._floors else None
        most = max(rates)
        seen = [*rates, *(max(most, floor) for floor in floors)]
        return math.fsum(seen) / len(seen)

    def _clear(self) -> None:
        self._num_looks = 0
        self._floors: dict[LinkPair, list[float]] = {}
        """Also of links that nobody filled and of which no rate is known."""
        self._healthy: dict[str, dict[tuple[str, str], int]] = {}
        self._rates: dict[LinkPair, list[float]] = {}
        self._rtts: dict[LinkPair, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFacts:
    """All that the region is modelled from. `traffic` is None before the first request has ended,
    `conversion` the one that the PD cluster is busy with.
    `other_models` are served beside `model`, by instances of their own.
    """

    model: str
    pd: Reported
    prefill_clusters: Sequence[Reported]
    knowledge: ModelKnowledge
    means: PeriodMeans
    thresholds: Mapping[str, float]
    traffic: Traffic | None
    conversion: Conversion | None = None
    converting: frozenset[str] = frozenset()
    other_models: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Modelled:
    """The region, what it is set to, and what was left out of it and why."""

    region: Region
    current: Allocation
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotModelled:
    """Why there is nothing to plan with yet."""

    reason: str


def model_region(facts: RegionFacts) -> Modelled | NotModelled:
    """The region for the planner, or everything that is missing for one.

    A prefill cluster that was away for the period is left out. Decode steps are taken as measured:
    those of a full batch may be longer.
    """
    if facts.traffic is None:
        return NotModelled("no request has ended yet")
    missing: list[str] = []
    notes: list[str] = []
    pd = _pd_cluster(facts, missing, notes)
    prefill_clusters = list(_prefill_clusters(facts, missing, notes))
    links = list(_links(facts, prefill_clusters, missing))
    kv = facts.knowledge.kv
    if kv is None:
        missing.append("the size of a prompt's KVCache is not known: none was transferred")
    if pd is None or kv is None or missing:
        return NotModelled("; ".join(missing))
    num_prefill, num_decode = division(facts.pd, facts.model, facts.means, facts.conversion)
    region = Region(tuple(prefill_clusters), (pd,), tuple(links), _kv_size(kv), facts.traffic)
    current = Allocation(
        thresholds={c.name: facts.thresholds[c.name] for c in prefill_clusters},
        num_prefill={pd.name: num_prefill},
        num_decode={pd.name: num_decode},
        converting=facts.converting,
    )
    return Modelled(region, current, tuple(notes))


def division(
    pd: Reported, model: str, means: PeriodMeans, conversion: Conversion | None
) -> tuple[int, int]:
    """Instances of the PD cluster that prefill and that decode for the model, now or once the
    conversion that runs is done. Those that do both count as decode: every request that they serve
    whole takes a slot there, but the router need not give them prefills of others.
    """
    roles = [role for _, role in _counted(pd, model, means, conversion)]
    num_prefill = sum(role == "prefill" for role in roles)
    return num_prefill, len(roles) - num_prefill


def pd_profile(knowledge: ModelKnowledge) -> LearnedProfile:
    """Prefill times in the PD cluster. Its engines are alike: what those that serve requests whole
    have shown holds for all, until some prefill for others.
    """
    own, whole = knowledge.profile(HAND_OFF), knowledge.profile(ONE_ENGINE)
    return own if own.is_known or not whole.is_known else whole


def _counted(
    pd: Reported, model: str, means: PeriodMeans, conversion: Conversion | None
) -> Iterator[tuple[InstanceReport, Role]]:
    """The PD cluster's instances that can be had, and the role that each will have."""
    lasting = means.lasting(pd.name, model)
    for item in pd.report.instances if pd.report is not None else ():
        role: Role = item.role
        if item.name not in lasting:
            continue
        if conversion is not None and conversion.instance == item.name:
            # It will be back in work, whichever role it is seen with now.
            role = conversion.wish.to_role
        elif item.draining or not item.role_ready:
            continue
        yield item, role


def _pd_cluster(facts: RegionFacts, missing: list[str], notes: list[str]) -> PdClusterModel | None:
    """None, and why in `missing`, where it cannot be divided or not all is known of it."""
    name, known = facts.pd.name, facts.knowledge
    if facts.pd.report is None:
        missing.append(f"{name} has sent no report lately")
        return None
    if facts.other_models and "" in facts.means.models(name):
        missing.append(f"{name} has instances that name no model: they count for none of several")
        return None
    counted = list(_counted(facts.pd, facts.model, facts.means, facts.conversion))
    num_prefill = sum(role == "prefill" for _, role in counted)
    num_decode = len(counted) - num_prefill
    both = [item.name for item, role in counted if role == "both"]
    if both:
        notes.append(f"{name}: {never_converted(both)} and counts as decode")
    if not (num_prefill and num_decode):
        missing.append(
            f"{name} has {num_prefill} usable instances that prefill and {num_decode} that decode: "
            "without one of each there is nothing to divide"
        )
        missing += notes
        return None
    learned = pd_profile(known)
    if not learned.is_known:
        missing.append(_unknown_profile(name, learned))
    slots = [item.decode_slots for item, role in counted if role != "prefill"]
    slots = [num for num in slots if num > 0]
    if not slots:
        missing.append(f"how many requests an instance of {name} decodes at a time is not known")
    if not known.step_s:
        missing.append(f"the time of a decode step in {name} is not known")
    if not (learned.is_known and slots and known.step_s):
        return None
    batch_size = round(sum(slots) / len(slots))
    curve = learned.profile.curve()
    return PdClusterModel(name, num_prefill + num_decode, curve, batch_size, known.step_s)


def _prefill_clusters(
    facts: RegionFacts, missing: list[str], notes: list[str]
) -> Iterator[PrefillClusterModel]:
    for source in facts.prefill_clusters:
        lasting = facts.means.lasting(source.name, facts.model)
        if source.report is not None:
            lasting -= {item.name for item in source.report.instances if item.draining}
        others = _others(facts, source.name)
        if others and not lasting:
            continue  # It is there for other models.
        if others:
            missing.append(
                f"{source.name} serves {facts.model} and {', '.join(others)}: it has one threshold "
                "and one link, which cannot be divided between plans"
            )
        if not lasting:
            notes.append(f"{source.name} is left out: it had no usable instance")
            continue
        learned = facts.knowledge.profile(source.name)
        if not learned.is_known:
            missing.append(_unknown_profile(source.name, learned))
        yield PrefillClusterModel(source.name, len(lasting), learned.profile.curve())


def _others(facts: RegionFacts, cluster: str) -> list[str]:
    """The other served models that instances of a cluster are for."""
    served = facts.means.models(cluster)
    unnamed = ["any other model"] if facts.other_models and "" in served else []
    return [*sorted(served & facts.other_models), *unnamed]


def _links(
    facts: RegionFacts, sources: Iterable[PrefillClusterModel], missing: list[str]
) -> Iterator[Link]:
    for source in sources:
        mean = facts.means.links.get((source.name, facts.pd.name), LinkMean(None))
        if mean.bytes_per_s is None:
            missing.append(f"the rate of the link {source.name} to {facts.pd.name} is not known")
        else:
            yield Link(source.name, facts.pd.name, mean.bytes_per_s, mean.rtt_s)


def _kv_size(kv: KvProfile) -> KvSize:
    return KvSize(Curve.quadratic(kv.fixed_bytes, kv.token_bytes), kv.fixed_bytes)


def _unknown_profile(name: str, learned: LearnedProfile) -> str:
    return f"prefill times of {name} are not known ({learned.num_seen} of {MIN_SEEN} prefills seen)"
