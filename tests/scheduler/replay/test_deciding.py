"""A replay drives the live scheduler: what it took and was shown decides the same again."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import pytest

from deploy.plan.solve.case_study import case_study_region
from scheduler.live.admission import AdmissionConfig
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.feedback import Prefilled
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.planning.plan import best_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.deciding import Decider
from scheduler.replay.driver import replay
from scheduler.replay.jobs import Fate
from scheduler.replay.links import LinkChange, RateSchedule
from scheduler.replay.model import Policy, ReplayModel
from scheduler.replay.prefill import PrefillStation
from scheduler.replay.recording import Entry, Played, entry_frame, frames_in, play
from scheduler.replay.results import Outcome
from scheduler.replay.station_views import Parts, PdParts, StationViews
from scheduler.replay.workload import Phase, drawn
from scheduler.routing.decision import HAND_OFF
from scheduler.routing.profiles import PrefillProfile

GBIT = 1e9 / 8
POLICY = Policy(
    admission=AdmissionConfig(ttft_slo_s=20),
    long_term=LongTermConfig(period_s=30, min_requests=30),
)


def shaky_model() -> ReplayModel:
    """Engines that waver and are not what the plan says, and a link that slows down."""
    region = case_study_region(4, 8)
    region = replace(region, links=(replace(region.links[0], rtt_s=0.02),))
    changes = [LinkChange(at_s=40, bytes_per_s=5 * GBIT), LinkChange(at_s=80, bytes_per_s=1e10)]
    schedule = RateSchedule.of(100 * GBIT, changes)
    return ReplayModel(
        region=region,
        schedules={region.links[0].name: schedule},
        prefill_factors={"h200": 1.3},
        prefill_jitter=0.2,
    )


@dataclass(frozen=True)
class Recorded:
    """A replay, its scheduler's events and answers, and what stations and pool looked like."""

    outcome: Outcome
    frames: bytes
    seen: tuple[Any, ...]


@cache
def recorded() -> Recorded:
    """Two minutes with more load than the region can take, and longer answers than it is set to."""
    model = shaky_model()
    traffic = model.region.traffic
    rate_rps = 1.2 * best_plan(model.region, Mode.EXACT).system_rps(Mode.EXACT)
    phase = Phase(
        duration_s=120,
        rate_rps=rate_rps,
        lengths=traffic.lengths,
        output_tokens=2 * traffic.output_tokens,
    )
    frames: list[bytes] = []
    seen: deque[Any] = deque()
    take, decode_side = LiveScheduler.take, StationViews.decode_side

    def taking(live: LiveScheduler, event: Event[Any], now_s: float) -> Any:
        answer = take(live, event, now_s)
        frames.append(entry_frame(event, answer, now_s))
        return answer

    def looking(views: Any, *asked: Any) -> Any:
        (pd,) = views._parts.pds
        pool = pd.pool
        seen.extend((pool.slots_total, pool.num_running, range(len(pool.waiting)), pool.num_usable))
        return decode_side(views, *asked)

    def keeping(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def kept(*asked: Any) -> Any:
            seen.append(method(*asked))
            return seen[-1]

        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveScheduler, "take", taking)
        patch.setattr(StationViews, "decode_side", looking)
        patch.setattr(PrefillStation, "queued_s", keeping(PrefillStation.queued_s))
        patch.setattr(PrefillStation, "free_s", keeping(PrefillStation.free_s))
        patch.setattr(PrefillStation, "num_busy", keeping(PrefillStation.num_busy))
        outcome = replay(model, drawn([phase], 1), POLICY)
    return Recorded(outcome, b"".join(frames), tuple(seen))


class SeenAgain:
    """A station and a pool that look as they did, question by question."""

    is_lost = False

    def __init__(self, name: str, profile: PrefillProfile, seen: deque[Any]) -> None:
        self.name, self.profile = name, profile
        self._seen = seen

    def queued_s(self, uncached_tokens: int, now_s: float, pd: int) -> float:
        found: float = self._seen.popleft()
        return found

    def free_s(self, now_s: float) -> tuple[float, ...]:
        found: tuple[float, ...] = self._seen.popleft()
        return found

    @property
    def slots_total(self) -> Any:
        return self._seen.popleft()

    def num_busy(self) -> int:
        found: int = self._seen.popleft()
        return found

    num_running = waiting = num_usable = slots_total


def scheduler_that_sees(seen: deque[Any]) -> LiveScheduler:
    """One that has taken nothing yet."""
    model = shaky_model()
    clusters = (model.pd, *model.region.prefill_clusters)
    stations: Any = [SeenAgain(c.name, PrefillProfile.of(c.prefill), seen) for c in clusters]
    # Links are in the recording, and are not looked at again.
    watch: Any = None
    parts = Parts([PdParts(stations[0], stations[0])], stations[1:], None, {(1, 0): watch})
    return Decider(parts, model, POLICY, {}).live


def test_every_decision_of_a_replay_is_the_live_schedulers_and_comes_out_the_same_again() -> None:
    found, played = recorded(), Played()
    seen = deque(found.seen)
    play(scheduler_that_sees(seen), frames_in(io.BytesIO(found.frames)), played)
    assert played.differences == []
    assert not seen
    jobs = found.outcome.jobs
    routes, verdicts = played.outcomes["RouteAsked"], played.outcomes["AdmitAsked"]
    assert routes.total() == verdicts.total() == len(jobs)
    refused = sum(count for (word, _), count in verdicts.items() if word.startswith("refused"))
    assert refused == sum(job.fate is Fate.REFUSED for job in jobs) > 0
    assert {word.partition(" ")[0] for word, _ in routes} == {"h200", HAND_OFF}
    assert len(routes) > 3
    plans = played.outcomes["PlansAsked"]
    assert plans["replayed (convert)", "replayed (convert)"] > 0
    assert played.outcomes["ConversionAnswered"].total() > 0
    assert found.outcome.role_changes


def test_decisions_rest_on_what_the_scheduler_learnt() -> None:
    """So that the test above proves something."""
    found, played = recorded(), Played()
    frames = frames_in(io.BytesIO(found.frames))
    others = [f for f in frames if isinstance(f, Entry) and not isinstance(f.event, Prefilled)]
    play(scheduler_that_sees(deque(found.seen)), others, played)
    assert played.differences
