"""The running region as the planner takes it: from reports, links and what requests have taught.

Disturbances of seconds must not move instances. So rates and health are means over a period, and an
instance counts if it was healthy for half of it. Pure; knows neither the plan nor requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

from netmon.region_link import LinkView
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.learning.learned_profile import MIN_SEEN, LearnedProfile
from scheduler.live.learning.media_window import MediaDemand
from scheduler.live.long_term.conversion import Conversion, never_converted
from scheduler.live.long_term.encode_facts import encode_stage, has_stage
from scheduler.live.long_term.encode_step import EncodeStage
from scheduler.live.snapshots import LinkPair, Reported
from scheduler.planning.curves import Curve
from scheduler.planning.region_model import (
    Allocation,
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
"""An instance counts if it was healthy for at least this share of a period."""

UNFILLED_BYTES_PER_S: Final = 12.5e9
"""The rate assumed for a link that nobody has ever filled, bytes/s. Such a link does not limit the
region now. Should a plan fill it, the next period knows its rate.
"""


@dataclass(frozen=True, slots=True)
class LinkMean:
    """A link over a period. `bytes_per_s` is None where nobody measured it; the round trip is the
    last one seen.
    """

    bytes_per_s: float | None
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PeriodMeans:
    """A period in means. `healthy` is the share of it, by cluster, then by instance and model.
    `busy` is how busy the instances of a cluster with a role and a model were.
    """

    links: Mapping[LinkPair, LinkMean] = field(default_factory=dict)
    healthy: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    busy: Mapping[tuple[str, Role, str], float] = field(default_factory=dict)

    def lasting(self, cluster: str, model: str) -> set[str]:
        """The instances of a cluster that were healthy for long enough, for this model."""
        shares = self.healthy.get(cluster, {})
        return {
            name
            for (name, served), share in shares.items()
            if share >= HEALTHY_SHARE and served in ("", model)
        }

    def models(self, cluster: str) -> set[str]:
        """The models that the instances of a cluster serve; "" if an instance named none."""
        return {served for _, served in self.healthy.get(cluster, {})}


class PeriodMeter:
    """Makes the means of a period from samples at even intervals."""

    def __init__(self) -> None:
        self.measured: dict[LinkPair, float] = {}
        """The mean rate of each link in the last period in which it was measured."""
        self._clear()

    def see(self, reports: Iterable[Reported], links: Mapping[LinkPair, LinkView]) -> None:
        """Take one sample. A cluster without a report has no healthy instance now."""
        self._num_looks += 1
        for source in reports:
            counts = self._healthy.setdefault(source.name, {})
            if source.report is None:
                continue
            computing = {job.instance for job in source.report.jobs}
            for item in source.report.instances:
                if item.healthy:
                    key = item.name, item.model
                    counts[key] = counts.get(key, 0) + 1
                    self._see_load(source.name, item, item.running or item.name in computing)
        for pair, link in links.items():
            self._see_link(pair, link)

    def take(self) -> PeriodMeans:
        """The means since the last call."""
        links = {pair: LinkMean(self._rate(pair), rtt_s) for pair, rtt_s in self._rtts.items()}
        healthy = {
            cluster: {key: num / self._num_looks for key, num in counts.items()}
            for cluster, counts in self._healthy.items()
        }
        busy = {key: math.fsum(shares) / len(shares) for key, shares in self._busy.items()}
        self._clear()
        return PeriodMeans(links, healthy, busy)

    def forget_health(self) -> None:
        """Begin the means of instances anew, because some have joined or left."""
        self._num_looks = 0
        self._busy: dict[tuple[str, Role, str], list[float]] = {}
        self._healthy: dict[str, dict[tuple[str, str], int]] = {}

    def _see_load(self, cluster: str, item: InstanceReport, num_running: int) -> None:
        """Note how busy an instance is: one prefill takes all of it, decodes fill its slots. How
        much one that encodes can do, no report says.
        """
        role: Role = "decode" if item.role == "both" else item.role
        num_places = {"prefill": 1, "decode": item.decode_slots}.get(role, 0)
        if num_places and not item.draining and item.role_ready:
            share = min(1.0, num_running / num_places)
            self._busy.setdefault((cluster, role, item.model), []).append(share)

    def _see_link(self, pair: LinkPair, link: LinkView) -> None:
        self._rtts[pair] = link.rtt_s
        rate = link.available_bytes_per_s
        if rate is not None:
            (self._floors if link.is_floor else self._rates).setdefault(pair, []).append(rate)

    def _rate(self, pair: LinkPair) -> float | None:
        """The mean rate, where a floor counts as at least the highest measured rate.

        Otherwise a few seconds of congestion would stand for a period in which the link was mostly
        idle. A link that nobody measured has the last mean until a floor is above it: silence is no
        news, and the plan must go on with what the link was found to carry.
        """
        rates, floors = self._rates.get(pair, []), self._floors.get(pair, [])
        if not rates:
            known = self.measured.get(pair, UNFILLED_BYTES_PER_S if floors else None)
            return None if known is None else max([known, *floors])
        # While the link was down, nothing was found out about its rate.
        if up := [rate for rate in rates if rate > 0]:
            self.measured[pair] = math.fsum(up) / len(up)
        most = max(rates)
        seen = [*rates, *(max(most, floor) for floor in floors)]
        return math.fsum(seen) / len(seen)

    def _clear(self) -> None:
        self.forget_health()
        self._floors: dict[LinkPair, list[float]] = {}
        self._rates: dict[LinkPair, list[float]] = {}
        self._rtts: dict[LinkPair, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFacts:
    """All that the model of the region is made from.

    `traffic` is that of the requests whose home is `pd`, None before the first one has ended.
    `conversion` is what the PD cluster is busy with. `other_models` are served beside `model`, by
    instances of their own. `pd_places` are the places of a hand-off and of one engine there, as
    `LiveScheduler.place` names them.
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
    pd_places: tuple[str, str] = (HAND_OFF, ONE_ENGINE)
    media: MediaDemand | None = None
    """The media of that traffic; None without any."""
    cached_before: float = 0.0
    """`MeasuredTraffic.cached_before` of that traffic: attention reads what is cached, too."""


@dataclass(frozen=True, slots=True)
class Modelled:
    """The region, its present settings, and what was left out of it and why. `encode` is the encode
    stage of the PD cluster, None where none can be planned or there is nothing to encode. `busy` is
    how busy its instances were, by role.
    """

    region: Region
    current: Allocation
    notes: tuple[str, ...] = ()
    encode: EncodeStage | None = None
    busy: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotModelled:
    """Why there is nothing to plan with yet."""

    reason: str


def model_region(facts: RegionFacts) -> Modelled | NotModelled:
    """The region for the planner, or everything that is missing for one.

    A prefill cluster that was away for the period is left out.
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
    busy: dict[str, float] = {
        role: share
        for (cluster, role, model), share in facts.means.busy.items()
        if cluster == pd.name and model in ("", facts.model)
    }
    found = Modelled(region, current, tuple(notes), busy=busy)
    return found if facts.media is None else _with_media(found, facts, facts.media)


def _with_media(found: Modelled, facts: RegionFacts, media: MediaDemand) -> Modelled:
    """The same for traffic with media. Where no instance encodes for others, those that prefill do,
    so that their prefills take longer.
    """
    knowledge, model = facts.knowledge, facts.model

    def own_s(source: Reported, place: str) -> float:
        if has_stage(source.report, model):
            return 0.0
        return media.seconds(knowledge.media.line(place))

    sources = {source.name: source for source in facts.prefill_clusters}
    clusters = tuple(
        replace(c, prefill=c.prefill.raised(own_s(sources[c.name], c.name)))
        for c in found.region.prefill_clusters
    )
    (pd,) = found.region.pd_clusters
    pd = replace(pd, prefill=pd.prefill.raised(own_s(facts.pd, facts.pd_places[0])))
    found = replace(
        found, region=replace(found.region, prefill_clusters=clusters, pd_clusters=(pd,))
    )
    if facts.pd.report is None or not has_stage(facts.pd.report, model):
        return found
    lasting = facts.means.lasting(pd.name, model)
    own = knowledge.media.line(facts.pd_places[0])
    stage = encode_stage(facts.pd.report, model, lasting, media, own, facts.conversion)
    if isinstance(stage, str):
        return replace(found, notes=(*found.notes, f"the encode stage of {pd.name} stays: {stage}"))
    return replace(found, encode=stage)


def division(
    pd: Reported, model: str, means: PeriodMeans, conversion: Conversion | None
) -> tuple[int, int]:
    """The instances of the PD cluster that prefill and that decode for the model: (N_p, N_d).

    It counts instances as they will be after the conversion that runs. Instances that do both count
    as decode: every request that they serve whole takes a slot there, while the router need not
    give them prefills of others.
    """
    roles = [role for _, role in _counted(pd, model, means, conversion)]
    num_prefill = sum(role == "prefill" for role in roles)
    return num_prefill, len(roles) - num_prefill


def pd_profile(
    knowledge: ModelKnowledge, places: tuple[str, str] = (HAND_OFF, ONE_ENGINE)
) -> LearnedProfile:
    """Prefill times in a PD cluster, by the places of a hand-off and of one engine there.

    Its engines are alike. So until some instances prefill for others, the times of those that serve
    requests whole hold for all.
    """
    own, whole = (knowledge.profile(place) for place in places)
    return own if own.is_known or not whole.is_known else whole


def _counted(
    pd: Reported, model: str, means: PeriodMeans, conversion: Conversion | None
) -> Iterator[tuple[InstanceReport, Role]]:
    """The usable instances of the PD cluster that prefill or decode, and the role that each will
    have.
    """
    lasting = means.lasting(pd.name, model)
    for item in pd.report.instances if pd.report is not None else ():
        role: Role = item.role
        if item.name not in lasting:
            continue
        if conversion is not None and conversion.instance == item.name:
            # It will serve again after the conversion, whatever its report says now.
            role = conversion.wish.to_role
        elif item.draining or not item.role_ready:
            continue
        if role != "encode":
            yield item, role


def _pd_cluster(facts: RegionFacts, missing: list[str], notes: list[str]) -> PdClusterModel | None:
    """The PD cluster for the planner, or None with the reasons in `missing`.

    It is None where it cannot be divided or not everything about it is known.
    """
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
    learned = pd_profile(known, facts.pd_places)
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
    # Equation 5 wants the step of a full batch. Small batches of quiet hours have short steps.
    step_s = known.full_step_s(batch_size) or known.step_s
    curve = learned.profile.curve().behind(facts.cached_before)
    return PdClusterModel(name, num_prefill + num_decode, curve, batch_size, step_s)


def _prefill_clusters(
    facts: RegionFacts, missing: list[str], notes: list[str]
) -> Iterator[PrefillClusterModel]:
    for source in facts.prefill_clusters:
        lasting = facts.means.lasting(source.name, facts.model)
        if source.report is not None:
            lasting -= {
                item.name
                for item in source.report.instances
                if item.draining or item.role == "encode"
            }
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
        curve = learned.profile.curve().behind(facts.cached_before)
        yield PrefillClusterModel(source.name, len(lasting), curve)


def _others(facts: RegionFacts, cluster: str) -> list[str]:
    """The other served models that a cluster has instances for."""
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
