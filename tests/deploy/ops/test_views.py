"""What lines, bars and timelines say whatever the request, and words for every reason."""

from __future__ import annotations

import io
from typing import Any, get_args

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from deploy.gateway.serving.records import Outcome, RequestRecord
from deploy.gateway.serving.ttft_parts import TtftParts
from deploy.ops.explain_view import OUTCOMES, REASONS, SPILLS, placement_words, reason_words
from deploy.ops.requests import _LETTERS, BAR_COLUMNS, bar, print_requests
from deploy.ops.timeline import timeline_of
from kvmanager.load_times import LoadTimes
from prfaas.jobs import PrefillResult
from scheduler.routing.decision import Reason
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.spill import PdReason

MIB = 1 << 20


def test_every_reason_and_outcome_has_words() -> None:
    assert set(REASONS) == set(Reason)
    assert set(OUTCOMES) == set(get_args(Outcome))
    assert {*SPILLS, PdReason.HOME} == set(PdReason)
    assert reason_words("from_another_version") == "from_another_version"
    assert placement_words("fewest of 2") == "fewest of 2"


def test_only_finite_numbers_are_kept() -> None:
    record = RequestRecord(request_id="abc", started_s=0.0, endpoint="chat")
    numbers = {"prompt_tokens": 12345, "local_ttft_s": float("inf")}
    record.decided(RouteDecision("prefill_cluster", "far", Reason.ABOVE_THRESHOLD, numbers))
    assert record.numbers == {"prompt_tokens": 12345}
    assert msgspec.json.decode(msgspec.json.encode(record), type=RequestRecord) == record


def test_parts_lie_behind_each_other_and_the_transfer_beside_them() -> None:
    # A request of 4 s: 2 s of them prefill, while which half of the KVCache is sent.
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
    made.first_byte(4.0, is_stream=True)
    made.loaded(LoadTimes(0.125, 0.125, 0.125))
    found = timeline_of(made)
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


def shown(*records: RequestRecord, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_requests(console, records, 1012.0)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


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
