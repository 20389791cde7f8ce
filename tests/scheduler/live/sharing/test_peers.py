"""Two gateways of one region: observations that add up, and work that both know of."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_region_cases import instance, report

from scheduler.live.core import LiveScheduler
from scheduler.live.events import ReportHeard
from scheduler.live.feedback import (
    DirectBegun,
    DirectOver,
    FirstToken,
    InstanceGiven,
    InstanceOver,
    LegAnswered,
    LegBegun,
    LegOver,
    Prefilled,
    RequestArrived,
)
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.sharing.events import ObservationsHeard, Observed, WorkHeard
from scheduler.live.sharing.learned_state import (
    MAX_HEARD,
    LearnedState,
    StateRestored,
    learned_state,
)
from scheduler.live.sharing.peer_work import Work
from scheduler.routing.decision import ONE_ENGINE
from scheduler.routing.prediction import Prediction

MODEL = "tiny"
SETTINGS = LiveSettings(
    pd_clusters=(PdSettings("home", ("far",)),),
    threshold_tokens=1000,
    hand_off_tokens=256,
    models=(MODEL,),
)


def prefilled(num_tokens: int, seconds: float) -> Prefilled:
    return Prefilled(MODEL, "far", "p0", num_tokens, 0, 0.0, seconds)


def told(live: LiveScheduler, now_s: float) -> Work:
    """The work of a gateway as another one reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(live.peers.own(now_s)), type=Work)


def leg(name: str, num_tokens: int = 1000) -> LegBegun:
    return LegBegun(name, MODEL, "far", num_tokens, num_tokens, 0, 512 * num_tokens, 2.0, 0, "d0")


@settings(max_examples=30, deadline=None)
@given(
    samples=st.lists(
        st.tuples(st.booleans(), st.integers(50, 20_000), st.floats(0.9, 1.1)), min_size=4
    ),
    again=st.integers(0, 3),
)
def test_the_samples_of_two_gateways_add_up_and_none_counts_twice(
    samples: list[tuple[bool, int, float]], again: int
) -> None:
    one, two = LiveScheduler(SETTINGS), LiveScheduler(SETTINGS)
    alone = LiveScheduler(SETTINGS)
    own: dict[LiveScheduler, list[Prefilled]] = {one: [], two: []}
    for number, (is_first, num_tokens, noise) in enumerate(samples):
        event = prefilled(num_tokens, 2e-4 * num_tokens * noise)
        seen_by, other = (one, two) if is_first else (two, one)
        seen_by.take(event, float(number))
        alone.take(event, float(number))
        own[seen_by].append(event)
        first = len(own[seen_by]) - 1
        # Some are heard again, as after an error when it is not known whether they were sent.
        start = max(0, first - again)
        heard = [Observed(0.0, item) for item in own[seen_by][start:]]
        other.take(ObservationsHeard(str(is_first), start, heard), float(number))
    expected = alone.knowledge(MODEL).profile("far")
    for live in (one, two):
        found = live.knowledge(MODEL).profile("far")
        assert found.num_seen == len(samples)
        for num_tokens in (100, 3000):
            assert found.profile.prefill_s(num_tokens) == pytest.approx(
                expected.profile.prefill_s(num_tokens)
            )


def test_what_is_told_late_counts_when_it_happened() -> None:
    one, two = LiveScheduler(SETTINGS), LiveScheduler(SETTINGS)
    for live in (one, two):
        live.take(RequestArrived(MODEL, 100, 0), 0.0)
        live.take(RequestArrived(MODEL, 100, 0), 900.0)
    one.take(RequestArrived(MODEL, 5000, 0), 900.0)
    two.take(ObservationsHeard("one", 0, [Observed(600.0, RequestArrived(MODEL, 5000, 0))]), 1500.0)
    for live in (one, two):
        live.knowledge(MODEL).traffic.finished(10, 1500.0)
    a, b = (live.knowledge(MODEL).traffic.measured(1500.0) for live in (one, two))
    assert a is not None
    assert b is not None
    assert a.uncached.mean_tokens == b.uncached.mean_tokens


def test_observations_that_a_restored_state_lacks_are_learnt_again() -> None:
    one, two = LiveScheduler(SETTINGS), LiveScheduler(SETTINGS)
    for number in range(3):
        one.take(prefilled(100, 0.1), float(number))
    own = prefilled(200, 0.2)
    two.take(own, 1.0)
    two.heard["two"] = 1  # its gateway has numbered it
    written = msgspec.msgpack.encode(learned_state(one, 5.0))
    two.take(StateRestored(msgspec.msgpack.decode(written, type=LearnedState)), 5.0)
    two.take(ObservationsHeard("two", 0, [Observed(4.0, own)]), 5.0)
    assert two.knowledge(MODEL).profile("far").num_seen == 4
    assert two.heard == {"two": 1}


def test_the_names_of_gateways_that_are_gone_do_not_pile_up() -> None:
    live = LiveScheduler(SETTINGS)
    arrived = [Observed(0.0, RequestArrived(MODEL, 100, 0))]
    for number in range(MAX_HEARD + 100):
        live.take(ObservationsHeard(f"gone{number}", 0, []), float(number))
        live.take(ObservationsHeard("steady", number, arrived), float(number))
    assert len(live.heard) == MAX_HEARD
    assert live.heard["steady"] == MAX_HEARD + 100


@pytest.mark.parametrize("others", [(), (PdSettings("second", ("far",)),)])
def test_a_pd_cluster_that_only_another_gateway_has_stops_nothing(
    others: tuple[PdSettings, ...],
) -> None:
    """A region file with one more PD cluster reaches one gateway after another."""
    live = LiveScheduler(replace(SETTINGS, pd_clusters=(*SETTINGS.pd_clusters, *others)))
    heard = [
        Observed(0.0, RequestArrived(MODEL, 100, 0, "new")),
        Observed(0.0, FirstToken(MODEL, "far", Prediction(prefill_s=1.0), 1.1, pd="new")),
        Observed(0.0, prefilled(100, 0.1)),
    ]
    live.take(ObservationsHeard("one", 0, heard), 10.0)
    assert live.heard == {"one": 3}
    assert live.knowledge(MODEL).profile("far").num_seen == 1
    assert not live.knowledge(MODEL).state(10.0).homes


def test_the_work_of_another_gateway_counts_until_it_ends() -> None:
    one, two = LiveScheduler(SETTINGS), LiveScheduler(SETTINGS)
    one.take(leg("a"), 10.0)
    one.take(InstanceGiven("d0"), 10.0)
    key = one.take(DirectBegun("d0", 700, 700), 10.5)
    two.take(WorkHeard("one", told(one, 11.0)), 1011.0)
    assert two.ledger.change_since({"d0"}, 1000.0) == 1
    ((transfer_id, found),) = two.ledger.unreported("far").items()
    assert (transfer_id, found.begun_s, found.lands_at_s) == ("a", 1010.0, 1012.0)
    assert [prompt.begun_s for prompt in two.ledger.direct()["d0"]] == [1010.5]
    # It is not this gateway's own, so it is not told on.
    assert two.peers.own(1011.0).legs == []
    assert two.peers.own(1011.0).requests == {}
    one.take(DirectOver(key), 12.0)
    one.take(LegOver("a"), 12.0)
    two.take(WorkHeard("one", told(one, 12.5)), 1012.5)
    assert not two.ledger.direct()
    assert two.ledger.over({"a"}) == {"a"}
    assert two.ledger.kv_change_since(MODEL, 1000.0, "home") == 512_000
    one.take(LegAnswered("a"), 13.0)
    one.take(InstanceOver("d0"), 13.0)
    two.take(WorkHeard("one", told(one, 13.5)), 1013.5)
    assert two.ledger.change_since({"d0"}, 1000.0) == 0
    assert two.ledger.kv_change_since(MODEL, 1000.0, "home") == 0
    assert len(two.ledger) == 0


def test_nothing_is_left_of_a_gateway_that_is_gone() -> None:
    one, two = LiveScheduler(SETTINGS), LiveScheduler(SETTINGS)
    two.take(InstanceGiven("d0"), 1000.0)
    for number in range(5):
        one.take(leg(f"t{number}"), 10.0)
        one.take(InstanceGiven("d0"), 10.0)
        one.take(DirectBegun("d1", 700, 700), 10.0)
    one.take(LegOver("t0"), 10.5)
    two.take(WorkHeard("one", told(one, 11.0)), 1011.0)
    assert two.ledger.requests == {"d0": 6}
    two.take(WorkHeard("one", None), 1014.0)
    assert two.ledger.requests == {"d0": 1}
    assert len(two.ledger) == 0
    assert two.peers.gateways == []
    assert two.peers.own(1014.0).requests == {"d0": 1}


def test_a_gateway_that_is_heard_again_has_its_work_again() -> None:
    one, two = LiveScheduler(SETTINGS), LiveScheduler(SETTINGS)
    one.take(leg("a"), 10.0)
    two.take(WorkHeard("one", told(one, 11.0)), 1011.0)
    two.take(WorkHeard("one", None), 1014.0)
    assert two.ledger.over({"a"}) == {"a"}
    two.take(WorkHeard("one", told(one, 15.0)), 1015.0)
    assert two.ledger.over({"a"}) == set()
    assert [found.num_tokens for found in two.ledger.landing(MODEL, "home")] == [1000]
    one.take(LegOver("a"), 16.0)
    two.take(WorkHeard("one", told(one, 16.0)), 1016.0)
    assert two.ledger.kv_change_since(MODEL, 1015.5, "home") == 512_000


def test_a_prompt_of_another_gateway_has_the_engine_before_ours() -> None:
    one, two = LiveScheduler(SETTINGS), LiveScheduler(SETTINGS)
    home = report("home", instance("d0", "both", decode_slots=4))
    two.take(ReportHeard("home", home, 1011.0), 1011.0)
    two.knowledge(MODEL).learn(ONE_ENGINE, 1000, 0, 1.0)
    before = two.snapshot(MODEL, 1011.0).engines.free_s[0]
    one.take(DirectBegun("d0", 2000, 2000), 11.0)
    two.take(WorkHeard("one", told(one, 11.0)), 1011.0)
    assert before == 0
    assert two.snapshot(MODEL, 1011.0).engines.free_s[0] == pytest.approx(2.0)
