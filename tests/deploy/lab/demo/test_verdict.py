"""What the demo holds a region's answers against, on records made up here."""

from dataclasses import replace
from typing import Any

import pytest

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import DemoRequest
from deploy.lab.demo.verdict import Row, judge, judge_shares

RIGHT = Answer(
    status=200, token_ids=[1, 2], num_prompt_tokens=5000, cached_tokens=0, request_id="r"
)
FAR = DemoRequest("long", "/v1/completions", 5000, 1, False, "prefill_cluster", 0)


def record(early: float = 0.95, tail_s: float = 0.1, **changes: Any) -> dict[str, Any]:
    found = {
        "route": "prefill_cluster",
        "reason": "above_threshold",
        "transfer_bytes": 1000,
        "transfer_s": 1.0,
        "sent_share_at_prefill_end": early,
        "parts": {"transfer_tail_s": tail_s},
    }
    return found | changes


def judged(*records: dict[str, Any]) -> list[Row]:
    rows = [judge("m", FAR, RIGHT, RIGHT, item) for item in records]
    judge_shares(rows)
    return rows


def test_a_good_transfer_passes() -> None:
    assert [row.failed_checks for row in judged(record())] == [[]]


@pytest.mark.parametrize(
    ("answer", "changes", "says"),
    [
        (Answer(token_ids=[1, 3], num_prompt_tokens=5000), {}, "tokens differ"),
        (Answer(error="503", num_prompt_tokens=5000), {}, "no whole answer: 503"),
        (RIGHT, {"route": "local"}, "route local"),
        (RIGHT, {"transfer_bytes": None}, "no KVCache"),
        (replace(RIGHT, cached_tokens=4999), {}, "usage says 4999 tokens cached"),
        (replace(RIGHT, cached_tokens=None), {}, "usage says None tokens cached"),
        (RIGHT, {"cached_tokens": 64}, "the prefill engine found 64"),
    ],
)
def test_each_request_is_checked(answer: Answer, changes: dict[str, Any], says: str) -> None:
    row = judge("m", FAR, answer, RIGHT, record(**changes))
    assert any(says in check for check in row.failed_checks)


def test_one_slow_transfer_of_three_is_the_machines() -> None:
    rows = judged(record(), record(early=0.4, tail_s=0.6), record())
    assert not any(row.failed_checks for row in rows)


def test_slow_transfers_in_the_median_fail_where_they_are_slow() -> None:
    rows = judged(record(early=0.5, tail_s=0.1), record(), record(early=0.4, tail_s=0.6))
    assert [len(row.failed_checks) for row in rows] == [1, 0, 1]
    assert "50% sent early, not 80%" in rows[0].failed_checks[0]
    rows = judged(record(tail_s=0.5), record(tail_s=0.3), record())
    assert rows[0].failed_checks == ["tail 50%, not at most 20%"]


def test_shares_that_nobody_measured_are_no_pass() -> None:
    assert judged(record(sent_share_at_prefill_end=None))[0].failed_checks
    cached = replace(RIGHT, cached_tokens=4000)
    row = judge("m", FAR, cached, RIGHT, record(cached_tokens=4000))
    judge_shares([row])
    assert row.failed_checks == ["no transfer of several chunks to look at"]
