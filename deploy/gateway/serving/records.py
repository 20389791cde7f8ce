"""What happened to a request: a record that fills up.

Only `serving.exchange` fills records. This file does not know HTTP. Time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.serving.ttft_parts import LegTimes, TtftParts, spread
from kvmanager.load_times import LoadTimes
from local_pd.messages import DecodeSlot
from prfaas.encoding.values import EncodeDone
from prfaas.jobs import PrefillResult
from scheduler.live.media_travel import MediaTravel
from scheduler.routing.decision import Decision, Number, RequestShape
from scheduler.routing.short_term import RouteDecision

Outcome = Literal[
    "open",
    "ok",
    "client_gone",
    "engine_error",  # the engine answered with an error, which the client got
    "engine_lost",  # the engine broke off after its answer had begun
    "refused",  # a limit or the load forbade it: no engine got the request
    "failed",  # the gateway answered with an error of its own
]


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request from arrival to end. `started_s` is wall-clock; all other times are durations.

    `is_settled` turns true when both legs are over and nothing will change any more.
    `num_prompt_tokens` is None for a prompt that was too short to be counted. `adapter` is the LoRA
    adapter of `model` that computed it, "" for none.

    `error_code` is the stable word of an error that the gateway answered itself, like
    `prefill_unavailable`; `reason` then says why no prefill cluster could take the prompt.

    `home` is the PD cluster that the request belongs to, `cluster` the one that decodes it, and
    `spill` why that is another one, "" where it is its home.

    `first_*` is the decision at arrival; the fields without a prefix are the latest one.
    `predicted_ttft_s` is what the first one was expected to take, and `predictions` has the parts
    of that for the side that was taken and for the other one ("local", "remote"). They are None and
    empty for a prompt that was not counted. `numbers` has the finite numbers of the decision, and
    `cache_move` what it says of a longer cached prefix in another cluster, "" if there is none.
    `media_travel` compares what crosses the link for media with their embeddings.

    `local_cached_tokens`, `prefill_cached_tokens` (by cluster) and `landing_cached_tokens` are what
    was known to be cached when the route was chosen, None and empty without a look-up. The last one
    becomes what the landing really built on; because of it `saved_bytes` were not sent.
    `cached_tokens` is what the prefill engine found cached, and `num_prefill_attempts` how many
    instances of its cluster were tried. `decode_reason` is why the PD cluster chose the instance.
    `hand_off` is the way of the KVCache from one engine to the other (`PrefillResult.hand_off`).
    `media` counts the images and other media that instances encode for others, by what became of
    them (`scheduler.encoding.values.EncodeReason`).

    `landing_wait_s` runs from the start of the prefill leg until the decode request is posted or
    the wait is given up. It covers queue, prefill and transfer, so it is no part of the TTFT beside
    those. `decode_posted_s` is when the decode engine was asked, in seconds after arrival. `leg`
    and `load_times` are what both engines say, of which `parts` is made. `transfer_progress` has,
    in seconds after the prefill engine was asked, the bytes of KVCache that were computed and those
    that were on the wire. `output_tokens` is what the engine reports, or the number of events in a
    stream.
    """

    request_id: str
    started_s: float
    endpoint: Kind
    model: str = ""
    adapter: str = ""
    trace_id: str = ""
    num_prompt_tokens: int | None = None
    home: str = ""
    cluster: str = ""
    spill: str = ""
    first_route: str = ""
    first_target: str = ""
    first_reason: str = ""
    first_cluster: str = ""
    route: str = ""
    target: str = ""
    reason: str = ""
    numbers: Mapping[str, Number] = {}
    cache_move: str = ""
    media_travel: MediaTravel | None = None
    predicted_ttft_s: float | None = None
    predictions: dict[str, dict[str, float]] = {}
    tenant: str = ""
    is_stream: bool = False
    status: int = 0
    outcome: Outcome = "open"
    error: str = ""
    error_code: str = ""
    num_retries: int = 0
    prefill_instance: str = ""
    num_prefill_attempts: int = 0
    decode_instance: str = ""
    decode_reason: str = ""
    prefill_error: str = ""
    landing_wait_s: float | None = None
    decode_posted_s: float | None = None
    transfer_bytes: int | None = None
    transfer_s: float | None = None
    transfer_progress: tuple[tuple[float, int, int], ...] = ()
    sent_share_at_prefill_end: float | None = None
    hand_off: str = ""
    media: dict[str, int] = {}
    cached_tokens: int | None = None
    local_cached_tokens: int | None = None
    prefill_cached_tokens: dict[str, int] = {}
    landing_cached_tokens: int | None = None
    saved_bytes: int | None = None
    answer_bytes: int = 0
    output_tokens: int = 0
    placement: str = ""
    ttft_s: float | None = None
    total_s: float | None = None
    leg: LegTimes | None = None
    load_times: LoadTimes | None = None
    parts: TtftParts = msgspec.field(default_factory=TtftParts)
    is_settled: bool = False

    def decided(self, decision: Decision, spill: str = "") -> None:
        """Note the route that is taken now, and why not in the request's home."""
        # The first route stays, and so does its prediction: later ones do not begin at arrival.
        if not self.first_route:
            self.first_route, self.first_target = decision.route, decision.target
            self.first_reason, self.first_cluster = decision.reason.value, decision.pd
            if self.num_prompt_tokens is not None and isinstance(decision, RouteDecision):
                self._predicted(decision)
        self.cluster, self.spill = decision.pd, spill
        self.route = decision.route
        self.target = decision.target
        self.reason = decision.reason.value
        if isinstance(decision, RouteDecision):
            self.cache_move = str(decision.move) if decision.move.source else ""
        # A place that cannot serve the request has an infinite prediction, which JSON cannot
        # express.
        self.numbers = {
            name: value for name, value in decision.numbers.items() if math.isfinite(value)
        }

    def _predicted(self, decision: RouteDecision) -> None:
        sides = {"local": decision.local, "remote": decision.remote}
        self.predictions = {
            side: {name: round(value, 6) for name, value in found.parts().items()}
            for side, found in sides.items()
            if found is not None and found.ttft_s < math.inf
        }
        if decision.predicted is not None and decision.predicted.ttft_s < math.inf:
            self.predicted_ttft_s = decision.predicted.ttft_s

    def looked_up(self, shape: RequestShape) -> None:
        """Note what is known to be cached."""
        self.local_cached_tokens = shape.local_cached_tokens
        self.prefill_cached_tokens = dict(shape.prefill_cached_tokens)
        self.landing_cached_tokens = shape.landing_cached_tokens

    def reserved(self, slot: DecodeSlot, saved_bytes: int) -> None:
        """Note what the landing builds on."""
        # Without a look-up nothing was known to be cached, and nothing is claimed to be saved.
        if self.local_cached_tokens is not None:
            self.landing_cached_tokens = slot.landing.cached_tokens
            self.saved_bytes = saved_bytes

    def prefilled(self, result: PrefillResult) -> None:
        """Note the report of the prefill leg."""
        self.prefill_instance = result.instance
        self.num_prefill_attempts = result.num_attempts
        self.placement = result.reason
        self.transfer_bytes = result.nbytes
        self.transfer_s = result.transfer_s
        self.sent_share_at_prefill_end = result.sent_share_at_prefill_end
        self.hand_off = result.hand_off
        self.cached_tokens = result.cached_tokens
        self.transfer_progress = result.progress
        self.leg = LegTimes(
            queue_s=result.queue_s,
            open_s=result.open_s,
            prefill_s=result.prefill_s,
            engine_queue_s=result.engine_queue_s,
            transfer_tail_s=result.transfer_tail_s,
            encode_s=result.encode_s if result.media else None,
        )
        self.media = dict(result.media)
        self._spread()

    def encoded(self, done: EncodeDone, encode_s: float) -> None:
        """Note what became of the media of a request that one engine serves whole."""
        self.media = dict(done.media)
        self.parts.encode_s = encode_s

    def waited_for_landing(self, wait_s: float, now_s: float) -> None:
        """Note the end of the wait for the KVCache, `now_s` after arrival: the decode engine is
        asked next.
        """
        self.landing_wait_s, self.decode_posted_s = wait_s, now_s

    def loaded(self, times: LoadTimes) -> None:
        """Note what the decode engine says of its load and its first step."""
        self.load_times = times
        self._spread()

    def first_byte(self, ttft_s: float, *, is_stream: bool) -> None:
        """Note that the answer's first byte was there `ttft_s` after arrival."""
        self.ttft_s = ttft_s
        self.is_stream = is_stream
        self._spread()

    def ended(
        self,
        outcome: Outcome,
        *,
        status: int | None = None,
        error: str = "",
        error_code: str = "",
        nbytes: int = 0,
        output_tokens: int = 0,
    ) -> None:
        """Note how the answer ended. `status` is given where it is not the engine's."""
        if status is not None:
            self.status = status
        self.outcome, self.error, self.error_code = outcome, error, error_code
        self.answer_bytes, self.output_tokens = nbytes, output_tokens

    def _spread(self) -> None:
        if self.ttft_s is None:
            return
        spread(
            self.parts,
            self.ttft_s,
            is_stream=self.is_stream,
            leg=self.leg,
            landing_wait_s=self.landing_wait_s,
            decode_posted_s=self.decode_posted_s,
            load_times=self.load_times,
        )
