"""What people see of a region: status tables and lines of progress."""

from __future__ import annotations

import io
import json

import pytest
from report_cases import agent_status
from rich.console import Console
from rich.text import Text

from deploy.lab.emulator.faults import DirectionReport, LinkReport
from deploy.region.launch.progress import LineView, TableView, line_view, progress_view
from deploy.region.launch.rundir import ProcessRecord, RegionState
from deploy.region.launch.running import ProcessProgress
from deploy.region.launch.status import ProcessUse, RegionStatus, render_status
from kvmanager.agent.messages import CacheStatus, EngineStatus


@pytest.mark.parametrize("width", [80, 100])
def test_status_of_long_names_fits_a_terminal_and_cuts_nothing_off(width: int) -> None:
    process = ProcessRecord(
        name="prefill-frankfurt-gpu-node-17/engine-0",
        kind="engine",
        state="unhealthy",
        reason="",
        pid=7,
        address="http://gpu-node-17.prefill.frankfurt.example:18000",
        log="/run/demo/logs/engine-0.log",
        num_restarts=2,
    )
    state = RegionState(
        region="demo",
        phase="running",
        launcher_pid=1,
        started_s=0.0,
        gateway_url="http://127.0.0.1:8000",
        region_file="region.json",
        processes=(process,),
        relays={},
        agents={},
    )
    cache = CacheStatus(
        nbytes={f"arena/{kind}": 1000 << 20 for kind in ("kv", "window", "state")}
        | {"ssd/kv": 1000 << 20},
        num_blocks=1000,
        queries=1234567,
        query_tokens=1000,
        hit_tokens={"arena": 1000},
        pinned_bytes=1000 << 20,
    )
    agent = agent_status(
        free_bytes=1 << 29,
        landing_bytes=3 << 20,
        cache=cache,
        num_landings={"receiving": 128, "landed": 64, "failed": 32},
        num_outboxes={"filling": 128, "sending": 64},
        engines=[
            EngineStatus(f"decode-frankfurt-gpu-node-17-engine-{i}", 2, 1, "", "") for i in (0, 1)
        ],
        is_encrypted=True,
    )
    busy = DirectionReport(1 << 40, 1000 << 20, 1000 << 20, 0, 0, None, None, None, None)
    link = LinkReport(
        now_s=0.0,
        rate_bytes_per_s=125e6,
        rtt_s=0.02,
        jitter_s=0.0,
        is_cut=True,
        stalled=["forward"],
        swallowing=["backward"],
        planned=0,
        open_connections=8,
        accepted_connections=8,
        failed_connections=0,
        forward=busy,
        backward=busy,
        cpu_s=0.0,
    )
    status = RegionStatus(
        state,
        True,
        {process.name: ProcessUse(3, 1000 << 20, 1e6)},
        {"node-frankfurt-gpu-17": agent},
        {"prefill-frankfurt-to-decode-amsterdam": link},
    )
    console = Console(file=io.StringIO(), width=width)
    console.print(render_status(status))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    # A long number goes on in the next line before its unit only.
    assert text.count("1000.0") == 9
    for words in ("1234567", "unhealthy", "278 h", "yes", "receiving", "100%", "swallowed"):
        assert words in text, words


def test_lines_show_changes_only() -> None:
    shown: list[ProcessProgress] = []
    with LineView(shown.append) as view:
        view.show(ProcessProgress("a", "engine", "starting", "starting", 0.0))
        view.show(ProcessProgress("b", "engine", "starting", "starting", 0.1))
        for elapsed_s in range(300):
            view.show(
                ProcessProgress("a", "engine", "starting", "starting", elapsed_s, f"{elapsed_s}%")
            )
        view.show(ProcessProgress("a", "engine", "healthy", "probe succeeded", 300.2))
        view.show(ProcessProgress("a", "engine", "healthy", "probe succeeded", 300.3))
    assert [(item.name, item.state) for item in shown] == [
        ("a", "starting"),
        ("b", "starting"),
        ("a", "healthy"),
    ]


LOG_LINE = "\x1b[32m(EngineCore pid=7) INFO\x1b[0m [config] " + "x=[1, 2], " * 400 + "\rend"


def shown_lines(console: Console, *items: ProcessProgress) -> list[str]:
    with progress_view(console, as_json=False) as view:
        for item in items:
            view.show(item)
    assert isinstance(console.file, io.StringIO)
    return Text.from_ansi(console.file.getvalue()).plain.splitlines()


CHANGES = (
    ProcessProgress("a1-prefill", "engine", "starting", "starting", 0.0, LOG_LINE),
    ProcessProgress("a1-prefill", "engine", "backoff", f"ended: {LOG_LINE}", 61.0),
    ProcessProgress("a1-prefill", "engine", "starting", "restart 1", 62.0, LOG_LINE),
    ProcessProgress("a1-prefill", "engine", "healthy", "probe succeeded", 90.0, LOG_LINE),
)


def test_without_a_terminal_a_change_is_one_short_line() -> None:
    lines = shown_lines(Console(file=io.StringIO(), width=80), *CHANGES)
    assert [line.split()[:2] for line in lines] == [
        ["a1-prefill", state] for state in ("starting", "backoff", "starting", "healthy")
    ]
    assert max(map(len, lines)) <= 120
    assert "x=[1, 2]" not in lines[0] + lines[2] + lines[3]
    assert lines[1].endswith("…")
    assert "restart 1" in lines[2]


@pytest.mark.parametrize("width", [20, 60, 100])
@pytest.mark.parametrize("item", CHANGES)
def test_on_a_terminal_no_line_is_longer_than_it(width: int, item: ProcessProgress) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    assert max(map(len, shown_lines(console, item))) <= width


@pytest.mark.parametrize("width", [40, 90])
def test_changes_below_the_table_fit_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    view = line_view(console)
    for item in CHANGES:
        view.show(item)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == len(CHANGES)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = progress_view(Console(), as_json=True)
    view.show(ProcessProgress("a", "engine", "healthy", "probe succeeded", 0.2))
    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "progress"
    assert (event["name"], event["state"]) == ("a", "healthy")
    for item in CHANGES:
        view.show(item)
    events = capsys.readouterr().out.splitlines()
    assert [json.loads(event)["state"] for event in events] == [
        "starting",
        "backoff",
        "starting",
        "healthy",
    ]
    assert max(map(len, events)) < 500


def test_the_table_shows_the_newest_log_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    view = progress_view(console, as_json=False)
    assert isinstance(view, TableView)
    with view:
        view.show(
            ProcessProgress(
                "a1-prefill", "engine", "starting", "starting", 1.0, "[Loading] weights"
            )
        )
    assert isinstance(console.file, io.StringIO)
    assert "[Loading] weights" in console.file.getvalue()
