"""Commands that watch or wait: what ends them, and what a terminal shows meanwhile."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.links.region_links import LinksOverview
from deploy.gateway.members.pages import InstanceNow, InstancesOverview
from deploy.gateway.scheduling.role_pages import InstanceRole
from deploy.gateway.serving.records import RequestRecord
from deploy.gateway.serving.ttft_parts import TtftParts
from deploy.region import client
from deploy.region.client import CannotAsk

run = CliRunner().invoke
AT = ["--gateway", "http://g"]
FAR = RequestRecord(
    request_id="far",
    started_s=1000.0,
    endpoint="chat",
    ttft_s=2.0,
    parts=TtftParts(queue_s=0.5, prefill_s=1.0, transfer_tail_s=0.25, load_s=0.25),
)


def answer_with(monkeypatch: pytest.MonkeyPatch, answers: Iterable[object]) -> None:
    """A gateway that gives these answers one by one. Pauses take no time."""
    given = iter(answers)
    monkeypatch.setattr(client, "ask", lambda *_, **__: next(given))
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were asked for. The second question finds no gateway, the third Ctrl-C."""
    paths: list[str] = []
    pauses = itertools.count(1)

    def ask(_url: str, path: str, _kind: Any, *, key: str = "") -> Any:
        assert key == ""
        paths.append(path)
        if len(paths) == 2:
            raise CannotAsk("http://g is gone")
        return {"requests": [FAR]}

    def sleep(_: float) -> None:
        if next(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(client, "ask", ask)
    monkeypatch.setattr(time, "sleep", sleep)
    return paths


def test_a_watch_outlives_the_gateway_and_ctrl_c_ends_it_well(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "140")
    result = run(app, ["requests", *AT, "--watch"])
    assert result.exit_code == 0, result.output
    assert len(asked) == 3
    assert "no answer: http://g is gone" in result.output
    assert "qqqqppppppppttll" in Text.from_ansi(result.output).plain


def test_a_watch_on_a_dumb_terminal_prints_one_table_below_the_other(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("LINES", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    result = run(app, ["requests", *AT, "--watch"])
    assert (result.exit_code, len(asked)) == (0, 3)
    assert "\x1b" not in result.output
    # rich gives it 80 columns.
    assert result.output.count("qqpppptl") == 2
    assert "\nno answer: http://g is gone\n" in result.output


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_a_watch_has_colours_unless_they_are_not_wanted(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, no_colour: str
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_colour)
    result = run(app, ["requests", *AT, "--watch"])
    assert (result.exit_code, len(asked)) == (0, 3)
    # 30 to 37 and 90 to 97 are the colours of text.
    has_colours = re.search(r"\x1b\[[0-9;]*(?<![0-9])[39][0-7]m", result.output) is not None
    assert has_colours is (not no_colour)


def test_a_watch_in_a_pipe_looks_once_and_in_json_ends_with_the_gateway(
    asked: list[str],
) -> None:
    result = run(app, ["requests", *AT, "--watch"])
    assert (result.exit_code, len(asked)) == (0, 1)
    result = run(app, ["requests", *AT, "--watch", "--json"])
    assert (result.exit_code, len(asked)) == (3, 2)
    assert "http://g is gone" in result.output


def test_json_goes_on_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = iter((0, 0))

    def sleep(_: float) -> None:
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    answer_with(monkeypatch, itertools.repeat(LinksOverview([], [])))
    monkeypatch.setattr(time, "sleep", sleep)
    result = run(app, ["link", "top", *AT, "--json"])
    assert result.exit_code == 0
    assert [json.loads(line)["links"] for line in result.output.splitlines()] == [[]] * 3


def test_ctrl_c_ends_the_wait_for_a_role_and_not_the_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draining = InstanceRole(
        instance="d1",
        role="decode",
        epoch=0,
        phase="draining",
        ready=False,
        healthy=True,
        requests=3,
    )

    def answers() -> Iterable[object]:
        yield draining
        raise KeyboardInterrupt

    answer_with(monkeypatch, answers())
    result = run(app, ["role", "set", "d1", "prefill", *AT])
    assert (result.exit_code, "goes on" in result.output) == (130, True)


def test_an_instance_that_never_joins_is_not_waited_for_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joining = InstanceNow(
        cluster="east", instance="p9", phase="joining", role="prefill", reason="engine: not probed"
    )
    answer_with(monkeypatch, (joining, InstancesOverview([joining])))
    times = iter((0.0, 1.0, 601.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    words = ["p9", "--cluster", "east", "--url", "http://e:1", "--agent", "a:1"]
    result = run(app, ["instance", "add", *words, *AT])
    assert result.exit_code == 1
    assert "p9 has not joined after 600 s: engine: not probed" in result.output
