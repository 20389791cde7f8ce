"""Requests let in and turned away: answers, what tenants hold, series, what operators see."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.errors import ApiError
from deploy.gateway.scheduling.admission import Admission, TenantNow
from deploy.gateway.scheduling.config import AdmissionSection, SchedulingConfig
from deploy.gateway.scheduling.scheduler import live_settings
from deploy.gateway.series.tenants import UNNAMED, TenantSeries
from scheduler.live.core import LiveScheduler
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.settings import PdSettings
from scheduler.routing.prediction import Prediction
from scheduler.routing.views import DecodeView

IDLE = DecodeView(slots_total=4, decode_s=10.0)
FULL = DecodeView(slots_total=4, slots_used=4, decode_s=24.0)
"""A slot falls free every 6 s."""
IN_5_S = Prediction(queue_s=1.0, prefill_s=4.0)


class FixedLoad(LiveScheduler):
    """Its decode side is `decode`, and a request's KVCache takes `kv_bytes`."""

    def __init__(self, section: AdmissionSection) -> None:
        scheduling = SchedulingConfig(admission=section)
        config = GatewayConfig(models=(ModelConfig(name="m"),), scheduling=scheduling)
        super().__init__(live_settings(config, (PdSettings("pd"),)))
        self.decode = IDLE
        self.kv_bytes = 0.0

    def decode_side(self, model: str, now_s: float, pd: str = "") -> DecodeView:
        return self.decode

    def knowledge(self, model: str) -> ModelKnowledge:
        known = ModelKnowledge()
        for _ in range(3):
            known.learn("far", 1000, 0, 1.0)
        known.reserved(100, 0, int(self.kv_bytes))
        return known


class Door:
    """An `Admission` whose clock is `now_s`."""

    def __init__(self, *, hide: Callable[[str], str] = str, **section: Any) -> None:
        self.now_s = 0.0
        self.registry = CollectorRegistry()
        config = AdmissionSection.model_validate(section)
        self.live = FixedLoad(config)
        self.admission = Admission(
            config,
            self.registry,
            lambda event: self.live.take(event, self.now_s),
            TenantSeries(self.registry),
            hide=hide,
        )

    def admit(
        self,
        tenant: str = "",
        *,
        prediction: Prediction = IN_5_S,
        decode: DecodeView = IDLE,
        num_tokens: int = 100,
        kv_bytes: float = 0.0,
    ) -> Any:
        self.live.decode, self.live.kv_bytes = decode, kv_bytes
        return self.admission.admit(tenant, "m", num_tokens, prediction)

    def refused(self, *args: Any, **kwargs: Any) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.admit(*args, **kwargs)
        return caught.value

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value("prfaas_gateway_" + name, labels)


def test_a_refusal_for_load_is_an_openai_error_with_its_numbers() -> None:
    door = Door()
    error = door.refused(decode=FULL)
    assert (error.status, error.code) == (429, "decode_load")
    assert error.headers == {"Retry-After": "6"}
    body = json.loads(error.body())["error"]
    assert body == {
        "message": "When this request would begin to decode, in 5.0 s, 4 requests are predicted to "
        "take or want the 4 decode slots. Try again in 6 s.",
        "type": "rate_limit_error",
        "param": None,
        "code": "decode_load",
    }
    assert door.admission.overview().tenants == {}


def test_what_will_have_room_by_then_is_let_in() -> None:
    late = Prediction(prefill_s=7.5)
    Door().admit(decode=FULL, prediction=late)
    assert Door(policy="present").refused(decode=FULL, prediction=late).code == "decode_load"


def test_a_full_region_is_full_before_the_first_answer_has_ended() -> None:
    unknown = DecodeView(slots_total=4, slots_used=4)
    Door().admit(decode=DecodeView(slots_total=4, slots_used=3))
    error = Door().refused(decode=unknown, prediction=Prediction(prefill_s=60.0))
    assert (error.code, error.retry_after_s) == ("decode_load", 1)


def test_a_queue_that_makes_the_first_token_late_is_a_reason_if_asked() -> None:
    slow = Prediction(queue_s=9.0, prefill_s=4.0)
    Door().admit(prediction=slow)
    error = Door(ttft_slo_s=10).refused(prediction=slow)
    assert (error.code, error.retry_after_s) == ("prefill_load", 6)
    assert "predicted in 13.0 s, of which 9.0 s are a queue; the objective is 10 s" in error.message
    never = Door(ttft_slo_s=10).refused(prediction=Prediction(queue_s=math.inf))
    assert never.retry_after_s == 60


def test_memory_is_a_reason() -> None:
    view = DecodeView(slots_total=8, slots_used=2, decode_s=10.0, kv_bytes=9e9, kv_total_bytes=10e9)
    error = Door().refused(decode=view, prediction=Prediction(), kv_bytes=2e9)
    assert error.code == "decode_memory"
    assert "1.1e+10 bytes of KVCache are predicted for 1e+10" in error.message


def test_a_tenant_has_so_many_requests_until_one_is_over() -> None:
    door = Door(tenants={"acme": {"max_requests": 2}})
    first, _ = door.admit("acme"), door.admit("acme")
    error = door.refused("acme")
    assert (error.status, error.code) == (429, "tenant_requests")
    assert error.message.startswith("Tenant acme has 2 of at most 2 requests in flight.")
    # One of two that take 5 s and 10 s ends within 7.5 s.
    assert error.retry_after_s == 8
    door.admit("other")
    first()
    door.admit("acme")
    first()
    assert door.refused("acme").code == "tenant_requests"


def test_a_tenant_has_so_many_tokens() -> None:
    door = Door(default_tenant={"max_tokens": 500})
    handle = door.admit("acme", num_tokens=400)
    error = door.refused("acme", num_tokens=101)
    assert error.code == "tenant_tokens"
    said = "400 tokens of prompts and answers in flight and may have 500; this request brings 101"
    assert said in error.message
    door.admit("acme", num_tokens=100)
    handle()
    door.admit("acme", num_tokens=400)


def test_a_tenant_brings_so_many_tokens_a_second() -> None:
    door = Door(default_tenant={"tokens_per_s": 10, "burst_tokens": 100})
    door.admit(num_tokens=80)()
    error = door.refused(num_tokens=70)
    assert (error.code, error.retry_after_s) == ("tenant_rate", 5)
    assert error.message.startswith("Everybody together brings more than 10 tokens of prompts")
    door.now_s = 5.0
    door.admit(num_tokens=70)


def test_limits_of_tenants_hold_without_a_policy_and_load_does_not() -> None:
    door = Door(policy="off", ttft_slo_s=1, default_tenant={"max_requests": 1}, max_retry_s=3)
    door.admit("acme", decode=FULL, prediction=Prediction(queue_s=100))
    error = door.refused("acme")
    assert (error.code, error.retry_after_s) == ("tenant_requests", 3)


def test_without_known_slots_load_is_no_reason() -> None:
    door = Door(default_tenant={"max_requests": 1}, ttft_slo_s=1)
    nothing = DecodeView(slots_total=0)
    door.admit(decode=nothing, prediction=Prediction(slot_s=math.inf))
    assert door.value("admission_total", verdict="admitted", reason="no_decode_slots") == 1
    assert door.refused(decode=nothing).code == "tenant_requests"


def test_every_reason_for_a_refusal_has_a_series_and_a_text() -> None:
    door = Door()
    reasons = {
        (sample.labels["verdict"], sample.labels["reason"])
        for family in door.registry.collect()
        for sample in family.samples
        if sample.name == "prfaas_gateway_admission_total"
    }
    assert {reason for verdict, reason in reasons if verdict == "admitted"} == {
        "admitted",
        "empty",
        "no_decode_slots",
    }
    assert len(reasons) == 9


def test_verdicts_and_loads_are_counted() -> None:
    door = Door()
    door.admit()
    door.refused(decode=FULL)
    assert door.value("admission_total", verdict="admitted", reason="admitted") == 1
    assert door.value("admission_total", verdict="refused", reason="decode_load") == 1
    assert door.value("predicted_decode_load_ratio_count") == 2
    assert door.value("predicted_decode_load_ratio_sum") == pytest.approx(1 / 4 + 5 / 4)
    door.admit(prediction=Prediction(tail_s=math.inf))
    assert door.value("predicted_decode_load_ratio_count") == 2


def test_only_named_tenants_have_a_series_of_their_own() -> None:
    door = Door(tenants={"acme": {"max_requests": 9}})
    handles = [door.admit(name) for name in ("", "acme", "acme", "other")]
    handles += [door.admit(f"key-{number:08x}") for number in range(50)]
    assert door.value("tenant_in_flight_requests", tenant="acme") == 2
    assert door.value("tenant_in_flight_requests", tenant="other") == 1
    assert door.value("tenant_in_flight_requests", tenant=UNNAMED) == 51
    assert door.value("tenant_in_flight_requests", tenant="key-00000001") is None
    for handle in handles:
        handle()
        handle()
    for tenant in ("acme", "other", UNNAMED):
        assert door.value("tenant_in_flight_requests", tenant=tenant) == 0


def test_the_series_of_a_tenant_goes_with_its_last_key_and_its_last_request() -> None:
    door = Door(tenants={"limited": {"max_requests": 9}})
    names = ("limited", "stays", "idle", "busy", "key-00000001")
    handles = {name: door.admit(name) for name in names}
    handles["idle"]()
    door.admission.keep_series(["stays"])
    for name, shown in {"limited": 1, "stays": 1, "idle": None, "busy": 1, UNNAMED: 1}.items():
        assert door.value("tenant_in_flight_requests", tenant=name) == shown, name
    for handle in handles.values():
        handle()
    for name, shown in {"limited": 0, "stays": 0, "idle": None, "busy": None, UNNAMED: 0}.items():
        assert door.value("tenant_in_flight_requests", tenant=name) == shown, name
    door.admit("busy")
    assert door.value("tenant_in_flight_requests", tenant="busy") == 1


def test_operators_see_who_has_what() -> None:
    door = Door(default_tenant={"max_requests": 2})
    handle = door.admit("acme", num_tokens=70)
    door.admit("acme", num_tokens=30)
    door.admit("key-00000001")()
    door.refused("acme")
    door.refused(decode=FULL)
    seen = door.admission.overview()
    assert (seen.policy, seen.admitted) == ("predicted", 3)
    assert seen.refused == {"tenant_requests": 1, "decode_load": 1}
    assert seen.tenants == {"acme": TenantNow(2, 100)}
    handle()
    assert door.admission.overview().tenants == {"acme": TenantNow(1, 30)}


@pytest.mark.parametrize("hide", [str, lambda tenant: f"hash of {tenant}"])
def test_other_limits_count_what_is_in_flight(hide: Callable[[str], str]) -> None:
    """With `hide` as a recorder has it for a tenant that had no limits when it began."""
    door = Door(hide=hide)
    first, _second = door.admit("acme"), door.admit("acme")
    assert not door.admission.is_limited("acme")
    limits = {"tenants": {"acme": {"max_requests": 2}}}
    door.admission.use(AdmissionSection.model_validate(limits))
    assert door.admission.is_limited("acme")
    error = door.refused("acme")
    assert error.code == "tenant_requests"
    assert "acme has 2 of at most 2 requests in flight" in error.message
    door.admit("other")
    first()
    door.admit("acme")
    assert door.admission.overview().tenants["acme"] == TenantNow(2, 200)
    door.admission.use(AdmissionSection())
    door.admit("acme")
    assert door.value("tenant_in_flight_requests", tenant="acme") == 3
