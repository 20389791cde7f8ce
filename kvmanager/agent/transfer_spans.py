"""The spans of transfers: what an agent tells traces of both ends, and of the load at an engine.

They have the numbers of the reports that fronts get. It does not know where spans go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvmanager.agent.messages import TransferReport
from kvmanager.load_times import LoadTimes
from kvmanager.tracing.spans import Attributes, AttributeValue, begin
from kvmanager.transfers.records import EnginePeer, LandingRecord, OutboxRecord

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer


class TransferSpans:
    """Records ends of transfers that are over. Without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None, retransmitted_bytes: Callable[[bytes], int]) -> None:
        """`retransmitted_bytes`: those of TCP on the link of an outbox."""
        self._tracer = tracer
        self._retransmitted_bytes = retransmitted_bytes
        self._before: dict[bytes, int] = {}
        """What TCP had sent again when an outbox was opened."""

    def opened(self, outbox: OutboxRecord) -> None:
        """An outbox begins to be sent."""
        spec = outbox.spec
        if begin(self._tracer, "transfer", spec.traceparent, outbox.opened_s).is_recorded:
            self._before[spec.transfer_id] = self._retransmitted_bytes(spec.transfer_id)

    def sent(self, outbox: OutboxRecord, report: TransferReport) -> None:
        """An outbox is over: complete, or without success."""
        span = begin(self._tracer, "transfer", outbox.spec.traceparent, outbox.opened_s)
        if not span.is_recorded:
            return
        ended_s = outbox.opened_s if outbox.ended_s is None else outbox.ended_s
        if is_complete := report.state == "complete":
            ended_s = outbox.opened_s + report.opened_to_complete_s
        events = []
        if is_complete and report.first_sent_to_complete_s:
            events.append(("first_sent", ended_s - report.first_sent_to_complete_s))
        if outbox.prefill_end_s is not None:
            events.append(("prefill_end", outbox.prefill_end_s))
        attributes: dict[str, AttributeValue] = {
            "prfaas.transfer_id": report.transfer_id,
            "prfaas.bytes": report.nbytes,
            "prfaas.acked_bytes": report.acked_bytes,
            "prfaas.wire_bytes": report.wire_bytes,
            # Sent again after a connection was lost.
            "prfaas.resent_bytes": report.resent_bytes,
            "prfaas.sent_bytes_at_prefill_end": report.sent_bytes_at_prefill_end,
            "prfaas.codecs": ",".join(report.codecs),
            "prfaas.hand_off": report.hand_off,
        }
        before_bytes = self._before.pop(outbox.spec.transfer_id, None)
        if before_bytes is not None:
            # Transfers share connections, so it is what the link lost meanwhile.
            lost_bytes = self._retransmitted_bytes(outbox.spec.transfer_id) - before_bytes
            attributes["prfaas.link_retransmitted_bytes"] = max(0, lost_bytes)
        span.end(ended_s, attributes, error="" if is_complete else report.state, events=events)

    def landed(self, landing: LandingRecord, report: TransferReport) -> None:
        """A landing has every byte, or is over without."""
        span = begin(self._tracer, "landing", landing.spec.traceparent, landing.opened_s)
        if not span.is_recorded or landing.ended_s is None:
            return
        attributes: Attributes = {
            "prfaas.transfer_id": report.transfer_id,
            "prfaas.bytes": report.nbytes,
            "prfaas.acked_bytes": report.acked_bytes,
            "prfaas.resent_bytes": report.resent_bytes,
            "prfaas.cached_tokens": landing.spec.cached_tokens,
            "prfaas.hand_off": report.hand_off,
        }
        error = "" if report.state == "complete" else report.state
        span.end(landing.ended_s, attributes, error=error)

    def loaded(
        self, landing: LandingRecord, peer: EnginePeer, times: LoadTimes, now_s: float
    ) -> None:
        """A worker of an engine has just taken its first step with the landing's KVCache.

        Nothing is recorded if another engine, or none, has owned the landing.
        """
        if landing.owner != peer.engine:
            return
        attributes: Attributes = {"prfaas.instance": peer.instance, "prfaas.rank": peer.rank}
        loaded_s = now_s - times.first_step_s
        began_s = loaded_s - times.load_s
        for name, from_s, until_s in (
            ("load_wait", began_s - times.wait_s, began_s),
            ("load", began_s, loaded_s),
            ("first_step", loaded_s, now_s),
        ):
            span = begin(self._tracer, name, landing.spec.traceparent, from_s)
            span.end(until_s, attributes)
