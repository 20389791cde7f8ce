"""`prfaas requests` without a gateway: its lines, its bars, how it ends."""

from __future__ import annotations

import io
import itertools
import json
import re
import time
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.serving.records import RequestRecord
from deploy.gateway.serving.ttft_parts import TtftParts
from deploy.ops.requests import _LETTERS, BAR_COLUMNS, bar, print_requests
from deploy.region import client
from deploy.region.client import CannotAsk

run = CliRunner().invoke
AT = ["--gateway", "http://g"]


def record(request_id: str, **fields: Any) -> RequestRecord:
    return RequestRecord(request_id=request_id, started_s=1000.0, endpoint="chat", **fields)


FAR = record(
    "far",
    outcome="ok",
    status=200,
    route="prefill_cluster",
    target="east",
    reason="above_threshold",
    num_prompt_tokens=12345,
    cached_tokens=4096,
    ttft_s=2.0,
    parts=TtftParts(queue_s=0.5, prefill_s=1.0, transfer_tail_s=0.25, load_s=0.25),
)
REFUSED = record("no", outcome="refused", status=429, error="4 requests [wait]. Try again in 6 s.")


def shown(*records: RequestRecord, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_requests(console, records, 1012.0)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_request_is_a_line_with_its_way_and_reason() -> None:
    text = shown(FAR, REFUSED)
    line = next(line for line in text.splitlines() if line.split()[:1] == ["far"])
    assert line.split() == [
        *("far", "12", "s", "ok", "east", "above_threshold", "12,345", "4,096", "2.000"),
        "qqqqppppppppttll",
    ]
    assert "refused (429)" in text
    assert "no: 4 requests [wait]. Try again in 6 s." in text
    assert "q queue, p prefill" in text
    assert shown() == "no request yet\n"
    spilled = record("x", route="local", target="one_engine", cluster="south", spill="home_full")
    assert "local, decoded in south" in shown(spilled)


def test_what_no_prefill_cluster_can_take_and_what_is_forwarded_say_why() -> None:
    text = shown(
        record(
            "none",
            outcome="failed",
            status=503,
            reason="no_landing_room",
            error_code="prefill_unavailable",
            error="no room",
        ),
        record("e", outcome="ok", status=200, route="direct", reason="forwarded"),
    )
    assert "failed (503)  not routed  no_landing_room" in text
    assert "none: prefill_unavailable: no room" in text
    assert "ok            direct      forwarded" in text


def test_a_request_is_one_line_of_80_columns() -> None:
    whole = "0d31bfddb11eafc2d2e099f9c619fb14"
    long = structs.replace(FAR, request_id=whole, target="prefill-a", num_prompt_tokens=1500)
    lines = shown(long, width=80).splitlines()
    (line,) = (line for line in lines if "0d31…" in line)
    assert line.split() == [
        *("0d31…b14", "12", "s", "ok", "prefill-a", "above_threshold", "1,500", "2.000"),
        "qqpppptl",
    ]
    assert len(line) <= 80
    assert "cached" not in shown(long, width=80)
    assert "4,096" in shown(long, width=96)
    assert whole in shown(long, width=124)
    # What fits stays whole, and an error names the whole id.
    failed = record(whole, outcome="failed", status=503, error="no room")
    assert f"{whole}: no room" in shown(failed, width=80)
    assert "reque-1 " in shown(record("reque-1"), width=80)


def test_a_bar_has_all_its_columns_whatever_the_parts() -> None:
    assert bar({}).plain == ""
    assert bar({"prefill": 0.0}).plain == ""
    for shares in ([1.0], [1 / 3] * 3, [1e-9, 5.0, 0.1], [0.01] * 19):
        parts = dict(zip(_LETTERS, shares, strict=False))
        assert len(bar(parts).plain) == BAR_COLUMNS
    assert bar({"from_a_later_version": 1.0}).plain == "r" * BAR_COLUMNS


def test_every_part_has_a_letter() -> None:
    known = {name.removesuffix("_s") for name in TtftParts.__struct_fields__}
    assert set(_LETTERS) == known


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


def test_json_is_what_the_gateway_said(asked: list[str]) -> None:
    result = run(app, ["requests", *AT, "--limit", "3", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["requests"][0]["parts"]["prefill_s"] == 1.0
    assert asked == ["/prfaas/requests?limit=3"]


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
