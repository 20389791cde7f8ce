"""Makes the reports of transfers and of the prefix cache from their records.

Pure; it does not know who asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from kvmanager.agent.cache.part_bytes import StoreUse
from kvmanager.agent.cache.request_records import CacheUse
from kvmanager.agent.messages import CacheStatus, PrefixLeaf, TransferReport
from kvmanager.agent.transfer_io import OutboxProgress
from kvmanager.pool.records import ListedPrefix, PoolStatus, Tier
from kvmanager.pool.shape import PartKind
from kvmanager.transfers.records import LandingRecord, OutboxRecord, State
from transport import TransferProgress

ReportState = Literal["open", "complete", "failed", "cancelled", "expired"]

REPORT_STATE: Final[dict[State, ReportState]] = {
    State.RESERVED: "open",
    State.RECEIVING: "open",
    State.OPEN: "open",
    State.LANDED: "complete",
    State.CLAIMED: "complete",
    State.RELEASED: "complete",
    State.COMPLETE: "complete",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
}


def landing_report(landing: LandingRecord, progress: TransferProgress | None) -> TransferReport:
    """The report of a landing. `progress` None: no sender has come, or it was forgotten."""
    complete = REPORT_STATE[landing.state] == "complete"
    nbytes = landing.spec.nbytes
    # A receiver knows of no bytes before they arrive, so all three counts are this one.
    arrived = progress.acked_bytes if progress else 0
    return TransferReport(
        transfer_id=landing.spec.transfer_id.hex(),
        kind="landing",
        state=REPORT_STATE[landing.state],
        nbytes=nbytes,
        error=landing.error,
        ready_bytes=nbytes if complete else arrived,
        sent_bytes=nbytes if complete else arrived,
        acked_bytes=nbytes if complete else arrived,
        resent_bytes=progress.resent_bytes if progress else 0,
        opened_to_complete_s=_span(landing.opened_s, landing.ended_s) if complete else 0.0,
        hand_off="arena" if landing.is_filled_here else "transport",
    )


def outbox_report(outbox: OutboxRecord, known: OutboxProgress | None) -> TransferReport:
    """The report of an outbox. `known` None: it was never sent. If the prefill has not ended and
    the transfer is complete all the same, everything was sent before.
    """
    progress = known.transfer if known else None
    sent_at_prefill_end = known.sent_at_prefill_end if known else None
    complete = outbox.state is State.COMPLETE
    completed_s = progress.completed_s if progress and complete else None
    if sent_at_prefill_end is None:
        sent_at_prefill_end = outbox.spec.nbytes if complete else 0
    return TransferReport(
        transfer_id=outbox.spec.transfer_id.hex(),
        kind="outbox",
        state=REPORT_STATE[outbox.state],
        nbytes=outbox.spec.nbytes,
        error=outbox.error,
        ready_bytes=outbox.ready.total,
        sent_bytes=progress.sent_bytes if progress else 0,
        acked_bytes=progress.acked_bytes if progress else 0,
        resent_bytes=progress.resent_bytes if progress else 0,
        sent_bytes_at_prefill_end=sent_at_prefill_end,
        prefill_end_to_complete_s=_span(outbox.prefill_end_s, completed_s),
        opened_to_complete_s=_span(outbox.opened_s, completed_s),
        first_sent_to_complete_s=_span(progress.first_sent_s if progress else None, completed_s),
        wire_bytes=progress.wire_bytes if progress else 0,
        prefill_s=outbox.prefill_s,
        progress=tuple(outbox.marks),
        codecs=progress.codecs if progress else (),
        hand_off="arena" if outbox.fills_landing else "transport",
    )


def cache_status(
    pool: PoolStatus, use: CacheUse, store: StoreUse, num_promotions: int, block_bytes: int
) -> CacheStatus:
    """The prefix cache in numbers."""
    return CacheStatus(
        nbytes=_by_name(pool.nbytes),
        num_blocks=pool.num_blocks,
        pinned_bytes=pool.pinned_bytes,
        queries=use.queries,
        query_tokens=use.query_tokens,
        hit_tokens={tier.name.lower(): tokens for tier, tokens in use.hit_tokens.items()},
        evictions=_by_name(pool.evictions),
        arena_blocks_bytes=pool.num_arena_blocks * block_bytes,
        fills=use.fills,
        promotions=num_promotions,
        ssd_reads=store.ssd_reads,
        ssd_writes=store.ssd_writes,
        ssd_failures=store.ssd_failures,
        wrong_parts=store.wrong_parts,
    )


def cached_prefix(prefix: ListedPrefix) -> PrefixLeaf:
    """One line of a listing."""
    return PrefixLeaf(
        key=prefix.key.hex(),
        num_tokens=prefix.num_tokens,
        nbytes=_by_name(prefix.nbytes),
        hits=prefix.num_hits,
        idle_s=prefix.idle_s,
        branch_tokens=prefix.branch_tokens,
        resumable_tokens=prefix.resumable_tokens,
        pinned=prefix.is_pinned,
    )


def _by_name(numbers: Mapping[tuple[Tier, PartKind], int]) -> dict[str, int]:
    return {f"{tier.name}/{kind.name}".lower(): n for (tier, kind), n in numbers.items()}


def _span(begin_s: float | None, end_s: float | None) -> float:
    return max(0.0, end_s - begin_s) if begin_s is not None and end_s is not None else 0.0
