"""Work that follows the ledger is, bit by bit, the work that is made anew from the same state."""

from __future__ import annotations

import random
from functools import partial

import pytest
import report_cases
from report_cases import cluster

from netmon.region_link import LinkView
from scheduler.live.core import LiveScheduler, ReportedViews
from scheduler.live.events import LinkHeard, ReportHeard, RouteAsked
from scheduler.live.feedback import LegBegun, LegOver, Prefilled
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.replay.recording import header_of, scheduler_of
from scheduler.reports import JobReport
from scheduler.routing.decision import RequestShape

MODEL = "m"
PDS = (PdSettings("a", ("far", "near")), PdSettings("b", ("far", "near")))


instance = partial(report_cases.instance, running=1, max_concurrent=2, decode_slots=4)


class Sites:
    """Two PD clusters and two prefill clusters, with all that happens to them drawn at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_s = 100.0
        settings = LiveSettings(
            pd_clusters=PDS, threshold_tokens=2000.0, hand_off_tokens=256, models=(MODEL,)
        )
        self.live = LiveScheduler(settings)
        known = self.live.knowledge(MODEL)
        for place in ("far", "near"):
            for number in range(1, 9):
                known.learn(place, number * 500, 0, number * 0.5)
        self.legs: dict[str, str] = {}
        self.num_legs = 0
        for name, pd in settings.pairs:
            # Round trips differ, so that a leg may count for one PD cluster and not for another.
            view = LinkView(available_bytes_per_s=1e9, rtt_s=0.02 if pd == "a" else 2.5)
            self.live.take(LinkHeard(name, pd, view), self.now_s)
        for name in self.live.reports:
            self.report(name)

    def report(self, name: str) -> None:
        jobs = [
            JobReport(
                transfer_id=leg,
                num_tokens=self.draw.randrange(1000, 9000),
                uncached_tokens=900,
                for_s=self.draw.random(),
                instance=self.draw.choice(["", f"{name}-0", f"{name}-1"]),
                model=MODEL,
                pd=self.draw.choice(["a", "b", ""]),
            )
            for leg, place in self.legs.items()
            if place == name and self.draw.random() < 0.7
        ]
        role = "decode" if name in ("a", "b") else "prefill"
        instances = (instance(f"{name}-0", role), instance(f"{name}-1", "prefill"))
        report = cluster(name, *instances, jobs=tuple(jobs))
        self.live.take(ReportHeard(name, report, self.now_s), self.now_s)

    def step(self) -> None:
        self.now_s += self.draw.random() * 0.3
        place, pd = self.draw.choice(["far", "near", "hand_off"]), self.draw.choice("ab")
        match self.draw.randrange(5):
            case 0 | 1:
                self.num_legs += 1
                leg = f"leg-{self.num_legs}"
                self.legs[leg] = pd if place == "hand_off" else place
                num_tokens, lands_s = self.draw.randrange(300, 70_000), self.draw.random()
                begun = LegBegun(leg, MODEL, place, num_tokens, num_tokens, 0, 9, lands_s, pd=pd)
                self.live.take(begun, self.now_s)
            case 2 if self.legs:
                leg = self.draw.choice(list(self.legs))
                del self.legs[leg]
                self.live.take(LegOver(leg), self.now_s)
            case 3:
                self.report(self.draw.choice(list(self.live.reports)))
            case _:
                name = f"{pd if place == 'hand_off' else place}-{self.draw.randrange(2)}"
                # The time of a prefill that ended in one pass with another is unknown.
                seconds = self.draw.choice([self.draw.random(), None, None])
                ended = Prefilled(MODEL, place, name, 1000, 0, 0.0, seconds, pd)
                self.live.take(ended, self.now_s)


@pytest.mark.parametrize("seed", range(4))
def test_a_scheduler_without_digests_decides_the_same_to_the_last_bit(seed: int) -> None:
    sites = Sites(seed)

    def anew() -> LiveScheduler:
        return scheduler_of(header_of(sites.live, "", sites.now_s).packed())

    for _ in range(60):
        sites.step()
        # What was worked out for one PD cluster must not show in the view of another.
        for pd in sites.draw.sample("ab", 2):
            fresh = anew().snapshot(MODEL, sites.now_s, pd=pd)
            assert sites.live.snapshot(MODEL, sites.now_s, pd=pd) == fresh
        shape = RequestShape(num_prompt_tokens=sites.draw.randrange(300, 40_000))
        home = sites.draw.choice("ab")
        asked = RouteAsked(MODEL, shape, sites.draw.randrange(-1, 2), frozenset(), home)
        fresh_decision = anew().take(asked, sites.now_s)
        assert sites.live.take(asked, sites.now_s) == fresh_decision


def test_digests_are_those_of_the_latest_reports() -> None:
    sites = Sites(0)
    sizes = set()
    for number in range(50):
        sites.step()
        for model in (MODEL, f"adapter-{number}"):
            sites.live.snapshot(model, sites.now_s)
        for name in sites.live.reports:
            sites.report(name)
        sites.live.snapshot(MODEL, sites.now_s)
        views = sites.live._views
        assert isinstance(views, ReportedViews)
        sizes.add(sum(len(digests) for _, digests in views._digests.values()))
    assert sizes == {3}
