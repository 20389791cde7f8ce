"""A replay drives the live scheduler: what it took and was shown decides the same again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from deploy.plan.solve.case_study import case_study_region
from scheduler.live.admission import AdmissionConfig
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.feedback import Prefilled
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.planning.solve import best_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay
from scheduler.replay.jobs import Fate
from scheduler.replay.links import LinkChange, RateSchedule
from scheduler.replay.model import Policy, ReplayModel
from scheduler.replay.recording import (
    Entry,
    Frame,
    Header,
    Played,
    entry_frame,
    frame_of,
    frames_in,
    header_of,
    play,
    scheduler_of,
)
from scheduler.replay.results import Outcome
from scheduler.replay.workload import Phase, drawn
from scheduler.routing.decision import HAND_OFF

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
    """A replay, and the file that a recorder would write of its scheduler."""

    outcome: Outcome
    file: bytes

    def frames(self) -> Iterator[Frame]:
        return frames_in(io.BytesIO(self.file))


@cache
def recorded() -> Recorded:
    """Two minutes with more load than the region can take, and longer answers than it is set to."""
    model = shaky_model()
    traffic = model.region.traffic
    rate_rps = 1.2 * best_plan(model.region).system_rps(Mode.EXACT)
    phase = Phase(
        duration_s=120,
        rate_rps=rate_rps,
        lengths=traffic.lengths,
        output_tokens=2 * traffic.output_tokens,
    )
    frames: list[bytes] = []
    take = LiveScheduler.take

    def taking(live: LiveScheduler, event: Event[Any], now_s: float) -> Any:
        if not frames:
            frames.append(frame_of(header_of(live, "1.0", 0.0).packed()))
        answer = take(live, event, now_s)
        frames.append(entry_frame(event, answer, now_s))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveScheduler, "take", taking)
        outcome = replay(model, drawn([phase], 1), POLICY)
    return Recorded(outcome, b"".join(frames))


def played(frames: Iterator[Frame]) -> Played:
    found, header = Played(), next(frames)
    assert isinstance(header, Header)
    play(scheduler_of(header), frames, found)
    return found


def test_every_decision_of_a_replay_is_the_live_schedulers_and_comes_out_the_same_again() -> None:
    found = recorded()
    again = played(found.frames())
    assert again.differences == []
    jobs = found.outcome.jobs
    routes, verdicts = again.outcomes["RouteAsked"], again.outcomes["AdmitAsked"]
    assert routes.total() == verdicts.total() == len(jobs)
    refused = sum(count for (word, _), count in verdicts.items() if word.startswith("refused"))
    assert refused == sum(job.fate is Fate.REFUSED for job in jobs) > 0
    assert {word.partition(" ")[0] for word, _ in routes} == {"h200", HAND_OFF}
    assert len(routes) > 3
    plans = again.outcomes["PlansAsked"]
    assert plans["replayed (convert)", "replayed (convert)"] > 0
    assert again.outcomes["ConversionAnswered"].total() > 0
    assert found.outcome.role_changes


def test_decisions_rest_on_what_the_scheduler_learnt() -> None:
    """So that the test above proves something."""
    frames = (
        f
        for f in recorded().frames()
        if not (isinstance(f, Entry) and isinstance(f.event, Prefilled))
    )
    assert played(frames).differences
