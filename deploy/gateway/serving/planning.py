"""Plans a request: counts its prompt, looks up what is cached of it, and asks for its route.

Counting costs a round trip to an engine, and looking up one to the directory. A prompt that is
certain to stay in a PD cluster skips both. This file does not know the client, nor how a plan is
carried out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec

from deploy.gateway.cache.cached_prompt import CachedPrompt
from deploy.gateway.cache.embedded_media import embedded_media
from deploy.gateway.errors import ApiError, EngineLost
from deploy.gateway.intake.inbound import InboundRequest, without_pixels
from deploy.gateway.proxy.engine import Expected
from deploy.gateway.scheduling.admission import AdmittedRequest
from deploy.gateway.serving.exchange import Exchange, Services
from deploy.gateway.serving.spilling import check_left, may_serve
from kvmanager.media_items import MediaItem
from kvmanager.token_ids import TokenIds, in_turns, parsing
from local_pd.errors import PdError
from local_pd.messages import DirectRequest, DirectTarget
from scheduler.live.media_travel import media_travel
from scheduler.reports import takes_text_only
from scheduler.routing.decision import Decision, Reason, RequestShape, one_engine
from scheduler.routing.media import MediaShape
from scheduler.routing.short_term import RouteDecision

logger = logging.getLogger("prfaas.deploy.gateway")


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A request's route and what it rests on. `token_ids` is None if the prompt was not counted.
    `media` are the media among them.
    """

    decision: Decision
    shape: RequestShape
    token_ids: TokenIds | None = None
    media: tuple[MediaItem, ...] = ()
    cached: CachedPrompt = field(default_factory=CachedPrompt)

    def at(self, pd: str) -> RequestPlan:
        """The plan with what is cached in another PD cluster than the request's home."""
        return replace(self, cached=self.cached.at(pd), shape=self.shape.at(pd))


class NotRendered(Exception):
    """The prompt's token ids cannot be known; `reason` says why one engine serves it whole."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    """The media of a rendered prompt by kind (vLLM's `MultiModalFeatures`)."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Range]] = {}

    def items(self) -> tuple[MediaItem, ...]:
        """Raises `ValueError` if a medium lacks its place."""
        return tuple(
            MediaItem(name, place.offset, place.length)
            for kind, names in self.mm_hashes.items()
            for name, place in zip(names, self.mm_placeholders.get(kind, ()), strict=True)
        )


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw
    features: _Features | None = None


_rendered_decoder = msgspec.json.Decoder(_Rendered)
_rendered_list_decoder = msgspec.json.Decoder(list[_Rendered])


def check_tenant(services: Services, exchange: Exchange) -> AdmittedRequest | None:
    """Raises `ApiError` 429 if a limit of the tenant refuses the request, as far as that can be
    said before its prompt is counted. None: the tenant has no limit.
    """
    inbound, tenant = exchange.inbound, exchange.record.tenant
    if exchange.refusal is not None:
        raise exchange.refusal
    if not services.admission.is_limited(tenant):
        return None
    shape = services.feedback.likely(inbound.model, inbound.shape, inbound.content)
    num_tokens = shape.num_prompt_tokens
    if not shape.is_exact:
        num_tokens //= 2  # an estimate, which must refuse nothing that counting lets in
    work_tokens = inbound.work_tokens(num_tokens)
    home = exchange.record.home
    return services.admission.check_tenant(tenant, inbound.model, work_tokens, home=home)


async def plan_request(services: Services, exchange: Exchange) -> RequestPlan:
    """The route of a request that has just arrived. Raises `ApiError` for media that no engine of
    the model takes.
    """
    inbound, home = exchange.inbound, exchange.record.home
    check_reads_media(services, inbound)
    shape = services.feedback.likely(inbound.model, inbound.shape, inbound.content)
    # Engines may encode media with the adapter, and name them after it.
    if inbound.adapter and inbound.content.has_media:
        shape = msgspec.structs.replace(shape, has_bound_media=True)
    if not exchange.endpoint.is_routed:
        return RequestPlan(one_engine(shape, Reason.FORWARDED, home), shape)
    early = services.scheduler.route_early(
        inbound.model, shape, home=home, priority=inbound.priority
    )
    if early is not None:
        if inbound.token_ids is not None:
            exchange.counted(len(inbound.token_ids))
        return RequestPlan(early, shape, inbound.token_ids)
    try:
        plan = await judge(services, exchange)
        await _check_taken(services, exchange, plan)
    except NotRendered as error:
        # The engine gets the request all the same, and words its own error.
        return RequestPlan(one_engine(shape, error.reason, home), shape)
    if plan.cached.keys is not None:
        exchange.looked_up(plan.shape)
        if services.placement is not None:
            services.placement.looked_up(plan.cached)
    return plan


def check_reads_media(services: Services, inbound: InboundRequest) -> None:
    """Raise `ApiError` if the request has media, and all instances that may answer it say that they
    have no encoder.
    """
    if not inbound.content.has_media:
        return
    if takes_text_only(services.reports().values(), inbound.model):
        message = f"The model `{inbound.model}` takes text only here: its engines have no encoder."
        raise ApiError(400, "text_only", message, param="messages")


async def judge(services: Services, exchange: Exchange) -> RequestPlan:
    """The route that a request would take now. Raises `NotRendered`.

    Its prompt is counted and looked up whatever its length. Engines only get it for rendering.
    """
    inbound, home = exchange.inbound, exchange.record.home
    token_ids = inbound.token_ids
    media: tuple[MediaItem, ...] = ()
    if token_ids is None or services.taken.is_long(inbound.model, len(token_ids)):
        token_ids, media = await _render(services, exchange)
        services.taken.took_length(inbound.model, len(token_ids))
    else:
        exchange.counted(len(token_ids))
    cached, adapter = CachedPrompt(), services.adapter_places(inbound, home)
    # Nobody can name what is cached of an adapter whose weights are not known.
    if services.caches is not None and adapter.identity is not None:
        started_s, places = exchange.elapsed_s(), services.places(inbound.model, home)
        cached = await services.caches.look_up(
            places,
            token_ids,
            inbound.cache_salt or "",
            exchange.record.tenant,
            adapter=adapter.identity,
            media=media,
        )
        exchange.asked_directory(exchange.elapsed_s() - started_s)
    shape = cached.shape(
        msgspec.structs.replace(
            inbound.shape,
            num_prompt_tokens=len(token_ids),
            is_exact=True,
            other_adapter_in=adapter.without,
            render_s=exchange.record.parts.render_s or 0.0,
            media=await _media_shape(services, exchange, media) if media else None,
        )
    )
    decision = services.scheduler.route(inbound.model, shape, home=home, priority=inbound.priority)
    return RequestPlan(decision, shape, token_ids, media, cached)


async def _check_taken(services: Services, exchange: Exchange, plan: RequestPlan) -> None:
    """Have an engine that may decode the request judge its parameters before it is prefilled.

    Raises `NotRendered` if it refuses them: then it gets the request alone, and tells the client.
    """
    decision, inbound, ids = plan.decision, exchange.inbound, plan.token_ids
    if ids is None or not (isinstance(decision, RouteDecision) and decision.needs_landing):
        return
    question = services.taken.question(inbound, ids)
    if question is None:
        return
    try:
        target = await direct_target(services, exchange, decision.pd)
    except PdError:
        return  # whoever serves the request says so
    own_id = {"X-Request-Id": f"{exchange.request_id}-check"}
    try:
        async with asyncio.timeout(services.timeouts.cluster_s):
            answer = await services.engines.open(
                target.instance,
                target.engine_url,
                exchange.path,
                question.body,
                exchange.headers | own_id | question.headers,
                Expected(rules=exchange.endpoint.stream),
            )
        answer.close()
    # An engine that has no time for a token now says nothing of the parameters.
    except (TimeoutError, EngineLost) as error:
        logger.info("%s: parameters not checked: %s", exchange.request_id, error)
        return
    finally:
        services.pds[decision.pd].request_ended(target.instance)
    if not services.taken.heard(question, answer.status, answer.begun):
        raise NotRendered(Reason.RENDER_REFUSED)


async def _media_shape(
    services: Services, exchange: Exchange, media: tuple[MediaItem, ...]
) -> MediaShape:
    """A prompt's media for routing. To a prefill cluster they travel in the client's body."""
    spans = tuple((item.offset, item.length) for item in media)
    nbytes, embedded = len(exchange.inbound.body), dict[str, frozenset[int]]()
    # With an adapter, engines may make other embeddings of the same media.
    if services.caches is not None and not exchange.inbound.adapter:
        reports = (*services.reports().values(), *services.prefill_reports().values())
        model = exchange.inbound.model
        embedded = await embedded_media(services.caches.directory, reports, model, media)
    return MediaShape(spans, nbytes, MappingProxyType(embedded))


def note_travel(
    services: Services, exchange: Exchange, decision: Decision, shape: RequestShape
) -> None:
    """Note what crosses the link for the media of a request, and what embeddings would take."""
    model = exchange.inbound.model
    exchange.record.media_travel = media_travel(
        services.scheduler.live, model, shape, decision.target, decision.pd
    )


async def direct_target(
    services: Services,
    exchange: Exchange,
    pd: str,
    lost: Set[str] = frozenset(),
    prefer_nodes: tuple[str, ...] = (),
) -> DirectTarget:
    """An engine of a PD cluster that can serve the request alone. It is one of the instances in
    `lost` only if there is no other. Raises `PdError`.
    """
    # No timeout here: an embedded front answers at once, and the client of a remote one has a
    # deadline.
    request = DirectRequest(
        request_id=exchange.request_id,
        model=exchange.inbound.model,
        exclude=tuple(sorted(lost)),
        prefer_nodes=prefer_nodes,
        has_media=exchange.inbound.content.has_media,
    )
    return await services.pds[pd].direct(request)


async def judge_alone(services: Services, exchange: Exchange) -> RequestPlan:
    """As `judge`, for a request that is not served after it. Its tenant may ask for it, and pays
    for its rendering as for a prompt. Raises `ApiError` 429 too.
    """
    inbound = exchange.inbound
    held, used_tokens = [check_tenant(services, exchange)], 0
    try:
        await exchange.fetch_media(services.media)
        shape = services.feedback.likely(inbound.model, inbound.shape, inbound.content)
        tenant, num_tokens = exchange.record.tenant, shape.num_prompt_tokens
        held.append(await services.admission.reserve(tenant, num_tokens))
        used_tokens = num_tokens
        plan = await judge(services, exchange)
        used_tokens = plan.shape.num_prompt_tokens
        return plan
    finally:
        for counted in held:
            if counted is not None:
                counted(used_tokens)


async def _rendering_target(services: Services, exchange: Exchange) -> tuple[str, DirectTarget]:
    """A PD cluster that may serve the request and an engine there. Raises `PdError`, `ApiError`."""
    lost: set[str] = set()
    while True:
        pd = next(name for name in may_serve(services, exchange) if name not in lost)
        try:
            return pd, await direct_target(services, exchange, pd)
        except PdError as error:
            lost.add(pd)
            check_left(services, exchange, lost, error)


async def _render(services: Services, exchange: Exchange) -> tuple[TokenIds, tuple[MediaItem, ...]]:
    """The prompt's token ids and its media from an engine's render endpoint. Raises `NotRendered`.

    The engine is the one source of truth for chat templates and tokenizers.
    """
    started_s, inbound = exchange.elapsed_s(), exchange.inbound
    pd, target = await _rendering_target(services, exchange)
    body = without_pixels(inbound.body) if inbound.content.has_media else inbound.body
    try:
        status, answer = await services.engines.render(
            target.instance, target.engine_url, exchange.path, body, exchange.headers
        )
        token_ids, media = await _rendered(status, answer, is_list=inbound.kind == "completion")
        # Media that the gateway did not see have no names that are the same at all sites.
        if media and not inbound.content.has_media:
            raise NotRendered(Reason.MULTIMODAL)
    except EngineLost as error:
        logger.warning("%s: not rendered: %s", exchange.request_id, error)
        raise NotRendered(Reason.RENDER_UNAVAILABLE) from error
    # Rendering uses the engine, so the front counts it until here.
    finally:
        services.pds[pd].request_ended(target.instance)
    services.feedback.counted(inbound.model, inbound.content, len(token_ids))
    exchange.counted(len(token_ids), exchange.elapsed_s() - started_s)
    return token_ids, media


async def _rendered(
    status: int, body: bytes, *, is_list: bool
) -> tuple[TokenIds, tuple[MediaItem, ...]]:
    """The ids and media of the one prompt in a render endpoint's answer. Raises `NotRendered`."""
    if status != 200:
        reason = Reason.RENDER_REFUSED if 400 <= status < 500 else Reason.RENDER_UNAVAILABLE
        raise NotRendered(reason)
    # The completions endpoint renders a list of prompts, chat a single one.
    try:
        found = _rendered_list_decoder.decode(body) if is_list else [_rendered_decoder.decode(body)]
        if len(found) != 1:
            raise NotRendered(Reason.SEVERAL_PROMPTS)
        token_ids = await in_turns(parsing(bytes(found[0].token_ids)))
        features = found[0].features
        media = () if features is None else features.items()
    except ValueError as error:
        logger.warning("the answer of an engine's render endpoint is not understood: %s", error)
        raise NotRendered(Reason.RENDER_UNAVAILABLE) from error
    # The prefill leaves the last token out, and half a medium cannot be encoded.
    if any(item.offset + item.length >= len(token_ids) for item in media):
        raise NotRendered(Reason.MULTIMODAL)
    return token_ids, media
