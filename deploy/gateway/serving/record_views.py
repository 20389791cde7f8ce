"""A request's record as response headers for its client, and as a line of the log."""

from __future__ import annotations

import logging

from deploy.gateway.serving.records import RequestRecord

logger = logging.getLogger("prfaas.deploy.gateway")


def response_headers(record: RequestRecord) -> dict[str, str]:
    """What a response says of how its request was served."""
    headers = {"x-request-id": record.request_id}
    if record.route:
        numbers = "".join([f"; {key}={value}" for key, value in record.numbers.items()])
        headers["x-prfaas-route"] = record.route
        headers["x-prfaas-reason"] = record.reason + numbers
        headers["x-prfaas-cluster"] = record.cluster
    if record.spill:
        headers |= {"x-prfaas-home": record.home, "x-prfaas-spill": record.spill}
    if record.local_cached_tokens is not None:
        # The chosen prefill cluster counts, or else the one with most tokens.
        by_cluster = record.prefill_cached_tokens
        prefill_tokens = by_cluster.get(record.target, max(by_cluster.values(), default=0))
        headers["x-prfaas-cached-tokens"] = (
            f"local={record.local_cached_tokens}, prefill={prefill_tokens}, "
            f"landing={record.landing_cached_tokens}"
        )
    if record.transfer_bytes is not None:
        headers["x-prfaas-transfer-bytes"] = str(record.transfer_bytes)
    if record.ttft_s is not None:
        parts = record.parts.known().items()
        headers["x-prfaas-ttft"] = ", ".join(f"{name}={value:.6f}" for name, value in parts)
    return headers


def log_record(record: RequestRecord) -> None:
    """Log a request that is over, at a level by its outcome."""
    level = logging.INFO if record.outcome in ("ok", "client_gone") else logging.WARNING
    if logger.isEnabledFor(level):
        logger.log(
            level,
            "%s route=%s target=%s reason=%s status=%d outcome=%s ttft_s=%s total_s=%.3f %s",
            record.endpoint,
            record.route,
            record.target,
            record.reason,
            record.status,
            record.outcome,
            None if record.ttft_s is None else f"{record.ttft_s:.3f}",
            record.total_s or 0.0,
            record.error,
        )
