"""Predictions through a gateway: kept in records, learnt from answers, shown to operators."""

import asyncio
import json
from typing import Any

import pytest
from live_region_cases import snapshot
from openai_engine import refusing

from deploy.ops.explain import find_records
from deploy.ops.explain_view import ttft_error
from deploy.region.client import CannotAsk
from scheduler.live.core import LiveScheduler
from scheduler.routing.decision import ONE_ENGINE

STREAM = {"stream": True, "max_tokens": 4}


async def page(region: Any, path: str, **headers: str) -> tuple[int, Any]:
    async with region.session.get(region.url + path, headers=headers) as response:
        return response.status, await response.json()


async def series(region: Any) -> dict[str, float]:
    async with region.session.get(region.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def test_tokens_and_the_time_between_them_are_measured(region: Any) -> None:
    region.engine.next_token.clear()
    body = {"model": "tiny", "prompt": "short", "max_tokens": 8} | STREAM
    body["stream_options"] = {"include_usage": True}
    async with region.session.post(region.url + "/v1/completions", json=body) as response:
        # So that the events do not reach the gateway in one piece.
        first = await response.content.readuntil(b"\n\n")
        region.engine.next_token.set()
        rest = await response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert json.loads(first.removeprefix(b"data: "))["choices"]
    usage = json.loads(rest.split(b"data: ")[-2])["usage"]
    values = await series(region)
    route = '{model_name="tiny",route="local"}'
    assert values[f"prfaas_gateway_inter_token_latency_seconds_count{route}"] >= 1
    for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds"):
        assert values[f"prfaas_gateway_{name}_count{route}"] == 1
    model = '{model_name="tiny"}'
    assert values[f"prfaas_gateway_prompt_tokens_total{model}"] == usage["prompt_tokens"]
    assert values[f"prfaas_gateway_generation_tokens_total{model}"] == usage["completion_tokens"]
    assert values['prfaas_gateway_tenant_requests_total{tenant="(unnamed)"}'] == 1


async def test_a_counted_prompt_has_predictions_in_its_record(region: Any) -> None:
    await region.post(region.long_body(**STREAM), headers={"X-Request-Id": "one"})
    record = await region.record()
    assert (record.first_target, record.first_reason) == ("far", "above_threshold")
    assert set(record.predictions) == {"local", "remote"}
    total_s = sum(record.predictions["remote"].values())
    assert record.predicted_ttft_s == pytest.approx(total_s, abs=1e-5)  # parts are rounded
    assert record.placement == ""  # these fronts do not say why
    assert record.output_tokens == 4
    found = await asyncio.to_thread(find_records, region.url, "one")
    assert [item.predictions for item in found] == [record.predictions]


async def test_a_prompt_that_is_not_counted_has_none_and_teaches_none(region: Any) -> None:
    await region.post({"model": "tiny", "prompt": "short"} | STREAM)
    record = await region.record()
    assert (record.predictions, record.predicted_ttft_s) == ({}, None)
    assert record.num_prompt_tokens is None
    known = region.gateway.scheduler.knowledge("tiny")
    assert known.error(ONE_ENGINE) is None
    assert known.step_s is not None


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 4}, STREAM | {"stream_options": {"include_usage": True}}],
    ids=["one piece", "stream"],
)
async def test_an_answers_usage_teaches_how_long_prompts_are(
    region: Any, fields: dict[str, Any]
) -> None:
    lengths = region.gateway.scheduler.knowledge("tiny").lengths
    assert not lengths.is_known
    # What only an engine can judge is one engine's work: nobody counts the prompt first.
    await region.post({"model": "tiny", "prompt": "x" * 60, "n": "2"} | fields)
    record = await region.record()
    assert record.num_prompt_tokens is None
    assert record.output_tokens == 4
    # The fake engines make a token of each byte; the quotes of the JSON are no tokens.
    assert lengths.bytes_per_token == pytest.approx(62 / 60)


@pytest.mark.parametrize("is_full", [False, True])
async def test_an_engine_that_was_full_teaches_no_prefill_time(
    region: Any, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr(LiveScheduler, "is_full", lambda *_: is_full)
    await region.post({"model": "tiny", "prompt": [1, 2, 3]} | STREAM)
    known = region.gateway.scheduler.knowledge("tiny")
    assert known.profile(ONE_ENGINE).num_seen == (0 if is_full else 1)


async def test_answers_teach_predictions(region: Any) -> None:
    for _ in range(12):
        await region.post(region.long_body(**STREAM))
        record = await region.record()
    known = region.gateway.scheduler.knowledge("tiny")
    assert known.profile("far").num_seen == 12
    assert known.kv.token_bytes == pytest.approx(512)
    assert known.error("far") is not None
    # Of a guess at first, of what these engines do in the end.
    assert record.predicted_ttft_s < 0.1
    assert ttft_error(record) is not None
    status, learnt = await page(region, "/prfaas/scheduling")
    assert status == 200
    (model,) = learnt["models"]
    assert model["model"] == "tiny"
    assert [place["place"] for place in model["places"] if place["num_seen"]] == ["far"]
    values = await series(region)
    assert values['prfaas_gateway_learned_prefills{model_name="tiny",place="far"}'] == 12
    assert values['prfaas_gateway_threshold_tokens{source="far",target="home"}'] == 100
    route = 'model_name="tiny",route="prefill_cluster"'
    for name in ("prediction_error_ratio", "predicted_seconds", "measured_seconds"):
        assert values[f"prfaas_gateway_ttft_{name}_count{{{route}}}"] == 12


async def test_a_client_that_names_no_model_teaches_the_only_one(region: Any) -> None:
    body = region.long_body(**STREAM)
    del body["model"]
    assert (await region.post(body))[0] == 200
    assert (await region.record()).model == "tiny"
    assert list(region.gateway.scheduler.models()) == ["tiny"]


async def test_a_prediction_that_came_to_nothing_teaches_nothing(region: Any) -> None:
    region.pd.is_full = True
    await region.post(region.long_body(**STREAM))
    record = await region.record()
    assert (record.first_target, record.target) == ("far", ONE_ENGINE)
    assert (record.first_reason, record.reason) == ("above_threshold", "no_landing_room")
    assert record.predictions
    assert ttft_error(record) is None
    known = region.gateway.scheduler.knowledge("tiny")
    assert known.error("far") is known.error(ONE_ENGINE) is None
    assert len(region.gateway.scheduler.live.ledger) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "is_traffic"), [(400, False), (422, False), (500, True)])
async def test_what_the_engine_refuses_is_no_traffic(
    region: Any, status: int, is_traffic: bool, stream: bool
) -> None:
    """One answer is needed to know any traffic; then the same prompt fails again and again."""
    assert (await region.post(region.long_body(**STREAM)))[0] == 200
    known = region.gateway.scheduler.knowledge("tiny").traffic
    now_s = region.gateway.scheduler.clock
    region.engine.reply = refusing(status)
    for _ in range(5):
        assert (await region.post(region.long_body(stream=stream)))[0] == status
    assert known.measured(now_s()).uncached.num == pytest.approx(1 + 5 * is_traffic)


async def test_a_request_that_its_client_gave_up_was_traffic(region: Any) -> None:
    assert (await region.post(region.long_body(**STREAM)))[0] == 200
    known = region.gateway.scheduler.knowledge("tiny").traffic
    region.far.gate.clear()
    asking = asyncio.create_task(region.post(region.long_body()))
    await region.until(lambda: len(region.far.jobs) == 2)
    asking.cancel()
    await region.until(lambda: region.gateway.num_in_flight == 0)
    measured = known.measured(region.gateway.scheduler.clock())
    assert measured.uncached.num == pytest.approx(2)


async def test_what_is_under_way_is_known_and_forgotten(region: Any) -> None:
    region.far.gate.clear()
    waiting = asyncio.create_task(region.post(region.long_body()))
    await region.far.started.wait()
    assert len(region.gateway.scheduler.live.ledger) == 1
    region.far.gate.set()
    await waiting
    await region.record()
    assert len(region.gateway.scheduler.live.ledger) == 0


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ({"running": 220, "num_running": 20, "num_waiting": 200, "kv_usage": 0.999}, "decode_load"),
        ({"running": 20, "num_running": 20, "kv_usage": 0.98}, "decode_memory"),
        ({"running": 20, "num_running": 20, "kv_usage": 0.5}, ""),
    ],
)
async def test_engines_whose_kv_memory_is_full_are_given_no_more(
    region: Any, numbers: dict[str, Any], code: str
) -> None:
    region.pd.engine_numbers = {"decode_slots": 256, "kv_total_bytes": 10**9, **numbers}

    scheduler = region.gateway.scheduler
    await region.until(lambda: snapshot(scheduler, "tiny").decode.slots_used == 20)
    status, headers, answer = await region.post(region.long_body())
    if not code:
        assert status == 200
        return
    assert (status, json.loads(answer)["error"]["code"]) == (429, code)
    assert int(headers["retry-after"]) >= 1
    assert region.far.jobs == region.engine.bodies() == []


async def test_answers_that_are_over_leave_their_kv_memory_to_others(region: Any) -> None:
    """However old the look at the engines is: ten such prompts at once would not fit."""
    assert (await region.post(region.long_body()))[0] == 200
    (transfer_bytes,) = {job.landing.nbytes for job in region.far.jobs}
    region.pd.engine_numbers = {
        "decode_slots": 256,
        "kv_usage": 0.0,
        "kv_total_bytes": 5 * transfer_bytes,
        "looked_s": 20.0,
    }
    scheduler = region.gateway.scheduler
    await region.until(lambda: snapshot(scheduler, "tiny").decode.kv_total_bytes is not None)
    for seed in range(1, 11):
        assert (await region.post(region.long_body(seed=seed)))[0] == 200
    await region.until(lambda: snapshot(scheduler, "tiny").decode.kv_bytes == 0)


async def test_a_refused_request_says_so_and_leaves_nothing(open_region: Any) -> None:
    limits = {"admission": {"default_tenant": {"max_requests": 1}}}
    async with open_region(scheduling=limits) as region:
        region.far.gate.clear()
        served = asyncio.create_task(region.post(region.long_body()))
        await region.far.started.wait()
        status, headers, _ = await region.post(region.long_body(), headers={"X-Request-Id": "no"})
        assert (status, headers["x-request-id"]) == (429, "no")
        assert int(headers["retry-after"]) >= 1
        record = await region.record()
        assert (record.outcome, record.status, record.route) == ("refused", 429, "")
        assert "1 of at most 1 requests in flight" in record.error
        region.far.gate.set()
        assert (await served)[0] == 200
        assert len(region.far.jobs) == 1
        await region.assert_nothing_held()
        assert len(region.gateway.scheduler.live.ledger) == 0


async def test_an_unknown_request_is_answered_with_the_newest(region: Any) -> None:
    await region.post(region.long_body(), headers={"X-Request-Id": "kept"})
    with pytest.raises(CannotAsk, match=r"no record of lost(.|\n)*\n  kept"):
        await asyncio.to_thread(find_records, region.url, "lost")


async def test_what_was_learnt_is_shown_to_those_who_may_see_it(open_region: Any) -> None:
    async with open_region(api_keys=("one",)) as region:
        assert (await page(region, "/prfaas/scheduling"))[0] == 401
        status, found = await page(region, "/prfaas/scheduling", Authorization="Bearer one")
        assert status == 200
        assert [item["cluster"] for item in found["thresholds"]] == ["far"]
        assert found["models"] == []
