"""Profiling an engine: from samples to the file, and the measuring against a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.plan.profile_cli import profile_command
from deploy.plan.profile_engine import ProfiledEngine, ProfilingError, base_url, parse_counters
from deploy.plan.profile_file import (
    EngineProfile,
    EngineProfileFile,
    PrefillPoint,
    PrefillProfile,
    Provenance,
)
from deploy.plan.profile_stats import (
    DecodeSample,
    DecodeSetup,
    Measured,
    PrefillSample,
    TokenTimes,
    build_profile,
    decode_step,
    doubts,
    prefill_profile,
)
from deploy.plan.profiling import (
    EngineBusyError,
    ProfilePlan,
    Progress,
    Wishes,
    default_lengths,
    make_plan,
    measure,
)
from deploy.problems import FileError
from kvmanager.engines.client import open_session

seconds = st.floats(1e-4, 1e3)
provenance = Provenance(
    url="http://engine:8000", model="m", date=datetime(2026, 11, 21, tzinfo=UTC), repeats=5
)


# --- numbers ---


@given(st.lists(st.tuples(st.integers(1, 6), seconds, seconds), min_size=1))
def test_every_prefill_sample_counts(samples: list[tuple[int, float, float]]) -> None:
    profile = prefill_profile([PrefillSample(*sample) for sample in samples])
    assert profile.clock == "engine"
    assert sum(point.samples or 0 for point in profile.points) == len(samples)
    for point in profile.points:
        times = [engine for tokens, _, engine in samples if tokens == point.tokens]
        low, high = min(times), max(times)
        assert low * 0.9999 <= point.seconds <= high * 1.0001
        assert point.spread_seconds == pytest.approx(high - low, rel=1e-4, abs=1e-9)


def test_one_sample_without_the_engines_time_and_the_client_counts() -> None:
    samples = [PrefillSample(100, 0.3, 0.2), PrefillSample(100, 0.5, None)]
    profile = prefill_profile(samples)
    assert profile.clock == "client"
    assert profile.points[0].seconds == 0.4


def streams(batch: int, tokens: int, step_s: float, stagger_s: float) -> tuple[TokenTimes, ...]:
    return tuple(
        TokenTimes(
            tuple(n * stagger_s + i * step_s for i in range(tokens)), tuple(range(1, tokens + 1))
        )
        for n in range(batch)
    )


@given(st.integers(1, 20), st.integers(32, 80), st.floats(1e-4, 1.0), st.integers(0, 1))
def test_a_step_is_the_gap_while_all_decode(
    batch: int, tokens: int, step_s: float, stagger_steps: int
) -> None:
    step = decode_step(DecodeSample(streams(batch, tokens, step_s, stagger_steps * step_s)))
    assert step is not None
    assert step.batch_size == batch
    assert step.step_seconds == pytest.approx(step_s, rel=1e-4)
    assert step.spread_seconds == pytest.approx(0, abs=step_s * 1e-3)


def test_slow_steps_before_all_decode_do_not_count() -> None:
    early = TokenTimes((0.0, 5.0, *(10 + 0.1 * i for i in range(20))), tuple(range(1, 23)))
    late = TokenTimes(tuple(10 + 0.1 * i for i in range(40)), tuple(range(1, 41)))
    step = decode_step(DecodeSample((early, late)))
    assert step is not None
    assert step.step_seconds == pytest.approx(0.1)
    assert step.spread_seconds == pytest.approx(0, abs=1e-9)


@given(st.lists(st.integers(1, 3), min_size=30, max_size=40))
def test_bursts_hardly_matter(bursts: list[int]) -> None:
    nums = list(itertools.accumulate(bursts))
    together = TokenTimes(tuple(0.1 * num for num in nums), tuple(nums))
    step = decode_step(DecodeSample((together,)))
    assert step is not None
    assert step.step_seconds == pytest.approx(0.1)
    # The same, but the tokens of a burst arrive one after the other within microseconds.
    at_s = [0.1 * num - 1e-6 * i for num, n in zip(nums, bursts, strict=True) for i in range(n)]
    apart = TokenTimes(tuple(sorted(at_s)), tuple(range(1, len(at_s) + 1)))
    step = decode_step(DecodeSample((apart,)))
    assert step is not None
    assert step.step_seconds == pytest.approx(0.1, rel=0.26)


def test_streams_that_take_turns_are_no_batch() -> None:
    assert decode_step(DecodeSample(streams(2, 20, 0.1, 5.0))) is None
    assert decode_step(DecodeSample(streams(1, 5, 0.1, 0.0))) is None


def test_doubts_are_said() -> None:
    samples = [PrefillSample(256, 1, 0.5), PrefillSample(512, 1, 0.4), PrefillSample(512, 1, 0.1)]
    measured = Measured(
        prefill=samples,
        decode=[
            DecodeSample(streams(1, 40, 0.2, 0), engine_mean_s=0.1),
            DecodeSample(streams(4, 40, 0.1, 0), engine_mean_s=0.1),
        ],
        notes=["said before"],
    )
    profile = build_profile(measured, DecodeSetup(16, 40), provenance)
    assert profile.provenance is not None
    notes = profile.provenance.notes
    assert notes[0] == "said before"
    assert len(notes) == 5
    assert "512 tokens took 0.25 s, less than" in notes[1]
    assert "samples 0.3 s apart" in notes[2]
    assert "step of 4 streams" in notes[3]
    assert "the engine made one every 0.1 s" in notes[4]


@given(st.lists(seconds, min_size=1, max_size=8).map(sorted))
def test_times_that_grow_are_not_doubted(times: list[float]) -> None:
    points = tuple(
        PrefillPoint(tokens=256 * (i + 1), seconds=time_s) for i, time_s in enumerate(times)
    )
    assert doubts(PrefillProfile(points=points), None) == []


# --- the file ---


def profile_file(times: list[float]) -> EngineProfileFile:
    samples = [PrefillSample(2**i, time_s, time_s / 2) for i, time_s in enumerate(times)]
    measured = Measured(prefill=samples, decode=[DecodeSample(streams(2, 40, times[0], 0))])
    return EngineProfileFile(profile=build_profile(measured, DecodeSetup(16, 40), provenance))


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(20):
        file = profile_file([10 ** rng.uniform(-5, 3) for _ in range(rng.randint(1, 9))])
        file.dump(tmp_path / "profile.yaml")
        assert EngineProfileFile.load(tmp_path / "profile.yaml") == file
    assert [path.name for path in tmp_path.iterdir()] == ["profile.yaml"]
    assert (tmp_path / "profile.yaml").stat().st_mode & 0o077 == 0o666 & ~_umask() & 0o077


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def test_a_file_written_by_hand_needs_little(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "profile:\n"
        "  prefill:\n"
        "    points:\n"
        "    - {tokens: 8Ki, seconds: 440ms}\n"
        "    - {tokens: 1024, seconds: 0.1}\n"
        "  kv_cache: {fixed_bytes: 2MiB, bytes_per_token: 512}\n"
    )
    profile = EngineProfileFile.load(path).profile
    assert [point.tokens for point in profile.prefill.points] == [1024, 8192]
    assert profile.prefill.points[1].seconds == pytest.approx(0.44)
    assert profile.kv_cache is not None
    assert profile.kv_cache.fixed_bytes == 2 * 2**20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "a profile file is a mapping"),
        ("profile: {prefill: {points: [{tokens: 1, second: 2}]}}\n", "did you mean 'seconds'"),
        ("profile:\n  prefill:\n    points: []\n", r"profile.prefill.points \(line 3\)"),
        ("profile: {prefill: {points: [{tokens: 1, seconds: 0}]}}\n", "greater than 0"),
        ("profile: {prefill: {points: [{tokens: 1, seconds: .nan}]}}\n", "nan: "),
        (
            "profile: {prefill: {points: [{tokens: 9, seconds: 1}, {tokens: 9, seconds: 2}]}}\n",
            "two points for 9 tokens",
        ),
        ("profile: {prefill: {points: [", "not valid YAML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        EngineProfileFile.load(path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        profile_file([1.0]).dump(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- the plan ---


@given(st.integers(4, 2_000_000))
def test_default_lengths_fit_and_end_at_the_limit(max_model_len: int) -> None:
    lengths = default_lengths(max_model_len)
    assert 1 <= len(lengths) <= 10
    assert list(lengths) == sorted(set(lengths))
    assert (max_model_len - 2) / 1.25 <= lengths[-1] <= max_model_len - 2


def test_default_lengths() -> None:
    assert default_lengths(2050) == (256, 512, 1024, 2048)
    assert default_lengths(4096) == (256, 512, 1024, 2048, 4094)
    assert default_lengths(2) == ()


def test_a_plan_within_the_engines_limits() -> None:
    plan = make_plan(Wishes(), max_model_len=2048, kv_tokens=5000)
    assert plan.batch_sizes == (1, 4)
    assert plan.setup == DecodeSetup(1024, 64)
    assert make_plan(Wishes(), 600, None).setup == DecodeSetup(536, 64)
    wished = Wishes(lengths=(9, 3, 9), batch_sizes=(64,))
    plan = make_plan(wished, max_model_len=2048, kv_tokens=5000)
    assert (plan.lengths, plan.batch_sizes) == ((3, 9), (64,))
    assert plan.total_work > 12 * 6


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(lengths=(2048,)), "above 2047"),
        (Wishes(context_tokens=2000), "--decode-context"),
        (Wishes(output_tokens=4096), "--output-tokens"),
    ],
)
def test_plans_that_cannot_be(wishes: Wishes, message: str) -> None:
    with pytest.raises(ProfilingError, match=message):
        make_plan(wishes, max_model_len=2048, kv_tokens=None)


def test_counters_are_summed_over_ranks() -> None:
    text = (
        "# HELP vllm:num_requests_running Number of requests\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 1.5e-05\n'
        'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="8192",x="None"} 1.0\n'
        "python_info 1.0\n"
    )
    counters = parse_counters(text)
    assert counters is not None
    assert (counters.num_running, counters.num_waiting, counters.num_ranks) == (3, 0, 2)
    assert counters.kv_tokens == 8192
    assert counters.since(counters, "vllm:request_prefill_time_seconds_sum") == 0
    assert counters.since(counters, "vllm:nothing") is None
    assert parse_counters("python_info 1.0\n") is None


def test_urls() -> None:
    assert base_url("http://h:1/v1/") == "http://h:1"
    with pytest.raises(ProfilingError, match="write http://127"):
        base_url("localhost:8000")


# --- an engine whose speed is known ---


@dataclass
class FakeEngine:
    """vLLM's HTTP surface with times of its own: it reports `prefill_s_per_token` exactly."""

    prefill_s_per_token: float = 1e-4
    step_s: float = 0.01
    max_model_len: int = 300
    models: tuple[str, ...] = ("tiny",)
    api_key: str = ""
    has_metrics: bool = True
    has_engine_series: bool = True
    has_prefill_histogram: bool = True
    tokenizes: bool = True
    max_num_seqs: int = 100
    num_strangers: int = 0
    strangers_in_a_sample: int = 0
    cached_tokens: int = 0
    preempts: bool = False
    on_request: Callable[[FakeEngine], None] = lambda engine: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_aborted: int = 0

    def __post_init__(self) -> None:
        self.num_running = 0
        self.finished = self.prefill_s = self.computed = 0.0
        self.steps = self.steps_s = self.preemptions = 0.0
        self.slots = asyncio.Semaphore(self.max_num_seqs)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._completions)
        if self.has_metrics:
            app.router.add_get("/metrics", self._metrics)
        if self.tokenizes:
            app.router.add_post("/tokenize", self._tokenize)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        cards = [{"id": name, "max_model_len": self.max_model_len} for name in self.models]
        adapter = {"id": "adapter", "parent": self.models[0]}
        return web.json_response({"object": "list", "data": [*cards, adapter]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": [1000 + hash(w) % 500 for w in text.split()]})

    async def _metrics(self, request: web.Request) -> web.Response:
        values = {"num_requests_running": self.num_running + self.num_strangers}
        values |= {"num_requests_waiting": 0, "num_preemptions_total": self.preemptions}
        values |= {"request_success_total": self.finished}
        values |= {"inter_token_latency_seconds_sum": self.steps_s}
        values |= {"inter_token_latency_seconds_count": self.steps}
        if self.has_prefill_histogram:
            values |= {"request_prefill_time_seconds_sum": self.prefill_s}
            values |= {"request_prefill_time_seconds_count": self.finished}
            values |= {"request_prefill_kv_computed_tokens_sum": self.computed}
        lines = [f'vllm:{name}{{engine="0"}} {value!r}' for name, value in values.items()]
        lines = lines if self.has_engine_series else []
        return web.Response(text="\n".join([*lines, "python_info 1.0", ""]))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.on_request(self)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.num_running += 1
        try:
            async with self.slots:
                await self._answer(response, len(body["prompt"]), body["max_tokens"])
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
        return response

    async def _answer(self, response: web.StreamResponse, prompt: int, output: int) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(prompt * self.prefill_s_per_token)
        for n in range(1, output + 1):
            if n > 1:
                # All streams step at the same moments.
                await asyncio.sleep(self.step_s - loop.time() % self.step_s)
                self.steps += 1
                self.steps_s += self.step_s
            if n == output:
                self.finished += 1 + self.strangers_in_a_sample
                self.prefill_s += prompt * self.prefill_s_per_token
                self.computed += prompt - self.cached_tokens
                self.preemptions += self.preempts
            usage = {"prompt_tokens": prompt, "completion_tokens": n}
            event = {"choices": [{"text": "x"}], "usage": usage}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")


@contextlib.asynccontextmanager
async def profiled(fake: FakeEngine, api_key: str = "") -> AsyncIterator[ProfiledEngine]:
    async with TestServer(fake.app()) as server, open_session() as session:
        yield ProfiledEngine(str(server.make_url("/")), session, api_key)


PLAN = ProfilePlan((64, 256), 2, (1, 4), DecodeSetup(16, 24))


async def run_plan(engine: ProfiledEngine, plan: ProfilePlan = PLAN) -> Measured:
    measured = Measured()
    model = await engine.served_model()
    await measure(engine, model, plan, measured, lambda progress: None, random.Random(1))
    return measured


async def test_the_measured_times_are_the_engines() -> None:
    fake = FakeEngine()
    shown: list[Progress] = []
    measured = Measured()
    async with profiled(fake) as engine:
        model = await engine.served_model()
        assert (model.name, model.max_model_len, model.vllm_version) == ("tiny", 300, "0.32.0")
        await measure(engine, model, PLAN, measured, shown.append, random.Random(1))
    profile = build_profile(measured, PLAN.setup, provenance)
    assert profile.prefill.clock == "engine"
    assert [point.tokens for point in profile.prefill.points] == [64, 256]
    for point in profile.prefill.points:
        assert point.seconds == pytest.approx(point.tokens * 1e-4, rel=1e-4)
        assert point.samples == 2
        assert point.client_seconds is not None
        assert point.client_seconds >= point.seconds
    assert profile.decode is not None
    assert [step.batch_size for step in profile.decode.steps] == [1, 4]
    for step in profile.decode.steps:
        assert 0.005 < step.step_seconds < 0.05
    assert shown[-1].work == PLAN.total_work
    assert [item.work for item in shown] == sorted(item.work for item in shown)


async def test_no_two_prompts_share_a_beginning_or_a_salt() -> None:
    fake = FakeEngine(step_s=0.001)
    async with profiled(fake) as engine:
        await run_plan(engine)
    assert len(fake.requests) == 2 * 3 + 2 * (1 + 4)
    assert len({request["cache_salt"] for request in fake.requests}) == len(fake.requests)
    assert len({tuple(request["prompt"][:8]) for request in fake.requests}) == len(fake.requests)
    for request in fake.requests:
        assert request["min_tokens"] == request["max_tokens"]
        assert request["ignore_eos"] is True
        assert min(request["prompt"]) >= 1000


async def test_an_engine_that_does_not_tokenize_gets_small_ids() -> None:
    fake = FakeEngine(step_s=0.001, tokenizes=False)
    async with profiled(fake) as engine:
        measured = await run_plan(engine)
    assert max(max(request["prompt"]) for request in fake.requests) < 256
    assert any("ids below 256" in note for note in measured.notes)


async def test_without_the_engines_histogram_the_client_counts() -> None:
    fake = FakeEngine(step_s=0.001, has_prefill_histogram=False)
    async with profiled(fake) as engine:
        measured = await run_plan(engine)
    profile = build_profile(measured, PLAN.setup, provenance)
    assert profile.prefill.clock == "client"
    for point in profile.prefill.points:
        assert point.seconds >= point.tokens * 1e-4


async def test_a_busy_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.plan.profiling._SETTLE_S", 0.05)
    async with profiled(FakeEngine(num_strangers=3)) as engine:
        with pytest.raises(EngineBusyError, match="3 requests running"):
            await run_plan(engine)
    async with profiled(FakeEngine(strangers_in_a_sample=1)) as engine:
        with pytest.raises(EngineBusyError, match="answered 1 requests of somebody else"):
            await run_plan(engine)


async def test_metrics_of_another_engine_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.plan.profiling._SETTLE_S", 0.05)
    async with profiled(FakeEngine(strangers_in_a_sample=-1)) as engine:
        with pytest.raises(ProfilingError, match="do several engines share this URL"):
            await run_plan(engine)


async def test_a_cached_prompt_is_no_prefill() -> None:
    async with profiled(FakeEngine(cached_tokens=32)) as engine:
        with pytest.raises(ProfilingError, match="computed 32 tokens of a random prompt of 64"):
            await run_plan(engine)


@pytest.mark.parametrize(
    ("fake", "why", "sizes", "missing"),
    [
        ({"max_num_seqs": 2}, "--max-num-seqs", [1], 4),
        ({"preempts": True}, "preempted", [], 1),
    ],
)
async def test_batches_that_do_not_fit_are_said(
    fake: dict[str, Any], why: str, sizes: list[int], missing: int
) -> None:
    plan = ProfilePlan((64,), 1, (1, 4, 8), DecodeSetup(16, 24))
    async with profiled(FakeEngine(step_s=0.002, **fake)) as engine:
        measured = await run_plan(engine, plan)
    assert [sample.batch_size for sample in measured.decode] == sizes
    assert why in measured.notes[-1]
    assert f"batch of {missing} was not measured" in measured.notes[-1]
    profile = build_profile(measured, plan.setup, provenance)
    assert (profile.decode is None) == (not sizes)


async def test_cancelling_drops_the_request_and_keeps_whole_samples() -> None:
    fake = FakeEngine(prefill_s_per_token=0.001)
    measured = Measured()
    plan = ProfilePlan((1, 60_000), 1, (1,), DecodeSetup(16, 24))
    async with profiled(fake) as engine:
        model = await engine.served_model()
        job = asyncio.create_task(
            measure(engine, model, plan, measured, lambda progress: None, random.Random(1))
        )
        while len(fake.requests) < 3:
            await asyncio.sleep(0.005)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        while not fake.num_aborted:
            await asyncio.sleep(0.005)
    assert [sample.tokens for sample in measured.prefill] == [1]


@pytest.mark.parametrize(
    ("fake", "wanted", "message"),
    [
        ({"api_key": "k"}, "", "--api-key"),
        ({"models": ("a", "b")}, "", "serves a, b: choose one with --model"),
        ({}, "other", "does not serve other; --model can be: tiny, adapter"),
    ],
)
async def test_wrong_models_and_keys(fake: dict[str, Any], wanted: str, message: str) -> None:
    async with profiled(FakeEngine(**fake)) as engine:
        with pytest.raises(ProfilingError, match=message):
            await engine.served_model(wanted)


async def test_an_adapter_has_its_base_models_length() -> None:
    async with profiled(FakeEngine(api_key="k"), api_key="k") as engine:
        assert (await engine.served_model("adapter")).max_model_len == 300


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"has_metrics": False}, "/metrics: HTTP 404"),
        ({"has_engine_series": False}, "--disable-log-stats"),
    ],
)
async def test_engines_without_metrics(fake: dict[str, Any], message: str) -> None:
    async with profiled(FakeEngine(**fake)) as engine:
        with pytest.raises(ProfilingError, match=message):
            await run_plan(engine)


# --- the command ---


@contextlib.contextmanager
def served(fake: FakeEngine) -> Iterator[str]:
    """The engine in a thread, as the command has an event loop of its own."""
    started: list[Any] = []
    ready = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        async with TestServer(fake.app()) as server:
            started.extend([str(server.make_url("")), asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    url, loop, stop = started
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command()(profile_command)
FAST = ["--lengths", "64,0.25Ki", "--repeats", "1", "--batch-sizes", "1,2", "--output-tokens", "24"]


def invoke(url: str, out: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["--url", url, "--out", str(out), *FAST, *words])


def test_the_command_writes_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    with served(FakeEngine(step_s=0.003, api_key="k")) as url:
        result = invoke(url, out, "--api-key", "k")
        assert result.exit_code == 0, result.output
        assert "wrote" in result.stdout
        assert "prefill of 256 tokens" in result.stderr
        again = invoke(url, out, "--api-key", "k")
        assert again.exit_code == 2
        assert "--force" in again.stderr
        forced = invoke(url, out, "--api-key", "k", "--force", "--json")
    assert forced.exit_code == 0, forced.output
    document = json.loads(forced.stdout)
    assert document["ok"] is True
    profile: EngineProfile = EngineProfileFile.load(out).profile
    assert [point.tokens for point in profile.prefill.points] == [64, 256]
    assert profile.provenance is not None
    assert profile.provenance.complete
    assert profile.provenance.vllm_version == "0.32.0"
    points = document["profile"]["prefill"]["points"]
    assert points[0]["seconds"] == profile.prefill.points[0].seconds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "x"], "does not serve x"),
        (["--lengths", "1Mi"], "no length can be above 299"),
        (["--lengths", "much"], "much"),
        (["--lengths", "0"], "at least 1 token"),
        (["--batch-sizes", "0"], "is not a number of streams"),
        (["--out", "/nowhere/x.yaml"], "existing folder"),
        (["--decode-context", "1k,2k"], "one number"),
    ],
)
def test_wrong_arguments(tmp_path: Path, words: list[str], message: str) -> None:
    with served(FakeEngine()) as url:
        result = invoke(url, tmp_path / "p.yaml", *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_nobody_there(tmp_path: Path, unused_tcp_port_factory: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port_factory()}"
    result = invoke(url, tmp_path / "p.yaml")
    assert result.exit_code == 2
    assert f"no engine answers at {url}" in result.stderr
    result = invoke(url, tmp_path / "p.yaml", "--json")
    assert json.loads(result.stdout)["ok"] is False


@pytest.mark.parametrize("keep", [False, True])
def test_ctrl_c(tmp_path: Path, keep: bool) -> None:
    def interrupt(fake: FakeEngine) -> None:
        # The third request: the first length is done.
        if len(fake.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "p.yaml"
    with served(FakeEngine(prefill_s_per_token=0.001, on_request=interrupt)) as url:
        result = invoke(url, out, *(["--keep-partial"] if keep else []))
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    if not keep:
        assert "nothing was written" in result.stderr
        assert list(tmp_path.iterdir()) == []
        return
    profile = EngineProfileFile.load(out).profile
    assert [point.tokens for point in profile.prefill.points] == [64]
    assert profile.decode is None
    assert profile.provenance is not None
    assert not profile.provenance.complete


CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "dtype": "bfloat16",
}


def test_the_models_config_gives_the_kvcache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "p.yaml"
    with served(FakeEngine(step_s=0.002)) as url:
        result = invoke(url, out, "--config", str(tmp_path))
    assert result.exit_code == 0, result.output
    kv_cache = EngineProfileFile.load(out).profile.kv_cache
    assert kv_cache is not None
    layer_bytes_per_token = 2 * 2 * 16 * 2
    assert kv_cache.bytes_per_token == layer_bytes_per_token
    assert kv_cache.fixed_bytes == 128 * layer_bytes_per_token


@pytest.mark.parametrize("text", ["{}", "[]", "no json"])
def test_a_wrong_config_is_told_before_anything_is_measured(tmp_path: Path, text: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    result = invoke("http://127.0.0.1:1", tmp_path / "p.yaml", "--config", str(config))
    assert result.exit_code == 2
    assert str(config) in result.stderr
    assert "no engine answers" not in result.stderr
