"""What people see of a region: status tables and lines of progress."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from report_cases import agent_status
from rich.console import Console
from rich.text import Text

from deploy.gateway.scheduling.plan_overview import ModelPlanNow, PlanOverview, RegionModel
from deploy.lab.emulator.faults import DirectionReport, LinkReport
from deploy.region.launch.progress import LineView, TableView, line_view, progress_view
from deploy.region.launch.rundir import ProcessRecord, RegionState
from deploy.region.launch.running import ProcessProgress
from deploy.region.launch.status import ProcessUse, RegionStatus, render_status
from kvmanager.agent.messages import CacheStatus, EngineStatus


def printed(value: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(value)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def status(*, launcher_lives: bool = True) -> RegionStatus:
    process = ProcessRecord(
        name="b1-decode",
        kind="engine",
        state="healthy",
        reason="",
        pid=7,
        address="http://127.0.0.1:9",
        log="/run/demo/logs/b1-decode.log",
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
    agent = agent_status(
        free_bytes=1 << 29,
        landing_bytes=3 << 20,
        num_landings={"receiving": 2, "landed": 0},
        engines=[EngineStatus("b1-decode", 2, 1, "layout", "ff")],
        num_received_connections=8,
        pid=2,
    )
    way = DirectionReport(10, 10, 0, 0, 0, None, None, None, None)
    link = LinkReport(
        now_s=0.0,
        rate_bytes_per_s=125e6,
        rtt_s=0.02,
        jitter_s=0.0,
        is_cut=True,
        stalled=["forward"],
        swallowing=[],
        planned=0,
        open_connections=8,
        accepted_connections=8,
        failed_connections=0,
        forward=way,
        backward=way,
        cpu_s=0.0,
    )
    use = {"b1-decode": ProcessUse(3, 5 << 30, 300.0)}
    return RegionStatus(state, launcher_lives, use, {"b1": agent}, {"link.a": link})


def test_status_shows_what_is_held_and_what_is_broken() -> None:
    text = printed(render_status(status()))
    for words in (
        "region demo  running  http://127.0.0.1:8000",
        "5 min",
        "5.0 GiB",
        "2 receiving",
        "3.0 MiB",
        "1Gbit",
        "20ms",
        "cut, forward stalled",
        "logs are in /run/demo/logs",
    ):
        assert words in text


@pytest.mark.parametrize(("is_encrypted", "word"), [(True, "yes"), (False, "no")])
def test_status_says_of_each_agent_whether_it_has_tls(is_encrypted: bool, word: str) -> None:
    shown = status()
    agent = msgspec.structs.replace(shown.agents["b1"], is_encrypted=is_encrypted)
    text = printed(render_status(msgspec.structs.replace(shown, agents={"b1": agent})))
    assert "agent tls" in " ".join(text.split())
    assert f"b1 {word} 1.0 GiB" in " ".join(text.split())


def test_status_shows_caches_of_those_that_have_one() -> None:
    shown = status()
    assert "prompts" not in printed(render_status(shown))
    cache = CacheStatus(
        nbytes={"arena/kv": 200 << 20, "arena/state": 31 << 20, "ssd/kv": 3 << 30, "ssd/state": 0},
        num_blocks=1000,
        queries=12345,
        query_tokens=1000,
        hit_tokens={"arena": 600, "ssd": 20},
    )
    agents = {"b1": msgspec.structs.replace(shown.agents["b1"], cache=cache)}
    text = printed(render_status(msgspec.structs.replace(shown, agents=agents)), width=100)
    row = next(line for line in text.splitlines() if "62%" in line)
    assert " ".join(row.split()) == "b1 200.0 MiB 0 31.0 MiB 3.0 GiB 0 12345 62%"
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 100])
def test_status_of_long_names_fits_a_terminal_and_cuts_nothing_off(width: int) -> None:
    shown = status()
    process = msgspec.structs.replace(
        shown.state.processes[0],
        name="prefill-frankfurt-gpu-node-17/engine-0",
        state="unhealthy",
        address="http://gpu-node-17.prefill.frankfurt.example:18000",
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
    agent = msgspec.structs.replace(
        shown.agents["b1"],
        cache=cache,
        num_landings={"receiving": 128, "landed": 64, "failed": 32},
        num_outboxes={"filling": 128, "sending": 64},
        engines=[
            EngineStatus(f"decode-frankfurt-gpu-node-17-engine-{i}", 2, 1, "", "") for i in (0, 1)
        ],
    )
    busy = DirectionReport(1 << 40, 1000 << 20, 1000 << 20, 0, 0, None, None, None, None)
    link = msgspec.structs.replace(
        next(iter(shown.links.values())), forward=busy, backward=busy, swallowing=["backward"]
    )
    long = RegionStatus(
        msgspec.structs.replace(shown.state, processes=(process,)),
        True,
        {process.name: ProcessUse(3, 1000 << 20, 1e6)},
        {"node-frankfurt-gpu-17": agent},
        {"prefill-frankfurt-to-decode-amsterdam": link},
    )
    text = printed(render_status(long), width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    # A long number goes on in the next line before its unit only.
    assert text.count("1000.0") == 9
    for words in ("1234567", "unhealthy", "278 h", "receiving", "100%", "swallowed"):
        assert words in text, words


def test_status_says_what_plans_leave_out() -> None:
    note = "near: b has the role both, which is never converted and counts as decode"
    region = RegionModel(clusters=[], links=[], kv_fixed_bytes=0, kv_token_bytes=0, notes=[note])
    counts = {"num_prefill": {"near": 1}, "num_decode": {"near": 1}}
    plan = PlanOverview(
        mode="act",
        period_s=300.0,
        next_step_s=1.0,
        thresholds={},
        models=[
            ModelPlanNow(model="tiny", region=region, **counts),
            ModelPlanNow(model="other", unknown="no request has ended yet", **counts),
        ],
    )
    text = printed(render_status(msgspec.structs.replace(status(), plan=plan)))
    assert f"plan of tiny: {note}" in text
    assert "no plan of other: no request has ended yet" in text
    off = msgspec.structs.replace(plan, mode="off")
    assert "plan of" not in printed(render_status(msgspec.structs.replace(status(), plan=off)))


def test_status_of_a_dead_region_says_so() -> None:
    text = printed(render_status(status(launcher_lives=False)))
    assert "its launcher was killed" in text
    assert "gone" in text


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
