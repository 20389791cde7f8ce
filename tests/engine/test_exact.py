"""Greedy tokens through a region equal those of one plain engine, whatever the caches hold.

Last comes a conversation, whose later turns compute and send only what is new, whoever died before.
The plain engine has no cache at all. Without prefix caching the window model is served in
`test_tensor_parallel`.

A test takes the regions that it says something about (`WITH_CACHE`, `IN_CHUNKS`); pytest runs all
tests of one region before it starts the next. The region of the window model has mutual TLS and its
nodes at an address of this host's network, so that its engines serve HTTPS; the others have the
region's key.
"""

import asyncio
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from bench_smoke import run_smoke
from client_answers import LOCAL_CALLS, NUM_CHOICES, TOOL_ARGS, client_answers
from conversation import TURNS, Talk, expected_turns, kill
from dashboard_queries import missing_of_engines
from data_port import is_welcome, tls_context
from engine_region import (
    LOOPBACK,
    RECURRENT,
    WINDOW,
    agent_status,
    ask_region,
    engine_metrics,
    everything_is_given_back,
    listening_hosts,
    model_dir,
    own_address,
    prompt,
    records,
    reference_answers,
    region_spec,
    running,
    settled_record,
    with_tls,
)
from handoff import Handoff
from landed_items import items_of
from load_tools import vllm_bench_serve
from odd_requests import odd_requests
from otlp_receiver import OtlpReceiver, ReceivedSpan, check_tree
from prometheus_server import needs_prometheus
from same_answers import HttpAnswer, HttpRequest, answers_of, unlike

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.reference import plain_engine
from deploy.lab.demo.scenario import CHUNK_TOKENS, DemoRequest, text
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.demo.verdict import MAX_TAIL_SHARE, MIN_EARLY_SHARE
from deploy.region.launch.launcher import RunningRegion
from kvmanager.config_files.security import is_loopback
from kvmanager.config_files.traces import SampledTraces
from transport import TlsFiles

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION_TOKENS = 20
"""Of the shortest chat, with its template."""
THRESHOLD_TOKENS = 100
ALL_AT_ONCE_TOKENS = 16384
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

RECURRENT_CACHED = pytest.param((RECURRENT, True, False), id="recurrent-cached")
RECURRENT_UNCACHED = pytest.param((RECURRENT, False, False), id="recurrent-uncached")
WINDOW_CACHED_TLS = pytest.param((WINDOW, True, True), id="window-cached-tls")
EVERY_REGION = (RECURRENT_CACHED, RECURRENT_UNCACHED, WINDOW_CACHED_TLS)
WITH_CACHE = IN_CHUNKS = (RECURRENT_CACHED, WINDOW_CACHED_TLS)


def serving(*regions: Any) -> pytest.MarkDecorator:
    """Run a test on each of these regions (model, prefix caching, TLS)."""
    return pytest.mark.parametrize("served", regions, indirect=True)


# Beside each length the draw of its text that the recurrent model is sure of: it spares the plain
# engine those before it. Where arithmetic rounds otherwise, `decided_answers` draws on from there.
ALONE = ((1, 9), (255, 2), (256, 2), (257, 1), (1000, 4), (1500, 0), (5000, 0))
TOGETHER = ((1, 9), (255, 2), (256, 2), (257, 1), (1000, 4), (1500, 4), (5000, 0), (700, 1))
SHARED = (
    *((1350, 1300, 11), (1500, 256, 7), (1500, 300, 0)),
    *((2000, 1024, 7), (1500, 256, 4), (1310, 1300, 0)),
)
PREFIX = text(1300, seed=77)
AGAIN = " again"


def requests() -> Sequence[DemoRequest]:
    """Each length alone, then eight at once, then prompts that share parts of their prefix."""
    alone = [
        prompt(f"alone {length}", length, length, wave=index, stream=bool(index % 2)).redrawn(draw)
        for index, (length, draw) in enumerate(ALONE)
    ]
    together = [
        prompt(
            f"together {index} {length}", length, 100 + index, wave=20, stream=bool(index % 2)
        ).redrawn(draw)
        for index, (length, draw) in enumerate(TOGETHER)
    ]
    # 1,500 tokens of which 256 are in the prefill engine's cache, and other shares of a prefix.
    shared = [
        prompt(
            f"shared {index}", length, 200 + index, wave=30 + index, prefix=PREFIX[:common]
        ).redrawn(draw)
        for index, (length, common, draw) in enumerate(SHARED)
    ]
    return [*alone, *together, *shared]


def again(asked: Sequence[DemoRequest]) -> Sequence[DemoRequest]:
    """The same requests once more, by other names and after the first."""
    return [
        replace(request, name=request.name + AGAIN, wave=request.wave + 100) for request in asked
    ]


@dataclass(frozen=True, slots=True)
class Served:
    """A region, the requests for it, and a plain engine's answers by the requests' names."""

    model: str
    prefix_caching: bool
    chunk_tokens: int
    region: RunningRegion
    plain: "Plain"
    talk: Talk
    receiver: OtlpReceiver
    """Of the spans of all processes, engines included."""


@dataclass(frozen=True, slots=True)
class Plain:
    """What one plain engine, without our connector, answers."""

    asked: list[DemoRequest]
    expected: dict[str, Answer]
    turns: list[DemoRequest]
    answers: list[Answer]
    by_clients: dict[str, list[str]]
    odd: list[HttpRequest]
    odd_answers: dict[str, HttpAnswer]


async def plain_answers(path: Path, name: str, log_dir: Path) -> Plain:
    model = replace(MODELS[name], engine_args=(*MODELS[name].engine_args, *TOOL_ARGS))
    async with plain_engine(model, path, log_dir) as url:
        asked, expected = await reference_answers(url, name, requests())
        turns, answers = await expected_turns(url, name, TURNS, seed=9000)
        # Texts of the official clients are not drawn until the recurrent model is sure of them.
        is_exact = name == WINDOW
        by_clients = await client_answers(url, name) if is_exact else {}
        odd = await odd_requests(url, name, model.max_model_len) if is_exact else []
        odd_answers = await answers_of(url, odd)
        return Plain(asked, expected, turns, answers, by_clients, odd, odd_answers)


_expected: dict[str, asyncio.Task[Plain]] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    request: pytest.FixtureRequest, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    name, prefix_caching, has_tls = request.param
    path = model_dir(models_dir, name)
    run_dir = tmp_path_factory.mktemp("r")
    if name not in _expected:
        _expected[name] = asyncio.create_task(
            plain_answers(path, name, tmp_path_factory.mktemp("p"))
        )
    chunk_tokens = CHUNK_TOKENS
    if name == RECURRENT and not prefix_caching:
        # Without blocks to align to, a batch of several prompts splits them anywhere, and another
        # split rounds the bfloat16 recurrence otherwise, in a plain engine as well.
        chunk_tokens = ALL_AT_ONCE_TOKENS
    spec = region_spec(
        path,
        name,
        chunk_tokens=chunk_tokens,
        prefix_caching=prefix_caching,
        threshold_tokens=THRESHOLD_TOKENS,
        local_prefill=name == RECURRENT and prefix_caching,
    )
    (model,) = spec.models
    model = model.model_copy(update={"args": (*model.args, *TOOL_ARGS)})
    spec = spec.model_copy(update={"models": (model,)})
    if has_tls:
        spec = with_tls(spec, tmp_path_factory.mktemp("tls"), own_address())
    with OtlpReceiver() as receiver, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # instead of five seconds
        spec = spec.model_copy(update={"traces": SampledTraces(endpoint=receiver.endpoint)})
        async with running(spec, run_dir / "region") as region:
            plain = await _expected[name]
            yield Served(
                name,
                prefix_caching,
                chunk_tokens,
                region,
                plain,
                Talk(name, region, plain.turns, plain.answers),
                receiver,
            )


@serving(*EVERY_REGION)
@pytest.mark.shows(
    kind="full attention with gated delta net, and with sliding windows",
    dtype="bfloat16, float32",
    prefill="TP 1",
    decode="TP 1",
    more="with and without prefix caching, TLS",
)
async def test_tokens_equal_a_plain_engines(served: Served) -> None:
    name, asked, region = served.model, served.plain.asked, served.region
    repeated = again(asked) if served.prefix_caching else []
    answers = await ask_region(region, name, [*asked, *repeated])
    for tried, answer in answers.items():
        assert not answer.error, (tried, answer.error)
        assert answer.token_ids == served.plain.expected[tried.removesuffix(AGAIN)].token_ids, tried
    listed = await records(region)
    for request in asked:
        record = listed[answers[request.name].request_id]
        # A prompt whose prefix the PD cluster can resume by now, or gets, may rightly stay there.
        cached_tokens = record["local_cached_tokens"] or 0
        cached_tokens += record["numbers"].get("moved_tokens", 0)
        if answers[request.name].num_prompt_tokens - cached_tokens > THRESHOLD_TOKENS:
            assert record["route"] == "prefill_cluster", record
        assert record.get("prefill_error", "") == "", record
    await everything_is_given_back(region)


@serving(WINDOW_CACHED_TLS)
async def test_official_clients_get_a_plain_engines_answers(served: Served) -> None:
    """Through every routed endpoint, with a long prompt that a prefill cluster prefills."""
    region = served.region
    before, computed = await records(region), await computed_tokens(region, "b1-decode")
    answers = await client_answers(region.gateway_url, served.model)
    assert answers == served.plain.by_clients
    routes = [
        record["route"] for key, record in (await records(region)).items() if key not in before
    ]
    expected = ["direct" if name in LOCAL_CALLS else "prefill_cluster" for name in answers]
    assert routes == expected
    # The last token of each prompt, for each choice. vLLM judges the parameters of responses only
    # with a prompt to compute; those of the two calls differ.
    num_tokens = len(answers) - len(LOCAL_CALLS) + NUM_CHOICES - 1 + 2 * QUESTION_TOKENS
    assert await computed_tokens(region, "b1-decode") - computed == num_tokens
    await everything_is_given_back(region)


@serving(WINDOW_CACHED_TLS)
async def test_vllm_bench_serve_asks_a_region_as_it_asks_an_engine(
    served: Served, models_dir: Path, tmp_path: Path
) -> None:
    before = await records(served.region)
    path = await asyncio.to_thread(model_dir, models_dir, served.model)
    found = await vllm_bench_serve(
        served.region.gateway_url, served.model, path, tmp_path, num_prompts=4, num_tokens=600
    )
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["total_output_tokens"] == 4 * 8
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    after = await records(served.region)
    made = [record for key, record in after.items() if key not in before]
    # The tool lets the endpoint count a prompt, too.
    assert sorted((record["outcome"], record["route"], record["reason"]) for record in made) == [
        ("ok", "direct", "forwarded"),
        *[("ok", "prefill_cluster", "above_threshold")] * 4,
    ]


async def computed_tokens(region: RunningRegion, instance: str) -> float:
    """The prompt tokens that the engine has computed itself."""
    metrics = await engine_metrics(region, instance)
    return metrics["vllm:prompt_tokens_total"] - metrics["vllm:prompt_tokens_cached_total"]


@serving(WINDOW_CACHED_TLS)
async def test_kvcache_crosses_tls(served: Served) -> None:
    """The only way into a data port is TLS with a certificate of the region; KVCache gets in."""
    region = served.region
    files = region.credentials("operator")
    assert isinstance(files, TlsFiles)
    contexts = [None, *(tls_context(files, with_certificate=shows) for shows in (False, True))]
    agents = [await agent_status(region, node) for node in ("a1", "b1")]
    for agent in agents:
        assert agent.is_encrypted
        port = agent.data_endpoint
        welcomes = [await asyncio.to_thread(is_welcome, port, one) for one in contexts]
        assert welcomes == [False, False, True]
    request = prompt("encrypted", 1500, 31)
    moved_before = region.relay().report().forward.out_bytes
    answers = await ask_region(region, served.model, [request])
    record = await settled_record(region, answers[request.name].request_id)
    assert (record["route"], record["prefill_error"]) == ("prefill_cluster", ""), record
    moved_bytes = region.relay().report().forward.out_bytes - moved_before
    assert moved_bytes >= record["transfer_bytes"] > 0, record


@serving(WINDOW_CACHED_TLS)
async def test_engines_serve_the_region_over_https(served: Served) -> None:
    """On a host that has only loopback addresses they are asked over HTTP, as in other regions."""
    region, host = served.region, own_address()
    access = region.engine_access()
    for engine in (process for process in region.processes if process.kind == "engine"):
        found = urlsplit(engine.address)
        assert (found.scheme, found.hostname) == ("http" if is_loopback(host) else "https", host)
        assert listening_hosts(engine) <= {host, LOOPBACK}
        async with aiohttp.ClientSession() as session:
            url = f"{engine.address}/health"
            async with session.get(url, ssl=access.tls()) as response:
                assert response.status == 401, "a certificate is no key"
            async with session.get(url, ssl=access.tls(), headers=access.headers) as response:
                assert response.status == 200
            if found.scheme == "https":
                files = region.credentials("operator")
                assert isinstance(files, TlsFiles)
                nameless = tls_context(files, with_certificate=False)
                with pytest.raises(aiohttp.ClientError):
                    await session.get(url, ssl=nameless, headers=access.headers)


@needs_prometheus
@serving(WINDOW_CACHED_TLS)
async def test_dashboards_find_what_engines_moved(served: Served, tmp_path: Path) -> None:
    """Panels of vLLM's metrics and of prefix caches, in a real Prometheus server."""
    region = served.region
    # The loop must go on, since it runs the region.
    found = asyncio.create_task(
        asyncio.to_thread(missing_of_engines, region.directory.root, tmp_path)
    )
    number = 0
    while not found.done():
        number += 1
        new = prompt(f"seen {number}", 600, 5000 + number, stream=True)
        await ask_region(region, served.model, [new, replace(new, name=f"{new.name}{AGAIN}")])
    assert await found == []


@serving(*IN_CHUNKS)
async def test_a_long_prompt_crosses_the_link_while_it_is_prefilled(served: Served) -> None:
    """Ten chunks, alone. Medians of three, because other processes of this machine delay one."""
    early_shares, tail_shares = [], []
    for seed in range(400, 400 + LAYER_WISE_TRIES):
        request = prompt("layer-wise", 10 * CHUNK_TOKENS - 20, seed)
        answers = await ask_region(served.region, served.model, [request])
        record = await settled_record(served.region, answers[request.name].request_id)
        early_shares.append(record["sent_share_at_prefill_end"])
        tail_shares.append(record["parts"]["transfer_tail_s"] / record["transfer_s"])
    assert statistics.median(early_shares) >= MIN_EARLY_SHARE, early_shares
    assert statistics.median(tail_shares) <= MAX_TAIL_SHARE, tail_shares


@serving(*IN_CHUNKS)
async def test_the_parts_of_a_ttft_add_up_to_it(served: Served) -> None:
    """Each is measured by whoever spends it. The median of three, as other processes of this
    machine may delay the gateway between two parts.
    """
    unexplained, traced = [], []
    for seed in range(500, 503):
        request = prompt("parts", 1500, seed, stream=True)
        answers = await ask_region(served.region, served.model, [request])
        record = await settled_record(served.region, answers[request.name].request_id)
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
    assert engines == {("engine", "a1-prefill"), ("decode", "b1-decode")}
    (computed,) = spans_of("prefill")
    assert sent.began_s <= computed.ended_s <= sent.ended_s + CLOCKS_S
    assert sum(span.seconds for span in spans_of(*IN_FRONT)) <= job.seconds + CLOCKS_S
    assert root.events["first_token"] - root.began_s == pytest.approx(record["ttft_s"], abs=1e-3)
    steps_s = sum(span.seconds for span in spans_of(*STEPS))
    assert steps_s <= record["ttft_s"] + CLOCKS_S
    return 1.0 - steps_s / float(record["ttft_s"])


@serving(RECURRENT_CACHED)
async def test_benches_of_a_region_run_on_this_one(served: Served, tmp_path: Path) -> None:
    """At their smallest size, and each keeps all of its rows."""
    region = served.region
    asking = ("--gateway", region.gateway_url)
    key = str(region.directory.engine_key)
    alone = ("--engine", region.engine("a1-prefill").address, "--engine-key", key)
    await asyncio.to_thread(run_smoke, "e2e", tmp_path, *asking, *alone)
    await asyncio.to_thread(run_smoke, "prediction", tmp_path, *asking)
    await asyncio.to_thread(run_smoke, "load", tmp_path, *asking)
    await everything_is_given_back(region)


@serving(*WITH_CACHE)
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
    described = (await agent_status(served.region, "b1")).engines[0].layout
    async with aiohttp.ClientSession() as session:
        handoff = Handoff(served.region, served.model, session)
        moved = await handoff.land("a1-prefill", "a1", token_ids[:num_cached])
        await handoff.load("b1-decode", moved, token_ids)
        sent_on = await handoff.land("b1-decode", "b1", token_ids)
        over_tcp = await handoff.land("b1-decode", "b1", token_ids, by_transport=True)
        sent = await handoff.land("a1-prefill", "a1", token_ids)
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


@serving(*WITH_CACHE)
async def test_usage_counts_as_cached_what_the_prefill_engine_found(served: Served) -> None:
    """Not what the transfer brought: of a prompt that nobody had cached clients are told 0."""
    new = prompt("new", 1500, 4711)
    longer = prompt("longer", 1900, 4712, prefix=new.prompt)
    cached_tokens = []
    async with aiohttp.ClientSession() as session:
        for request in (new, longer):
            url = f"{served.region.gateway_url}/v1/completions"
            async with session.post(url, json=request.body(served.model)) as response:
                answer = await response.json()
            record = await settled_record(served.region, response.headers["x-request-id"])
            assert record["route"] == "prefill_cluster", record
            cached_tokens.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached_tokens[-1] == record["cached_tokens"], record
    assert cached_tokens[0] == 0
    assert 1024 <= cached_tokens[1] < new.num_bytes


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


@serving(RECURRENT_CACHED)
async def test_what_no_engine_takes_is_not_prefilled(served: Served) -> None:
    """And gets vLLM's own 400; what it takes is prefilled elsewhere, and its tokens are counted."""
    url, region = f"{served.region.gateway_url}/v1/completions", served.region
    async with aiohttp.ClientSession() as session:
        for by_ids in (True, False):
            before = await computed_tokens(region, "a1-prefill")
            draw = [66 + by_ids] * 1500
            body = {"model": served.model, "prompt": draw if by_ids else bytes(draw).decode()}
            for fields in REFUSED:
                async with session.post(url, json=body | fields) as response:
                    assert response.status == 400, fields
                    assert (await response.json())["error"]["code"] == 400, fields
                assert await computed_tokens(region, "a1-prefill") == before, fields
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
            record = await settled_record(region, response.headers["x-request-id"])
            assert (record["route"], record["output_tokens"]) == ("prefill_cluster", 24), record


@serving(*WITH_CACHE)
async def test_a_second_turn_computes_and_sends_what_is_new(served: Served) -> None:
    record = await served.talk.next_turn()
    assert not record["cached_tokens"], record
    assert not record["landing_cached_tokens"], record
    await served.talk.assert_only_the_new(await served.talk.next_turn())


@serving(RECURRENT_CACHED)
async def test_the_cache_outlives_an_engine(served: Served) -> None:
    await kill(served.region, served.region.engine("a1-prefill"))
    await served.talk.assert_only_the_new(await served.talk.next_turn())
    await everything_is_given_back(served.region)


@serving(WINDOW_CACHED_TLS)
async def test_the_cache_outlives_engine_and_agents(served: Served) -> None:
    region = served.region
    await kill(region, region.agent("a1"), region.agent("b1"), region.engine("a1-prefill"))
    await served.talk.assert_only_the_new(await served.talk.next_turn())
    await everything_is_given_back(region)


# The last one: it fills the caches.
@serving(WINDOW_CACHED_TLS)
async def test_odd_requests_get_a_plain_engines_answers(served: Served) -> None:
    """Legal and illegal ones, at each routed endpoint, on each way through the region."""
    asked, region = served.plain.odd, served.region
    assert len(asked) >= 500
    answers = await answers_of(region.gateway_url, asked)
    assert unlike(asked, served.plain.odd_answers, answers) == []
    routes = Counter(answer.route for answer in answers.values())
    assert min(routes[route] for route in ("local", "prefill_cluster", "direct")) > 100, routes
    await everything_is_given_back(region)
