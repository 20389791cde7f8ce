"""`prfaas explain` without a gateway: what it prints of records, errors, JSON."""

from __future__ import annotations

import io
import json
from typing import Any, get_args

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.serving.records import Outcome, RequestRecord, TtftParts
from deploy.ops.explain_view import (
    OUTCOMES,
    REASONS,
    SPILLS,
    placement_words,
    print_records,
    reason_words,
    ttft_error,
)
from deploy.region import client
from deploy.region.client import CannotAsk
from kvmanager.load_times import LoadTimes
from prfaas.jobs import PrefillResult
from scheduler.live.media_travel import MediaTravel
from scheduler.routing.decision import Decision, Reason
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.spill import PdReason

run = CliRunner().invoke

LOCAL = Prediction(queue_s=3.0, prefill_s=2.0, step_s=0.01, overhead_s=0.05)
REMOTE = Prediction(queue_s=0.5, prefill_s=2.0, tail_s=0.25, step_s=0.01, overhead_s=0.05)
ROUTE = RouteDecision(
    "prefill_cluster",
    "far",
    Reason.ABOVE_THRESHOLD,
    {
        "prompt_tokens": 12345,
        "uncached_tokens": 8249,
        "local_uncached_tokens": 12345,
        "threshold_tokens": 1024,
        "link_bytes_per_s": 1.25e8,
        "link_backlog_bytes": 3e6,
        "local_ttft_s": float("inf"),
    },
    local=LOCAL,
    remote=REMOTE,
)
RESULT = PrefillResult(
    instance="far-0",
    queue_s=0.4,
    prefill_s=2.5,
    transfer_tail_s=0.2,
    nbytes=7 << 20,
    sent_share_at_prefill_end=0.93,
    transfer_s=2.1,
    reason="cached; cached_tokens=4096; tokens_ahead=0",
)


def record(**fields: Any) -> RequestRecord:
    """A stream that went to a prefill cluster, 3.5 s to its first token."""
    made = RequestRecord(
        request_id="abc", started_s=1000.0, endpoint="chat", model="tiny", num_prompt_tokens=12345
    )
    made.tenant, made.status, made.outcome = "acme", 200, "ok"
    made.local_cached_tokens, made.prefill_cached_tokens = 0, {"far": 4096}
    made.landing_cached_tokens, made.saved_bytes = 512, 1 << 20
    made.decode_instance = "d0"
    made.decided(ROUTE)
    made.prefilled(RESULT)
    made.first_byte(3.5, is_stream=True)
    made.is_settled = True
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def shown(*records: RequestRecord) -> str:
    out = io.StringIO()
    print_records(Console(file=out, width=160), records, 1012.0)
    return out.getvalue()


def row(text: str, title: str) -> list[str]:
    found = [line for line in text.splitlines() if line.strip().startswith(title)]
    assert len(found) == 1, found
    return found[0].strip().removeprefix(title).split()


def test_it_says_what_crossed_the_link_for_media_and_what_would_have_been_better() -> None:
    travel = MediaTravel(
        what="pixels",
        reason="fewer_bytes",
        pixel_bytes=1 << 20,
        embedding_bytes=6 << 20,
        pixels_s=0.21,
        embedding_s=0.54,
    )
    words = "1.0 MiB of pixels, encoded there after 210ms; embeddings: 6.0 MiB, there after 540ms"
    assert words in shown(record(media_travel=travel))
    sooner = msgspec.structs.replace(travel, what="embedding", reason="sooner")
    assert f"{words}, which is sooner" in shown(record(media_travel=sooner))
    assert "pixels" not in shown(record())


def test_a_record_says_where_why_and_with_what_numbers() -> None:
    text = shown(record())
    for part in (
        "abc: chat for tiny, 12 s ago",
        "acme",
        "answered (HTTP 200)",
        "prefill cluster far (above_threshold)",
        "more tokens are uncached than the threshold",
        "12,345 tokens, 8,249 of them uncached where it is computed, 12,345 at the PD cluster",
        "PD cluster 0, far 4,096, landing 512",
        "1,024 tokens uncached",
        "1Gbit/s, 2.9 MiB waiting",
        "7.0 MiB in 2.100 s, 93% of it before the prefill ended; 1.0 MiB were there already",
        "far-0: it has most of the prompt cached (cached_tokens=4096, tokens_ahead=0)",
    ):
        assert part in text, part
    assert row(text, "decoded by") == ["d0"]
    apart = record(decode_reason="2 usable, least loaded first")
    assert row(shown(apart), "decoded by") == ["d0:", "2", "usable,", "least", "loaded", "first"]
    assert "cache move" not in text


def test_a_prefill_at_the_second_instance_says_so() -> None:
    made = record(num_prefill_attempts=2, placement="")
    assert row(shown(made), "prefilled by") == ["far-0,", "at", "try", "2"]


def test_a_prompt_without_landing_room_says_what_it_lacks() -> None:
    made = record()
    numbers = {"landing_bytes": 3 << 20, "landing_room_bytes": 1 << 20}
    made.decided(Decision("local", "one_engine", Reason.NO_LANDING_ROOM, numbers))
    text = shown(made)
    assert "the PD cluster has no room for its KVCache to land" in text
    assert "3.0 MiB of KVCache, room for 1.0 MiB" in text


def test_a_cached_prefix_that_came_first_is_told_with_its_time() -> None:
    made = record(cache_move="4000 tokens more in home, 2048000 bytes, 0.1 s: pays")
    made.parts.move_s = 0.125
    text = shown(made)
    assert made.cache_move in text
    assert row(text, "move cache") == ["0.000", "0.000", "0.125", "-100%"]


def test_predicted_and_measured_stand_side_by_side() -> None:
    text = shown(record())
    assert row(text, "queue") == ["3.000", "0.500", "0.400", "+25%"]
    assert row(text, "prefill ") == ["2.000", "2.000", "2.500", "-20%"]
    assert row(text, "transfer tail") == ["0.000", "0.250", "0.200", "+25%"]
    assert row(text, "overhead") == ["0.050", "0.050"]
    assert row(text, "load, first step") == ["0.400"]
    assert row(text, "first token") == ["5.060", "2.810", "3.500", "-20%"]


def test_a_second_try_is_told_and_not_compared() -> None:
    moved = record(num_retries=1, prefill_error="engine_failed: boom")
    moved.decided(Decision("local", "one_engine", Reason.PREFILL_FAILED))
    text = shown(moved)
    assert "at try 2" in text
    assert "prefill cluster far (above_threshold): more tokens are uncached" in text
    assert "one engine of the PD cluster prefills and decodes (prefill_failed)" in text
    assert "failed: engine_failed: boom" in text
    assert "the predictions are of the route first taken" in text
    assert "%" not in "".join(row(text, "first token"))
    assert ttft_error(moved) is None


def test_the_pd_cluster_and_why_it_is_not_the_home_are_said() -> None:
    assert row(shown(record(home="north", cluster="north")), "home") == ["PD", "cluster", "north"]
    spilled = record(home="north", cluster="south", spill="home_unable")
    assert {*SPILLS, PdReason.HOME} == set(PdReason)
    text = shown(spilled)
    assert "PD cluster south: no engine of its home could serve it" in text
    assert "the predictions are of the route first taken" in text
    assert ttft_error(spilled) is None
    assert "because I say so" in shown(record(cluster="a", spill="because I say so"))


def test_an_answer_in_one_piece_has_no_first_token() -> None:
    whole = record(ttft_s=None)
    whole.first_byte(9.0, is_stream=False)
    text = shown(whole)
    assert "not streamed: the whole answer was there after 9.000 s" in text
    assert row(text, "load, all steps") == ["5.900"]
    assert row(text, "first token") == ["5.060", "2.810"]


def test_a_refusal_has_no_route_and_no_table() -> None:
    refused = RequestRecord(
        request_id="r",
        started_s=1000.0,
        endpoint="completion",
        outcome="refused",
        status=429,
        error="4 requests want the 4 decode slots. Try again in 6 s.",
    )
    text = shown(refused)
    assert "refused: over a limit, or too much load (HTTP 429): 4 requests want" in text
    assert "none was taken" in text
    assert "time to first token" not in text
    assert "not over yet" in text


def test_a_prompt_that_was_not_counted_was_not_predicted() -> None:
    short = RequestRecord(request_id="r", started_s=1000.0, endpoint="completion")
    numbers = {"prompt_tokens_about": 9, "prefill_s": 0.1}
    short.decided(
        RouteDecision("local", "one_engine", Reason.BELOW_THRESHOLD, numbers, local=LOCAL)
    )
    short.first_byte(0.5, is_stream=True)
    text = shown(short)
    assert short.predictions == {}
    assert "not counted: about 9 tokens" in text
    assert "nothing was predicted" in text
    assert row(text, "engine, first step") == ["0.500"]


def test_several_records_of_one_id_come_newest_first() -> None:
    text = shown(record(tenant="new"), record(tenant="old"))
    assert text.startswith("2 requests had this id")
    assert text.index("new") < text.index("old")


def test_only_finite_numbers_are_kept() -> None:
    assert "local_ttft_s" not in record().numbers
    round_trip = msgspec.json.decode(msgspec.json.encode(record()), type=RequestRecord)
    assert round_trip == record()


def test_every_reason_and_outcome_has_words() -> None:
    assert set(REASONS) == set(Reason)
    assert set(OUTCOMES) == set(get_args(Outcome))
    assert reason_words("from_another_version") == "from_another_version"
    assert placement_words("fewest of 2") == "fewest of 2"


def answers(monkeypatch: pytest.MonkeyPatch, by_path: dict[str, Any]) -> list[str]:
    """A gateway that knows these; what it was asked for."""
    asked = []

    def ask(url: str, path: str, kind: type[Any], *, key: str = "") -> Any:
        asked.append(path)
        found = by_path.get(path.partition("?")[0])
        if found is None:
            raise CannotAsk(f"{url} answered 404: No record of this request (any more).", 404)
        return found

    monkeypatch.setattr(client, "ask", ask)
    return asked


def test_json_is_what_the_gateway_said(monkeypatch: pytest.MonkeyPatch) -> None:
    known = RequestRecord(request_id="a/b", started_s=1.0, endpoint="chat", parts=TtftParts())
    asked = answers(monkeypatch, {"/prfaas/requests/a%2Fb": {"requests": [known]}})
    result = run(app, ["explain", "a/b", "--gateway", "http://g", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["requests"][0]["request_id"] == "a/b"
    assert asked == ["/prfaas/requests/a%2Fb"]
    text = run(app, ["explain", "a/b", "--gateway", "http://g"])
    assert "a/b: chat" in text.output


def test_an_unknown_id_is_answered_with_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = [
        RequestRecord(request_id=name, started_s=1.0, endpoint="chat") for name in ("n2", "n1")
    ]
    answers(monkeypatch, {"/prfaas/requests": {"requests": newest}})
    result = run(app, ["explain", "lost", "--gateway", "http://g"])
    assert result.exit_code == 1
    assert "http://g has no record of lost" in result.output
    assert result.output.index("n2") < result.output.index("n1")
    answers(monkeypatch, {"/prfaas/requests": {"requests": []}})
    result = run(app, ["explain", "lost", "--gateway", "http://g"])
    assert "it has served no request yet" in result.output


def test_a_gateway_that_does_not_answer_is_named() -> None:
    result = run(app, ["explain", "x", "--gateway", "http://127.0.0.1:1"])
    assert result.exit_code == 3
    assert "127.0.0.1:1" in result.output


def test_what_the_engines_measured_has_rows_of_its_own() -> None:
    made = record()
    made.waited_for_landing(3.2, 3.3)
    made.prefilled(msgspec.structs.replace(RESULT, engine_queue_s=0.5, open_s=0.02))
    made.loaded(LoadTimes(0.01, 0.02, 0.03))
    text = shown(made)
    # The predicted wait is that of the front and the engine together.
    assert row(text, "queue") == ["3.000", "0.500", "0.400", "-44%"]
    assert row(text, "engine's queue") == ["0.500"]
    assert row(text, "prefill ") == ["2.000", "2.000", "2.000", "+0%"]
    assert row(text, "open outbox") == ["0.020"]
    assert row(text, "decode slot") == ["0.000", "0.000", "0.010", "-100%"]
    assert row(text, "load") == ["0.020"]
    assert row(text, "first step") == ["0.010", "0.010", "0.030", "-67%"]
    assert row(text, "relay") == ["0.140"]
    whole = record(ttft_s=None)
    whole.waited_for_landing(3.2, 3.3)
    whole.loaded(LoadTimes(0.01, 0.02, 0.03))
    whole.first_byte(9.0, is_stream=False)
    assert row(shown(whole), "all further steps") == ["5.640"]
