"""A request's spans, from the gateway, both fronts and both agents, at one receiver."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from openai_engine import refusing
from otlp_receiver import OtlpReceiver, ReceivedSpan, check_tree
from whole_region import BODY, Whole, ask, whole_region

pytestmark = pytest.mark.slow

SLACK_S = 0.005
"""Two processes of one host read one clock, one after the other."""
OF_GATEWAY = {"read", "render", "reserve", "landing_wait", "prefill_leg", "decode", "first_token"}
OF_PREFILL = {"prefill_job", "queue", "open", "engine", "prefill", "transfer_tail"}
OF_AGENTS = {"transfer", "landing", "load_wait", "load", "first_step"}
ROOT = "text_completion tiny"
EVERYTHING = OF_GATEWAY | OF_PREFILL | OF_AGENTS | {"choose_landing", ROOT}


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as made:
        yield made


@pytest.fixture
async def whole(
    tmp_path: Path, lone_engine: Any, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Whole]:
    # Instead of five seconds. All processes read OpenTelemetry's own variables.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with whole_region(tmp_path, lone_engine, receiver.endpoint) as made:
        yield made


def one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


async def ask_patiently(whole: Whole, **fields: Any) -> None:
    """Ask. The decode engine answers once the gateway has heard all of the prefill leg: what no
    engine computes would be answered before.
    """
    num_before = len(whole.gateway.records)
    whole.decoder.first_token.clear()
    asking = asyncio.create_task(ask(whole, **fields))
    records = whole.gateway.records
    await eventually(lambda: len(records) > num_before and records[-1].leg is not None)
    whole.decoder.first_token.set()
    await asking


@pytest.mark.parametrize("stream", [False, True])
async def test_one_tree_has_all_that_was_done_for_a_request(
    whole: Whole, receiver: OtlpReceiver, stream: bool
) -> None:
    await ask_patiently(whole, stream=stream)
    record = await whole.record()
    spans = await receiver.trace(record.trace_id, EVERYTHING)
    root = check_tree(spans, SLACK_S)
    assert root.name == ROOT
    assert root.parent_id == ""
    above = {span.span_id: span.name for span in spans}
    parents = {span.name: above[span.parent_id] for span in spans if span is not root}
    assert {name for name, parent in parents.items() if parent == ROOT} == {
        *("read", "render", "reserve", "landing_wait", "prefill_leg", "decode"),
        *("choose_landing", "landing", "load_wait", "load", "first_step"),
    } | ({"look_up"} & parents.keys())
    assert parents["prefill_job"] == "prefill_leg"
    assert {parents[name] for name in OF_PREFILL - {"prefill_job"}} == {"prefill_job"}
    assert parents["transfer"] == "prefill_job"
    assert parents["first_token"] == "decode"
    services = {span.name: span.service for span in spans}
    assert {services[name] for name in OF_GATEWAY} == {"prfaas-gateway"}
    assert {services[name] for name in OF_PREFILL} == {"prfaas-prefill"}
    assert {services[name] for name in OF_AGENTS} == {"prfaas-agent"}
    assert services["choose_landing"] == "prfaas-pd"


async def test_spans_have_the_numbers_of_the_record(whole: Whole, receiver: OtlpReceiver) -> None:
    await ask_patiently(whole, stream=True)
    record = await whole.record()
    spans = await receiver.trace(record.trace_id, EVERYTHING)
    (root,) = (span for span in spans if span.name == ROOT)
    parts = record.parts.known()
    shown = {
        name.removeprefix("prfaas.ttft."): value
        for name, value in root.attributes.items()
        if name.startswith("prfaas.ttft.")
    }
    assert shown == parts
    for name in ("read", "render", "reserve"):
        assert one(spans, name).seconds == pytest.approx(parts[name], abs=1e-5)
    assert one(spans, "landing_wait").seconds == pytest.approx(record.landing_wait_s, abs=1e-5)
    for name in ("queue_s", "open_s", "transfer_tail_s"):
        span = one(spans, name.removesuffix("_s"))
        assert span.seconds == pytest.approx(getattr(record.leg, name), abs=1e-2)
    assert one(spans, "load").seconds == pytest.approx(record.load_times.load_s, abs=1e-5)
    # What follows each other at the gateway is the TTFT, apart from its own work in between.
    steps = sum(
        span.seconds
        for span in spans
        if span.name in ("read", "render", "look_up", "reserve", "landing_wait", "first_token")
    )
    assert root.events["first_token"] - root.began_s == pytest.approx(record.ttft_s, abs=1e-4)
    assert steps <= record.ttft_s + SLACK_S
    assert record.ttft_s - steps < 0.1 + parts.get("other", 0.0)
    transfer = one(spans, "transfer").attributes
    assert transfer["prfaas.bytes"] == transfer["prfaas.acked_bytes"] == whole.nbytes
    assert transfer["prfaas.resent_bytes"] == 0
    assert transfer["prfaas.link_retransmitted_bytes"] >= 0
    assert transfer["prfaas.sent_bytes_at_prefill_end"] <= whole.nbytes
    assert root.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["gen_ai.usage.input_tokens"] == len(BODY["prompt"])
    assert root.attributes["prfaas.route"] == "prefill_cluster"
    texts = [str(value) for span in spans for value in span.attributes.values()]
    assert not any("xxx" in text for text in texts), "the prompt is in a span"


async def test_both_engines_are_told_of_the_spans_that_ask_them(
    whole: Whole, receiver: OtlpReceiver
) -> None:
    await ask_patiently(whole, stream=True)
    record = await whole.record()
    spans = await receiver.trace(record.trace_id, EVERYTHING)
    told = [whole.prefiller.requests[-1][1]["traceparent"]]
    told += [headers["traceparent"] for path, headers, _ in whole.decoder.requests[-1:]]
    asking = [one(spans, "engine"), one(spans, "decode")]
    assert told == [f"00-{record.trace_id}-{span.span_id}-01" for span in asking]


async def test_a_clients_trace_goes_on_and_its_wish_decides(
    whole: Whole, receiver: OtlpReceiver
) -> None:
    mine, quiet = "ab" * 16, "ef" * 16
    for trace_id, flags in ((quiet, "00"), (mine, "01")):
        await ask_patiently(whole, headers={"traceparent": f"00-{trace_id}-{'cd' * 8}-{flags}"})
        await whole.record()
    spans = await receiver.trace(mine, EVERYTHING)
    assert check_tree(spans, SLACK_S).parent_id == "cd" * 8
    assert receiver.of_trace(quiet) == []
    assert whole.prefiller.requests[0][1]["traceparent"] == f"00-{quiet}-{'cd' * 8}-00"


async def test_a_failed_prefill_shows_as_an_error(whole: Whole, receiver: OtlpReceiver) -> None:
    whole.prefiller.reply, whole.share = refusing(400), 0.5
    await ask(whole, stream=True)
    record = await whole.record()
    # Every process exports on its own: all spans of the failed prefill are waited for.
    wanted = {"engine", "prefill_job", "prefill_leg", "landing", "transfer", "decode", ROOT}
    spans = await receiver.trace(record.trace_id, wanted)
    failed = {span.name: span.attributes["error.type"] for span in spans if span.is_error}
    assert failed["engine"] == failed["prefill_job"] == failed["prefill_leg"] == "rejected"
    assert failed["transfer"] == "cancelled"
    root = one(spans, ROOT)
    assert not root.is_error, "the decode engine computed the prompt"
    assert root.attributes["prfaas.reason"] == "prefill_failed"
