"""What is under way: legs, prompts of one engine, who had an instance for itself. No clock."""

from typing import Any

import pytest

from scheduler.live.ledger import KEEP_ENDED_S, DirectPrompt, Ledger, PrefillLeg


def leg(begun_s: float = 0.0, place: str = "far", **fields: Any) -> PrefillLeg:
    values: dict[str, Any] = {"num_tokens": 1000, "uncached_tokens": 800, "lands_at_s": begun_s + 2}
    return PrefillLeg(place=place, begun_s=begun_s, **(values | fields))


def test_legs_are_found_by_place_until_they_are_over() -> None:
    ledger = Ledger()
    for name, begun_s, place in (("a", 0.0, "far"), ("b", 1.0, "far"), ("c", 1.0, "near")):
        ledger.leg_begun(name, leg(begun_s, place))
    assert list(ledger.unreported("far")) == ["a", "b"]
    assert len(ledger.landing("")) == len(ledger) == 3
    ledger.leg_over("b", 2.0)
    assert list(ledger.unreported("far")) == ["a"]
    assert ledger.over({"a", "b", "unknown"}) == {"b"}
    assert len(ledger) == 2


def test_a_leg_that_a_report_had_is_for_reports_to_count() -> None:
    ledger = Ledger()
    for name in ("a", "b"):
        ledger.leg_begun(name, leg())
    for _ in range(2):
        ledger.legs_reported("far", {"a", "somebody else's"})
    ledger.legs_reported("near", {"b"})
    assert list(ledger.unreported("far")) == ["b"]
    assert len(ledger.landing("")) == 2
    ledger.leg_over("a", 1.0)
    ledger.legs_reported("far", {"a"})  # in a report that is older than its end
    ledger.leg_begun("a", leg())
    assert list(ledger.unreported("far")) == ["b", "a"]


def test_what_lands_decodes_for_one_model() -> None:
    ledger = Ledger()
    ledger.leg_begun("a", leg(model="big"))
    ledger.leg_begun("b", leg(model="small"))
    assert [found.model for found in ledger.landing("big")] == ["big"]


def test_a_leg_may_end_more_than_once_and_others_legs_may_too() -> None:
    ledger = Ledger()
    ledger.leg_begun("a", leg())
    ledger.leg_over("a", 1.0)
    ledger.leg_over("a", 5.0)
    ledger.leg_over("somebody else's", 5.0)
    assert ledger.over({"a", "somebody else's"}) == {"a"}


def test_what_ended_is_forgotten_after_a_while() -> None:
    ledger = Ledger()
    for number in range(1000):
        ledger.leg_begun(str(number), leg(float(number)))
        ledger.leg_over(str(number), float(number))
    assert [bool(ledger.over({str(number)})) for number in (999, 999 - int(KEEP_ENDED_S), 900)] == [
        True,
        True,
        False,
    ]
    assert len(ledger._all.ended) == KEEP_ENDED_S + 1
    assert len(ledger) == 0


def test_engines_hold_what_has_landed_until_it_is_answered() -> None:
    ledger = Ledger()
    for transfer_id, landed_s in (("early", 1.0), ("late", 3.0), ("open", 3.0)):
        ledger.leg_begun(transfer_id, leg(model="m", kv_bytes=100.0))
        ledger.leg_over(transfer_id, landed_s)
    ledger.leg_begun("under way", leg(model="m", kv_bytes=100.0))
    assert ledger.kv_change_since("m", 2.0) == 200.0
    ledger.answer_over("late", 4.0)
    assert ledger.kv_change_since("m", 2.0) == 100.0
    ledger.answer_over("early", 4.0)
    assert ledger.kv_change_since("m", 2.0) == 0.0
    # Those who looked after that saw it all, but for what is held since then.
    assert ledger.kv_change_since("m", 4.5) == 0.0
    assert ledger.kv_change_since("other", 2.0) == 0.0


def test_landings_count_from_their_reservation_until_their_request_is_answered() -> None:
    ledger = Ledger()
    for transfer_id, begun_s, instance in (("a", 1.0, "d0"), ("b", 2.0, "d0"), ("c", 3.0, "d1")):
        ledger.leg_begun(transfer_id, leg(begun_s, kv_bytes=100.0, instance=instance))
    ledger.leg_over("a", 3.0)
    ledger.leg_over("b", 3.0)
    assert ledger.landing_change(0.0, 0.0) == {"d0": 200.0, "d1": 100.0}
    assert ledger.landing_change(2.0, 2.0) == {"d0": 100.0, "d1": 100.0}
    assert ledger.landing_change(3.1, 3.0) == {}
    ledger.answer_over("a", 4.0)
    ledger.answer_over("c", 5.0)
    assert ledger.landing_change(0.0, 0.0) == {"d0": 100.0}
    # A report of 2.5 had a and b, and a node that was looked at before 4 still held a.
    assert ledger.landing_change(2.5, 4.0) == {"d0": -100.0}
    assert ledger.landing_change(2.5, 4.1) == {}
    assert ledger.landing_change(3.5, 4.1) == {"d1": -100.0}


def test_an_answer_may_be_over_before_its_leg() -> None:
    ledger = Ledger()
    ledger.leg_begun("a", leg(model="m", kv_bytes=100.0))
    assert len(ledger.landing("m")) == 1
    ledger.answer_over("a", 1.0)
    ledger.answer_over("somebody else's", 1.0)
    assert ledger.landing("m") == []
    ledger.leg_over("a", 2.0)
    assert ledger.kv_change_since("m", 0.0) == 0.0
    ledger.leg_begun("b", leg())
    ledger.leg_over("b", 2.0 + KEEP_ENDED_S + 1)
    assert ledger._all.answered_s == {}


def test_prompts_of_one_engine_are_over_once() -> None:
    ledger = Ledger()
    first, second = (DirectPrompt("d0", 100, 100, float(at_s)) for at_s in (0, 1))
    keys = [ledger.direct_begun(prompt) for prompt in (first, second)]
    assert ledger.direct() == {"d0": [first, second]}
    assert ledger.direct_over(keys[0]) == first
    assert ledger.direct_over(keys[0]) is None
    assert ledger.direct() == {"d0": [second]}
    assert len(ledger) == 1


def test_prefills_of_an_instance_had_it_one_after_the_other() -> None:
    ledger = Ledger()
    assert ledger.alone_s("far", "p0", begun_s=1.0, now_s=4.0) == 3.0
    ledger.prefill_ended("far", "p0", 3.0)
    ledger.prefill_ended("far", "p0", 2.5)  # told late
    assert ledger.alone_s("far", "p0", begun_s=1.0, now_s=4.0) == 1.0
    assert ledger.alone_s("far", "p0", begun_s=3.5, now_s=4.0) == 0.5
    assert ledger.alone_s("far", "p1", begun_s=1.0, now_s=4.0) == 3.0
    assert ledger.alone_s("near", "p0", begun_s=1.0, now_s=4.0) == 3.0


def test_time_alone_is_never_negative() -> None:
    ledger = Ledger()
    ledger.prefill_ended("far", "p0", 10.0)
    assert ledger.alone_s("far", "p0", begun_s=1.0, now_s=9.0) == pytest.approx(0.0)
