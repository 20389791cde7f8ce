"""What all steps of a request share: the request itself, its record, and the gateway's services.

A step that learns something about the request tells its `Exchange`, which alone fills the record
and counts the metrics. This file does not know how requests are routed or relayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from deploy.gateway.cache.cached_prompt import CachePlaces
from deploy.gateway.cache.placement import PrefixPlacement
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.config import TimeoutConfig
from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import ENDPOINTS, Endpoint
from deploy.gateway.intake.homes import Reports
from deploy.gateway.intake.inbound import InboundRequest
from deploy.gateway.intake.limits import AcceptedBody, Limits
from deploy.gateway.media.fetcher import MediaFetcher
from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.proxy.engine import EngineAnswer, EngineHttpClient, Expected
from deploy.gateway.proxy.slow_client import ClientPatience
from deploy.gateway.scheduling.admission import Admission
from deploy.gateway.scheduling.feedback import Feedback
from deploy.gateway.scheduling.scheduler import RegionScheduler
from deploy.gateway.serving.adapters import AdapterPlaces, adapter_places
from deploy.gateway.serving.background import Background
from deploy.gateway.serving.parameters import TakenParameters
from deploy.gateway.serving.record_views import span_attributes
from deploy.gateway.serving.records import RequestRecord
from kvmanager.load_times import LoadTimes
from kvmanager.tracing.spans import Span
from local_pd.cluster import PdCluster
from local_pd.messages import DecodeSlot
from prfaas.cluster import PrefillCluster
from prfaas.encoding.values import EncodeDone
from prfaas.engines.errors import PrefillFailed
from prfaas.jobs import PrefillResult
from scheduler.reports import ClusterReport
from scheduler.routing.decision import Decision, Reason, RequestShape
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.spill import Spill
from transport.grants import Granter


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every request uses and the gateway owns.

    `spill` has the rule of each PD cluster, and `reports` gives their last reports, as
    `prefill_reports` does those of prefill clusters. `places` says where prompts for a model may be
    cached that belong to a PD cluster. Without `caches` nothing is known to be cached, and without
    `placement` no cached prefix is moved. Without `granter` nothing is signed for node agents.
    `receivers` names the agents of a cluster for a grant; "": any.
    With `refuses_local_prefill` no PD cluster prefills what is meant for a prefill cluster.
    """

    pds: Mapping[str, PdCluster]
    spill: Mapping[str, Spill]
    reports: Callable[[], Reports]
    prefill_reports: Callable[[], Reports]
    prefill_clusters: dict[str, PrefillCluster]
    engines: EngineHttpClient
    background: Background
    timeouts: TimeoutConfig
    patience: ClientPatience
    scheduler: RegionScheduler
    admission: Admission
    places: Callable[[str, str], CachePlaces]
    media: MediaFetcher
    limits: Limits
    caches: RegionCaches | None = None
    placement: PrefixPlacement | None = None
    refuses_local_prefill: bool = False
    granter: Granter | None = None
    receivers: Callable[[str], str] = lambda cluster: ""
    taken: TakenParameters = field(default_factory=TakenParameters)
    tokens_per_event: dict[str, float] = field(default_factory=dict)
    """How many tokens an event of a stream of each model has, as far as streams have told."""

    @property
    def feedback(self) -> Feedback:
        """Tells the scheduler how requests go."""
        return Feedback(self.scheduler)

    async def embedding_nodes(
        self, report: ClusterReport | None, identifiers: Sequence[str]
    ) -> tuple[str, ...]:
        """The nodes of a cluster that are known to have embeddings of these media."""
        return () if self.caches is None else await self.caches.embedding_nodes(report, identifiers)

    def expected(self, exchange: Exchange) -> Expected:
        """What an engine's answer to the request may be."""
        inbound, rules = exchange.inbound, exchange.endpoint.stream
        if inbound.hides_usage:
            rules = replace(rules, hides_usage=True)
        timeouts = self.timeouts
        return Expected(
            rules=rules,
            silence_s=timeouts.engine_silence_s if inbound.is_stream else timeouts.whole_answer_s,
            count=partial(self.limits.buffer, exchange.accepted),
        )

    def adapter_places(self, inbound: InboundRequest, pd: str) -> AdapterPlaces:
        """Where the request's LoRA adapter has the weights with which `pd` decodes it."""
        if not inbound.adapter:
            return AdapterPlaces()
        decoding = self.reports().get(pd)
        return adapter_places(inbound.model, inbound.adapter, decoding, self.prefill_reports())


@dataclass(slots=True)
class Exchange:
    """A parsed request, the headers with which engines get it, and its record.

    `started_s` is the time of its arrival (time.monotonic). `accepted` counts the memory of its
    body.
    """

    inbound: InboundRequest
    headers: dict[str, str]
    record: RequestRecord
    metrics: GatewayMetrics
    started_s: float
    span: Span
    """The request in a trace. Each step that is a part of the TTFT becomes a span below it, with
    the duration that `record.parts` has.
    """
    accepted: AcceptedBody
    refusal: ApiError | None = None
    """Why its tenant may not ask now. Its body was not looked at then."""
    number: int = 0
    """The number under which admission let the request in; 0 before."""
    predicted: Prediction | None = None
    """What was predicted for the route that is being taken; None if nothing usable was."""
    was_full: bool = False
    """Whether the decode instance was full when it got the request, so that it waited there."""
    transfer_ids: list[str] = field(default_factory=list)
    """The transfers of all landings that were reserved for the request."""
    _decoding: Span | None = None
    """The wait for an engine's answer, then the answer."""
    _num_open: int = field(default=1)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint, which is the same here and at an engine."""
        return ENDPOINTS[self.inbound.kind]

    @property
    def path(self) -> str:
        """Its path."""
        return self.endpoint.path

    @property
    def request_id(self) -> str:
        """The id that the client sees."""
        return self.record.request_id

    def elapsed_s(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self.started_s

    def decided(self, decision: Decision, spill: str = "") -> None:
        """Note the route that is taken from now on, and why another PD cluster than the request's
        home decodes, "" if none does.
        """
        # Only the first prediction counts from arrival. It must be for a counted prompt, because an
        # estimate of the length predicts nothing.
        self.predicted = None
        is_counted = self.record.num_prompt_tokens is not None
        if isinstance(decision, RouteDecision) and is_counted and not self.record.first_route:
            self.predicted = decision.predicted
        self.record.decided(decision, spill)
        self.metrics.decided(self.inbound.model, decision)

    def read(self, read_s: float) -> None:
        """Note how long the client took to send its body."""
        self.record.parts.read_s = read_s
        self.span.past("read", self.started_s, self.started_s + read_s)

    async def fetch_media(self, fetcher: MediaFetcher) -> None:
        """Have the media at addresses in the request's body. Raises `ApiError`."""
        if not self.inbound.media_addresses:
            return
        begun_s = self.elapsed_s()
        try:
            self.inbound = await fetcher.complete(self.inbound, self.accepted)
        finally:
            self.record.parts.media_s = media_s = self.elapsed_s() - begun_s
            self._took("media", media_s)

    def counted(self, num_tokens: int, render_s: float | None = None) -> None:
        """Note the exact length of the prompt, and how long its rendering took."""
        self.record.num_prompt_tokens = num_tokens
        self.record.parts.render_s = render_s
        if render_s is not None:
            self._took("render", render_s)

    def asked_directory(self, look_up_s: float) -> None:
        """Note how long the look-up of what is cached took."""
        self.record.parts.look_up_s = look_up_s
        self._took("look_up", look_up_s)

    def looked_up(self, shape: RequestShape) -> None:
        """Note what the directory says is cached of the prompt."""
        self.record.looked_up(shape)
        self.metrics.looked_up(self.inbound.model, self.record.home, shape)

    def moved_cache(self, move_s: float) -> None:
        """Note how long the request waited for a cached prefix of another cluster."""
        self.record.parts.move_s = move_s
        self._took("move", move_s)

    def given(self, instance: str, reason: str, *, was_full: bool) -> None:
        """Note the instance that will decode, and why the PD cluster chose it."""
        self.record.decode_instance, self.record.decode_reason = instance, reason
        self.was_full = was_full

    def reserved(self, slot: DecodeSlot, reserve_s: float, saved_bytes: int) -> None:
        """Note the landing, which took `reserve_s` to get."""
        self.record.parts.reserve_s = reserve_s
        self.record.reserved(slot, saved_bytes)
        self.transfer_ids.append(slot.landing.transfer_id)
        self._took("reserve", reserve_s, instance=slot.instance)

    def not_reserved(self, reserve_s: float, reason: Reason) -> None:
        """Note that there is no landing, which took so long to find out."""
        self._took("reserve", reserve_s, error=reason.value)

    def waited_for_landing(self, wait_s: float) -> None:
        """Note how long the decode request waited for the KVCache. It is posted now."""
        self.record.waited_for_landing(wait_s, self.elapsed_s())
        self._took("landing_wait", wait_s)

    def encoded(self, done: EncodeDone, encode_s: float) -> None:
        """Note that the media of a request that one engine serves whole are encoded, as far as that
        was of use.
        """
        self.record.encoded(done, encode_s)
        self._took("encode", encode_s)

    def leg_begun(self) -> Span:
        """Begin the span of a prefill leg."""
        return self.span.child("prefill_leg", time.monotonic(), "client")

    def leg_over(
        self, span: Span, target: str, result: PrefillResult | PrefillFailed | None
    ) -> None:
        """End the span of the prefill leg at `target`; None: it was given up."""
        error = "" if isinstance(result, PrefillResult) else "given_up"
        if isinstance(result, PrefillFailed):
            error = result.code
        span.end(time.monotonic(), {"prfaas.target": target}, error=error)

    def decoding(self) -> dict[str, str]:
        """Note that an engine is asked for the answer. Returns the headers for it."""
        if not self.span.is_recorded:
            return self.headers
        self._end_decoding("")
        self._decoding = self.span.child("decode", time.monotonic(), "client")
        return self.headers | {"traceparent": self._decoding.traceparent}

    def loaded(self, times: LoadTimes | None) -> None:
        """Note what the decode engine says of its load and its first step; None: nothing."""
        if times is not None:
            self.record.loaded(times)

    def prefilled(self, target: str, result: PrefillResult, saved_bytes: int) -> None:
        """Note that the prefill leg at `target` ended with all of its KVCache landed."""
        self.record.prefilled(result)
        self.metrics.transferred(target, result.nbytes, saved_bytes)

    def prefill_failed(self, target: str, error: PrefillFailed) -> None:
        """Note that the prefill leg at `target` failed."""
        self.record.prefill_error = str(error)
        self.metrics.prefill_failed(target, error.code)

    def retried(self, reason: Reason) -> None:
        """Note a second try."""
        self.record.num_retries += 1
        self.metrics.retried(reason.value)
        self._end_decoding(reason.value)

    def answered(self, answer: EngineAnswer) -> None:
        """Note that an engine's answer has begun."""
        self.record.status = answer.status
        self.record.decode_instance = answer.instance
        ttft_s = self.elapsed_s()
        self.record.first_byte(ttft_s, is_stream=answer.is_stream)
        if self._decoding is not None:
            ended_s = self.started_s + ttft_s
            self._decoding.past("first_token", self._decoding.began_s, ended_s)

    def over(self, num_prompt_tokens: int) -> None:
        """Note that the answer is over. The legs may still run: `hold` keeps the record open
        for them. `num_prompt_tokens` is the best that is known of the prompt's length.
        """
        self.record.total_s = self.elapsed_s()
        self._end_decoding("" if self.record.outcome == "ok" else self.record.outcome)
        self.metrics.ended(self.record, num_prompt_tokens)
        self.release()

    def hold(self) -> None:
        """Keep the record open: the caller will still change it. Pair it with `release`."""
        self._num_open += 1

    def release(self) -> None:
        """End one `hold`, or the answer. The last one settles the record."""
        self._num_open -= 1
        if self._num_open == 0:
            self.record.is_settled = True
            self.metrics.settled(self.record)
            self._end_span()

    def _took(self, name: str, seconds: float, *, error: str = "", **attributes: str) -> None:
        """Record a step that is over now."""
        if self.span.is_recorded:
            now_s = time.monotonic()
            found = {f"prfaas.{name}": value for name, value in attributes.items()}
            self.span.child(name, now_s - seconds).end(now_s, found, error=error)

    def _end_decoding(self, error: str) -> None:
        if self._decoding is not None:
            self._decoding.end(
                time.monotonic(), {"prfaas.instance": self.record.decode_instance}, error=error
            )
            self._decoding = None

    def _end_span(self) -> None:
        # Settled, so that it has the numbers of both legs, which may follow the answer.
        if not self.span.is_recorded:
            return
        record = self.record
        error = "" if record.outcome == "ok" else record.outcome
        first = None if record.ttft_s is None else self.started_s + record.ttft_s
        self.span.end(
            self.started_s + (record.total_s or 0.0),
            span_attributes(record),
            error=error,
            events=() if first is None else (("first_token", first),),
        )
