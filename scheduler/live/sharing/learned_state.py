"""The state that a live scheduler has learnt, as a value for a file or another gateway.

It holds ages instead of times, because another process has another clock. It does not hold what is
under way: requests, legs and reports end with their gateway, or are heard again. Pure; this file
does not know where states are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Final

import msgspec
import numpy as np

from netmon.region_link import LinkRate
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.learning.cache_moves import MeasuredMoves
from scheduler.live.learning.knowledge import KnowledgeState, ModelKnowledge
from scheduler.live.learning.prompt_length import Media, PromptContent
from scheduler.live.settings import LiveSettings
from scheduler.routing.prediction import Prediction

VERSION: Final = 4
"""A state of another version is not read: its fields may mean something else."""
MAX_HEARD: Final = 1000
"""The gateways whose numbers are remembered, those that were heard last. A gateway has another name
after each start.
"""
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class PlannedThreshold(msgspec.Struct, frozen=True, array_like=True):
    """The plan's threshold of the link from a prefill cluster to a PD cluster, and what the plan
    sends over it, bytes/s.
    """

    cluster: str
    pd: str
    tokens: NotNegative
    bytes_per_s: NotNegative


class ConversionAge(msgspec.Struct, frozen=True, array_like=True):
    """When a PD cluster was last converted for a model, and by how much that changed N_p; with
    `is_encode`, the number of instances that encode.
    """

    model: str
    cluster: str
    age_s: NotNegative
    way: int
    is_encode: bool = False


class PlanState(msgspec.Struct, frozen=True, array_like=True):
    """The thresholds that the long-term loop has set, and the conversions since which it dwells.
    It began from a threshold of `configured_tokens`.
    """

    configured_tokens: float
    thresholds: list[PlannedThreshold]
    conversions: list[ConversionAge]


class LearnedState(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one gateway has learnt.

    `measured_links` are the mean rates in the last periods in which links were measured. `links`
    are the rates that are remembered.
    `spent` are the levels of the token buckets of tenants that are not full. `heard` says how many
    observations of each gateway the rest contains.
    """

    models: dict[str, KnowledgeState]
    moves: list[MeasuredMoves]
    plan: PlanState
    spent: dict[str, float]
    measured_links: list[tuple[str, str, NotNegative]]
    links: list[LinkRate]
    heard: dict[str, int]


class StateRestored(Event[None], frozen=True):
    """The scheduler goes on from a state that was made `age_s` ago."""

    state: LearnedState
    age_s: float = 0.0

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """The state replaces what was learnt before. Unknown clusters and models are left
        out. ValueError for a state that contradicts itself; nothing is changed then.
        """
        state, made_s = self.state, now_s - self.age_s
        served = live.settings.models or state.models
        models = {
            name: ModelKnowledge.restored(kept, made_s)
            for name, kept in state.models.items()
            if name in served
        }
        live.replace_knowledge(models)
        live.moves.restore(state.moves, made_s)
        live.period.measured |= {(a, b): rate for a, b, rate in state.measured_links}
        live.tenants.restore(state.spent, made_s)
        # The numbers belong to the state: what was heard before it has given way.
        live.heard = dict(islice(state.heard.items(), MAX_HEARD))
        adopt_plan(live, state.plan, made_s)


class PlanHeard(Event[None], frozen=True):
    """The gateway that leads has set a plan, `age_s` ago."""

    plan: PlanState
    age_s: float = 0.0

    def apply(self, live: LiveScheduler, now_s: float) -> None:
        """This gateway has the same thresholds, and dwells as long if it comes to lead."""
        adopt_plan(live, self.plan, now_s - self.age_s)


def rehearse(state: LearnedState, settings: LiveSettings) -> None:
    """Do with a state what requests will do, in a scheduler of its own.

    It comes from outside, and a number that contradicts others shows only when it is used.
    ValueError: one cannot be calculated with.
    """
    live, now_s = LiveScheduler(settings), 1e6
    try:
        with np.errstate(all="raise"):
            StateRestored(state).apply(live, now_s)
            results = [
                result for known in live.models().values() for result in _used(live, known, now_s)
            ]
    except (ArithmeticError, LookupError, TypeError, np.linalg.LinAlgError) as error:
        raise ValueError(f"it cannot be calculated with: {error!r}") from error
    if not all(0 <= result < math.inf for result in results):
        raise ValueError(f"it leads to times and lengths of {min(results)} to {max(results)}")


def _used(live: LiveScheduler, known: ModelKnowledge, now_s: float) -> Iterator[float]:
    """What a few requests predict and teach."""
    for kind in Media:
        yield known.lengths.num_tokens(PromptContent(1000, 10, {kind: 1}))
    for meter in (known.traffic, *(known.traffic_of(pd.name) for pd in live.settings.pd_clusters)):
        for _ in range(2):
            meter.arrived(1000, 100, now_s, 10)
            meter.finished(100, now_s)
        measured = meter.measured(now_s)
        yield math.inf if measured is None else measured.input_tokens + measured.rate_rps
    predicted = Prediction(prefill_s=1.0)
    for place in sorted(live.all_places()):
        for number in range(1, 6):
            known.prefilled(place, 1000 * number, 10, float(number), now_s)
            known.prefilled(place, 1000 * number, 10, number + 1.0, now_s, encoded_tokens=100)
            for has_media in (False, True):
                known.answered(place, predicted, 1.0 + number, now_s, has_media=has_media)
        yield known.prefill(place).prefill_s(2000, 100)
        yield known.error(place) or 0.0
        for service in (known.service(place, now_s), known.media.service(place, now_s)):
            yield from service or ()
    for number in range(1, 6):
        known.reserved(1000 * number, 100, 1_000_000)
        known.decoded(100, float(number), now_s, number)
    yield (known.decode_s or 0.0) + (known.full_step_s(8) or 0.0)
    yield 0.0 if known.kv is None else known.kv.size_bytes(1000)


def learned_state(
    live: LiveScheduler, now_s: float, links: Iterable[LinkRate] = ()
) -> LearnedState:
    """Everything that `live` has learnt. `links` are rates that are remembered outside of it."""
    return LearnedState(
        models={name: known.state(now_s) for name, known in live.models().items()},
        moves=live.moves.state(now_s),
        plan=plan_state(live, now_s),
        spent=live.tenants.state(now_s),
        measured_links=sorted((*pair, rate) for pair, rate in live.period.measured.items()),
        links=list(links),
        heard=dict(live.heard),
    )


def plan_state(live: LiveScheduler, now_s: float) -> PlanState:
    """The plan that `live` follows now."""
    return PlanState(
        live.settings.threshold_tokens,
        [PlannedThreshold(*planned) for planned in live.thresholds.planned()],
        [
            ConversionAge(model, cluster, now_s - at_s, way, is_encode)
            for (model, _), plan in live.plans.items()
            # Gateways from before the encode stage take all for changes of N_p: the last one holds.
            for is_encode, changed in ((True, plan.changed_encode), (False, plan.changed))
            for cluster, (at_s, way) in changed.items()
        ],
    )


def adopt_plan(live: LiveScheduler, plan: PlanState, made_s: float) -> None:
    """Let `live` go on with a plan that another gateway had at `made_s`."""
    known = set(live.settings.pairs)
    # An operator who sets another threshold means it, whatever was planned from the one before.
    is_for_this = plan.configured_tokens == live.settings.threshold_tokens
    for kept in plan.thresholds:
        if is_for_this and (kept.cluster, kept.pd) in known:
            live.thresholds.set_base(kept.cluster, kept.tokens, kept.bytes_per_s, pd=kept.pd)
    for conversion in plan.conversions:
        followed = live.plans.get((conversion.model, conversion.cluster))
        if followed is not None:
            changed = followed.changed_encode if conversion.is_encode else followed.changed
            changed[conversion.cluster] = made_s - conversion.age_s, conversion.way
