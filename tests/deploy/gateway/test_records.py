"""Records of requests, and the metrics made of them."""

from typing import Any

import pytest

from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.serving.records import RequestRecord
from kvmanager.load_times import LoadTimes
from prfaas.jobs import PrefillResult
from scheduler.routing.decision import Decision, Reason


def record(request_id: str = "r") -> RequestRecord:
    return RequestRecord(request_id=request_id, started_s=0.0, endpoint="completion", model="m")


def result(**fields: Any) -> PrefillResult:
    values = {
        "instance": "p0",
        "queue_s": 0.1,
        "prefill_s": 1.0,
        "transfer_tail_s": 0.2,
        "nbytes": 7,
        "transfer_s": 1.1,
        "sent_share_at_prefill_end": 0.9,
    }
    return PrefillResult(**(values | fields))


def test_parts_add_up_in_whatever_order_they_come() -> None:
    early, late = record(), record()
    early.prefilled(result())
    early.first_byte(2.0, is_stream=True)
    late.first_byte(2.0, is_stream=True)
    late.prefilled(result())
    assert early.parts == late.parts
    assert (early.transfer_bytes, early.transfer_s) == (7, 1.1)
    assert early.parts.load_and_first_step_s == pytest.approx(0.7)
    assert sum(early.parts.known().values()) == pytest.approx(2.0)


def test_an_answer_in_one_piece_does_not_show_its_first_step() -> None:
    whole = record()
    whole.first_byte(2.0, is_stream=False)
    assert whole.parts.known() == {"load_and_decode": 2.0}


def test_parts_measured_by_other_clocks_never_make_a_negative_rest() -> None:
    odd = record()
    odd.prefilled(result(prefill_s=9.0))
    odd.first_byte(2.0, is_stream=True)
    assert odd.parts.load_and_first_step_s == 0.0


def test_the_first_route_stays_visible() -> None:
    moved = record()
    moved.decided(Decision("prefill_cluster", "far", Reason.ABOVE_THRESHOLD))
    moved.decided(Decision("local", "one_engine", Reason.PREFILL_FAILED, {"n": 1}))
    assert (moved.first_route, moved.route, moved.reason) == (
        "prefill_cluster",
        "local",
        "prefill_failed",
    )


def test_metrics_know_every_ending() -> None:
    metrics = GatewayMetrics()
    ended = record()
    ended.decided(Decision("prefill_cluster", "far", Reason.ABOVE_THRESHOLD))
    ended.prefilled(result())
    ended.first_byte(2.0, is_stream=True)
    ended.total_s, ended.outcome, ended.status, ended.num_prompt_tokens = 3.0, "ok", 200, 50
    metrics.watch(lambda: 3, lambda: 1)
    metrics.ended(ended, 50)
    metrics.settled(ended)
    metrics.rejected("x")
    text = metrics.render().decode()
    assert "prfaas_gateway_in_flight_requests 3.0" in text
    assert 'outcome="ok",route="prefill_cluster",status="200"} 1.0' in text
    assert 'prfaas_gateway_ttft_part_seconds_count{model_name="m",part="queue"' in text


def test_both_engines_words_divide_the_times_of_the_gateway() -> None:
    told = record()
    told.waited_for_landing(1.5, 1.75)
    told.prefilled(result(open_s=0.05, engine_queue_s=0.4, progress=((0.5, 3, 2),)))
    told.first_byte(2.0, is_stream=True)
    told.loaded(LoadTimes(0.02, 0.03, 0.04))
    known = told.parts.known()
    assert sum(known.values()) == pytest.approx(2.0)
    assert (known["engine_queue"], known["prefill"]) == (0.4, pytest.approx(0.6))
    assert (known["load_wait"], known["load"], known["first_step"]) == (0.02, 0.03, 0.04)
    assert known["relay"] == pytest.approx(0.25 - 0.09)
    assert told.leg is not None
    assert told.leg.prefill_s == 1.0, "the total stays"
    assert told.transfer_progress == ((0.5, 3, 2),)
