"""Greedy tokens through a region equal those of one plain engine, whatever the caches hold.

Last comes a conversation, whose later turns compute and send only what is new, whoever died before.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from bench_smoke import run_smoke
from engine_region import (
    RECURRENT,
    WINDOW,
    ask_at,
    computed_tokens,
    engine_status,
    everything_is_given_back,
    prompt,
    records_at,
)
from handoff import Handoff
from landed_items import items_of
from otlp_receiver import ReceivedSpan, check_tree
from served_region import DECODE, PREFILL, THRESHOLD_TOKENS, UNCACHED, Served, serving

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import CHUNK_TOKENS, DemoRequest, text
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.demo.verdict import MAX_TAIL_SHARE, MIN_EARLY_SHARE

pytestmark = pytest.mark.asyncio(loop_scope="session")

AGAIN = " again"
LAYER_WISE_TRIES = 3
MAX_UNEXPLAINED = 0.03
"""The share of a TTFT that no process may have measured."""
TTFT_PARTS = {
    f"{part}_s"
    for part in (
        *("render", "reserve", "queue", "open", "engine_queue", "prefill", "transfer_tail"),
        *("news", "load_wait", "load", "first_step", "relay", "other"),
    )
}

STEPS = {"read", "render", "look_up", "reserve", "landing_wait", "first_token"}
"""The spans of the gateway that follow each other up to the first token."""
IN_FRONT = {"queue", "open", "engine_queue", "prefill", "transfer_tail"}
"""Those of a prefill job in its front."""
SPANS = STEPS | IN_FRONT | {"prefill_leg", "prefill_job", "engine", "transfer"}
SPANS |= {"choose_landing", "landing", "load_wait", "load", "first_step", "decode", "llm_request"}
CLOCKS_S = 0.01
"""How far apart several processes of one host read the same moment."""


def again(asked: Sequence[DemoRequest]) -> list[DemoRequest]:
    """The same requests once more, by other names and after the first."""
    return [
        replace(request, name=request.name + AGAIN, wave=request.wave + 100) for request in asked
    ]


@serving(RECURRENT, WINDOW)
@pytest.mark.shows(
    kind="full attention with gated delta net, and with sliding windows",
    dtype="bfloat16, float32",
    prefill="TP 1",
    decode="TP 1",
    more="with and without prefix caching, TLS",
)
async def test_tokens_equal_a_plain_engines(served: Served) -> None:
    asked = served.plain.asked
    await are_exact(served, await served.ask([*asked, *again(asked)]), served.url)
    if served.model == RECURRENT:
        url = served.region.gateway_url
        await are_exact(served, await ask_at(url, UNCACHED, asked), url)
    await everything_is_given_back(served.region)


async def are_exact(served: Served, answers: dict[str, Answer], url: str) -> None:
    for tried, answer in answers.items():
        assert not answer.error, (tried, answer.error)
        assert answer.token_ids == served.plain.expected[tried.removesuffix(AGAIN)].token_ids, tried
    listed = await records_at(url)
    for request in served.plain.asked:
        record = listed[answers[request.name].request_id]
        # A prompt whose prefix the PD cluster can resume by now, or gets, may rightly stay there.
        cached_tokens = record["local_cached_tokens"] or 0
        cached_tokens += record["numbers"].get("moved_tokens", 0)
        if answers[request.name].num_prompt_tokens - cached_tokens > THRESHOLD_TOKENS:
            assert record["route"] == "prefill_cluster", record
        assert record.get("prefill_error", "") == "", record


@serving(RECURRENT, WINDOW)
async def test_a_long_prompt_crosses_the_link_while_it_is_prefilled(served: Served) -> None:
    """Ten chunks, alone. Medians of three, because other processes of this machine delay one."""
    early_shares, tail_shares = [], []
    for seed in range(400, 400 + LAYER_WISE_TRIES):
        record = await served.prefilled(prompt("layer-wise", 10 * CHUNK_TOKENS - 20, seed))
        early_shares.append(record["sent_share_at_prefill_end"])
        tail_shares.append(record["parts"]["transfer_tail_s"] / record["transfer_s"])
    assert statistics.median(early_shares) >= MIN_EARLY_SHARE, early_shares
    assert statistics.median(tail_shares) <= MAX_TAIL_SHARE, tail_shares


@serving(RECURRENT, WINDOW)
async def test_the_parts_of_a_ttft_add_up_to_it(served: Served) -> None:
    """Each is measured by whoever spends it. The median of three, as other processes of this
    machine may delay the gateway between two parts.
    """
    unexplained, traced = [], []
    for seed in range(500, 503):
        record = await served.prefilled(prompt("parts", 1500, seed, stream=True))
        parts = record["parts"]
        assert {name for name in parts if name not in ("read_s", "move_s")} >= TTFT_PARTS, record
        assert all(seconds >= 0 for seconds in parts.values()), parts
        assert sum(parts.values()) == pytest.approx(record["ttft_s"], rel=MAX_UNEXPLAINED), record
        assert parts["prefill_s"] + parts["engine_queue_s"] <= record["leg"]["prefill_s"] + 1e-6
        unexplained.append(parts["other_s"] / record["ttft_s"])
        assert record["transfer_progress"][-1][1] == record["transfer_bytes"], record
        traced.append(record)
    assert statistics.median(unexplained) <= MAX_UNEXPLAINED, unexplained
    between = [await between_spans(served, record) for record in traced]
    assert statistics.median(between) <= MAX_UNEXPLAINED, between


async def between_spans(served: Served, record: dict[str, Any]) -> float:
    """The share of the TTFT that lies between the spans of one request.

    They are one tree, from the gateway over both clusters to both engines, whose spans lie inside
    those above them.
    """
    root_name = f"text_completion {served.model}"
    # Two engines have one each.
    wanted = [*SPANS, root_name, "llm_request"]
    spans = await served.receiver.trace(record["trace_id"], wanted)
    root = check_tree(spans, CLOCKS_S)
    assert root.name == root_name
    assert {span.service for span in spans} == {"prfaas-gateway", "prfaas-agent", "vllm"}

    def spans_of(*names: str) -> list[ReceivedSpan]:
        return [span for span in spans if span.name in names]

    (sent,), (landed,), (job,) = spans_of("transfer"), spans_of("landing"), spans_of("prefill_job")
    assert sent.instance != landed.instance
    assert sent.attributes["prfaas.bytes"] == record["transfer_bytes"]
    names = {span.span_id: span.name for span in spans}
    engines = {(names[span.parent_id], span.instance) for span in spans_of("llm_request")}
    assert engines == {("engine", PREFILL), ("decode", DECODE)}
    (computed,) = spans_of("prefill")
    assert sent.began_s <= computed.ended_s <= sent.ended_s + CLOCKS_S
    assert sum(span.seconds for span in spans_of(*IN_FRONT)) <= job.seconds + CLOCKS_S
    assert root.events["first_token"] - root.began_s == pytest.approx(record["ttft_s"], abs=1e-3)
    steps_s = sum(span.seconds for span in spans_of(*STEPS))
    assert steps_s <= record["ttft_s"] + CLOCKS_S
    return 1.0 - steps_s / float(record["ttft_s"])


@serving(RECURRENT)
async def test_benches_of_a_region_run_on_this_one(served: Served, tmp_path: Path) -> None:
    """At their smallest size, and each keeps all of its rows."""
    region = served.region
    asking = ("--gateway", region.gateway_url)
    key = str(region.directory.engine_key)
    alone = ("--engine", region.engine(PREFILL).address, "--engine-key", key)
    await asyncio.to_thread(run_smoke, "e2e", tmp_path, *asking, *alone)
    await asyncio.to_thread(run_smoke, "prediction", tmp_path, *asking)
    await asyncio.to_thread(run_smoke, "load", tmp_path, *asking)
    await everything_is_given_back(region)


@serving(RECURRENT, WINDOW)
async def test_a_decode_engine_sends_on_the_bytes_that_it_loaded(served: Served) -> None:
    """Any byte that two arenas, the link or the engine's pages lost or misplaced shows.

    The decode engine loads a landing and is then made to send the same prefix on. Compared is what
    it loaded, not what it computes after that: the same sums in batches of another shape may
    differ in the last bit. A recurrent state moves on with every token: there the
    prefill engine computes the same one token after the same state, and all bytes are compared.
    The decode engine sends on twice: into the landing itself, and over TCP.
    """
    num_cached = 1024  # a multiple of every block size here
    token_ids = list(text(num_cached + 1, seed=4242).encode())  # a token is a byte
    described = (await engine_status(served.region, "b1", DECODE)).layout
    async with aiohttp.ClientSession() as session:
        handoff = Handoff(served.region, served.model, session)
        moved = await handoff.land(PREFILL, "a1", token_ids[:num_cached])
        await handoff.load(DECODE, moved, token_ids)
        sent_on = await handoff.land(DECODE, "b1", token_ids)
        over_tcp = await handoff.land(DECODE, "b1", token_ids, by_transport=True)
        sent = await handoff.land(PREFILL, "a1", token_ids)
        for landed in (sent_on, over_tcp, sent):
            await handoff.drop(landed)
        await handoff.close()
    layer_types = MODELS[served.model].config["layer_types"]
    loaded = items_of(described, layer_types, moved)
    assert loaded
    for handed, way in ((sent_on, "arena"), (over_tcp, "transport")):
        assert (handed.result.hand_off, handed.result.cached_tokens) == (way, num_cached)
        items = items_of(described, layer_types, handed)
        assert loaded.keys() <= items.keys()
        assert [place for place, item in loaded.items() if items[place] != item] == []
    if served.model == RECURRENT:
        assert sent.result.cached_tokens == num_cached
        assert sent.data == sent_on.data == over_tcp.data
    await everything_is_given_back(served.region)


@serving(RECURRENT, WINDOW)
async def test_usage_counts_as_cached_what_the_prefill_engine_found(served: Served) -> None:
    """Not what the transfer brought: of a prompt that nobody had cached clients are told 0."""
    new = prompt("new", 1500, 4711)
    longer = prompt("longer", 1900, 4712, prefix=new.prompt)
    told = []
    for request in (new, longer):
        answer, record = await served.gateways.ask(request, PREFILL, DECODE)
        told.append(answer.cached_tokens)
        assert told[-1] == record["cached_tokens"], record
    assert told[0] == 0
    assert 1024 <= (told[1] or 0) < new.num_bytes


REFUSED: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"logprobs": 1000},
    {"stream_options": {"include_usage": True}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 7}}},
    {"structured_outputs": {"regex": "(("}},
    {"structured_outputs": {"json": "{"}},
    {"stop_token_ids": [1 << 30]},
    {"max_tokens": 0},
    {"max_tokens": 1 << 30},
    {"prompt": [65] * 1500 + [1 << 30]},
    {"prompt": [65] * MODELS[RECURRENT].max_model_len},
)


@serving(RECURRENT)
async def test_what_no_engine_takes_is_not_prefilled(served: Served) -> None:
    """And gets vLLM's own 400; what it takes is prefilled elsewhere, and its tokens are counted."""
    url, region = f"{served.url}/v1/completions", served.region
    async with aiohttp.ClientSession() as session:
        for by_ids in (True, False):
            before = await computed_tokens(region, PREFILL)
            draw = [66 + by_ids] * 1500
            body = {"model": served.model, "prompt": draw if by_ids else bytes(draw).decode()}
            for fields in REFUSED:
                async with session.post(url, json=body | fields) as response:
                    assert response.status == 400, fields
                    assert (await response.json())["error"]["code"] == 400, fields
                assert await computed_tokens(region, PREFILL) == before, fields
            taken: dict[str, Any] = {"logprobs": 3, "temperature": 0, "max_tokens": 24}
            taken |= {
                "ignore_eos": True,
                "stream": True,
                "stream_interval": 8,
                "stop_token_ids": [3],
            }
            async with session.post(url, json=body | taken) as response:
                assert response.status == 200
                told = await response.read()
            assert b'"usage"' not in told
            assert told.count(b"data: ") < 10
            record = await served.record(Answer(request_id=response.headers["x-request-id"]))
            assert (record["route"], record["output_tokens"]) == ("prefill_cluster", 24), record


@serving(RECURRENT, WINDOW)
async def test_a_second_turn_computes_and_sends_what_is_new(served: Served) -> None:
    record = await served.talk.next_turn()
    assert not record["cached_tokens"], record
    assert not record["landing_cached_tokens"], record
    await served.talk.assert_only_the_new(await served.talk.next_turn())


@serving(RECURRENT)
async def test_the_cache_outlives_an_engine(served: Served) -> None:
    """With the other model, `test_faults` kills agents as well."""
    await served.region.engine(PREFILL).kill()
    await served.is_whole()
    await served.talk.assert_only_the_new(await served.talk.next_turn())
    await everything_is_given_back(served.region)
