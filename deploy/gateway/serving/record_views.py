"""A request's record as response headers for its client, as a line of the log, and as attributes of
its span.
"""

from __future__ import annotations

import logging

from deploy.gateway.intake.endpoints import ENDPOINTS
from deploy.gateway.serving.records import RequestRecord
from kvmanager.tracing.spans import Attributes

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


def span_attributes(record: RequestRecord) -> Attributes:
    """The attributes of the request's span, by OpenTelemetry's conventions for generative AI where
    they have a name, without the prompt and the answer. `prfaas.ttft.*` are the parts of the TTFT
    that `prfaas explain` shows, each measured by one process's clock, in seconds.
    """
    parts = {f"prfaas.ttft.{name}": seconds for name, seconds in record.parts.known().items()}
    known = {
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        # What is not streamed has no first chunk before its last one.
        "gen_ai.response.time_to_first_chunk": record.ttft_s if record.is_stream else None,
        "prfaas.cached_tokens": record.cached_tokens,
        "prfaas.transfer_bytes": record.transfer_bytes,
        "prfaas.saved_bytes": record.saved_bytes,
        "prfaas.predicted_ttft": record.predicted_ttft_s,
        "prfaas.ttft": record.ttft_s,
        **parts,
    }
    words = {
        "gen_ai.output.type": "text",
        "prfaas.route": record.route,
        "prfaas.reason": record.reason,
        "prfaas.target": record.target,
        "prfaas.cluster": record.cluster,
        "prfaas.spill": record.spill,
        "prfaas.instance": record.decode_instance,
        "prfaas.prefill_instance": record.prefill_instance,
        "prfaas.hand_off": record.hand_off,
        "prfaas.adapter": record.adapter,
        "prfaas.tenant": record.tenant,
        "prfaas.outcome": record.outcome,
    }
    return {
        "gen_ai.operation.name": ENDPOINTS[record.endpoint].operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "http.response.status_code": record.status,
        "prfaas.request_id": record.request_id,
        "prfaas.num_retries": record.num_retries,
        **{name: value for name, value in known.items() if value is not None},
        **{name: value for name, value in words.items() if value},
    }


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
