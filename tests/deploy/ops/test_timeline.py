"""`prfaas explain --timeline` without a gateway: its bars, what it prints, JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.serving.records import RequestRecord
from deploy.ops import explain
from deploy.ops.timeline import WIDTH, print_timelines, timeline_of
from kvmanager.load_times import LoadTimes
from prfaas.jobs import PrefillResult

MIB = 1 << 20


def record(*, is_stream: bool = True) -> RequestRecord:
    """A request of 4 s: 2 s of them prefill, while which half of the KVCache is sent."""
    made = RequestRecord(request_id="abc", started_s=0.0, endpoint="chat", is_settled=True)
    made.parts.render_s = 0.5
    made.waited_for_landing(3.0, 3.5)
    made.prefilled(
        PrefillResult(
            instance="p0",
            queue_s=0.0,
            open_s=0.25,
            prefill_s=2.25,
            engine_queue_s=0.25,
            transfer_tail_s=0.5,
            nbytes=4 * MIB,
            sent_share_at_prefill_end=0.5,
            transfer_s=1.5,
            progress=((1.25, 2 * MIB, MIB), (2.25, 4 * MIB, 2 * MIB)),
        )
    )
    made.first_byte(4.0, is_stream=is_stream)
    made.loaded(LoadTimes(0.125, 0.125, 0.125))
    return made


def test_parts_lie_behind_each_other_and_the_transfer_beside_them() -> None:
    found = timeline_of(record())
    begins = {bar.name: bar.begin_s for bar in found.parts}
    assert begins == pytest.approx(
        {
            "render": 0.0,
            "queue": 0.5,
            "open": 0.5,
            "engine_queue": 0.75,
            "prefill": 1.0,
            "transfer_tail": 3.0,
            "news": 3.5,
            "load_wait": 3.5,
            "load": 3.625,
            "first_step": 3.75,
            "relay": 3.875,
            "other": 4.0,
        }
    )
    assert found.parts[-1].end_s == pytest.approx(4.0)
    assert found.transfer is not None
    assert (found.transfer.begin_s, found.transfer.end_s) == pytest.approx((2.0, 3.5))
    assert [mark.time_s for mark in found.progress] == pytest.approx([2.0, 3.0])


def test_every_part_is_drawn_on_one_axis() -> None:
    out = io.StringIO()
    print_timelines(Console(file=out, width=160), [record()])
    text = out.getvalue()
    assert text.startswith("abc: first token after 4.000 s")
    by_name = {line[:24].strip(): line for line in text.splitlines()}
    prefill = next(line for name, line in by_name.items() if name.startswith("prefill"))
    render = next(line for name, line in by_name.items() if name.startswith("turn into"))
    # Half of the axis, from its first quarter.
    assert prefill.count("\u2588") == WIDTH // 2
    assert prefill.index("\u2588") - render.index("\u2588") == WIDTH // 4
    assert any(line.strip().startswith("computed of 4.0 MiB") for line in text.splitlines())
    sent = next(line for line in text.splitlines() if line.strip().startswith("sent of it"))
    # A quarter of it, then half, then all.
    steps = "".join(dict.fromkeys(sent.strip().removeprefix("sent of it").strip()))
    assert steps == "\u2582\u2584\u2588"
    assert "not over yet" not in text


def test_a_part_shorter_than_a_column_is_seen() -> None:
    made = record()
    made.parts.render_s = 1e-6
    out = io.StringIO()
    print_timelines(Console(file=out, width=160), [made])
    line = next(line for line in out.getvalue().splitlines() if "turn into" in line)
    assert line.count("\u2588") == 1


def test_an_answer_that_did_not_begin_has_no_timeline() -> None:
    refused = RequestRecord(request_id="r", started_s=0.0, endpoint="chat", status=429)
    found = timeline_of(refused)
    assert (found.ttft_s, found.parts) == (None, [])
    out = io.StringIO()
    print_timelines(Console(file=out, width=160), [refused])
    assert out.getvalue() == "r: its answer did not begin\n"


def test_a_request_that_nobody_sent_kvcache_for_has_one_bar_for_its_engine() -> None:
    local = RequestRecord(request_id="r", started_s=0.0, endpoint="chat")
    local.first_byte(1.0, is_stream=False)
    found = timeline_of(local)
    assert ([bar.name for bar in found.parts], found.transfer) == (["load_and_decode"], None)
    out = io.StringIO()
    print_timelines(Console(file=out, width=160), [local])
    assert "whole answer after 1.000 s" in out.getvalue()
    assert "engine, all steps" in out.getvalue()
    assert "it is not over yet" in out.getvalue()


def test_the_command_draws_or_writes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain.client, "find_pages", lambda *_: ("http://gateway", ""))
    monkeypatch.setattr(explain, "find_records", lambda *_, key="": [record()])
    run = CliRunner().invoke
    drawn = run(app, ["explain", "abc", "--timeline"])
    assert drawn.exit_code == 0
    assert "abc: first token after 4.000 s" in drawn.output
    written = run(app, ["explain", "abc", "--timeline", "--json"])
    (timeline,) = json.loads(written.output)["timelines"]
    assert timeline["request_id"] == "abc"
    assert timeline["parts"][0] == {"name": "render", "begin_s": 0.0, "end_s": 0.5}
    assert timeline["transfer"]["name"] == "transfer"
    assert timeline["progress"][0]["sent_bytes"] == MIB
