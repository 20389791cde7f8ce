"""Recordings of the long-term loop: what was decided with a solver in a thread and role changes is
decided again from the file alone, number by number.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_plan_cases import MODEL, STEP_S, LiveRegion, teach
from prometheus_client import CollectorRegistry

from deploy.gateway.config import RecorderSection
from deploy.gateway.scheduling import recorder as module
from deploy.gateway.scheduling.config import LongTermSection
from deploy.gateway.scheduling.long_term import LongTermService
from deploy.gateway.scheduling.plan_metrics import PlanMetrics
from deploy.gateway.scheduling.recorder import Recorder
from deploy.plan.simulate.recording import document_of, play_recordings
from scheduler.live.feedback import AnswerDecoded, RequestArrived
from scheduler.live.long_term.conversion import ConversionOutcome, ConversionWish
from scheduler.live.long_term.events import PeriodLook
from scheduler.live.settings import LiveSettings
from scheduler.replay.recording import Header, frames_in, scheduler_of

PERIOD_S = 300.0
NUM_REQUESTS = 500


class Flight:
    """A region with its long-term loop, recorded to `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.region = LiveRegion()
        self._rng = random.Random(1)
        teach(self.region.knowledge, 600, now_s=self.region.now_s, output_tokens=128)
        roles: Any = {"near": self.region.roles}
        metrics = PlanMetrics(CollectorRegistry())
        self.service = LongTermService(LongTermSection(), self.region.scheduler, roles, metrics)
        self.recorder = Recorder(RecorderSection(dir=directory), CollectorRegistry())
        self.region.scheduler.record(self.recorder)

    async def period(self, output_tokens: int) -> str:
        """Requests with answers of this length, looks, and a step; its reason."""
        region = self.region
        for index in range(NUM_REQUESTS):
            region.now_s += PERIOD_S / NUM_REQUESTS
            prompt_tokens = max(128, round(math.exp(self._rng.gauss(9.9, 1.0))))
            region.scheduler.tell(RequestArrived(MODEL, prompt_tokens, 0))
            seconds = STEP_S * (output_tokens - 1)
            region.scheduler.tell(AnswerDecoded(MODEL, output_tokens, seconds))
            if index % 10 == 0:
                region.scheduler.ask(PeriodLook())
        (decision,) = await self.service.step()
        return decision.reason

    def outcomes(self, played: dict[str, Any]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in played["outcomes"]:
            found.setdefault(row["decision"], []).append(row["outcome"])
        return found


@pytest.fixture
async def flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flight:
    """Periods with conversions that end well and badly, in files that begin at any moment of it."""
    monkeypatch.setattr(module, "NUM_FILES", 20_000)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 1 << 30)  # every file begins with the state
    flight = Flight(tmp_path)
    roles = flight.region.roles
    reasons = [await flight.period(128) for _ in range(2)]
    roles.end()
    roles.dwelt()
    reasons.append(await flight.period(64))
    roles.end(ConversionOutcome.TOO_SLOW)
    reasons.append(await flight.period(64))
    # An operator's conversion counts as well.
    roles.ask(ConversionWish("near", "decode", "prefill", MODEL))
    roles.end()
    roles.dwelt()
    reasons += [await flight.period(8192) for _ in range(2)]
    assert reasons == ["convert", "converting", "convert", "dwelling", "dwelling", "dwelling"]
    await asyncio.to_thread(flight.recorder.close)
    return flight


async def test_plans_and_role_changes_are_decided_again(flight: Flight) -> None:
    found = document_of(*play_recordings(flight.directory))
    assert (found["differences"], found["is_complete"]) == ([], True)
    assert found["files"] > 5
    outcomes = flight.outcomes(found)
    assert f"{MODEL} (convert)" in outcomes["PlansAsked"]
    assert any(told.startswith("far ") for told in outcomes["ConversionAnswered"])
    assert any(told.startswith("far ") for told in outcomes["ConversionEnded"])
    assert "nothing" in outcomes["ConversionEnded"]


async def test_the_last_file_leads_to_the_thresholds_that_are_set(flight: Flight) -> None:
    path = max(flight.directory.iterdir())
    with path.open("rb") as stream:
        header, *entries = frames_in(stream)
    assert isinstance(header, Header)
    live = scheduler_of(header)
    for entry in entries:
        live.take(entry.event, entry.now_s)  # type: ignore[union-attr]
    assert live.thresholds.base_tokens() == flight.region.thresholds.base_tokens()


async def test_other_settings_would_have_planned_otherwise(flight: Flight) -> None:
    def content(settings: LiveSettings) -> LiveSettings:
        return replace(settings, long_term=replace(settings.long_term, min_gain=50.0))

    found = document_of(*play_recordings(flight.directory, content))
    rows = [row for row in found["outcomes"] if row["decision"] == "PlansAsked"]
    converted = next(row for row in rows if row["outcome"] == f"{MODEL} (convert)")
    assert converted["recorded"] > 0 == converted["replayed"]
