"""The gRPC methods of a node agent: they check requests and convert ids and errors.

They do not know states or memory, which are the agent's.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from kvmanager.agent.cache.landing_bases import LandingBase
from kvmanager.agent.cache.service import AgentCache
from kvmanager.agent.grants import outbox_send, probe_send, reservation
from kvmanager.agent.host_messages import HostFacts, HostFactsReply
from kvmanager.agent.messages import (
    Await,
    CacheFeed,
    Cancel,
    CancelReply,
    ListCache,
    ListCacheReply,
    OpenOutbox,
    OpenOutboxReply,
    Renew,
    RenewReply,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    TransferReport,
    WatchCache,
)
from kvmanager.agent.probe_messages import (
    ProbeEnd,
    ProbeEndReply,
    ProbeLanding,
    ProbeLandingReply,
    ProbeSend,
    ProbeSendReply,
    ProbeStatus,
    ProbeStatusReply,
)
from kvmanager.agent.request_values import (
    ID_BYTES,
    KEY_BYTES,
    MAX_REASON_CHARS,
    endpoint_of,
    hex_bytes,
    transfer_id_of,
)
from kvmanager.agent.service import ControlMethod, NodeAgent
from kvmanager.agent.transfer_io import now_s
from kvmanager.hashing import split_keys
from kvmanager.layout import KVLayout
from kvmanager.transfers.holds import Key, Kind
from kvmanager.transfers.records import (
    BadRequest,
    LandingSpec,
    OutboxSpec,
    TransferError,
    UnknownEngine,
    UnknownTransfer,
)
from transport import Elements, OutgoingSpec
from transport.rpc import Method, RpcError

MAX_NUM_TOKENS: Final = 1 << 31

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class ControlService:
    """The methods of service `prfaas.NodeAgent`."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent

    def methods(self) -> dict[str, Method[Any, Any]]:
        """Every method, by its name, which is the name of its request's type."""
        own: list[ControlMethod] = [
            (Reserve, ReserveReply, self.reserve),
            (Renew, RenewReply, self.renew),
            (Cancel, CancelReply, self.cancel),
            (OpenOutbox, OpenOutboxReply, self.open_outbox),
            (Await, TransferReport, self.wait),
            (Status, StatusReply, self.status),
            (WatchCache, CacheFeed, self.watch_cache),
            (ListCache, ListCacheReply, self.list_cache),
            (ProbeLanding, ProbeLandingReply, self.probe_landing),
            (ProbeSend, ProbeSendReply, self.probe_send),
            (ProbeStatus, ProbeStatusReply, self.probe_status),
            (ProbeEnd, ProbeEndReply, self.probe_end),
            (HostFacts, HostFactsReply, self._agent.host_facts),
        ]
        return {
            request_type.__name__: self._method(request_type, reply_type, handler)
            for request_type, reply_type, handler in (*own, *self._agent.control_methods)
        }

    async def reserve(self, request: Reserve) -> ReserveReply:
        # KVCache that lands is cached under the request's keys: a caller that may choose them can
        # plant it.
        about = request.num_tokens, request.token_digest, request.block_keys
        wanted = reservation(*about, self._agent.grants.agent)
        with self._agent.grants.once(request.grant, wanted):
            return await self._reserve(request)

    async def _reserve(self, request: Reserve) -> ReserveReply:
        agent = self._agent
        wanted = request.layout_fingerprint
        fingerprint, layout = agent.book.layout(
            hex_bytes(wanted, KEY_BYTES, "layout_fingerprint") if wanted else None
        )
        token_digest = hex_bytes(request.token_digest, None, "token_digest")
        base = await self._base(request, fingerprint, layout)
        cached_tokens = base.cached_tokens if base is not None else 0
        window_step = agent.book.window_step(fingerprint)
        try:
            nbytes = layout.transfer_bytes(request.num_tokens, cached_tokens, window_step)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        # Whoever knows id and token may write into the landing, so they must not be guessable.
        spec = LandingSpec(
            transfer_id=secrets.token_bytes(ID_BYTES),
            token=secrets.token_bytes(KEY_BYTES),
            nbytes=nbytes,
            nbytes_without_draft=layout.transfer_bytes(
                request.num_tokens, cached_tokens, window_step, with_draft=False
            ),
            num_tokens=request.num_tokens,
            fingerprint=fingerprint,
            token_digest=token_digest,
            lease_s=request.lease_s,
            tenant=request.tenant,
            cached_tokens=cached_tokens,
            window_step=window_step,
            draft=layout.draft_fingerprint,
            traceparent=request.traceparent,
        )
        landing = await agent.transfers.reserve(spec, base)
        return ReserveReply(
            transfer_id=spec.transfer_id.hex(),
            token=spec.token.hex(),
            nbytes=spec.nbytes,
            host=agent.transfers.advertised.host,
            port=agent.transfers.advertised.port,
            layout_fingerprint=fingerprint.hex(),
            lease_s=landing.lease_until_s - landing.opened_s,
            cached_tokens=cached_tokens,
            landing_room_bytes=agent.landing_room_bytes,
            is_lossy=agent.config.is_lossy,
            window_step=window_step,
            draft=layout.draft_fingerprint.hex(),
        )

    async def _base(
        self, request: Reserve, fingerprint: bytes, layout: KVLayout
    ) -> LandingBase | None:
        """The cached prefix for the landing; None without a prefix cache for this layout, and for
        keys of blocks that no engine of the node caches.
        """
        num_tokens, agent = _num_tokens(request.num_tokens), self._agent
        draft, bases = layout.draft_fingerprint, agent.transfers.bases
        # Blocks that engines with another drafter have cached have other bytes.
        known = [
            item
            for item in agent.book.cached_layouts(fingerprint)
            if item[0].draft_fingerprint == draft
        ]
        if not request.block_keys or bases is None or not known:
            return None
        try:
            root, *keys = split_keys(request.block_keys)
        except ValueError as error:
            raise BadRequest(f"block_keys: {error}") from error
        # The keys are those of the engine that will load the landing: one for each of its blocks.
        cut = next(
            (item for item in known if num_tokens // item[1].block_tokens == len(keys)), None
        )
        # The engine may be about to join, or cut its blocks in a way of its own. Its KVCache lands
        # all the same, whole, and is not kept.
        if cut is None:
            return None
        layout, shape = cut
        return await bases.pin(layout, shape, num_tokens, root, keys)

    async def open_outbox(self, request: OpenOutbox) -> OpenOutboxReply:
        agent = self._agent
        agent.grants.require(request.grant, outbox_send(request))
        # Whoever asks would wait for an engine that is gone, and the landing is untouched so far.
        if request.instance and not agent.book.is_connected(request.instance):
            raise UnknownEngine(f"engine {request.instance} is not connected to its node agent")
        fingerprint, layout = agent.book.layout(
            hex_bytes(request.layout_fingerprint, KEY_BYTES, "layout_fingerprint"),
            request.instance,
        )
        with_draft = request.draft != "" and request.draft == layout.draft_fingerprint.hex()
        try:
            expected = layout.transfer_bytes(
                _num_tokens(request.num_tokens),
                request.cached_tokens,
                request.window_step,
                with_draft=with_draft,
            )
        except ValueError as error:
            raise BadRequest(str(error)) from error
        # The landing's size comes from the layout of the receiving engine: a difference shows that
        # the two layouts are not the same. How large another drafter's part is is not known here.
        has_other_draft = request.draft != "" and not with_draft
        if request.nbytes < expected or (request.nbytes > expected and not has_other_draft):
            raise BadRequest(
                f"{request.num_tokens} tokens take {expected} bytes here with "
                f"{request.cached_tokens} of them cached, not {request.nbytes}"
            )
        endpoint = endpoint_of(request.host, request.port)
        transfer_id = transfer_id_of(request.transfer_id)
        spec = OutboxSpec(
            transfer_id,
            expected,
            request.num_tokens,
            fingerprint,
            request.lease_s,
            request.cached_tokens,
            request.window_step,
            layout.draft_fingerprint if with_draft else b"",
            request.traceparent,
        )
        token = hex_bytes(request.token, KEY_BYTES, "token")
        wire = OutgoingSpec(
            transfer_id,
            token,
            fingerprint,
            endpoint,
            tenant=request.tenant,
            elements=Elements(layout.elements),
            digest=agent.config.digest,
        )
        outbox = await agent.transfers.open_outbox(spec, wire, by_transport=request.by_transport)
        return OpenOutboxReply(
            lease_s=outbox.lease_until_s - outbox.opened_s,
            attempt=outbox.attempt,
            draft=request.draft if with_draft else "",
        )

    async def renew(self, request: Renew) -> RenewReply:
        transfer_id = transfer_id_of(request.transfer_id)
        return RenewReply(self._agent.transfers.table.renew(transfer_id, request.lease_s, now_s()))

    async def cancel(self, request: Cancel) -> CancelReply:
        transfer_id = transfer_id_of(request.transfer_id)
        reason = request.reason[:MAX_REASON_CHARS] or "cancelled by the control plane"
        cancelled = self._agent.transfers.cancel(transfer_id, reason)
        landing = self._agent.transfers.table.landings.records.get(transfer_id)
        times = landing.times if landing is not None else None
        return CancelReply(cancelled, self._agent.landing_room_bytes, times)

    async def wait(self, request: Await) -> TransferReport:
        _check_timeout(request.timeout_s)
        transfer_id = transfer_id_of(request.transfer_id)
        key = self._find(transfer_id, request.kind)
        await self._agent.transfers.wait_ended(key, request.timeout_s)
        return self._agent.transfers.report(key)

    async def status(self, _: Status) -> StatusReply:
        return self._agent.status()

    async def watch_cache(self, request: WatchCache) -> CacheFeed:
        _check_timeout(request.timeout_s)
        if self._agent.cache is None and self._agent.embeddings is None:
            raise BadRequest("this agent has no prefix cache and keeps no embeddings")
        return await self._agent.feed.watch(request)

    async def list_cache(self, request: ListCache) -> ListCacheReply:
        return await self._cache().list_prefixes(request)

    def _cache(self) -> AgentCache:
        if self._agent.cache is None:
            raise BadRequest("this agent has no prefix cache (cache_gib is 0)")
        return self._agent.cache

    async def probe_landing(self, request: ProbeLanding) -> ProbeLandingReply:
        return self._agent.transfers.prober.open_landing(request, now_s())

    async def probe_send(self, request: ProbeSend) -> ProbeSendReply:
        self._agent.grants.require_for_probe(b"", probe_send(request))
        return await self._agent.transfers.prober.open_send(
            transfer_id_of(request.transfer_id),
            keys=(
                hex_bytes(request.token, KEY_BYTES, "token"),
                hex_bytes(request.fingerprint, KEY_BYTES, "fingerprint"),
            ),
            endpoint=endpoint_of(request.host, request.port),
            nbytes=request.nbytes,
            lease_s=request.lease_s,
            clock_s=now_s,
        )

    async def probe_status(self, request: ProbeStatus) -> ProbeStatusReply:
        transfer_id = transfer_id_of(request.transfer_id)
        return self._agent.transfers.prober.status(
            transfer_id, request.role, request.lease_s, now_s()
        )

    async def probe_end(self, request: ProbeEnd) -> ProbeEndReply:
        transfer_id = transfer_id_of(request.transfer_id)
        reason = request.reason[:MAX_REASON_CHARS] or "ended by its caller"
        return ProbeEndReply(self._agent.transfers.prober.end(transfer_id, reason, now_s()))

    def _find(self, transfer_id: bytes, kind: str) -> Key:
        table = self._agent.transfers.table
        # One agent may have both ends of a transfer. Without a kind its outbox answers.
        if kind != "landing" and transfer_id in table.outboxes.records:
            return Kind.OUTBOX, transfer_id
        if kind != "outbox" and transfer_id in table.landings.records:
            return Kind.LANDING, transfer_id
        raise UnknownTransfer(f"no {kind or 'transfer'} {transfer_id.hex()} here")

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

        return Method(request_type, reply_type, handle)


def _check_timeout(timeout_s: float) -> None:
    if not math.isfinite(timeout_s) or timeout_s < 0:
        raise BadRequest(f"a timeout of {timeout_s} s")


def _num_tokens(number: int) -> int:
    if not 0 < number <= MAX_NUM_TOKENS:
        raise BadRequest(f"a transfer of {number} tokens")
    return number
