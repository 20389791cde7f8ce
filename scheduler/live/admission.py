"""Whether a request is let in: it is refused before it costs anything, or served.

Load has two sides (Mooncake 7.1). The load of the prefill side is the predicted time to first token
over its objective. The load of the decode side is occupied over available slots, or KVCache over
memory where that is more. A slot is a place in a batch that keeps the time per token within its
objective.

Three policies differ in the moment whose decode load counts:

- `predicted` (Mooncake 7.4): the moment when the request would begin to decode. Requests in prefill
  that land by then are added, and decodes that end by then are taken away. Every decode is taken to
  last `decode_s`; before any answer has ended that is unknown, and no decode counts as ended. Early
  rejection on the present load lags by the length of a prefill, so that prefill and decode load
  swing against each other. This policy avoids that.
- `present` (7.2): now, before the prefill begins. It is there for comparison.
- `at_decode`: none. `admit_decode` asks once the prefill is over, and what it refuses was prefilled
  in vain. It is a baseline for `prfaas simulate`; no gateway can be set to it.

While nothing decodes, waits to decode or is under way, nothing is refused unless there is no slot.
Tenants have limits of their own (`scheduler.live.tenants`), which hold at any load. A refusal says
when to try again, which is when the same prediction expects room.

Pure; knows no HTTP and no clock. The numbers of a verdict are what it rests on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from scheduler.live.tenants import TenantLedger
from scheduler.routing.prediction import Prediction, release_s
from scheduler.routing.views import DecodeView


class AdmissionPolicy(StrEnum):
    """The moment whose decode load counts, as described above."""

    PREDICTED = "predicted"
    PRESENT = "present"
    AT_DECODE = "at_decode"


class AdmissionReason(StrEnum):
    """Why a request was let in or refused. Values are stable: they are metric labels."""

    ADMITTED = "admitted"
    EMPTY = "empty"
    """No other request is there, so load cannot be a reason."""
    PREFILL_LOAD = "prefill_load"
    DECODE_LOAD = "decode_load"
    DECODE_MEMORY = "decode_memory"
    NO_DECODE_SLOTS = "no_decode_slots"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    TENANT_RATE = "tenant_rate"


MAX_MEMORY_SHARE: Final = 0.97
"""The rest of the decode memory is for errors of prediction: who finds none there is preempted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """The highest load that admission allows.

    A share of the decode slots is rounded up to whole slots, one above 1 down. Above 1 requests
    wait, so that a slot that falls free is taken at once: 1.05 lets one wait for each 20 slots.
    """

    policy: AdmissionPolicy = AdmissionPolicy.PREDICTED
    ttft_slo_s: float | None = None
    """A request is refused if its first token is predicted later than this, seconds. Left out: no
    request is refused because of a long queue.
    """
    max_prefill_load: float = 0.75
    """The share of `ttft_slo_s` within which the first token must be predicted. The rest is for
    shorter prompts that come later and overtake.
    """
    max_decode_load: float = 1.05
    """The share of the decode slots that may be taken, and of their memory, of which it is at most
    0.97. Above 1 requests wait.
    """
    min_retry_s: float = 1.0
    """The least Retry-After of a refusal, seconds."""
    max_retry_s: float = 60.0
    """The greatest Retry-After of a refusal, seconds."""

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "max_prefill_load", "max_decode_load", "min_retry_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}; it must be above 0")
        if self.max_retry_s < self.min_retry_s:
            raise ValueError(
                f"max_retry_s {self.max_retry_s!r} is below min_retry_s {self.min_retry_s!r}"
            )


class AdmissionRequest(msgspec.Struct, frozen=True):
    """A request as admission sees it.

    `prediction` is the prediction for the route it would take, `kv_bytes` its KVCache while it
    decodes, and `num_tokens` the tokens that count for its tenant.
    """

    prediction: Prediction
    kv_bytes: float = 0.0
    num_tokens: int = 0
    tenant: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """Let in or refused, why, and after how many whole seconds to try again (0 when let in)."""

    admitted: bool
    reason: AdmissionReason
    retry_after_s: int = 0
    numbers: Mapping[str, int | float] = MappingProxyType({})

    def __str__(self) -> str:
        return str(self.reason) + "".join(f"; {key}={value}" for key, value in self.numbers.items())


class DecodeLoad(msgspec.Struct, frozen=True):
    """A decode pool at one moment: the requests that decode or wait to, and their KVCache."""

    occupied: int
    kv_bytes: float


def decode_load_at(decode: DecodeView, at_s: float) -> DecodeLoad:
    """The load at `at_s` from now if no other request is let in; 0 gives the present load.

    The KVCache of decoding requests, and that of requests under way, counts in equal parts for each
    request.
    """
    ended = _num_ended(decode, at_s)
    landed = bisect_right(decode.landing_s, at_s)
    over = 0
    if at_s > 0 and decode.decode_s is not None:
        # A request that lands and ends before that moment is gone again.
        over = bisect_right(decode.landing_s, at_s - decode.decode_s)
    held = decode.slots_used + decode.num_waiting
    left_share = (held - ended) / held if held else 0.0
    landed_share = (landed - over) / len(decode.landing_s) if decode.landing_s else 0.0
    return DecodeLoad(
        held - ended + landed - over,
        decode.kv_bytes * left_share + decode.landing_kv_bytes * landed_share,
    )


def admit(
    request: AdmissionRequest,
    decode: DecodeView,
    config: AdmissionConfig,
    now_s: float,
    tenants: TenantLedger | None = None,
) -> Verdict:
    """Decide before the prefill. Changes nothing: the caller tells `tenants` what was let in."""
    # Tenants first: their limits hold at any load, also in an empty region.
    verdict = tenant_refusal(request, decode, config, now_s, tenants)
    if verdict is not None:
        return verdict
    if decode.slots_total <= 0:
        return _refused(AdmissionReason.NO_DECODE_SLOTS, config.max_retry_s, config, {})
    # With nothing else there, no wait would make room: a refusal would hold for ever.
    if decode.is_empty and not request.prediction.queue_s:
        return Verdict(True, AdmissionReason.EMPTY)
    verdict = _prefill_verdict(request, config)
    if verdict is not None or config.policy is AdmissionPolicy.AT_DECODE:
        return verdict or Verdict(True, AdmissionReason.ADMITTED)
    is_predicted = config.policy is AdmissionPolicy.PREDICTED
    at_s = request.prediction.landed_s if is_predicted else 0.0
    return _decode_verdict(request.kv_bytes, decode, config, at_s)


def tenant_refusal(
    request: AdmissionRequest,
    decode: DecodeView,
    config: AdmissionConfig,
    now_s: float,
    tenants: TenantLedger | None,
) -> Verdict | None:
    """The refusal of a request that would break a limit of its tenant, or None.

    It does not depend on load. Of `config` it uses only the bounds of Retry-After.
    """
    if tenants is None:
        return None
    refusal = tenants.refusal(request.tenant, request.num_tokens, now_s)
    if refusal is None:
        return None
    retry_s = refusal.retry_after_s
    if retry_s is None:
        # One of the tenant's own requests must end. Their ends are spread over the time that a
        # request takes. There is at least one, or no limit of requests in flight would be
        # reached.
        requests, _ = tenants.in_flight(request.tenant)
        retry_s = (request.prediction.landed_s + (decode.decode_s or 0.0)) / requests
    return _refused(AdmissionReason(refusal.reason.value), retry_s, config, dict(refusal.numbers))


def admit_decode(kv_bytes: float, decode: DecodeView, config: AdmissionConfig) -> Verdict:
    """Decide when the prefill is over, on the present load.

    Only the simulator asks, for its baseline `at_decode`. `decode` does not count this request
    among those that wait.
    """
    if decode.slots_total <= 0:
        return _refused(AdmissionReason.NO_DECODE_SLOTS, config.max_retry_s, config, {})
    if not decode.slots_used and not decode.num_waiting:
        return Verdict(True, AdmissionReason.EMPTY)
    return _decode_verdict(kv_bytes, decode, config, 0.0)


def _prefill_verdict(request: AdmissionRequest, config: AdmissionConfig) -> Verdict | None:
    """A refusal if waiting makes the first token too late, else None.

    A prompt that would be too late without any waiting is not refused for that, because trying
    again would not help. It may wait for as long as the objective.
    """
    if config.ttft_slo_s is None:
        return None
    prediction = request.prediction
    queue_s, move_s, prefill_s, tail_s, slot_s, step_s, overhead_s, others_s, _, encode_s = (
        prediction
    )
    limit_s = config.ttft_slo_s * config.max_prefill_load
    # The tail is nearly all a wait for what others send, since layers leave during the prefill.
    wait_s = queue_s + tail_s + slot_s
    spare_s = limit_s - (move_s + prefill_s + step_s + overhead_s + others_s + encode_s)
    over_s = wait_s - (spare_s if spare_s > 0 else limit_s)
    if over_s <= 0:
        return None
    numbers = {
        "ttft_s": prediction.ttft_s,
        "ttft_slo_s": config.ttft_slo_s,
        "prefill_load": prediction.ttft_s / config.ttft_slo_s,
        "queue_s": queue_s,
    }
    return _refused(AdmissionReason.PREFILL_LOAD, over_s, config, numbers)


def _decode_verdict(
    kv_bytes: float, decode: DecodeView, config: AdmissionConfig, at_s: float
) -> Verdict:
    load = decode_load_at(decode, at_s)
    wanted = config.max_decode_load * decode.slots_total
    limit = math.ceil(wanted) if config.max_decode_load <= 1 else math.floor(wanted)
    numbers: dict[str, int | float] = {
        "at_s": at_s,
        "decode_load": (load.occupied + 1) / decode.slots_total,
        "occupied": load.occupied,
        "slots": decode.slots_total,
    }
    too_many = load.occupied + 1 - limit
    # One slot falls free for each decode that ends, so the wait is until `too_many` have ended.
    if too_many > 0:
        retry_s = release_s(decode, too_many)
        return _refused(AdmissionReason.DECODE_LOAD, retry_s, config, numbers)
    if decode.kv_total_bytes is not None and load.kv_bytes > 0:
        numbers |= {"kv_bytes": load.kv_bytes + kv_bytes, "kv_total_bytes": decode.kv_total_bytes}
        share = min(config.max_decode_load, MAX_MEMORY_SHARE)
        too_much = load.kv_bytes + kv_bytes - decode.kv_total_bytes * share
        if too_much > 0:
            # `occupied` counts all holders of memory, so it is not 0 here. When all of them have
            # ended nothing more comes free.
            each = load.kv_bytes / load.occupied
            retry_s = release_s(decode, math.ceil(min(too_much / each, load.occupied)))
            return _refused(AdmissionReason.DECODE_MEMORY, retry_s, config, numbers)
    return Verdict(True, AdmissionReason.ADMITTED, numbers=MappingProxyType(numbers))


def _num_ended(decode: DecodeView, at_s: float) -> int:
    """How many of the requests that decode or wait now have ended at a later moment.

    Waiting requests begin when a slot falls free. So none of them ends within one decode time, and
    together they end at most as fast as full batches allow. While nobody knows how long a decode
    takes, none counts as ended.
    """
    if at_s <= 0:
        return 0
    rounds = _num_rounds(decode.decode_s, at_s)
    of_running = int(decode.slots_used * min(1.0, rounds))
    of_waiting = int(min(decode.num_waiting, decode.slots_total * max(0.0, rounds - 1)))
    return of_running + of_waiting


def _num_rounds(decode_s: float | None, at_s: float) -> float:
    """How many decodes in a row one slot completes until `at_s`."""
    if decode_s is None:
        return 0.0
    return at_s / decode_s if decode_s > 0 else math.inf


def _refused(
    reason: AdmissionReason,
    retry_s: float,
    config: AdmissionConfig,
    numbers: dict[str, int | float],
) -> Verdict:
    bounded_s = min(max(retry_s, config.min_retry_s), config.max_retry_s)
    return Verdict(False, reason, math.ceil(bounded_s), MappingProxyType(numbers))
