"""Profiling an engine: the measuring and the command, against a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from eventually import eventually
from free_ports import free_port
from profiling_cases import provenance
from typer.testing import CliRunner

from deploy.plan.profile.cli import profile_command
from deploy.plan.profile.engine import ProfiledEngine, ProfilingError
from deploy.plan.profile.measuring import (
    EngineBusyError,
    ProfilePlan,
    ProfilingProgress,
    measure,
)
from deploy.plan.profile.noise_images import noise_uri
from deploy.plan.profile.stats import (
    DecodeSetup,
    Measured,
    build_profile,
)
from deploy.profile_file import (
    EngineProfile,
    EngineProfileFile,
)
from prfaas.engines.client import open_session

# --- an engine whose speed is known ---


@dataclass
class TimedEngine:
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
    on_request: Callable[[TimedEngine], None] = lambda engine: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_aborted: int = 0
    encode_s_per_image: float = 0.003
    image_tokens: int = 20
    most_images: int = 4

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
        app.router.add_post("/v1/chat/completions", self._chat)
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
                await self._answer(response, *self._work_of(body))
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        content = (await request.json())["messages"][0]["content"]
        if len(content) - 1 > self.most_images:
            error = {"message": f"At most {self.most_images} image(s) may be provided"}
            return web.json_response({"error": error}, status=400)
        return await self._completions(request)

    def _work_of(self, body: dict[str, Any]) -> tuple[int, int, float]:
        """Prompt tokens, output tokens and seconds of encoding."""
        if "messages" not in body:
            return len(body["prompt"]), body["max_tokens"], 0.0
        num_images = len(body["messages"][0]["content"]) - 1
        tokens = 12 + num_images * self.image_tokens
        return tokens, body["max_tokens"], num_images * self.encode_s_per_image

    async def _answer(
        self, response: web.StreamResponse, prompt: int, output: int, encode_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(prompt * self.prefill_s_per_token + encode_s)
        for n in range(1, output + 1):
            if n > 1:
                # All streams step at the same moments.
                await asyncio.sleep(self.step_s - loop.time() % self.step_s)
                self.steps += 1
                self.steps_s += self.step_s
            if n == output:
                self.finished += 1 + self.strangers_in_a_sample
                self.prefill_s += prompt * self.prefill_s_per_token + encode_s
                self.computed += prompt - self.cached_tokens
                self.preemptions += self.preempts
            usage = {"prompt_tokens": prompt, "completion_tokens": n}
            event = {"choices": [{"text": "x"}], "usage": usage}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")


@contextlib.asynccontextmanager
async def profiled(fake: TimedEngine, api_key: str = "") -> AsyncIterator[ProfiledEngine]:
    async with TestServer(fake.app()) as server, open_session() as session:
        yield ProfiledEngine(str(server.make_url("/")), session, api_key)


PLAN = ProfilePlan((64, 256), 2, (1, 4), DecodeSetup(16, 24))


async def run_plan(engine: ProfiledEngine, plan: ProfilePlan = PLAN) -> Measured:
    measured = Measured()
    model = await engine.served_model()
    await measure(engine, model, plan, measured, lambda progress: None, random.Random(1))
    return measured


async def test_the_measured_times_are_the_engines() -> None:
    fake = TimedEngine()
    shown: list[ProfilingProgress] = []
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
    fake = TimedEngine(step_s=0.001)
    async with profiled(fake) as engine:
        await run_plan(engine)
    assert len(fake.requests) == 2 * 3 + 2 * (1 + 4)
    assert len({request["cache_salt"] for request in fake.requests}) == len(fake.requests)
    assert len({tuple(request["prompt"][:8]) for request in fake.requests}) == len(fake.requests)
    for request in fake.requests:
        assert request["min_tokens"] == request["max_tokens"]
        assert request["ignore_eos"] is True
        assert min(request["prompt"]) >= 1000


IMAGES = replace(PLAN, lengths=(64,), batch_sizes=(), image_side=32)


async def test_images_take_what_their_chat_takes_beyond_its_tokens() -> None:
    fake = TimedEngine()
    async with profiled(fake) as engine:
        measured = await run_plan(engine, IMAGES)
    found = build_profile(measured, IMAGES.setup, provenance).encode
    assert found is not None
    assert [(point.images, point.tokens) for point in found.points] == [(1, 20), (2, 40), (4, 80)]
    assert [p.seconds for p in found.points] == pytest.approx([0.003, 0.006, 0.012])
    uris = [
        part["image_url"]["url"]
        for body in fake.requests
        for part in body.get("messages", [{"content": []}])[0]["content"]
        if part["type"] == "image_url"
    ]
    # No cache can know a picture.
    assert len(set(uris)) == len(uris) == (1 + 2 + 4) * 3
    assert all(uri.startswith("data:image/png;base64,") for uri in uris)


async def test_without_the_engines_clock_the_clients_counts_for_images_too() -> None:
    fake = TimedEngine(has_prefill_histogram=False, encode_s_per_image=0.03)
    async with profiled(fake) as engine:
        measured = await run_plan(engine, IMAGES)
    found = build_profile(measured, IMAGES.setup, provenance).encode
    assert found is not None
    assert found.points[-1].seconds == pytest.approx(0.12, rel=0.3)


async def test_an_engine_that_takes_fewer_images_is_measured_as_far_as_it_goes() -> None:
    async with profiled(TimedEngine(most_images=2)) as engine:
        measured = await run_plan(engine, IMAGES)
    assert {sample.num_images for sample in measured.encode} == {1, 2}
    assert any("no chat with 4 images was measured" in note for note in measured.notes)


async def test_a_model_of_text_takes_no_images() -> None:
    async with profiled(TimedEngine(most_images=0)) as engine:
        with pytest.raises(ProfilingError, match=r"At most 0 image.*--images: chat with 1 image"):
            await run_plan(engine, IMAGES)


async def test_encoding_below_the_noise_is_no_point() -> None:
    async with profiled(TimedEngine(encode_s_per_image=0.0)) as engine:
        measured = await run_plan(engine, IMAGES)
    found = build_profile(measured, IMAGES.setup, provenance)
    assert found.provenance is not None
    if found.encode is None:
        assert any("less than the noise" in note for note in found.provenance.notes)


def test_noise_is_a_png_of_its_size() -> None:
    uri = noise_uri(17, random.Random(1))
    png = base64.b64decode(uri.partition(",")[2])
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">2I", png[16:24]) == (17, 17)
    length = struct.unpack(">I", png[33:37])[0]
    assert len(zlib.decompress(png[41 : 41 + length])) == 17 * (1 + 3 * 17)


async def test_an_engine_that_does_not_tokenize_gets_small_ids() -> None:
    fake = TimedEngine(step_s=0.001, tokenizes=False)
    async with profiled(fake) as engine:
        measured = await run_plan(engine)
    assert max(max(request["prompt"]) for request in fake.requests) < 256
    assert any("ids below 256" in note for note in measured.notes)


async def test_without_the_engines_histogram_the_client_counts() -> None:
    fake = TimedEngine(step_s=0.001, has_prefill_histogram=False)
    async with profiled(fake) as engine:
        measured = await run_plan(engine)
    profile = build_profile(measured, PLAN.setup, provenance)
    assert profile.prefill.clock == "client"
    for point in profile.prefill.points:
        assert point.seconds >= point.tokens * 1e-4


async def test_a_busy_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.plan.profile.measuring._SETTLE_S", 0.05)
    async with profiled(TimedEngine(num_strangers=3)) as engine:
        with pytest.raises(EngineBusyError, match="3 requests running"):
            await run_plan(engine)
    async with profiled(TimedEngine(strangers_in_a_sample=1)) as engine:
        with pytest.raises(EngineBusyError, match="answered 1 requests of somebody else"):
            await run_plan(engine)


async def test_metrics_of_another_engine_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.plan.profile.measuring._SETTLE_S", 0.05)
    async with profiled(TimedEngine(strangers_in_a_sample=-1)) as engine:
        with pytest.raises(ProfilingError, match="do several engines share this URL"):
            await run_plan(engine)


async def test_a_cached_prompt_is_no_prefill() -> None:
    async with profiled(TimedEngine(cached_tokens=32)) as engine:
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
    async with profiled(TimedEngine(step_s=0.002, **fake)) as engine:
        measured = await run_plan(engine, plan)
    assert [sample.batch_size for sample in measured.decode] == sizes
    assert why in measured.notes[-1]
    assert f"batch of {missing} was not measured" in measured.notes[-1]
    profile = build_profile(measured, plan.setup, provenance)
    assert (profile.decode is None) == (not sizes)


async def test_cancelling_drops_the_request_and_keeps_whole_samples() -> None:
    fake = TimedEngine(prefill_s_per_token=0.001)
    measured = Measured()
    plan = ProfilePlan((1, 60_000), 1, (1,), DecodeSetup(16, 24))
    async with profiled(fake) as engine:
        model = await engine.served_model()
        job = asyncio.create_task(
            measure(engine, model, plan, measured, lambda progress: None, random.Random(1))
        )
        await eventually(lambda: len(fake.requests) >= 3)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await eventually(lambda: fake.num_aborted)
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
    async with profiled(TimedEngine(**fake)) as engine:
        with pytest.raises(ProfilingError, match=message):
            await engine.served_model(wanted)


async def test_an_adapter_has_its_base_models_length() -> None:
    async with profiled(TimedEngine(api_key="k"), api_key="k") as engine:
        assert (await engine.served_model("adapter")).max_model_len == 300


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"has_metrics": False}, "/metrics: HTTP 404"),
        ({"has_engine_series": False}, "--disable-log-stats"),
    ],
)
async def test_engines_without_metrics(fake: dict[str, Any], message: str) -> None:
    async with profiled(TimedEngine(**fake)) as engine:
        with pytest.raises(ProfilingError, match=message):
            await run_plan(engine)


# --- the command ---


@contextlib.contextmanager
def served(fake: TimedEngine) -> Iterator[str]:
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


def test_the_command_measures_images_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    with served(TimedEngine()) as url:
        result = invoke(url, out, "--images", "--image-size", "32")
    assert result.exit_code == 0, result.output
    assert "what images add to a prefill" in result.stdout
    encode = EngineProfileFile.load(out).profile.encode
    assert encode is not None
    assert [point.images for point in encode.points] == [1, 2, 4]


def test_the_command_writes_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    with served(TimedEngine(step_s=0.003, api_key="k")) as url:
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
    assert profile.encode is None
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
    with served(TimedEngine()) as url:
        result = invoke(url, tmp_path / "p.yaml", *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_nobody_there(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = invoke(url, tmp_path / "p.yaml")
    assert result.exit_code == 2
    assert f"no engine answers at {url}" in result.stderr
    result = invoke(url, tmp_path / "p.yaml", "--json")
    assert json.loads(result.stdout)["ok"] is False


@pytest.mark.parametrize("keep", [False, True])
def test_ctrl_c(tmp_path: Path, keep: bool) -> None:
    def interrupt(fake: TimedEngine) -> None:
        # The third request: the first length is done.
        if len(fake.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "p.yaml"
    with served(TimedEngine(prefill_s_per_token=0.001, on_request=interrupt)) as url:
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
    with served(TimedEngine(step_s=0.002)) as url:
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
