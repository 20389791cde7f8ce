"""Admission: predicted against present decode load, empty regions, Retry-After, tenants."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduling_cases import decode_views, seconds, untimed

from scheduler.live.admission import (
    AdmissionConfig,
    AdmissionPolicy,
    AdmissionReason,
    AdmissionRequest,
    DecodeLoad,
    Verdict,
    admit,
    admit_decode,
    decode_load_at,
)
from scheduler.live.tenants import TenantLedger, TenantLimit
from scheduler.routing.prediction import Prediction
from scheduler.routing.views import DecodeView

PREDICTED = AdmissionConfig()
PRESENT = AdmissionConfig(policy=AdmissionPolicy.PRESENT)
AT_DECODE = AdmissionConfig(policy=AdmissionPolicy.AT_DECODE)
HALF_MEMORY = AdmissionConfig(policy=AdmissionPolicy.PRESENT, max_decode_load=0.5)
NOW = AdmissionRequest(Prediction())
IN_5_S = AdmissionRequest(Prediction(queue_s=1.0, prefill_s=4.0))
FULL = DecodeView(slots_total=4, slots_used=4, decode_s=10.0)
"""A slot falls free every 2.5 s."""


def verdict(
    decode: DecodeView, config: AdmissionConfig = PREDICTED, request: AdmissionRequest = IN_5_S
) -> Verdict:
    return admit(request, decode, config, 0.0)


def test_the_load_at_a_moment_counts_who_lands_and_who_ends() -> None:
    view = replace(FULL, landing_s=(2.0, 4.0, 30.0), num_waiting=1)
    assert decode_load_at(view, 0.0) == DecodeLoad(5, 0.0)
    assert decode_load_at(view, 3.5).occupied == 5 - 1 + 1
    assert decode_load_at(view, 5.0).occupied == 5 - 2 + 2
    # What landed at 2 s has decoded by 13 s, what waited may have.
    assert decode_load_at(view, 13.0).occupied == 5 - 5 + 2 - 1


def test_decodes_of_unknown_age_end_evenly() -> None:
    assert [decode_load_at(FULL, t).occupied for t in (0, 2.5, 5, 10, 20)] == [4, 3, 2, 0, 0]
    quick = replace(FULL, decode_s=0.5)
    assert [decode_load_at(quick, t).occupied for t in (0, 0.25, 0.5)] == [4, 2, 0]


def test_while_nobody_knows_how_long_a_decode_takes_none_counts_as_ended() -> None:
    view = DecodeView(slots_total=4, slots_used=4, num_waiting=1, landing_s=(1.0, 2.0))
    assert [decode_load_at(view, t).occupied for t in (0, 1.5, 5, 1e6)] == [5, 6, 7, 7]


def test_a_full_pool_admits_nothing_more_before_the_first_answer_has_ended() -> None:
    # One of 32 may wait for a slot: a load above 1 is rounded down.
    pool = DecodeView(slots_total=32, slots_used=31)
    late = AdmissionRequest(Prediction(prefill_s=30.0))
    assert verdict(pool, request=late).admitted
    assert verdict(replace(pool, landing_s=(5.0,)), request=late).admitted
    assert not verdict(replace(pool, landing_s=(5.0, 6.0)), request=late).admitted
    found = verdict(replace(pool, num_waiting=1, slots_used=32), request=late)
    assert (found.reason, found.numbers["occupied"]) == (AdmissionReason.DECODE_LOAD, 33)
    assert found.retry_after_s == 1


def test_decodes_that_take_no_time_are_over_at_any_later_moment() -> None:
    view = replace(FULL, decode_s=0.0, num_waiting=9, landing_s=(1.0,))
    assert [decode_load_at(view, t).occupied for t in (0, 0.5, 2)] == [13, 0, 0]


def test_memory_follows_those_that_hold_it() -> None:
    view = replace(FULL, kv_bytes=400.0, landing_s=(1.0, 2.0), landing_kv_bytes=100.0)
    assert decode_load_at(view, 0.0).kv_bytes == 400
    assert decode_load_at(view, 3.5).kv_bytes == pytest.approx(300 + 100)


def test_a_pool_that_is_full_now_takes_what_will_find_room() -> None:
    later = verdict(FULL)
    assert (later.admitted, later.reason) == (True, AdmissionReason.ADMITTED)
    assert later.numbers == {"at_s": 5.0, "decode_load": 0.75, "occupied": 2, "slots": 4}
    now = verdict(FULL, PRESENT)
    assert (now.admitted, now.reason) == (False, AdmissionReason.DECODE_LOAD)
    assert now.numbers["decode_load"] == 1.25
    assert now.retry_after_s == 3


def test_a_pool_that_has_room_now_may_be_full_by_then() -> None:
    view = replace(FULL, slots_used=1, landing_s=(1.0, 2.0, 3.0))
    then = verdict(view)
    assert (then.admitted, then.reason) == (False, AdmissionReason.DECODE_LOAD)
    assert (then.numbers["occupied"], then.retry_after_s) == (4, 3)
    assert verdict(view, PRESENT).admitted


def test_rejection_at_decode_lets_everything_be_prefilled_first() -> None:
    assert verdict(replace(FULL, num_waiting=50), AT_DECODE).admitted
    refused = admit_decode(0.0, replace(FULL, num_waiting=50), AT_DECODE)
    assert (refused.admitted, refused.reason) == (False, AdmissionReason.DECODE_LOAD)
    assert refused.retry_after_s == 60
    assert admit_decode(0.0, replace(FULL, slots_used=3), AT_DECODE).admitted
    assert admit_decode(0.0, DecodeView(slots_total=1), AT_DECODE).reason is AdmissionReason.EMPTY
    none = admit_decode(0.0, DecodeView(slots_total=0), AT_DECODE)
    assert none.reason is AdmissionReason.NO_DECODE_SLOTS


def test_memory_can_be_what_is_full() -> None:
    view = replace(FULL, kv_bytes=800.0, kv_total_bytes=500.0)
    request = AdmissionRequest(Prediction(prefill_s=5.0), kv_bytes=200.0)
    found = verdict(view, request=request)
    assert (found.admitted, found.reason) == (False, AdmissionReason.DECODE_MEMORY)
    assert found.numbers["kv_bytes"] == pytest.approx(600)
    assert verdict(view, request=replace(request, kv_bytes=50.0)).admitted
    # Each of the two that still decode then holds next to nothing: the wait is until both end.
    tiny = replace(FULL, kv_bytes=1e-300, kv_total_bytes=1.0)
    found = verdict(tiny, request=replace(request, kv_bytes=1e12))
    assert (found.reason, found.retry_after_s) == (AdmissionReason.DECODE_MEMORY, 5)


def test_a_first_token_that_waits_too_long_is_refused_with_the_wait() -> None:
    config = AdmissionConfig(ttft_slo_s=10.0, max_prefill_load=1.0)
    late = AdmissionRequest(Prediction(queue_s=14.0, prefill_s=4.0))
    found = verdict(FULL, config, late)
    assert (found.admitted, found.reason) == (False, AdmissionReason.PREFILL_LOAD)
    assert found.retry_after_s == 8
    assert found.numbers["prefill_load"] == 1.8
    assert str(found) == (
        "prefill_load; ttft_s=18.0; ttft_slo_s=10.0; prefill_load=1.8; queue_s=14.0"
    )


def test_a_prompt_that_is_too_long_anyway_is_not_sent_away_for_it() -> None:
    config = AdmissionConfig(ttft_slo_s=10.0, max_prefill_load=1.0)
    assert verdict(FULL, config, AdmissionRequest(Prediction(prefill_s=40.0))).admitted
    behind = AdmissionRequest(Prediction(queue_s=9.0, prefill_s=40.0))
    assert verdict(FULL, config, behind).admitted
    far_behind = AdmissionRequest(Prediction(queue_s=15.0, prefill_s=40.0))
    assert verdict(FULL, config, far_behind).retry_after_s == 5


def test_a_load_above_one_lets_some_wait() -> None:
    lenient = AdmissionConfig(policy=AdmissionPolicy.PRESENT, max_decode_load=1.5)
    assert verdict(replace(FULL, num_waiting=1), lenient).admitted
    assert not verdict(replace(FULL, num_waiting=2), lenient).admitted


def test_without_slots_nothing_can_be_served() -> None:
    found = verdict(DecodeView(slots_total=0))
    assert (found.admitted, found.reason) == (False, AdmissionReason.NO_DECODE_SLOTS)


@pytest.mark.parametrize(
    "name", ["ttft_slo_s", "max_prefill_load", "max_decode_load", "min_retry_s"]
)
def test_settings_that_cannot_be_meant(name: str) -> None:
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"^{name} is {value!r}; it must be above 0$"):
            AdmissionConfig(**{name: value})
    assert getattr(AdmissionConfig(**{name: 0.5}), name) == 0.5


def test_the_bounds_of_a_wait_may_be_equal_and_not_crossed() -> None:
    assert AdmissionConfig(min_retry_s=2.0, max_retry_s=2.0).max_retry_s == 2.0
    with pytest.raises(ValueError, match=r"max_retry_s 0\.5 is below min_retry_s 1\.0"):
        AdmissionConfig(max_retry_s=0.5)


def test_what_holds_unless_somebody_says_otherwise() -> None:
    assert AdmissionConfig() == AdmissionConfig(
        policy=AdmissionPolicy.PREDICTED,
        ttft_slo_s=None,
        max_prefill_load=0.75,
        max_decode_load=1.05,
        min_retry_s=1.0,
        max_retry_s=60.0,
    )
    request = AdmissionRequest(Prediction())
    assert (request.kv_bytes, request.num_tokens, request.tenant) == (0.0, 0, "")
    assert str(Verdict(True, AdmissionReason.ADMITTED)) == "admitted"
    assert Verdict(True, AdmissionReason.ADMITTED).retry_after_s == 0


def test_a_moment_is_now_until_it_is_later() -> None:
    """What lands at this very moment has landed, and nothing has ended by now."""
    view = DecodeView(slots_total=4, slots_used=2, landing_s=(0.0,))
    for decode_s, at_half in ((0.0, 0), (0.25, 0), (0.5, 0), (0.75, 2), (None, 3)):
        timed = replace(view, decode_s=decode_s)
        assert decode_load_at(timed, 0.0).occupied == 3
        assert decode_load_at(timed, 0.5).occupied == at_half


@pytest.mark.parametrize(
    ("at_s", "occupied"), [(4.0, 6 - 1), (8.0, 6 - 2), (9.0, 6 - 2), (12.0, 6 - 3), (64.0, 0)]
)
def test_what_waits_ends_after_what_runs_as_fast_as_full_batches(
    at_s: float, occupied: int
) -> None:
    view = DecodeView(slots_total=2, slots_used=2, num_waiting=4, decode_s=8.0)
    assert decode_load_at(view, at_s).occupied == occupied


def test_the_load_is_for_the_slots_that_exist() -> None:
    half = AdmissionConfig(policy=AdmissionPolicy.PRESENT, max_decode_load=0.5)
    for used, admitted in ((1, True), (2, False)):
        view = DecodeView(slots_total=4, slots_used=used, decode_s=8.0)
        found = verdict(view, half)
        assert found.admitted is admitted
        assert found.numbers == {
            "at_s": 0.0,
            "decode_load": (used + 1) / 4,
            "occupied": used,
            "slots": 4,
        }
    # Of two slots 1.05 are two.
    assert verdict(DecodeView(slots_total=2, slots_used=1), PRESENT).admitted
    assert verdict(replace(view, slots_used=6, slots_total=8), half).retry_after_s == 3


@pytest.mark.parametrize("policy", AdmissionPolicy)
def test_one_slot_is_enough_for_an_empty_pool_and_none_is_not(policy: AdmissionPolicy) -> None:
    config = AdmissionConfig(policy=policy, max_retry_s=7.0)
    assert verdict(DecodeView(slots_total=1), config, NOW).reason is AdmissionReason.EMPTY
    assert admit_decode(9.0, DecodeView(slots_total=1), config).reason is AdmissionReason.EMPTY
    for found in (
        verdict(DecodeView(slots_total=0), config, NOW),
        admit_decode(0.0, DecodeView(slots_total=0), config),
    ):
        assert found == Verdict(False, AdmissionReason.NO_DECODE_SLOTS, 7, {})


def test_a_pool_is_not_empty_while_anything_is_queued_decodes_waits_or_lands() -> None:
    idle = DecodeView(slots_total=4)
    for view in (
        replace(idle, slots_used=1),
        replace(idle, num_waiting=1),
        replace(idle, landing_s=(1.0,)),
    ):
        assert verdict(view, request=NOW).reason is AdmissionReason.ADMITTED
    assert verdict(idle, request=IN_5_S).reason is AdmissionReason.ADMITTED
    assert admit_decode(0.0, replace(idle, landing_s=(1.0,)), PRESENT).reason is (
        AdmissionReason.EMPTY
    )


@pytest.mark.parametrize("field", ["slots_used", "num_waiting"])
def test_the_last_check_before_decoding_looks_at_the_present(field: str) -> None:
    view = replace(DecodeView(slots_total=4, decode_s=8.0), **{field: 1})
    found = admit_decode(0.0, view, PREDICTED)
    assert found.reason is AdmissionReason.ADMITTED
    assert found.numbers == {"at_s": 0.0, "decode_load": 0.5, "occupied": 1, "slots": 4}


def memory(kv_bytes: float, new_bytes: float, total_bytes: float | None, **view: Any) -> Verdict:
    decode = DecodeView(slots_total=8, decode_s=8.0, kv_bytes=kv_bytes, kv_total_bytes=total_bytes)
    return admit_decode(new_bytes, replace(decode, **({"slots_used": 2} | view)), HALF_MEMORY)


def test_memory_is_full_by_the_byte() -> None:
    """Half of 16 bytes may be used."""
    assert memory(7.5, 0.5, 16.0).admitted
    assert memory(7.5, 1.0, 16.0).reason is AdmissionReason.DECODE_MEMORY
    assert memory(7.5, 0.25, 16.0).numbers["kv_bytes"] == 7.75
    assert memory(7.5, 99.0, None).admitted


def test_memory_that_nobody_holds_refuses_nobody() -> None:
    free = memory(0.0, 99.0, 16.0)
    assert (free.admitted, "kv_bytes" in free.numbers) == (True, False)
    for held in (0.5, 1.0):
        assert memory(held, 99.0, 16.0).reason is AdmissionReason.DECODE_MEMORY


def test_a_refusal_for_memory_waits_for_as_many_as_hold_what_is_missing() -> None:
    # Two requests of 6 bytes each; 5 bytes are missing, or 7: one must end, or both do.
    assert memory(12.0, 1.0, 16.0, decode_s=24.0).retry_after_s == 3
    found = memory(12.0, 3.0, 16.0, decode_s=24.0)
    assert found.retry_after_s == 6
    assert found.numbers == {
        "at_s": 0.0,
        "decode_load": 3 / 8,
        "occupied": 2,
        "slots": 8,
        "kv_bytes": 15.0,
        "kv_total_bytes": 16.0,
    }


def test_memory_without_a_request_that_holds_it_is_free() -> None:
    view = DecodeView(slots_total=4, kv_bytes=10.0, landing_kv_bytes=10.0)
    assert decode_load_at(view, 1.0) == DecodeLoad(0, 0.0)


def test_memory_of_what_lands_is_shared_by_those_that_land() -> None:
    view = DecodeView(slots_total=4, decode_s=2.0, landing_s=(1.0, 5.0), landing_kv_bytes=10.0)
    by_time = [decode_load_at(view, at_s).kv_bytes for at_s in (0.0, 1.0, 4.0, 5.0)]
    assert by_time == [0.0, 5.0, 0.0, 5.0]


def late(ttft_slo_s: float = 10.0, max_prefill_load: float = 0.5, **parts: float) -> Verdict:
    config = AdmissionConfig(ttft_slo_s=ttft_slo_s, max_prefill_load=max_prefill_load)
    return verdict(FULL, config, AdmissionRequest(Prediction(**parts)))


def test_a_wait_may_take_what_the_other_parts_leave_of_the_objective() -> None:
    """Half of 10 s is allowed: 1 s to compute, 3 s of other parts, and 1 s to wait."""
    own = {"prefill_s": 1.0, "move_s": 0.5, "step_s": 0.5, "overhead_s": 2.0}
    for part in ("queue_s", "tail_s", "slot_s"):
        for wait_s in (0.5, 1.0):
            assert late(**own, **{part: wait_s}).reason is not AdmissionReason.PREFILL_LOAD
        assert late(**own, **{part: 1.5}).reason is AdmissionReason.PREFILL_LOAD
        assert late(**own, **{part: 4.0}).retry_after_s == 3
    found = late(**own, queue_s=0.75, tail_s=0.5, slot_s=0.25)
    assert found.retry_after_s == 1
    assert found.numbers == {
        "ttft_s": 5.5,
        "ttft_slo_s": 10.0,
        "prefill_load": 0.55,
        "queue_s": 0.75,
    }


@pytest.mark.parametrize("own_s", [5.0, 40.0])
def test_a_prompt_that_leaves_nothing_of_it_may_wait_as_long_again(own_s: float) -> None:
    assert late(prefill_s=own_s, queue_s=5.0).reason is not AdmissionReason.PREFILL_LOAD
    assert late(prefill_s=own_s, queue_s=8.0).retry_after_s == 3


def test_nearly_all_of_the_objective_leaves_little_to_wait() -> None:
    assert late(prefill_s=4.5, queue_s=4.5).retry_after_s == 4


def test_a_queue_that_never_ends_is_waited_for_as_long_as_allowed() -> None:
    assert late(queue_s=math.inf, prefill_s=1.0).retry_after_s == 60
    assert late(queue_s=math.inf, prefill_s=100.0).retry_after_s == 60


@pytest.mark.parametrize(
    ("wait_s", "retry_after_s"), [(0.25, 3), (3.0, 3), (3.25, 4), (8.75, 9), (9.5, 9)]
)
def test_a_wait_is_rounded_up_within_its_bounds(wait_s: float, retry_after_s: int) -> None:
    config = AdmissionConfig(
        ttft_slo_s=10.0, max_prefill_load=1.0, min_retry_s=2.5, max_retry_s=9.0
    )
    request = AdmissionRequest(Prediction(queue_s=10.0 + wait_s))
    assert verdict(FULL, config, request).retry_after_s == retry_after_s


def test_the_prefill_side_comes_before_the_decode_side() -> None:
    slow = AdmissionConfig(policy=AdmissionPolicy.AT_DECODE, ttft_slo_s=1.0)
    found = verdict(replace(FULL, num_waiting=50), slow)
    assert found.reason is AdmissionReason.PREFILL_LOAD
    quick = verdict(replace(FULL, num_waiting=50), slow, NOW)
    assert quick == Verdict(True, AdmissionReason.ADMITTED)


def test_a_tenant_waits_for_one_of_its_own() -> None:
    request = AdmissionRequest(Prediction(prefill_s=4.0), tenant="a")
    unknown = replace(FULL, decode_s=None)
    for num, retry_after_s, while_unknown_s in ((1, 14, 4), (2, 7, 2)):
        tenants = TenantLedger(TenantLimit(max_requests=num))
        for _ in range(num):
            tenants.started("a", 10, 0.0)
        assert admit(request, FULL, PREDICTED, 0.0, tenants).retry_after_s == retry_after_s
        found = admit(request, unknown, PREDICTED, 0.0, tenants)
        assert (found.admitted, found.retry_after_s) == (False, while_unknown_s)
        assert found.numbers == {"requests": num, "max_requests": num}


predictions = st.tuples(*[st.one_of(seconds, st.just(math.inf))] * 7).map(
    lambda parts: Prediction(*parts)
)
configs = st.builds(
    AdmissionConfig,
    policy=st.sampled_from(AdmissionPolicy),
    ttft_slo_s=st.one_of(st.none(), st.floats(0.1, 100)),
    max_decode_load=st.floats(0.1, 3),
)


@untimed
@given(
    st.integers(1, 100),
    st.floats(0, 1e6),
    configs,
    st.floats(0, 1e12),
    st.one_of(st.none(), st.floats(0, 1e12)),
)
def test_an_empty_region_refuses_nothing(
    slots: int, prefill_s: float, config: AdmissionConfig, kv: float, total: float | None
) -> None:
    empty = DecodeView(slots_total=slots, decode_s=10.0, kv_total_bytes=total)
    request = AdmissionRequest(Prediction(prefill_s=prefill_s), kv, 10**6, "anyone")
    tenants = TenantLedger(
        TenantLimit(max_requests=1, max_tokens=1, tokens_per_s=1, burst_tokens=1)
    )
    assert admit(request, empty, config, 0.0, tenants).admitted
    assert admit_decode(kv, empty, config).admitted


@untimed
@given(predictions, decode_views(), configs, st.floats(0, 1e12))
def test_every_refusal_says_when_to_come_back(
    prediction: Prediction, decode: DecodeView, config: AdmissionConfig, kv: float
) -> None:
    found = admit(AdmissionRequest(prediction, kv), decode, config, 0.0)
    assert (found.retry_after_s == 0) == found.admitted
    assert 0 <= found.retry_after_s <= 60
    assert found.admitted == (found.reason in (AdmissionReason.ADMITTED, AdmissionReason.EMPTY))


@untimed
@given(predictions, decode_views(), configs)
def test_more_load_never_lets_a_request_in(
    prediction: Prediction, decode: DecodeView, config: AdmissionConfig
) -> None:
    decode = replace(decode, kv_total_bytes=None)
    request = AdmissionRequest(prediction)
    if admit(request, decode, config, 0.0).admitted:
        return
    at_s = prediction.landed_s
    more = (
        replace(decode, num_waiting=decode.num_waiting + 1),
        replace(decode, landing_s=tuple(sorted((*decode.landing_s, at_s)))),
        replace(decode, slots_used=decode.slots_used + 1),
    )
    for fuller in more:
        assert not admit(request, fuller, config, 0.0).admitted


def test_tenants_are_held_to_their_requests_and_tokens() -> None:
    tenants = TenantLedger(limits={"a": TenantLimit(max_requests=2, max_tokens=1000)})
    request = AdmissionRequest(Prediction(prefill_s=4.0), num_tokens=600, tenant="a")
    tenants.started("a", 600, 0.0)
    found = admit(request, FULL, PREDICTED, 0.0, tenants)
    assert (found.reason, found.retry_after_s) == (AdmissionReason.TENANT_TOKENS, 14)
    assert found.numbers == {"tokens": 600, "new_tokens": 600, "max_tokens": 1000}
    small = replace(request, num_tokens=400)
    assert admit(small, FULL, PREDICTED, 0.0, tenants).admitted
    tenants.started("a", 400, 0.0)
    assert admit(small, FULL, PREDICTED, 0.0, tenants).reason is AdmissionReason.TENANT_REQUESTS
    assert admit(replace(small, tenant="b"), FULL, PREDICTED, 0.0, tenants).admitted
    tenants.ended("a", 600)
    assert tenants.in_flight("a") == (1, 400)
    assert admit(replace(small, num_tokens=600), FULL, PREDICTED, 0.0, tenants).admitted
    with pytest.raises(ValueError, match="no request of 600 tokens"):
        tenants.ended("a", 600)


def test_tenants_bring_tokens_at_their_rate() -> None:
    limit = TenantLimit(tokens_per_s=100.0, burst_tokens=1000.0)
    tenants = TenantLedger(limit)
    assert tenants.refusal("a", 5000, 0.0) is None
    tenants.started("a", 5000, 0.0)
    refusal = tenants.refusal("a", 500, 10.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx((500 + 3000) / 100)
    assert tenants.refusal("a", 500, 45.0) is None
    assert tenants.refusal("a", 9999, 49.0) is not None
    assert tenants.refusal("a", 9999, 50.0) is None
    request = AdmissionRequest(Prediction(), num_tokens=500, tenant="a")
    found = admit(request, FULL, PREDICTED, 10.0, tenants)
    assert (found.reason, found.retry_after_s) == (AdmissionReason.TENANT_RATE, 35)
