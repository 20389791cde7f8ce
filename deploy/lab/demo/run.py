"""The demo: for each tiny model a plain engine and a region get the same requests.

It succeeds only if every check holds and nothing is left behind.
"""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from deploy.command_line import print_json
from deploy.lab.demo.answers import Answer, ask_all
from deploy.lab.demo.leftovers import arenas, leftovers
from deploy.lab.demo.reference import decided_answers, plain_engine
from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.report import print_tables, write_json
from deploy.lab.demo.scenario import DemoRequest, demo_requests
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.demo.verdict import Row, judge, judge_shares
from deploy.region.client import ask
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.progress import progress_view
from deploy.region.launch.running import RegionStartFailed
from prfaas.engines.errors import EngineStartFailed
from prfaas.engines.supervision.log_lines import shortened

DEFAULT_MODELS = ("qwen3-next-tiny", "mimo-v2-tiny")
SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Where models and the report go, and which of the tiny models take part."""

    work_dir: Path = Path(".demo")
    models: Sequence[str] = DEFAULT_MODELS
    report: Path | None = None
    as_json: bool = False
    """Whether the report goes to stdout, too, in place of the tables."""
    keep: bool = False
    """Whether the last region runs until Ctrl-C."""

    @property
    def report_path(self) -> Path:
        return self.report or self.work_dir / "report.json"


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo and return its exit status.

    It is 0 if every check held, 1 if one failed or an engine did not start, 130 after Ctrl-C or
    SIGTERM.
    """
    arenas_before = arenas()
    failure = ""
    # A short path, since paths of unix sockets are limited to about a hundred bytes.
    with tempfile.TemporaryDirectory(prefix="prfaas-demo-") as directory:
        run_dir = Path(directory)
        try:
            rows = asyncio.run(interruptible(_run(options, run_dir, console)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            rows = None
        except (EngineStartFailed, RegionStartFailed) as error:
            rows, failure = [], str(error)
        left = leftovers(run_dir, arenas_before)
        failed = not rows or bool(left) or any(row.failed_checks for row in rows)
        if failed:
            kept = keep_logs(run_dir, options.work_dir / "logs")
            # The run directory is removed, so messages show where its logs are then.
            for source, target in kept.items():
                failure = failure.replace(str(source), str(target))
    if failure:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)
    if failed:
        # A path that is broken over two lines cannot be copied.
        console.print(f"logs are in {options.work_dir / 'logs'}", soft_wrap=True)
    for item in left:
        console.print(f"[red]left behind:[/] {item}")
    # After an interruption there is nothing to judge, only something to clean up.
    if rows is None:
        console.print("interrupted; " + ("see above" if left else "nothing is left behind"))
        return 130
    if failure:
        return 1
    report = write_json(options.report_path, rows, left)
    if options.as_json:
        print_json(report)
    else:
        for model in dict.fromkeys(row.model for row in rows):
            print_tables(console, model, [row for row in rows if row.model == model])
    num_failed = sum(bool(row.failed_checks) for row in rows)
    console.print(
        f"{len(rows) - num_failed} of {len(rows)} requests passed every check; "
        f"{'nothing' if not left else len(left)} left behind; report: {options.report_path}"
    )
    return 1 if failed else 0


async def interruptible(work: Any) -> Any:
    """`work`, cancelled by SIGINT and SIGTERM, so that its clean-up runs."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, task.cancel)
    return await task


async def _run(options: DemoOptions, run_dir: Path, console: Console) -> list[Row]:
    rows = []
    for name in options.models:
        rows += await _run_model(name, options, run_dir / name, console)
    return rows


async def _run_model(name: str, options: DemoOptions, run_dir: Path, console: Console) -> list[Row]:
    console.rule(f"[bold]{name}")
    model = MODELS[name]
    path = build_model(model, options.work_dir.resolve() / "models")
    async with status_line(console, "starting a plain engine to compare with") as say:
        async with plain_engine(model, path, run_dir / "plain", say) as url:
            requests, expected = await decided_answers(
                url, model, demo_requests(), partial(_show, console, "plain engine")
            )
    view = progress_view(console, as_json=False)
    region = RunningRegion(demo_region(model, path), run_dir / "region", on_progress=view.show)
    try:
        with view:
            await region.start()
        show = partial(_show, console, "region")
        answers = await ask_all(region.gateway_url, name, requests, show)
        records = await _settled_records(region.gateway_url, answers)
        if options.keep and name == options.models[-1]:
            await wait_for_interruption(console, region.gateway_url)
    finally:
        await region.stop()
    rows = [
        judge(
            name,
            request,
            answers[request.name],
            expected[request.name],
            records.get(answers[request.name].request_id),
        )
        for request in requests
    ]
    judge_shares(rows)
    return rows


async def wait_for_interruption(console: Console, url: str) -> None:
    """Print where the region's page is, and wait until this task is cancelled, which Ctrl-C does.
    A second Ctrl-C interrupts what follows.
    """
    console.print(f"the region's page is {url}/ui; Ctrl-C ends the region", soft_wrap=True)
    task = asyncio.current_task()
    assert task is not None
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        # The checks of the answers are still to be told.
        task.uncancel()


def _show(console: Console, who: str, request: DemoRequest, answer: Answer) -> None:
    outcome = answer.error or f"{len(answer.token_ids)} tokens in {answer.total_s:.2f} s"
    console.print(f"  {who}: {request.name}, {answer.num_prompt_tokens} tokens: {outcome}")


async def _settled_records(url: str, answers: dict[str, Answer]) -> dict[str, dict[str, Any]]:
    """The gateway's records by request id, once both legs of each request are over."""
    wanted = {answer.request_id for answer in answers.values()}
    records: dict[str, dict[str, Any]] = {}
    path, kind = "/prfaas/requests?limit=200", dict[str, list[dict[str, Any]]]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while not all(records.get(i, {}).get("is_settled") for i in wanted):
                answer = await asyncio.to_thread(ask, url, path, kind)
                records = {record["request_id"]: record for record in answer["requests"]}
                await asyncio.sleep(0.1)
    return records


@contextlib.asynccontextmanager
async def status_line(console: Console, what: str) -> AsyncIterator[Any]:
    """Show `what`. On a terminal the newest line of a log follows it on the same line."""
    if not console.is_terminal:
        console.print(what)
        yield lambda line: None
        return
    with console.status(what) as status:
        # The spinner and a space are left of it, and two spaces are between the texts.
        room = console.width - len(what) - 4
        yield lambda line: status.update(f"{what}  [dim]{escape(shortened(line, room))}[/]")


def keep_logs(run_dir: Path, log_dir: Path) -> dict[Path, Path]:
    """Copy all logs of a run that is over. Returns where each log is now."""
    log_dir.mkdir(parents=True, exist_ok=True)
    kept = {}
    for log in run_dir.rglob("*.log"):
        kept[log] = target = log_dir / "-".join(log.relative_to(run_dir).parts)
        target.write_bytes(log.read_bytes())
    return kept
