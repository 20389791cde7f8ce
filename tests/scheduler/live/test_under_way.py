"""A request counts from when it is taken until whatever ends it; asking for a route never counts.

The region has a prefill cluster `far` of four instances, and `home`, which decodes. No clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from live_region_cases import FAST_LINK, MODEL, instance, job, report

from netmon.region_link import LinkView
from scheduler.live.admission import AdmissionConfig
from scheduler.live.core import LiveScheduler
from scheduler.live.events import (
    AdmissionOver,
    AdmitAsked,
    LinkHeard,
    ReportHeard,
    RequestTaken,
    RouteAsked,
)
from scheduler.live.feedback import (
    Calibrated,
    InstanceGiven,
    InstanceOver,
    LegBegun,
    LegOver,
    Prefilled,
)
from scheduler.live.ledger import PrefillLeg
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.sharing.events import WorkHeard
from scheduler.live.sharing.peer_work import SharedLeg, Work
from scheduler.reports import JobReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, Reason, RequestShape
from scheduler.routing.short_term import RouteDecision

NUM_TOKENS, PREFILL_S, SLO_S = 40_000, 2.2, 12.0
LONG = RequestShape(num_prompt_tokens=NUM_TOKENS)


class Region:
    """Tells a live scheduler what a gateway tells it; `far` starts jobs first come, first served.

    `far_s` is how long the scheduler has seen a long prompt take there; 0: it has seen none.
    """

    def __init__(self, decode_slots: int = 1000, far_s: float = PREFILL_S) -> None:
        settings = LiveSettings(
            pd_clusters=(PdSettings("home", ("far",)),),
            threshold_tokens=1000,
            hand_off_tokens=1,
            admission=AdmissionConfig(ttft_slo_s=SLO_S),
        )
        self.live, self.decode_slots = LiveScheduler(settings), decode_slots
        known = self.live.knowledge(MODEL)
        for place, long_s in (("far", far_s), (ONE_ENGINE, 10 * PREFILL_S)):
            for share in range(1, 9) if far_s else ():
                known.learn(place, share * NUM_TOKENS // 8, 0, share * long_s / 8)
        known.reserved(NUM_TOKENS, 0, NUM_TOKENS * 512)
        self.live.take(LinkHeard("far", "home", FAST_LINK), 0.0)
        self.free_s = [0.0] * 4
        self.jobs: list[tuple[float, float, int, int]] = []  # end, begin, request, instance
        self.num_done = 0
        self.hear(0.0)

    def hear(self, now_s: float) -> None:
        """The reports of both clusters come."""
        jobs = [
            job(str(request), NUM_TOKENS, now_s - begin_s, instance=f"p{at}")
            if begin_s <= now_s
            else job(str(request), NUM_TOKENS)
            for _, begin_s, request, at in self.jobs
        ]
        far = [instance(f"p{number}", max_concurrent=1) for number in range(4)]
        home = instance("d0", "decode", decode_slots=self.decode_slots)
        for found in (report("far", *far, jobs=tuple(jobs)), report("home", home)):
            self.live.take(ReportHeard(found.name, found, now_s), now_s)

    def ask(self, now_s: float = 0.0) -> RouteDecision:
        return self.live.take(RouteAsked(MODEL, LONG), now_s)

    def comes(self, request: int, now_s: float) -> bool:
        """A long prompt comes: it is routed and admitted, and then taken, or refused."""
        decision = self.ask(now_s)
        asked = AdmitAsked(request, "", MODEL, NUM_TOKENS, decision.predicted, pd="home")
        if not self.live.take(asked, now_s).verdict.admitted:
            return False
        assert decision.predicted is not None
        lands_s = decision.predicted.landed_s
        event = RequestTaken(request, MODEL, decision.target, NUM_TOKENS, NUM_TOKENS, lands_s)
        self.live.take(event, now_s)
        return True

    def begins(self, request: int, now_s: float) -> None:
        """Its landing is reserved, and its job goes to the prefill cluster."""
        self.live.take(InstanceGiven("d0", request), now_s)
        begun = LegBegun(str(request), MODEL, "far", NUM_TOKENS, NUM_TOKENS, 0, 512, 2.0)
        self.live.take(begun, now_s)
        at = self.free_s.index(min(self.free_s))
        begin_s = max(now_s, self.free_s[at])
        self.free_s[at] = begin_s + PREFILL_S
        self.jobs.append((begin_s + PREFILL_S, begin_s, request, at))

    def ends(self, now_s: float) -> None:
        """Jobs whose time is over land, and their answers are short."""
        for item in [item for item in self.jobs if item[0] <= now_s]:
            self.jobs.remove(item)
            _, _, request, at = item
            took = Prefilled(MODEL, "far", f"p{at}", NUM_TOKENS, 0, 0.0, PREFILL_S)
            for event in (took, LegOver(str(request)), InstanceOver("d0"), AdmissionOver(request)):
                self.live.take(event, now_s)
            self.num_done += 1


@pytest.mark.parametrize("offered_rps", [10, 80])
def test_a_flood_of_refused_requests_does_not_starve_the_region(offered_rps: int) -> None:
    region, seconds = Region(), 40
    for number in range(seconds * offered_rps):
        now_s = number / offered_rps
        region.ends(now_s)
        if int(2 * now_s) != int(2 * (number - 1) / offered_rps):
            region.hear(now_s)
        if region.comes(number + 1, now_s):
            region.begins(number + 1, now_s)
    capacity = 4 * (seconds - PREFILL_S) / PREFILL_S
    assert region.num_done >= 0.95 * capacity
    # And those that were let in are served in time.
    assert max(end_s for end_s, *_ in region.jobs) <= seconds + SLO_S


def test_asking_changes_nothing_and_taking_counts_until_the_request_is_over() -> None:
    region = Region()
    first = region.ask()
    assert [region.ask() for _ in range(99)] == [first] * 99
    for request in range(1, 6):
        assert region.comes(request, 0.0)
    # A cached prefix may take seconds to come: the requests wait on, whatever reports say.
    region.hear(9.0)
    assert region.ask(9.0).numbers["queue_s"] == pytest.approx(PREFILL_S, rel=0.01)
    # Another way of the same request replaces the first one: its landing found no room.
    region.live.take(RequestTaken(1, MODEL, ONE_ENGINE, NUM_TOKENS, NUM_TOKENS, 22.0), 9.0)
    assert region.ask(9.0).numbers["queue_s"] == pytest.approx(PREFILL_S, rel=0.01)
    assert region.ask(9.0).numbers["local_ttft_s"] == pytest.approx(20 * PREFILL_S, rel=0.01)
    for request in range(1, 6):
        region.live.take(AdmissionOver(request), 9.0)
    assert region.ask(9.0) == first


def test_requests_that_wait_for_an_instance_take_decode_slots() -> None:
    region = Region(decode_slots=4)
    assert sum(region.comes(request, 0.0) for request in range(1, 11)) == 4
    region.begins(1, 0.0)
    assert not region.comes(11, 0.0)
    region.live.take(AdmissionOver(2), 0.0)
    assert region.comes(12, 0.0)


def test_the_work_of_another_gateway_takes_the_place_of_none_of_ours() -> None:
    region = Region()
    for request in range(1, 6):
        region.comes(request, 0.0)
    before = region.ask()
    short = PrefillLeg("far", 50, 50, 0.0, 0.1, model=MODEL, pd="home")
    region.live.take(WorkHeard("other", Work([SharedLeg("t", short, False)], [], {}, [])), 0.0)
    assert region.ask().numbers["queue_s"] >= before.numbers["queue_s"]


def test_one_request_tries_a_place_that_was_slow_however_often_it_is_asked_about() -> None:
    region = Region(far_s=30 * PREFILL_S)
    assert [region.ask().reason for _ in range(3)] == [Reason.ABOVE_THRESHOLD] * 3
    assert region.comes(1, 0.0)
    region.live.take(AdmissionOver(1), 1.0)
    assert region.ask(1.0).reason is Reason.LOCAL_SOONER
    assert region.ask(121.0).reason is Reason.ABOVE_THRESHOLD


def test_a_calibrated_region_refuses_what_it_cannot_serve_before_its_first_answer() -> None:
    region = Region(far_s=0)
    region.live.take(Calibrated(MODEL, "far", "key", ((NUM_TOKENS, PREFILL_S), (400, 0.022))), 0.0)
    let_in = sum(region.comes(request, request / 80) for request in range(1, 161))
    # Five instances compute, since the engine of the PD cluster is taken to be as fast.
    assert let_in <= 5 * SLO_S / PREFILL_S


def route_of(jobs: Sequence[JobReport]) -> RouteDecision:
    """The route of a prompt of the model `a` in a PD cluster that also serves `b`, which has
    `jobs`.
    """
    live = LiveScheduler(
        LiveSettings(pd_clusters=(PdSettings("home"),), threshold_tokens=1e6, hand_off_tokens=1)
    )
    instances = [
        instance(f"{role[0]}-{model}", role, model=model, decode_slots=4)
        for model in "ab"
        for role in ("prefill", "decode")
    ]
    live.take(ReportHeard("home", report("home", *instances, jobs=tuple(jobs)), 0.0), 0.0)
    return live.take(RouteAsked("a", RequestShape(num_prompt_tokens=5000)), 0.0)


def test_the_jobs_of_one_model_do_not_fill_the_instances_of_another() -> None:
    def queue_s(model: str) -> float:
        busy = [job(str(n), 5000, 1.0, instance=f"p-{model}", model=model) for n in range(2)]
        found = route_of(busy)
        assert found.target == HAND_OFF
        assert found.local is not None
        return found.local.queue_s

    assert queue_s("a") > queue_s("b") == 0.0


def test_recurrent_states_of_prompts_ahead_take_their_time_on_the_link() -> None:
    def tail_s(state_bytes: int) -> float:
        region = Region()
        known = region.live.knowledge(MODEL)
        for num_tokens in (NUM_TOKENS // 2, NUM_TOKENS):
            for _ in range(64):
                known.reserved(num_tokens, 0, num_tokens * 512 + state_bytes)
        slow = LinkView(available_bytes_per_s=1e7)  # a prompt emits 9.3 MB/s besides its state
        region.live.take(LinkHeard("far", "home", slow), 0.0)
        for number in range(2):
            region.jobs.append((PREFILL_S, 0.0, number, number))
        region.hear(0.0)
        found = region.ask().remote
        assert found is not None
        return found.tail_s

    state_bytes = 20_000_000
    # Those of two prompts ahead and its own cross the link after what they cross with anyway.
    assert tail_s(state_bytes) - tail_s(0) == pytest.approx(3 * state_bytes / 1e7, rel=0.2)
