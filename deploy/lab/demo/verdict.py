"""Compares a region's answers with a single engine's, and with what the design promises.

Pure: it takes answers and the gateway's records, and returns rows with the checks that failed.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.lab.demo.answers import Answer
from deploy.lab.demo.scenario import CHUNK_TOKENS, DemoRequest

MIN_CHUNKS = 4
MIN_EARLY_SHARE = 0.8
"""The least share of a transfer's bytes on the wire when the prefill ends, for MIN_CHUNKS or
more.
"""
MAX_TAIL_SHARE = 0.2
"""The largest share of a transfer's duration after the end of the prefill, for the same prompts.

Both are compared with the median of a model's transfers. On a machine where engines, agents and the
link share two cores, one of them has to wait now and then.
"""


@dataclass(slots=True)
class Row:
    """One request of the demo's table. Bytes, seconds, shares 0..1; None: does not apply."""

    model: str
    request: str
    num_prompt_tokens: int
    route: str
    reason: str
    transfer_bytes: int | None
    early_share: float | None
    tail_share: float | None
    ttft_s: float
    parts_s: Mapping[str, float]
    tokens_equal: bool
    shares_count: bool = False
    """Whether the shares are promised: a prompt of several chunks, alone on a link in use."""
    failed_checks: list[str] = field(default_factory=list)


def judge(
    model: str,
    request: DemoRequest,
    answer: Answer,
    expected: Answer,
    record: Mapping[str, Any] | None,
) -> Row:
    """One row. `record` is the gateway's record (GET /prfaas/requests), None if it is missing."""
    record = record or {}
    parts = {
        name.removesuffix("_s"): value
        for name, value in record.get("parts", {}).items()
        if value is not None
    }
    row = Row(
        model=model,
        request=request.name,
        num_prompt_tokens=answer.num_prompt_tokens,
        route=record.get("route", "?"),
        reason=record.get("reason", "?"),
        transfer_bytes=record.get("transfer_bytes"),
        early_share=record.get("sent_share_at_prefill_end"),
        tail_share=_tail_share(record),
        ttft_s=answer.ttft_s,
        parts_s=parts,
        tokens_equal=bool(answer.token_ids) and answer.token_ids == expected.token_ids,
    )
    num_computed = row.num_prompt_tokens - (record.get("cached_tokens") or 0)
    row.shares_count = (
        request.alone
        and request.route == "prefill_cluster"
        and num_computed >= MIN_CHUNKS * CHUNK_TOKENS
    )
    row.failed_checks = _failed_checks(row, request, answer, expected)
    found = record.get("cached_tokens") or 0
    if row.route == "prefill_cluster" and answer.cached_tokens != found:
        said = f"usage says {answer.cached_tokens} tokens cached"
        row.failed_checks.append(f"{said}, the prefill engine found {found}")
    return row


def judge_shares(rows: Sequence[Row]) -> None:
    """Note in one model's rows if its transfers did not overlap their prefills as promised."""
    counted = [row for row in rows if row.shares_count]
    # A check without anything to check would always hold.
    if not counted:
        rows[0].failed_checks.append("no transfer of several chunks to look at")
        return
    early = [row.early_share or 0.0 for row in counted]
    tail = [1.0 if row.tail_share is None else row.tail_share for row in counted]
    if statistics.median(early) < MIN_EARLY_SHARE:
        for row, share in zip(counted, early, strict=True):
            if share < MIN_EARLY_SHARE:
                row.failed_checks.append(f"{share:.0%} sent early, not {MIN_EARLY_SHARE:.0%}")
    if statistics.median(tail) > MAX_TAIL_SHARE:
        for row, share in zip(counted, tail, strict=True):
            if share > MAX_TAIL_SHARE:
                row.failed_checks.append(f"tail {share:.0%}, not at most {MAX_TAIL_SHARE:.0%}")


def _tail_share(record: Mapping[str, Any]) -> float | None:
    duration_s = record.get("transfer_s")
    tail_s = record.get("parts", {}).get("transfer_tail_s")
    return tail_s / duration_s if duration_s and tail_s is not None else None


def _failed_checks(row: Row, request: DemoRequest, answer: Answer, expected: Answer) -> list[str]:
    failed = []
    if answer.error:
        failed.append(f"no whole answer: {answer.error}")
    if expected.error:
        failed.append(f"no reference answer: {expected.error}")
    if not row.tokens_equal:
        failed.append("tokens differ from the single engine's")
    if row.route != request.route:
        failed.append(f"route {row.route}, expected {request.route}")
    if request.route == "prefill_cluster" and not row.transfer_bytes:
        failed.append("no KVCache was transferred")
    return failed
