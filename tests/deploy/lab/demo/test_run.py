"""What the demo says while engines start and when one does not, with its engines left out."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from deploy.lab.demo import run
from deploy.lab.demo.run import DemoOptions, run_demo, status_line
from deploy.lab.demo.verdict import Row
from deploy.region.launch.running import RegionStartFailed
from prfaas.engines.errors import EngineStartFailed

LOG_LINE = "[/] non-default args: " + "[red]x=1, " * 400


def console(*, terminal: bool, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def lines(shown: Console) -> list[str]:
    assert isinstance(shown.file, io.StringIO)
    return Text.from_ansi(shown.file.getvalue()).plain.splitlines()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_failed_start_is_shown_with_where_its_log_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    async def fails(_options: DemoOptions, run_dir: Path, _console: Console) -> Any:
        log = run_dir / "tiny" / "plain" / "engine.log"
        log.parent.mkdir(parents=True)
        log.write_text(LOG_LINE)
        error = EngineStartFailed("plain-tiny", "ended with status 1", [LOG_LINE], str(log))
        raise RegionStartFailed(str(error)) if wrapped else error

    monkeypatch.setattr(run, "_run", fails)
    shown = console(terminal=False)
    assert run_demo(DemoOptions(tmp_path), shown) == 1
    kept = tmp_path / "logs" / "tiny-plain-engine.log"
    assert kept.read_text() == LOG_LINE
    said = lines(shown)
    assert said[0] == f"plain-tiny: ended with status 1; last lines of {kept}:"
    assert said[1].startswith("    [/] non-default args: [red]x=1, ")
    assert said[2] == f"logs are in {tmp_path / 'logs'}"
    assert max(map(len, said[1:2])) < 220
    assert len(said) == 3


def test_the_report_can_go_to_stdout_in_place_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("tiny", "long", 3000, "local", "local_sooner", None, None, None, 0.5, {}, True)

    async def passes(_options: DemoOptions, _run_dir: Path, _console: Console) -> list[Row]:
        return [row]

    monkeypatch.setattr(run, "_run", passes)
    monkeypatch.setattr(run, "leftovers", lambda *_: [])
    shown = console(terminal=False)
    assert run_demo(DemoOptions(tmp_path, as_json=True), shown) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["requests"][0]["request"]) == (True, "long")
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert "requests through the region" not in " ".join(lines(shown))


@pytest.mark.parametrize("width", [60, 100])
async def test_on_a_terminal_the_newest_log_line_stays_within_it(width: int) -> None:
    shown = console(terminal=True, width=width)
    async with status_line(shown, "starting a plain engine to compare with") as say:
        say(LOG_LINE)
    assert max(map(len, lines(shown))) <= width
    assert any("[/] non" in line for line in lines(shown))


async def test_without_a_terminal_a_start_is_one_line() -> None:
    shown = console(terminal=False)
    async with status_line(shown, "starting a plain engine to compare with") as say:
        for _ in range(10):
            say(LOG_LINE)
    assert lines(shown) == ["starting a plain engine to compare with"]


async def test_a_kept_region_says_where_its_page_is_until_it_is_interrupted() -> None:
    text = io.StringIO()
    task = asyncio.create_task(
        run.wait_for_interruption(Console(file=text, width=60), "http://127.0.0.1:8000")
    )
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert "http://127.0.0.1:8000/ui" in text.getvalue()
