"""From an HTTP request to an `Exchange`: whose it is, whether there is room for it, what it asks.

Without a tracer the gateway takes part in traces (https://www.w3.org/TR/trace-context/) without
recording spans: it hands a valid context on as it came and replaces a missing or broken one. This
file does not know routes or what becomes of the exchange.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from aiohttp import web

from deploy.gateway.config import ModelConfig
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.intake.auth import KeyRing, authorization_of
from deploy.gateway.intake.cache_salts import CacheSalts
from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.homes import HOME_HEADER, Homes
from deploy.gateway.intake.inbound import InboundRequest, parsing_request
from deploy.gateway.intake.limits import AcceptedBody, Limits
from deploy.gateway.intake.traced import RequestTraces
from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.serving.exchange import Exchange
from deploy.gateway.serving.records import RequestRecord
from kvmanager.token_ids import in_turns
from kvmanager.tracing.context import parse_traceparent

_PRINTABLE: Final = re.compile(r"[ -~]+")
# What vLLM reads from headers besides the request id, as far as an engine and the way to it can
# carry it. The gateway chooses the engine, so it does not pass x-data-parallel-rank on.
_PASSED_ON: Final = {"X-Session-ID": _PRINTABLE, "X-Vllm-Priority": re.compile(r"-?[0-9]{1,18}")}
_LAST_WORDS_S: Final = 0.5
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as OpenAI's and vLLM's /v1/models show it. `created` is in seconds since 1970."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "prfaas"
    root: str
    parent: str | None = None
    max_model_len: int | None
    permission: tuple[str, ...] = ()


class ServedModels:
    """The models of one gateway and their LoRA adapters, in the order of the configuration."""

    def __init__(self, models: Iterable[ModelConfig]) -> None:
        self._models = {model.name: model for model in models}
        self._models_of_adapters = {
            adapter: model.name for model in self._models.values() for adapter in model.adapters
        }
        self._since_s = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may ask for: of each model, then of its adapters."""
        return tuple(
            name for model in self._models.values() for name in (model.name, *model.adapters)
        )

    def resolve(self, name: str) -> tuple[str, str]:
        """The served model that a request for `name` means, and its adapter, "" for the model
        itself. Raises `ApiError` 404.
        """
        # As at an engine, a request without a name means the only model there is.
        if not name and len(self._models) == 1:
            return next(iter(self._models)), ""
        if name in self._models:
            return name, ""
        if name in self._models_of_adapters:
            return self._models_of_adapters[name], name
        message = f"The model `{name[:200]}` does not exist. Served here: {', '.join(self.names)}."
        raise ApiError(404, "model_not_found", message, param="model")

    def card(self, name: str) -> ModelCard:
        """The card of the model or adapter that `name` means. Raises `ApiError` 404."""
        model_name, adapter = self.resolve(name)
        model = self._models[model_name]
        return ModelCard(
            id=adapter or model.name,
            created=self._since_s,
            root=model.adapters[adapter] if adapter else model.root or model.name,
            parent=model.name if adapter else None,
            max_model_len=model.max_model_len,
        )

    def cards(self) -> list[ModelCard]:
        """The cards of all models and adapters."""
        return [self.card(name) for name in self.names]


@dataclass(slots=True, kw_only=True)
class Intake:
    """Takes the requests for completions of one gateway in. A chat template may add
    `template_tokens` tokens to a prompt. `salts`, `homes` and `priority_tenants` may be replaced;
    requests that came in before keep what they got.
    """

    keys: KeyRing
    limits: Limits
    models: ServedModels
    metrics: GatewayMetrics
    may_ask: Callable[[str], AbstractContextManager[None]]
    """Raises `ApiError` 429 if a limit refuses whatever this tenant asks for; while the context is
    open, one request more counts for it.
    """
    salts: CacheSalts
    homes: Homes
    template_tokens: int
    priority_tenants: frozenset[str]
    """Who may go before others, where there are tenants."""
    traces: RequestTraces

    @asynccontextmanager
    async def received(
        self, request: web.Request, kind: Kind | None = None
    ) -> AsyncIterator[Exchange]:
        """`request` as an exchange; it counts towards the limits until the context ends.

        With `kind` None the body tells the endpoint. Raises `ApiError`.
        """
        started_s = time.monotonic()
        authorization = authorization_of(request.headers)
        cut_off = partial(_cut_off, request, asyncio.current_task())
        with self.keys.using(authorization, cut_off) as tenant:
            async with self.limits.received(request, tenant) as accepted:
                exchange = await self._exchange(request, tenant, kind, accepted, started_s)
                exchange.read(time.monotonic() - started_s)
                try:
                    yield exchange
                finally:
                    accepted.is_served = bool(exchange.record.decode_instance)

    async def _exchange(
        self,
        request: web.Request,
        tenant: str,
        kind: Kind | None,
        accepted: AcceptedBody,
        started_s: float,
    ) -> Exchange:
        refusal = None
        try:
            with self.may_ask(tenant):
                inbound = await self._parsed(tenant, kind, accepted.body)
        except ApiError as error:
            if error.status != 429:
                raise
            # The record says who was refused. What is in the body was not looked at.
            refusal, inbound = error, await self._parsed(tenant, kind, b"{}")
        model, adapter = "", ""
        if refusal is None or len(self.models.names) == 1:
            model, adapter = self.models.resolve(inbound.model)
        # What is learnt of a model must not depend on whether clients bother to name it.
        inbound = msgspec.structs.replace(inbound, model=model, adapter=adapter)
        self._check_priority(tenant, inbound, request.headers)
        home = self.homes.home(tenant, inbound.model, request.headers.get(HOME_HEADER))
        accepted.body = inbound.body  # one copy of it is enough
        headers = engine_headers(request.headers, inbound)
        span = self.traces.begin(inbound, request.headers, headers["traceparent"], started_s)
        headers["traceparent"] = span.traceparent
        record = _new_record(inbound, headers, tenant, home)
        return Exchange(inbound, headers, record, self.metrics, started_s, span, accepted, refusal)

    async def _parsed(self, tenant: str, kind: Kind | None, body: bytes) -> InboundRequest:
        return await in_turns(
            parsing_request(
                kind,
                body,
                template_tokens=self.template_tokens,
                salt_of=partial(self.salts.salt, tenant),
            )
        )

    def _check_priority(
        self, tenant: str, inbound: InboundRequest, headers: Mapping[str, str]
    ) -> None:
        """Raises `ApiError` 403 if the tenant may not go before others and this might.

        Engines read numbers of other types too, so whatever is no plain number may be negative.
        """
        if not tenant or tenant in self.priority_tenants:
            return
        header = headers.get("X-Vllm-Priority", "0").strip()
        if inbound.may_go_first or not (header.isascii() and header.isdigit()):
            message = (
                f"{tenant} may not go before others; send a priority of 0 or more, or have the "
                "operator name it in gateway.priority_tenants."
            )
            raise ApiError(403, "priority_not_allowed", message, param="priority")


def _cut_off(request: web.Request, task: asyncio.Task[object] | None) -> None:
    """End the handler, which tells the client why if it can, and the connection soon after it."""
    if task is not None:
        task.cancel("The API key has been taken away.")
    if request.transport is not None:
        # A client that reads nothing would keep what is buffered for it.
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, request.transport.abort)


def engine_headers(headers: Mapping[str, str], inbound: InboundRequest) -> dict[str, str]:
    """The headers with which engines get a client's request."""
    # One call for all that is random: each one asks the kernel.
    drawn = secrets.token_hex(40)
    request_id = (
        usable_request_id(headers.get("X-Request-Id"))
        or usable_request_id(inbound.request_id)
        or drawn[:32]
    )
    found = {
        "Content-Type": JSON_TYPE,
        "Accept-Encoding": "identity",
        "X-Request-Id": request_id,
    }
    traceparent = headers.get("traceparent", "")
    passed_on = _PASSED_ON
    if parse_traceparent(traceparent) is not None:
        passed_on = _PASSED_ON | {"tracestate": _PRINTABLE}
    else:
        traceparent = f"00-{drawn[32:64]}-{drawn[64:]}-01"
    found["traceparent"] = traceparent
    return found | {
        name: value
        for name, usable in passed_on.items()
        if usable.fullmatch(value := headers.get(name, ""))
    }


def usable_request_id(value: str | None) -> str | None:
    """`value` if it may stand in headers, logs and engine ids unchanged, else None."""
    return value if value and _REQUEST_ID.fullmatch(value) else None


def _new_record(
    inbound: InboundRequest, headers: Mapping[str, str], tenant: str, home: str
) -> RequestRecord:
    return RequestRecord(
        request_id=headers["X-Request-Id"],
        started_s=time.time(),
        endpoint=inbound.kind,
        model=inbound.model,
        adapter=inbound.adapter,
        trace_id=headers["traceparent"][3:35],
        tenant=tenant,
        home=home,
    )
