"""`prfaas plan profile`: measures a running engine and writes its profile.

It turns arguments into calls and errors into exit statuses: 2 for the arguments, the engine or the
file, 130 for Ctrl-C. The command imports what it needs when it runs, so that its help appears at
once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.plan.profile.ends import Ends, kv_cache_size

if TYPE_CHECKING:
    from deploy.plan.profile.engine import ServedModel
    from deploy.plan.profile.measuring import ProfilePlan, Wishes
    from deploy.plan.profile.stats import Measured
    from deploy.plan.profile.view import ProfilingView
    from deploy.profile_file import EngineProfileFile, KvCacheSize


def profile_command(
    url: Annotated[str, typer.Option(help="base URL of one vLLM engine")],
    model: Annotated[str, typer.Option(help="served model; not needed if there is one")] = "",
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="the engine's key")] = "",
    lengths: Annotated[
        str,
        typer.Option(
            metavar="TOKENS,...",
            help="prompts to prefill, such as 1Ki,4Ki,32Ki (Ki: 1024, k: 1000); default: powers "
            "of two from 256 up to what the engine takes, at most 10",
        ),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="samples of each length")] = 5,
    batch_sizes: Annotated[
        str,
        typer.Option(
            metavar="N,...", help="streams that decode at once; default: 1,4,16 as far as they fit"
        ),
    ] = "",
    output_tokens: Annotated[int, typer.Option(min=16, help="tokens of each stream")] = 64,
    decode_context: Annotated[
        str,
        typer.Option(
            metavar="TOKENS", help="prompt of each stream; steps slow down with it; default: 1Ki"
        ),
    ] = "",
    images: Annotated[
        bool,
        typer.Option("--images", help="also chats with 1, 2 and 4 images: what encoding takes"),
    ] = False,
    image_size: Annotated[
        int, typer.Option(min=16, max=4096, help="width and height of these images, pixels")
    ] = 448,
    config: Annotated[
        Path | None,
        typer.Option(help="the model's Hugging Face config.json: adds KVCache sizes to the file"),
    ] = None,
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("profile.yaml"),
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
    keep_partial: Annotated[
        bool, typer.Option("--keep-partial", help="write what there is when cut short")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables")] = False,
) -> None:
    """Measure prefill times and decode steps of a running engine, for `prfaas plan solve`.

    Sends prompts of random tokens, one at a time, then streams that decode together, and with
    --images chats about images of noise, for the time of an encoder pass. The engine
    must serve no other client meanwhile. Ctrl-C stops at once and writes nothing, unless
    --keep-partial is given.

    \b
    prfaas plan profile --url http://127.0.0.1:8000
    prfaas plan profile --url http://gpu1:8000 --lengths 1Ki,8Ki,32Ki,128Ki --out h200.yaml
    """
    from deploy.plan.profile.measuring import Wishes

    context = _numbers(decode_context, "--decode-context", _tokens)
    if len(context) > 1:
        raise typer.BadParameter("one number, please", param_hint="--decode-context")
    wishes = Wishes(
        lengths=_numbers(lengths, "--lengths", _tokens),
        repeats=repeats,
        batch_sizes=_numbers(batch_sizes, "--batch-sizes", _count),
        output_tokens=output_tokens,
        context_tokens=context[0] if context else None,
        image_side=image_size if images else None,
    )
    ends = Ends(out, as_json)
    ends.check_target(force)
    job = _new_job(url, api_key, model, wishes)
    kv_cache = kv_cache_size(config, ends)
    reason, status = _run(job)
    # Decode steps alone make no profile.
    if reason and not (keep_partial and job.measured.prefill):
        ends.fail(f"{reason}; nothing was written", status)
    file = _file(job, kv_cache, complete=not reason)
    ends.write(file)
    if reason:
        ends.fail(f"{reason}; {out} has what was measured before", status)
    ends.show(file)


@dataclass(slots=True)
class _Job:
    """One measurement. `model` and `plan` are known once the engine has answered."""

    url: str
    api_key: str
    wanted_model: str
    wishes: Wishes
    measured: Measured
    started: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    model: ServedModel | None = None
    plan: ProfilePlan | None = None


def _new_job(url: str, api_key: str, model: str, wishes: Wishes) -> _Job:
    from deploy.plan.profile.stats import Measured

    return _Job(url, api_key, model, wishes, Measured())


def _run(job: _Job) -> tuple[str, int]:
    """Measure. Returns why it was cut short, "" if it was not, and the exit status."""
    from rich.console import Console

    from deploy.plan.profile.engine import ProfilingError
    from deploy.plan.profile.view import ProfilingView

    try:
        with ProfilingView(Console(stderr=True)) as view:
            asyncio.run(_measure(job, view))
    except KeyboardInterrupt:
        return "interrupted", 130
    except ProfilingError as error:
        return str(error), 2
    return "", 0


async def _measure(job: _Job, view: ProfilingView) -> None:
    from deploy.plan.profile.engine import ProfiledEngine
    from deploy.plan.profile.measuring import make_plan, measure
    from prfaas.engines.client import open_session

    async with open_session() as session:
        engine = ProfiledEngine(job.url, session, job.api_key)
        job.model = await engine.served_model(job.wanted_model)
        kv_tokens = (await engine.counters()).kv_tokens
        job.plan = make_plan(job.wishes, job.model.max_model_len, kv_tokens)
        view.begin(job.plan.total_work)
        await measure(engine, job.model, job.plan, job.measured, view.show, random.Random())


def _file(job: _Job, kv_cache: KvCacheSize | None, *, complete: bool) -> EngineProfileFile:
    from deploy.plan.profile.engine import base_url
    from deploy.plan.profile.stats import build_profile
    from deploy.profile_file import EngineProfileFile, Provenance

    assert job.model is not None
    assert job.plan is not None
    provenance = Provenance(
        url=base_url(job.url),
        model=job.model.name,
        vllm_version=job.model.vllm_version,
        date=job.started,
        repeats=job.plan.repeats,
        complete=complete,
    )
    profile = build_profile(job.measured, job.plan.setup, provenance, kv_cache)
    return EngineProfileFile(profile=profile)


def _numbers(text: str, option: str, parse: Callable[[str], int]) -> tuple[int, ...]:
    """The numbers of a comma-separated list."""
    try:
        return tuple(parse(word.strip()) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _tokens(word: str) -> int:
    from kvmanager.config_files.units import parse_tokens

    return parse_tokens(word)


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"{word!r} is not a number of streams; write 1,4,16")
    return int(word)
