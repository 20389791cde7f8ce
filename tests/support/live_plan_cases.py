"""A region as the long-term loop's shell meets it: reports, knowledge, links, and who converts."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import report_cases
from report_cases import cluster

from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.region_link import LinkView
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.long_term.conversion import (
    Conversion,
    ConversionOutcome,
    ConversionPhase,
    ConversionWish,
    Drain,
    Ended,
    Start,
)
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.snapshots import LinkPair, Reported
from scheduler.reports import ClusterReport, InstanceReport, Role
from scheduler.routing.decision import HAND_OFF
from scheduler.routing.profiles import PrefillProfile

MODEL = "tiny"
FAST = PrefillProfile((0.0,), ((0.39180, 4.2061e-5, 9.937e-11),))
SLOW = PrefillProfile((0.0,), ((0.4488, 1.3177e-4, 2.7035e-10),))
KV_FIXED_BYTES, KV_TOKEN_BYTES = 1.8e8, 17280.0
STEP_S = 0.025
SLOTS = 20


# Busy, so that it may be helped by another one.
instance = partial(
    report_cases.instance, model=MODEL, running=SLOTS, max_concurrent=8, decode_slots=SLOTS
)


def numbered(name: str, role: Role, num: int) -> tuple[InstanceReport, ...]:
    return tuple(instance(f"{name}-{index}", role) for index in range(num))


def near(num_prefill: int, num_decode: int) -> ClusterReport:
    return cluster(
        "near", *numbered("p", "prefill", num_prefill), *numbered("d", "decode", num_decode)
    )


def teach(
    knowledge: ModelKnowledge, num: int, *, now_s: float, output_tokens: int = 1024, seed: int = 0
) -> None:
    """So many requests over the last 5 minutes, and what prefills, landings and answers showed."""
    rng = random.Random(seed)
    for index in range(num):
        at_s = now_s - 300.0 + 300.0 * index / num
        tokens = min(131_072, max(128, round(math.exp(rng.gauss(9.9, 1.0)))))
        knowledge.traffic.arrived(tokens, 0, at_s)
        knowledge.decoded(output_tokens, STEP_S * (output_tokens - 1), at_s)
        for place, truth in ((HAND_OFF, SLOW), ("far", FAST)):
            if index < 30:
                knowledge.learn(place, tokens, 0, truth.prefill_s(tokens))
        knowledge.reserved(tokens, 0, round(KV_FIXED_BYTES + KV_TOKEN_BYTES * tokens))


class Roles:
    """Converts one instance at a time when told to, in the region's reports."""

    def __init__(self, region: "LiveRegion") -> None:
        self.current: Conversion | None = None
        self.asked: list[ConversionWish] = []
        self.refusal = ""
        self._region = region
        self._listeners: list[Callable[[Ended], None]] = []

    @property
    def converting(self) -> frozenset[str]:
        return frozenset({"near"} if self.current else ())

    def leads(self) -> bool:
        return True

    def on_ended(self, listener: Callable[[Ended], None]) -> None:
        self._listeners.append(listener)

    def ask(self, wish: ConversionWish) -> Start:
        self.asked.append(wish)
        if self.refusal or self.current is not None:
            return Start((), self.refusal or "another one runs")
        assert self._region.pd is not None
        found = next(
            item
            for item in self._region.pd.instances
            if item.role == wish.from_role and item.model == wish.model
        )
        self.current = Conversion(found.name, wish, 1, ConversionPhase.DRAINING, self._region.now_s)
        self._region.change(found.name, draining=True)
        return Start((Drain(found.name),), "it is the first")

    def end(self, outcome: ConversionOutcome = ConversionOutcome.CONVERTED) -> None:
        assert self.current is not None
        name, wish = self.current.instance, self.current.wish
        is_converted = outcome is ConversionOutcome.CONVERTED
        role = wish.to_role if is_converted else wish.from_role
        self._region.change(name, draining=False, role=role)
        self.current = (
            replace(self.current, phase=ConversionPhase.DWELLING) if is_converted else None
        )
        for listener in self._listeners:
            listener(Ended(name, wish, outcome, ""))

    def dwelt(self) -> None:
        self.current = None


@dataclass
class LiveRegion:
    """What the gateway would have; also the source of reports."""

    pd: ClusterReport | None = field(default_factory=lambda: near(4, 4))
    far: ClusterReport | None = field(
        default_factory=lambda: cluster("far", *numbered("f", "prefill", 4))
    )
    link: LinkView = field(
        default_factory=lambda: LinkView(available_bytes_per_s=1.25e10, rtt_s=0.02)
    )
    now_s: float = 1000.0
    error: Exception | None = None
    """What looking at links ends in."""
    models: tuple[str, ...] = (MODEL,)

    def __post_init__(self) -> None:
        self.roles = Roles(self)
        settings = LiveSettings(
            pd_clusters=(PdSettings("near", ("far",)),),
            threshold_tokens=8000,
            hand_off_tokens=256,
            models=self.models,
        )
        self.scheduler = RegionScheduler(
            settings,
            self,
            lambda source, target: self.links().get((source, target), LinkView()),
            clock=lambda: self.clock(),
        )
        self.knowledge = self.scheduler.knowledge(MODEL)
        self.thresholds = self.scheduler.live.thresholds

    def clock(self) -> float:
        return self.now_s

    def reported_pd(self) -> Reported:
        return Reported("near", self.pd, self.now_s)

    def reported_pds(self) -> list[Reported]:
        return [self.reported_pd()]

    def reported_prefill(self) -> list[Reported]:
        return [Reported("far", self.far, self.now_s)]

    def links(self) -> dict[LinkPair, LinkView]:
        if self.error is not None:
            raise self.error
        return {("far", "near"): self.link, ("near", "far"): LinkView()}

    def change(self, name: str, **changes: object) -> None:
        """Another report of one of the PD cluster's instances."""
        assert self.pd is not None
        instances = tuple(
            msgspec.structs.replace(item, **changes) if item.name == name else item
            for item in self.pd.instances
        )
        self.pd = msgspec.structs.replace(self.pd, instances=instances)
