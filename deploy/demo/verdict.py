"""Holds a region's answers against a single engine's and against what the design promises.

Pure: takes answers and the gateway's records, gives rows with the checks that failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.demo.answers import Answer
from deploy.demo.scenario import CHUNK_TOKENS, DemoRequest

MIN_CHUNKS = 4
MIN_EARLY_SHARE = 0.8
"""Share of a transfer's bytes on the wire when prefill ends, for prompts of MIN_CHUNKS or more."""
MAX_TAIL_SHARE = 0.2
"""Share of a transfer's duration after the end of prefill, likewise."""


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
    failed_checks: list[str] = field(default_factory=list)


def judge(
    model: str,
    request: DemoRequest,
    answer: Answer,
    expected: Answer,
    record: Mapping[str, Any] | None,
) -> Row:
    """`record` is the gateway's record of the request (GET /prfaas/requests), None if missing."""
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
    row.failed_checks = _failed_checks(row, request, answer, expected, record.get("cached_tokens"))
    return row


def _tail_share(record: Mapping[str, Any]) -> float | None:
    duration_s = record.get("transfer_s")
    tail_s = record.get("parts", {}).get("transfer_tail_s")
    return tail_s / duration_s if duration_s and tail_s is not None else None


def _failed_checks(
    row: Row, request: DemoRequest, answer: Answer, expected: Answer, cached_tokens: int | None
) -> list[str]:
    failed = []
    if answer.error:
        failed.append(f"no whole answer: {answer.error}")
    if expected.error:
        failed.append(f"no reference answer: {expected.error}")
    if not row.tokens_equal:
        failed.append("tokens differ from the single engine's")
    if row.route != request.route:
        failed.append(f"route {row.route}, expected {request.route}")
    if request.route != "prefill_cluster":
        return failed
    if not row.transfer_bytes:
        failed.append("no KVCache was transferred")
    num_computed = row.num_prompt_tokens - (cached_tokens or 0)
    if num_computed < MIN_CHUNKS * CHUNK_TOKENS or not request.alone:
        return failed  # the shares are promised for a prompt of several chunks on an idle link
    if row.early_share is None or row.early_share < MIN_EARLY_SHARE:
        failed.append(f"share sent before prefill ended {row.early_share}, not {MIN_EARLY_SHARE}")
    if row.tail_share is None or row.tail_share > MAX_TAIL_SHARE:
        failed.append(f"tail share {row.tail_share}, not at most {MAX_TAIL_SHARE}")
    return failed
