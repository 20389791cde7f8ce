"""One link between clusters out of what agents say of their paths. No sockets."""

from __future__ import annotations

import pytest
from link_cases import path_report

from netmon.estimate import LinkCondition, PathReport
from netmon.region_link import NUM_STEPS, STALE_S, LinkPath, RegionLink

MB = 1_000_000


def heard(*reports: PathReport) -> list[LinkPath]:
    return [LinkPath(f"far/a{index}", "home/b1", item, 0.0) for index, item in enumerate(reports)]


def link_of(*reports: PathReport, now_s: float = 10.0) -> RegionLink:
    link = RegionLink("far", "home")
    link.observe(heard(*reports), now_s)
    return link


def test_an_unused_link_is_clear_and_unknown() -> None:
    now = RegionLink("far", "home", "wan").now(5.0)
    assert (now.name, now.condition, now.available_bytes_per_s) == ("wan", "clear", None)
    assert (now.age_s, now.num_paths) == (None, 0)
    assert now.view().age_s > 1000
    heard_of = RegionLink("far", "home").now(5.0, 0.5)
    assert heard_of.age_s == 0.5
    assert heard_of.view().available_bytes_per_s is None


def test_a_link_whose_senders_are_silent_says_so() -> None:
    link = link_of(path_report(available=50.0 * MB, full_age_s=0.2), now_s=10.0)
    assert "heard of" not in link.now(14.0, 4.0).reason
    silent = link.now(18.0, 8.0)
    assert silent.reason == "none of its senders has reported for 8.0 s"
    assert silent.age_s == 8.0


def test_what_is_measured_together_adds_up() -> None:
    busy = {"available": 50.0 * MB, "full_age_s": 0.2, "achieved_bytes_per_s": 50.0 * MB}
    link = link_of(
        path_report(**busy, backlog_bytes=100 * MB, num_transfers=2, rtt_s=0.03, base_rtt_s=0.02),
        path_report(
            **busy, backlog_bytes=50 * MB, num_transfers=1, rtt_s=0.02, base_rtt_s=0.01, loss=0.1
        ),
        path_report(
            available=90.0 * MB, full_age_s=50.0, achieved_bytes_per_s=10.0 * MB, rtt_s=0.01
        ),
    )
    now = link.now(10.0)
    assert now.available_bytes_per_s == 110 * MB
    assert now.achieved_bytes_per_s == 110 * MB
    assert (now.utilisation, now.is_floor, now.rate_age_s) == (1.0, False, 0.0)
    assert (now.backlog_bytes, now.num_transfers) == (150 * MB, 3)
    assert now.backlog_s == pytest.approx(150 / 110)
    assert (now.rtt_s, now.loss) == (0.03, 0.1)
    routing = now.view()
    assert (routing.state, routing.backlog_bytes) == (LinkCondition.CLEAR, 150 * MB)


def test_a_rate_stays_when_the_traffic_ends_and_grows_older() -> None:
    busy = {"available": 50.0 * MB, "full_age_s": 0.2}
    link = link_of(path_report(**busy), path_report(**busy))
    for now_s in (12.0, 14.0, 16.0):
        idle = {"available": 50.0 * MB, "full_age_s": now_s - 9.8}
        link.observe(heard(path_report(**idle), path_report(**idle)), now_s)
    now = link.now(16.0)
    assert now.available_bytes_per_s == 100 * MB
    assert now.rate_age_s == 6.0


def test_one_that_measures_now_overrules_the_memory_of_others() -> None:
    link = link_of(path_report(available=100.0 * MB, full_age_s=0.1))
    paths = heard(
        path_report(available=100.0 * MB, full_age_s=20.0),
        path_report(available=5.0 * MB, full_age_s=0.2, num_transfers=1),
    )
    link.observe(paths, 30.0)
    assert link.now(30.0).available_bytes_per_s == 5 * MB


def test_floors_raise_and_never_lower() -> None:
    link = link_of(path_report(available=10.0 * MB, age_s=0.5, is_floor=True))
    assert link.now(10.0).available_bytes_per_s == 10 * MB
    assert link.now(10.0).is_floor
    for rate, expected in ((30.0, 30.0), (20.0, 30.0), (28.0, 30.0)):
        link.observe(heard(path_report(available=rate * MB, age_s=0.0, is_floor=True)), 20.0)
        assert link.now(20.0).available_bytes_per_s == expected * MB
    assert link.now(21.0).rate_age_s == 1.0


def test_the_worst_path_speaks_for_the_link() -> None:
    link = link_of(
        path_report("b1:1"),
        path_report("b2:1", "congested", num_transfers=1),
        path_report("b3:1", "rising"),
    )
    now = link.now(10.0)
    assert (now.condition, now.num_paths) == ("congested", 3)
    assert now.reason == "far/a1 to home/b1: because of b2:1"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], "down"),
        ([path_report("b2:1")], "clear"),
        ([path_report("b2:1", "rising", num_transfers=1)], "rising"),
        ([path_report("b2:1", "down")], "down"),
    ],
)
def test_one_dead_receiver_is_no_dead_link(others: list[PathReport], expected: str) -> None:
    assert link_of(path_report("b1:1", "down"), *others).now(10.0).condition == expected


def test_a_link_is_down_when_all_who_want_to_send_cannot() -> None:
    link = link_of(
        path_report("b1:1", "down", num_transfers=1, backlog_bytes=5),
        path_report("b2:1", available=7.0, age_s=0.0),
    )
    now = link.now(10.0)
    assert (now.condition, now.available_bytes_per_s) == ("down", 0.0)
    assert now.view().state is LinkCondition.DOWN


def test_old_news_is_no_news() -> None:
    link = link_of(path_report(condition="congested", available=5.0 * MB, full_age_s=0.1))
    late_s = 10.0 + STALE_S + 1
    now = link.now(late_s, 2.0)
    assert (now.condition, now.num_paths, now.age_s) == ("clear", 0, 2.0)
    assert now.available_bytes_per_s == 5 * MB
    assert now.rate_age_s == STALE_S + 1


def test_the_past_is_kept_for_a_while() -> None:
    link = RegionLink("far", "home")
    for index in range(4 * NUM_STEPS):
        now_s = index / 4
        link.observe(heard(path_report(achieved_bytes_per_s=float(index))), now_s)
    lately = link.now(now_s).lately_bytes_per_s
    assert len(lately) == NUM_STEPS
    assert lately == sorted(lately)
    assert lately[-1] >= 4 * NUM_STEPS - 2
