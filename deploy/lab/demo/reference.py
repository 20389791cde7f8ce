"""One plain vLLM engine, without our connector, with which a region's answers are compared."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp

from deploy.lab.demo.answers import REQUEST_TIMEOUT_S, Answer, ask
from deploy.lab.demo.regions import rank_environment
from deploy.lab.demo.scenario import DemoRequest
from deploy.lab.demo.tiny_specs import TinyModel
from prfaas.engines.client import EngineHttp
from prfaas.engines.command import EngineSpec
from prfaas.engines.supervision.supervisor import Supervisor, engine_process

START_TIMEOUT_S = 300.0

MIN_MARGIN_NATS = {"bfloat16": 0.25, "float32": 0.001}
"""How sure the plain engine must be of each of its tokens for a prompt to be used, nats.

The last prompt token goes through another kernel in a region than in one engine. In bfloat16 that
moves the logits of the tiny recurrent model by 0.015 in the median and by 0.16 at most, measured on
one engine against itself. Other CPUs round differently, so the limit is well above that.
"""

MAX_DRAWS = 16


@contextlib.asynccontextmanager
async def plain_engine(
    model: TinyModel,
    path: Path,
    log_dir: Path,
    progress: Callable[[str], None] | None = None,
) -> AsyncIterator[str]:
    """Start the engine, yield its URL, stop it. Raises EngineStartFailed with its last log
    lines.
    """
    log_dir.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - once, before anything runs
    spec = EngineSpec(
        instance=f"plain-{model.name}",
        model=str(path),
        served_name=model.name,
        port=_free_port(),
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        kv_space_gib=1,
        enforce_eager=True,
        args=model.engine_args,
        env=rank_environment(),
    )
    async with aiohttp.ClientSession() as session:
        supervisor = Supervisor(engine_process(spec, log_dir), EngineHttp(spec.url, session).health)
        supervisor.start()
        try:
            await supervisor.wait_healthy(START_TIMEOUT_S, progress)
            yield spec.url
        finally:
            await supervisor.stop()


async def decided_answers(
    url: str,
    model: TinyModel,
    requests: Sequence[DemoRequest],
    on_answer: Callable[[DemoRequest, Answer], None],
) -> tuple[list[DemoRequest], dict[str, Answer]]:
    """For each request a text that the plain engine answers without near ties, and the answer.

    Texts are drawn again, at most MAX_DRAWS times; after that the most decided one is taken.
    """
    chosen: list[DemoRequest] = []
    answers: dict[str, Answer] = {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for request in requests:
            best: tuple[float, DemoRequest, Answer] | None = None
            for attempt in range(MAX_DRAWS):
                drawn = request.redrawn(attempt)
                answer = await ask(session, url, model.name, drawn, with_logprobs=True)
                margin = min(answer.margins, default=0.0)
                if best is None or margin > best[0]:
                    best = (margin, drawn, answer)
                if answer.error or margin >= MIN_MARGIN_NATS[model.dtype]:
                    break
            assert best is not None
            chosen.append(best[1])
            answers[request.name] = best[2]
            on_answer(best[1], best[2])
    return chosen, answers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
