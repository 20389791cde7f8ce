"""Several PD clusters in virtual time: homes, spilling, uplinks, and the loss of a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from paper_region import FAST, KV, LENGTHS, SLOW

from scheduler.live import spilling
from scheduler.planning.joint import JointRegion
from scheduler.planning.region_model import (
    Home,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
    Uplink,
)
from scheduler.replay.driver import replay
from scheduler.replay.jobs import Fate
from scheduler.replay.links import RateSchedule, ReplayLink
from scheduler.replay.model import Policy, ReplayModel, Routing
from scheduler.replay.results import Outcome
from scheduler.replay.workload import Phase, Workload, at_homes, drawn

GBIT = 1e9 / 8
SPAN_S = 300.0


def joint(*uplinks: Uplink, names: tuple[str, ...] = ("a", "b")) -> JointRegion:
    """PD clusters of 8 instances, with links to the prefill clusters `x` and `y`."""
    homes = []
    for name in names:
        links = tuple(Link(source, name, 50 * GBIT, 0.02) for source in ("x", "y"))
        sources = tuple(PrefillClusterModel(source, 4, FAST) for source in ("x", "y"))
        pd = PdClusterModel(name, 8, SLOW, 20, 0.025)
        traffic = Traffic(LENGTHS, 1024, 27_000)
        homes.append(Home(Region(sources, (pd,), links, KV, traffic), 2.0))
    return JointRegion(tuple(homes), uplinks)


def model(of: JointRegion, **fields: Any) -> ReplayModel:
    first = of.homes[0].region
    region = replace(
        first,
        pd_clusters=tuple(home.region.pd_clusters[0] for home in of.homes),
        links=tuple(link for home in of.homes for link in home.region.links),
    )
    return ReplayModel(region=region, joint=of, **fields)


def work(*rates_rps: float) -> Workload:
    """Requests of each home."""
    phases = [
        Phase(duration_s=SPAN_S, rate_rps=rate, lengths=LENGTHS, output_tokens=1024)
        for rate in rates_rps
    ]
    return at_homes([drawn([phase], seed) for seed, phase in enumerate(phases, 1)])


def decoded(outcome: Outcome) -> set[tuple[int, int]]:
    """The pairs of homes and PD clusters that decoded something."""
    return {(job.home, job.pd) for job in outcome.jobs if job.fate is Fate.DONE}


@pytest.mark.parametrize("routing", list(Routing))
def test_requests_are_served_at_home_over_the_links_of_their_home(routing: Routing) -> None:
    outcome = replay(model(joint()), work(1.5, 1.0), Policy(routing=routing, spill="never"))
    assert all(job.fate is Fate.DONE for job in outcome.jobs)
    assert decoded(outcome) == {(0, 0), (1, 1)}
    assert set(outcome.egress_bytes) == {"x to a", "y to a", "x to b", "y to b"}
    sent = {name: outcome.egress_bytes[f"x to {name}"] for name in "ab"}
    assert min(sent.values()) > 0


def test_the_same_requests_come_out_the_same() -> None:
    first, second = (replay(model(joint()), work(2.0, 2.0), Policy()) for _ in range(2))
    assert first.ttft_s.tolist() == second.ttft_s.tolist()


def test_requests_of_a_crowded_home_spill_where_they_may() -> None:
    crowded = work(5.0, 0.2)
    stay = replay(model(joint()), crowded, Policy(spill="never"))
    leave = replay(model(joint()), crowded, Policy(spill="overflow"))
    assert decoded(stay) == {(0, 0), (1, 1)}
    assert (0, 1) in decoded(leave)
    assert leave.summary().ttft.p90_s < 0.7 * stay.summary().ttft.p90_s


def test_clusters_that_cannot_be_sooner_are_passed_over_without_a_change_of_any_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = joint(names=("a", "b", "c"))
    crowded = work(5.0, 0.2, 1.5)
    first = replay(model(several), crowded, Policy(spill="overflow"))
    monkeypatch.setattr(spilling, "_least_prefill_s", lambda *_: 0.0)
    second = replay(model(several), crowded, Policy(spill="overflow"))
    assert [(j.pd, j.place) for j in first.jobs] == [(j.pd, j.place) for j in second.jobs]
    assert {job.pd for job in first.jobs if job.home == 0} == {0, 1, 2}


def test_requests_with_a_lost_home_decode_elsewhere() -> None:
    lost = {"b": (100.0, 200.0)}
    outcome = replay(model(joint(), lost=lost), work(1.0, 1.0), Policy(spill="overflow"))
    during = [job for job in outcome.jobs if 100 < job.arrival_s < 200]
    assert all(job.fate is Fate.DONE and job.pd == 0 for job in during)
    # What it had under way is lost with it, and nothing else.
    gone = [job for job in outcome.jobs if job.fate is Fate.LOST]
    assert gone
    assert all(job.pd == 1 and job.arrival_s <= 100 for job in gone)
    after = [job for job in outcome.jobs if job.arrival_s > 220 and job.home == 1]
    assert any(job.pd == 1 for job in after)


def test_without_spilling_requests_wait_for_their_home() -> None:
    lost = {"b": (100.0, 200.0)}
    outcome = replay(model(joint(), lost=lost), work(1.0, 0.5), Policy(spill="never"))
    waited = [job for job in outcome.jobs if job.home == 1 and 100 < job.arrival_s < 190]
    assert waited
    assert all(job.fate is Fate.DONE and job.slot_s >= 200 for job in waited)


def test_what_a_lost_prefill_cluster_had_is_prefilled_where_it_decodes() -> None:
    lost = {"x": (100.0, 200.0), "y": (100.0, 200.0)}
    outcome = replay(model(joint(), lost=lost), work(1.5, 1.5), Policy(spill="never"))
    assert all(job.fate is Fate.DONE for job in outcome.jobs)
    fell_back = [job for job in outcome.jobs if job.fell_back]
    assert fell_back
    assert all(job.place == 0 and job.arrival_s <= 100 for job in fell_back)
    assert not any(job.place for job in outcome.jobs if 100 < job.arrival_s < 200)
    assert any(job.place for job in outcome.jobs if job.arrival_s > 200)


def test_a_region_is_seen_by_its_reports_as_a_gateway_sees_it() -> None:
    seen = replay(model(joint()), work(1.5, 1.0), Policy(report_every_s=1.0))
    assert all(job.fate is Fate.DONE for job in seen.jobs)
    assert any(job.place for job in seen.jobs)
    lost = {"b": (100.5, 200.0), "x": (100.5, 200.0)}
    outcome = replay(model(joint(), lost=lost), work(1.0, 1.0), Policy(report_every_s=1.0))
    during = [job for job in outcome.jobs if 100.5 < job.arrival_s < 200]
    # Also those that come before the missing report is noticed.
    assert all(job.fate is Fate.DONE and job.pd == 0 and job.place != 1 for job in during)


def test_an_uplink_carries_no_more_than_its_rate() -> None:
    rate = 1 * GBIT
    uplinks = (Uplink("x", "egress", rate), Uplink("y", "egress", rate))
    # The plan knows of no uplink, so that it sends more than one carries.
    blind = joint()
    narrow = replace(blind, uplinks=uplinks)
    narrow.__dict__["plans"] = blind.plans
    outcome = replay(model(narrow), work(1.5, 1.5), Policy(spill="never"))
    free = replay(model(blind), work(1.5, 1.5), Policy(spill="never"))
    end_s = max(job.done_s for job in outcome.jobs if job.fate is Fate.DONE)
    for source in "xy":
        sent = sum(outcome.egress_bytes[f"{source} to {pd}"] for pd in "ab")
        assert sent <= rate * end_s
    assert sum(outcome.egress_bytes.values()) < sum(free.egress_bytes.values())


def test_bytes_land_when_link_and_uplink_have_carried_them() -> None:
    uplink = ReplayLink(RateSchedule.of(10.0))
    one, two = (ReplayLink(RateSchedule.of(8.0), 0.5, (uplink,)) for _ in range(2))
    one.change(0.0, 0.0, 40.0)
    two.change(0.0, 0.0, 40.0)
    assert one.landed_s(one.emitted_bytes) == pytest.approx(8.5)
    two.advance(4.0)
    assert uplink.backlog_bytes == pytest.approx(40)
    assert two.waiting_bytes == pytest.approx(40 * 8 / 10)
    one.skip(4.0, one.emitted_bytes, 80.0)
    assert uplink.backlog_bytes == 0


def test_links_share_a_full_uplink_by_what_they_emit() -> None:
    uplink = ReplayLink(RateSchedule.of(10.0))
    one, two = (ReplayLink(RateSchedule.of(8.0), 0.0, (uplink,)) for _ in range(2))
    assert one.available(8.0) == 8.0
    two.expect(6.0)
    assert one.available(8.0) == 4.0
    one.expect(18.0)
    assert (one.available(8.0), two.available(8.0)) == (pytest.approx(7.5), pytest.approx(2.5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: model(joint(), lost={"z": (1.0, 2.0)}), "no cluster 'z'"),
        (lambda: model(joint(), lost={"x": (2.0, 1.0)}), "times must ascend"),
        (lambda: replace(model(joint()), joint=None), "a replay of several needs one home"),
        (lambda: replay(model(joint()), work(1, 1), Policy(num_prefill=2)), "one PD cluster"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
