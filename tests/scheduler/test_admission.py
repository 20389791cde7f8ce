"""Admission: predicted against present decode load, empty regions, Retry-After, tenants."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import decode_views, seconds, untimed

from scheduler.admission import (
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
from scheduler.prediction import Prediction
from scheduler.tenants import TenantLedger, TenantLimit
from scheduler.views import DecodeView

PREDICTED = AdmissionConfig()
PRESENT = AdmissionConfig(policy=AdmissionPolicy.PRESENT)
AT_DECODE = AdmissionConfig(policy=AdmissionPolicy.AT_DECODE)
IN_5_S = AdmissionRequest(Prediction(queue_s=1.0, prefill_s=4.0))
FULL = DecodeView(slots_total=4, slots_used=4, decode_s=10.0, left_s=(1.0, 3.0, 8.0, 9.0))


def verdict(
    decode: DecodeView, config: AdmissionConfig = PREDICTED, request: AdmissionRequest = IN_5_S
) -> Verdict:
    return admit(request, decode, config, 0.0)


def test_the_load_at_a_moment_counts_who_lands_and_who_ends() -> None:
    view = replace(FULL, landing_s=(2.0, 4.0, 30.0), num_waiting=1)
    assert decode_load_at(view, 0.0) == DecodeLoad(5, 0.0)
    assert decode_load_at(view, 3.5).occupied == 5 - 2 + 1
    assert decode_load_at(view, 5.0).occupied == 5 - 2 + 2
    # What landed at 2 s has decoded by 13 s, what waited may have.
    assert decode_load_at(view, 13.0).occupied == 5 - 5 + 2 - 1


def test_decodes_of_unknown_age_end_evenly() -> None:
    view = replace(FULL, left_s=None)
    assert [decode_load_at(view, t).occupied for t in (0, 2.5, 5, 10, 20)] == [4, 3, 2, 0, 0]


def test_while_nobody_knows_how_long_a_decode_takes_none_counts_as_ended() -> None:
    view = DecodeView(slots_total=4, slots_used=4, num_waiting=1, landing_s=(1.0, 2.0))
    assert [decode_load_at(view, t).occupied for t in (0, 1.5, 5, 1e6)] == [5, 6, 7, 7]
    # Where their lengths are known, those that decode end all the same; what waits does not.
    known = replace(view, left_s=(1.0, 1.0, 1.0, 9.0))
    assert decode_load_at(known, 5.0).occupied == 7 - 3


def test_a_full_pool_admits_nothing_more_before_the_first_answer_has_ended() -> None:
    pool = DecodeView(slots_total=32, slots_used=30)
    late = AdmissionRequest(Prediction(prefill_s=30.0))
    assert verdict(pool, request=late).admitted
    assert verdict(replace(pool, landing_s=(5.0,)), request=late).admitted
    assert not verdict(replace(pool, landing_s=(5.0, 6.0)), request=late).admitted
    found = verdict(replace(pool, slots_used=32), request=late)
    assert (found.reason, found.numbers["occupied"]) == (AdmissionReason.DECODE_LOAD, 32)
    assert found.retry_after_s == 1


def test_decodes_that_take_no_time_are_over_at_any_later_moment() -> None:
    view = replace(FULL, left_s=None, decode_s=0.0, num_waiting=9, landing_s=(1.0,))
    assert [decode_load_at(view, t).occupied for t in (0, 0.5, 2)] == [13, 0, 0]


def test_memory_follows_those_that_hold_it() -> None:
    view = replace(FULL, kv_bytes=400.0, landing_s=(1.0, 2.0), landing_kv_bytes=100.0)
    assert decode_load_at(view, 0.0).kv_bytes == 400
    assert decode_load_at(view, 3.5).kv_bytes == pytest.approx(200 + 100)


def test_a_pool_that_is_full_now_takes_what_will_find_room() -> None:
    later = verdict(FULL)
    assert (later.admitted, later.reason) == (True, AdmissionReason.ADMITTED)
    assert later.numbers == {"at_s": 5.0, "decode_load": 0.75, "occupied": 2, "slots": 4}
    now = verdict(FULL, PRESENT)
    assert (now.admitted, now.reason) == (False, AdmissionReason.DECODE_LOAD)
    assert now.numbers["decode_load"] == 1.25
    assert now.retry_after_s == 1


def test_a_pool_that_has_room_now_may_be_full_by_then() -> None:
    view = replace(FULL, slots_used=1, left_s=(9.0,), landing_s=(1.0, 2.0, 3.0))
    then = verdict(view)
    assert (then.admitted, then.reason) == (False, AdmissionReason.DECODE_LOAD)
    assert (then.numbers["occupied"], then.retry_after_s) == (4, 9)
    assert verdict(view, PRESENT).admitted


def test_rejection_at_decode_lets_everything_be_prefilled_first() -> None:
    assert verdict(replace(FULL, num_waiting=50), AT_DECODE).admitted
    refused = admit_decode(0.0, replace(FULL, num_waiting=50), AT_DECODE)
    assert (refused.admitted, refused.reason) == (False, AdmissionReason.DECODE_LOAD)
    assert refused.retry_after_s == 60
    assert admit_decode(0.0, replace(FULL, slots_used=3, left_s=None), AT_DECODE).admitted
    assert admit_decode(0.0, DecodeView(slots_total=1), AT_DECODE).reason is AdmissionReason.EMPTY
    none = admit_decode(0.0, DecodeView(slots_total=0), AT_DECODE)
    assert none.reason is AdmissionReason.NO_DECODE_SLOTS


def test_memory_can_be_what_is_full() -> None:
    view = replace(FULL, kv_bytes=800.0, kv_total_bytes=500.0)
    request = AdmissionRequest(Prediction(prefill_s=3.5), kv_bytes=200.0)
    found = verdict(view, request=request)
    assert (found.admitted, found.reason) == (False, AdmissionReason.DECODE_MEMORY)
    assert found.numbers["kv_bytes"] == pytest.approx(600)
    assert verdict(view, request=replace(request, kv_bytes=50.0)).admitted


def test_a_first_token_that_waits_too_long_is_refused_with_the_wait() -> None:
    config = AdmissionConfig(ttft_slo_s=10.0, max_prefill_load=1.0)
    late = AdmissionRequest(Prediction(queue_s=14.0, prefill_s=4.0))
    found = verdict(FULL, config, late)
    assert (found.admitted, found.reason) == (False, AdmissionReason.PREFILL_LOAD)
    assert found.retry_after_s == 8
    assert found.numbers["prefill_load"] == 1.8
    assert str(found).startswith("prefill_load; ttft_s=18.0; ttft_slo_s=10.0")


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


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match=r"max_decode_load is 0\.0"):
        AdmissionConfig(max_decode_load=0.0)
    with pytest.raises(ValueError, match=r"max_retry_s 0\.5 is below"):
        AdmissionConfig(max_retry_s=0.5)


predictions = st.tuples(*[st.one_of(seconds, st.just(math.inf))] * 7).map(Prediction._make)
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
        replace(
            decode,
            slots_used=decode.slots_used + 1,
            left_s=None if decode.left_s is None else (*decode.left_s, 1e6),
        ),
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


def test_idle_tenants_are_forgotten() -> None:
    tenants = TenantLedger(TenantLimit(tokens_per_s=1.0, burst_tokens=10.0))
    for i in range(TenantLedger.SWEEP_ABOVE):
        tenants.started(f"t{i}", 10, 0.0)
        if i % 2:
            tenants.ended(f"t{i}", 10)
    tenants.started("new", 1, 5.0)
    assert len(tenants) == TenantLedger.SWEEP_ABOVE + 1
    for i in range(1, TenantLedger.SWEEP_ABOVE + 1):
        tenants.started(f"u{i}", 0, 20.0)
    assert len(tenants) <= 1.5 * TenantLedger.SWEEP_ABOVE + 1


def test_limits_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="max_requests is 0"):
        TenantLimit(max_requests=0)
    with pytest.raises(ValueError, match=r"burst_tokens is 0\.0"):
        TenantLimit(tokens_per_s=5.0)
