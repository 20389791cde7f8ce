"""The gRPC side of a node agent: checks what came over the wire and speaks hex and codes.

It does not know states or memory; the agent behind it does.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from kvmanager.agent.cache.service import AgentCache, LandingBase
from kvmanager.agent.engines.instances import UnknownLayout
from kvmanager.agent.messages import (
    Await,
    CacheFeed,
    Cancel,
    CancelReply,
    ListCache,
    ListCacheReply,
    OpenOutbox,
    OpenOutboxReply,
    ProbeEnd,
    ProbeEndReply,
    ProbeLanding,
    ProbeLandingReply,
    ProbeSend,
    ProbeSendReply,
    ProbeStatus,
    ProbeStatusReply,
    Renew,
    RenewReply,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    TransferReport,
    WatchCache,
)
from kvmanager.agent.service import NodeAgent
from kvmanager.agent.transfer_io import now_s
from kvmanager.layout import KVLayout
from kvmanager.transfers.holds import Key, Kind
from kvmanager.transfers.records import LandingSpec, OutboxSpec, TransferError
from transport import Elements, Endpoint, OutgoingSpec
from transport.rpc import Method, RpcError

ID_BYTES: Final = 16
KEY_BYTES: Final = 32
MAX_NUM_TOKENS: Final = 1 << 31
MAX_REASON_CHARS: Final = 1000

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class ControlService:
    """The methods of service `prfaas.NodeAgent`."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent

    def methods(self) -> dict[str, Method[Any, Any]]:
        of_parts = {
            request_type.__name__: self._method(request_type, reply_type, handler)
            for request_type, reply_type, handler in self._agent.control_methods
        }
        return of_parts | {
            "Reserve": self._method(Reserve, ReserveReply, self.reserve),
            "Renew": self._method(Renew, RenewReply, self.renew),
            "Cancel": self._method(Cancel, CancelReply, self.cancel),
            "OpenOutbox": self._method(OpenOutbox, OpenOutboxReply, self.open_outbox),
            "Await": self._method(Await, TransferReport, self.wait),
            "Status": self._method(Status, StatusReply, self.status),
            "WatchCache": self._method(WatchCache, CacheFeed, self.watch_cache),
            "ListCache": self._method(ListCache, ListCacheReply, self.list_cache),
            "ProbeLanding": self._method(ProbeLanding, ProbeLandingReply, self.probe_landing),
            "ProbeSend": self._method(ProbeSend, ProbeSendReply, self.probe_send),
            "ProbeStatus": self._method(ProbeStatus, ProbeStatusReply, self.probe_status),
            "ProbeEnd": self._method(ProbeEnd, ProbeEndReply, self.probe_end),
        }

    async def reserve(self, request: Reserve) -> ReserveReply:
        agent = self._agent
        wanted = request.layout_fingerprint
        fingerprint, layout = agent.book.layout(
            _bytes(wanted, KEY_BYTES, "layout_fingerprint") if wanted else None
        )
        token_digest = _bytes(request.token_digest, None, "token_digest")
        base = await self._base(request, fingerprint, layout)
        cached_tokens = base.cached_tokens if base is not None else 0
        spec = LandingSpec(
            transfer_id=secrets.token_bytes(ID_BYTES),
            token=secrets.token_bytes(KEY_BYTES),
            nbytes=layout.transfer_bytes(request.num_tokens, cached_tokens),
            num_tokens=request.num_tokens,
            fingerprint=fingerprint,
            token_digest=token_digest,
            lease_s=request.lease_s,
            tenant=request.tenant,
            cached_tokens=cached_tokens,
        )
        await agent.make_room(spec, base)
        landing = agent.reserve(spec, base)
        return ReserveReply(
            transfer_id=spec.transfer_id.hex(),
            token=spec.token.hex(),
            nbytes=spec.nbytes,
            host=agent.advertised.host,
            port=agent.advertised.port,
            arena_epoch=agent.arena.epoch,
            runs=[(first, length) for first, length in landing.runs],
            layout_fingerprint=fingerprint.hex(),
            lease_s=landing.lease_until_s - landing.opened_s,
            cached_tokens=cached_tokens,
            cached_runs=base.runs if base is not None else [],
        )

    async def _base(
        self, request: Reserve, fingerprint: bytes, layout: KVLayout
    ) -> LandingBase | None:
        """What the landing can stand on; None without a prefix cache for this layout."""
        num_tokens, agent = _num_tokens(request.num_tokens), self._agent
        shape = agent.book.cache_shape(fingerprint)
        if not request.block_keys or agent.cache is None or shape is None:
            return None
        return await agent.cache.landing_base(layout, shape, num_tokens, request.block_keys)

    async def open_outbox(self, request: OpenOutbox) -> OpenOutboxReply:
        agent = self._agent
        fingerprint, layout = agent.book.layout(
            _bytes(request.layout_fingerprint, KEY_BYTES, "layout_fingerprint")
        )
        try:
            expected = layout.transfer_bytes(_num_tokens(request.num_tokens), request.cached_tokens)
        except ValueError as error:
            raise RpcError("INVALID", str(error)) from error
        if request.nbytes != expected:
            raise RpcError(
                "INVALID",
                f"{request.num_tokens} tokens take {expected} bytes here with "
                f"{request.cached_tokens} of them cached, not {request.nbytes}",
            )
        endpoint = _endpoint(request.host, request.port)
        transfer_id = _bytes(request.transfer_id, ID_BYTES, "transfer_id")
        spec = OutboxSpec(
            transfer_id, request.nbytes, request.num_tokens, fingerprint, request.lease_s
        )
        token = _bytes(request.token, KEY_BYTES, "token")
        wire = OutgoingSpec(
            transfer_id,
            token,
            fingerprint,
            endpoint,
            tenant=request.tenant,
            elements=Elements(layout.elements),
            digest=agent.config.digest,
        )
        outbox = agent.open_outbox(spec, wire)
        return OpenOutboxReply(
            arena_epoch=agent.arena.epoch,
            runs=[(first, length) for first, length in outbox.runs],
            lease_s=outbox.lease_until_s - outbox.opened_s,
            attempt=outbox.attempt,
        )

    async def renew(self, request: Renew) -> RenewReply:
        transfer_id = _bytes(request.transfer_id, ID_BYTES, "transfer_id")
        return RenewReply(self._agent.table.renew(transfer_id, request.lease_s, now_s()))

    async def cancel(self, request: Cancel) -> CancelReply:
        transfer_id = _bytes(request.transfer_id, ID_BYTES, "transfer_id")
        reason = request.reason[:MAX_REASON_CHARS] or "cancelled by the control plane"
        return CancelReply(self._agent.cancel(transfer_id, reason))

    async def wait(self, request: Await) -> TransferReport:
        if not math.isfinite(request.timeout_s) or request.timeout_s < 0:
            raise RpcError("INVALID", f"a timeout of {request.timeout_s} s")
        transfer_id = _bytes(request.transfer_id, ID_BYTES, "transfer_id")
        key = self._find(transfer_id, request.kind)
        await self._agent.wait_ended(key, request.timeout_s)
        return self._agent.report(key)

    async def status(self, _: Status) -> StatusReply:
        return self._agent.status()

    async def watch_cache(self, request: WatchCache) -> CacheFeed:
        if not math.isfinite(request.timeout_s) or request.timeout_s < 0:
            raise RpcError("INVALID", f"a timeout of {request.timeout_s} s")
        return await self._cache().watch(request)

    async def list_cache(self, request: ListCache) -> ListCacheReply:
        return await self._cache().list_prefixes(request)

    def _cache(self) -> AgentCache:
        if self._agent.cache is None:
            raise RpcError("INVALID", "this agent has no prefix cache (cache_gib is 0)")
        return self._agent.cache

    async def probe_landing(self, request: ProbeLanding) -> ProbeLandingReply:
        return self._agent.prober.open_landing(request, now_s())

    async def probe_send(self, request: ProbeSend) -> ProbeSendReply:
        return await self._agent.prober.open_send(
            _bytes(request.transfer_id, ID_BYTES, "transfer_id"),
            keys=(
                _bytes(request.token, KEY_BYTES, "token"),
                _bytes(request.fingerprint, KEY_BYTES, "fingerprint"),
            ),
            endpoint=_endpoint(request.host, request.port),
            nbytes=request.nbytes,
            lease_s=request.lease_s,
            clock_s=now_s,
        )

    async def probe_status(self, request: ProbeStatus) -> ProbeStatusReply:
        transfer_id = _bytes(request.transfer_id, ID_BYTES, "transfer_id")
        return self._agent.prober.status(transfer_id, request.role, request.lease_s, now_s())

    async def probe_end(self, request: ProbeEnd) -> ProbeEndReply:
        transfer_id = _bytes(request.transfer_id, ID_BYTES, "transfer_id")
        reason = request.reason[:MAX_REASON_CHARS] or "ended by its caller"
        return ProbeEndReply(self._agent.prober.end(transfer_id, reason, now_s()))

    def _find(self, transfer_id: bytes, kind: str) -> Key:
        table = self._agent.table
        if kind != "landing" and transfer_id in table.outboxes:
            return Kind.OUTBOX, transfer_id
        if kind != "outbox" and transfer_id in table.landings:
            return Kind.LANDING, transfer_id
        raise RpcError("NOT_FOUND", f"no {kind or 'transfer'} {transfer_id.hex()} here")

    def _method(
        self,
        request_type: type[RequestT],
        reply_type: type[ReplyT],
        handler: Callable[[RequestT], Awaitable[ReplyT]],
    ) -> Method[RequestT, ReplyT]:
        name = request_type.__name__
        refused = self._agent.metrics.refused_requests

        async def handle(request: RequestT) -> ReplyT:
            try:
                return await handler(request)
            except TransferError as error:
                refused.labels(name, error.code).inc()
                raise RpcError(error.code, str(error)) from error
            except UnknownLayout as error:
                refused.labels(name, "INVALID").inc()
                raise RpcError("INVALID", str(error)) from error
            except RpcError as error:
                refused.labels(name, error.code).inc()
                raise

        return Method(request_type, reply_type, handle)


def _bytes(text: str, size: int | None, field: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError as error:
        raise RpcError("INVALID", f"{field} is not hex") from error
    if size is not None and len(value) != size:
        raise RpcError("INVALID", f"{field} has {len(value)} bytes, not {size}")
    return value


def _endpoint(host: str, port: int) -> Endpoint:
    if not host or not 0 < port <= 65535:
        raise RpcError("INVALID", f"{host!r}:{port} is no endpoint")
    return Endpoint(host, port)


def _num_tokens(number: int) -> int:
    if not 0 < number <= MAX_NUM_TOKENS:
        raise RpcError("INVALID", f"a transfer of {number} tokens")
    return number
