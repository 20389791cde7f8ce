"""Moves between clusters as the live scheduler learns of them, and what it decides by that."""

from __future__ import annotations

import pytest
from live_region_cases import FAST_LINK, MODEL, Region, instance, report, teach
from msgspec.structs import replace

from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.feedback import CacheMoveBegun, CacheMoveOver
from scheduler.live.learning.cache_moves import CacheMoveLedger
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, CacheMove, MoveReason, RequestShape
from scheduler.routing.short_term import RouteDecision

PAIR = ("far", "home")
IDLE = LinkView()


def ended(
    ledger: CacheMoveLedger,
    now_s: float,
    nbytes: int = 10**8,
    seconds: float = 0.5,
    *,
    failed: bool = False,
) -> None:
    ledger.over(ledger.begun(PAIR, now_s), (nbytes, seconds, 0.03), now_s, failed=failed)


def rate(ledger: CacheMoveLedger, now_s: float) -> float | None:
    return ledger.completed(IDLE, PAIR, now_s).available_bytes_per_s


class TestLedger:
    def test_nothing_measured_is_no_rate(self) -> None:
        ledger = CacheMoveLedger()
        ended(ledger, 0.0, seconds=0.0)
        ended(ledger, 0.0, nbytes=0)
        assert rate(ledger, 0.0) is None

    def test_later_measurements_count_more(self) -> None:
        ledger = CacheMoveLedger()
        ended(ledger, 0.0, 100, 1.0)
        assert rate(ledger, 0.0) == 100
        ended(ledger, 60.0, 10, 1.0)
        assert rate(ledger, 60.0) == pytest.approx((50 + 10) / 1.5)

    def test_a_rate_that_is_too_old_is_none(self) -> None:
        ledger = CacheMoveLedger()
        ended(ledger, 0.0, 100, 1.0)
        assert (rate(ledger, 600.0), rate(ledger, 600.1)) == (100, None)

    def test_moves_complete_what_is_known_of_a_link(self) -> None:
        ledger = CacheMoveLedger()
        ended(ledger, 100.0)
        found = ledger.completed(IDLE, PAIR, 100.0)
        assert (found.available_bytes_per_s, found.rtt_s, found.is_floor) == (2e8, 0.03, False)
        floor = LinkView(available_bytes_per_s=1e6, is_floor=True, rtt_s=0.01)
        found = ledger.completed(floor, PAIR, 100.0)
        assert (found.available_bytes_per_s, found.rtt_s, found.is_floor) == (2e8, 0.01, False)
        assert ledger.completed(FAST_LINK, PAIR, 100.0) is FAST_LINK
        assert ledger.completed(IDLE, ("home", "far"), 100.0) is IDLE
        assert ledger.completed(IDLE, PAIR, 701.0) is IDLE

    def test_a_failure_bars_the_pair_for_a_minute(self) -> None:
        ledger = CacheMoveLedger()
        ended(ledger, 100.0, 0, 0.0, failed=True)
        assert ledger.failed_lately(160.0) == {PAIR}
        assert ledger.failed_lately(160.1) == set()
        assert ledger.completed(IDLE, PAIR, 100.0) is IDLE

    def test_a_move_that_no_request_waits_for_any_more_bars_it_too(self) -> None:
        ledger = CacheMoveLedger()
        key = ledger.begun(PAIR, 100.0)
        assert (ledger.moving(), ledger.failed_lately(110.0)) == ({PAIR}, set())
        assert ledger.failed_lately(110.1) == {PAIR}
        ledger.over(key, (10**8, 20.0, 0.0), 120.0, failed=False)
        assert (ledger.moving(), ledger.failed_lately(120.0)) == (set(), set())


def region() -> Region:
    """One engine, one that prefills for it, and a prefill cluster, all with agents; 1 ms a token at
    home, a quarter of it there.
    """
    made = Region()
    made.home = report(
        "home",
        instance("d0", "decode", decode_slots=4, node="d0:1"),
        instance("h0", "prefill", node="h0:1"),
    )
    made.far = report("far", instance("p0", node="p0:1"), max_queued=8)
    return made


def taught(made: Region) -> RegionScheduler:
    scheduler = made.scheduler()
    teach(scheduler, "far", 0.25e-3)
    for place in (HAND_OFF, ONE_ENGINE):
        teach(scheduler, place, 1e-3)
    return scheduler


def routed(scheduler: RegionScheduler, num_tokens: int, home: int, far: int) -> RouteDecision:
    """The route of a prompt of which `home` and `far` have so many tokens cached."""
    shape = RequestShape(
        num_prompt_tokens=num_tokens,
        local_cached_tokens=home,
        prefill_cached_tokens={"far": far},
        sendable_tokens={"home": home, "far": far},
    )
    return scheduler.route(MODEL, shape)


def test_a_prompt_is_computed_at_the_pd_cluster_with_the_prefill_clusters_cache() -> None:
    """t is 1000: 8000 tokens of which 7500 are cached far away leave 500."""
    found = routed(taught(region()), 8000, home=0, far=7500)
    assert (found.route, found.target) == ("local", HAND_OFF)
    move = found.move
    assert (move.reason, move.source, move.saved_tokens) == (MoveReason.PAYS, "far", 7500)
    assert move.nbytes == pytest.approx(7500 * 512, rel=1e-3)
    assert move.seconds == pytest.approx(move.nbytes / 1e9 + 4 * 0.02)
    assert found.local is not None
    assert found.local.prefill_s == pytest.approx(0.5, rel=0.05)
    assert found.numbers["moved_tokens"] == 7500
    assert str(move).startswith("7500 tokens more in far, 3840000 bytes, 0.0838 s: pays")


def test_a_prompt_is_computed_at_the_prefill_cluster_with_the_pd_clusters_cache() -> None:
    found = routed(taught(region()), 8000, home=4000, far=0)
    assert (found.target, found.move.source, found.move.reason) == ("far", "home", MoveReason.PAYS)
    assert found.remote is not None
    assert found.remote.prefill_s == pytest.approx(1.0, rel=0.05)


def test_scarce_bandwidth_leaves_every_cluster_its_own_cache() -> None:
    made = region()
    made.links[PAIR] = replace(FAST_LINK, available_bytes_per_s=1e5)
    for home, far in ((0, 7500), (4000, 0)):
        found = routed(taught(made), 8000, home=home, far=far)
        assert found.move.reason in (MoveReason.BANDWIDTH_SCARCE, MoveReason.NOTHING_SAVED)
        assert not found.move.begins
    made.links[PAIR] = replace(FAST_LINK, state=LinkCondition.CONGESTED)
    found = routed(taught(made), 8000, home=4000, far=0)
    assert not found.move.begins


def test_before_prefills_are_measured_nothing_moves() -> None:
    found = routed(region().scheduler(), 8000, home=4000, far=0)
    assert (found.target, found.move.reason) == ("far", MoveReason.PREFILL_RATE_UNKNOWN)


def test_a_place_without_an_agent_gets_no_cache() -> None:
    made = region()
    made.far = report("far", instance("p0"), max_queued=8)
    assert routed(taught(made), 8000, home=4000, far=0).move.reason is MoveReason.NO_AGENT


@pytest.mark.parametrize(
    ("num_tokens", "home", "far", "pair"),
    [(1000, 0, 900, PAIR), (8000, 4000, 0, ("home", "far"))],
)
def test_the_first_move_measures_an_unknown_link_and_no_request_waits_for_it(
    num_tokens: int, home: int, far: int, pair: tuple[str, str]
) -> None:
    made = region()
    made.links = dict.fromkeys(made.links, IDLE)
    scheduler = taught(made)

    def move() -> CacheMove:
        return routed(scheduler, num_tokens, home=home, far=far).move

    assert (move().reason, move().begins, move().pays) == (
        MoveReason.LINK_RATE_UNKNOWN,
        True,
        False,
    )
    key = scheduler.tell(CacheMoveBegun(*pair))
    assert move().reason is MoveReason.LINK_BEING_MEASURED
    scheduler.tell(CacheMoveOver(key, False, 10**8, 0.1, 0.01))
    assert move().reason is MoveReason.PAYS
    assert move().seconds == pytest.approx(move().nbytes / 1e9 + 4 * 0.01)
    key = scheduler.tell(CacheMoveBegun(*pair))
    scheduler.tell(CacheMoveOver(key, True))
    assert move().reason is MoveReason.FAILED_LATELY
    made.now_s = made.at_s = made.now_s + 61.0
    assert move().reason is MoveReason.PAYS
    key = scheduler.tell(CacheMoveBegun(*pair))
    made.now_s = made.at_s = made.now_s + 120.0
    assert move().reason is MoveReason.FAILED_LATELY
    scheduler.tell(CacheMoveOver(key, False, 10**6, 100.0))
    assert move().reason in (MoveReason.TOO_SLOW, MoveReason.TOO_LONG)
