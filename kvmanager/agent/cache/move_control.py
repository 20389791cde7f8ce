"""The control plane's methods for cache moves: they check requests and call the mover.

They do not know pools or transports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from kvmanager.agent.cache.move_messages import (
    CacheMoveStatus,
    CacheMoveStatusReply,
    DropCached,
    DropCachedReply,
    EndCacheMove,
    EndCacheMoveReply,
    ReserveCacheMove,
    ReserveCacheMoveReply,
    SendCacheMove,
    SendCacheMoveReply,
)
from kvmanager.agent.cache.moved_parts import MovedParts
from kvmanager.agent.cache.moves import PrefixMoves
from kvmanager.agent.engines.instances import InstanceBook
from kvmanager.agent.engines.protocol import MAX_CACHE_BLOCKS
from kvmanager.agent.grants import AgentGrants, move_landing, move_send
from kvmanager.agent.moves import Mover
from kvmanager.agent.request_values import (
    KEY_BYTES,
    MAX_REASON_CHARS,
    PRIORITIES,
    endpoint_of,
    hex_bytes,
    transfer_id_of,
)
from kvmanager.hashing import split_keys
from kvmanager.layout import KVLayout
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.records import BadRequest
from transport import Elements, OutgoingSpec

_REPLICATION_TENANT: Final = "replication"


class CacheMoveControl:
    """The handlers. They raise the errors of the transfer table, and UnknownLayout.

    `prefixes` None: this agent has no prefix cache. `digest`: whether moves are checked by a
    digest. `is_lossy`: whether transfers of requests may lose precision.
    """

    def __init__(
        self,
        mover: Mover,
        prefixes: PrefixMoves | None,
        book: InstanceBook,
        grants: AgentGrants,
        *,
        digest: bool,
        is_lossy: bool,
    ) -> None:
        self._mover = mover
        self._prefixes_or_none = prefixes
        self._book = book
        self._grants = grants
        self._digest = digest
        self._is_lossy = is_lossy

    async def reserve(self, request: ReserveCacheMove) -> ReserveCacheMoveReply:
        # A caller that may choose the keys of a landing can plant KVCache.
        with self._grants.once(request.grant, move_landing(request, self._grants.agent)):
            what, _ = self._what(request)
            return await self._prefixes.open_landing(what, request.lease_s)

    async def send(self, request: SendCacheMove) -> SendCacheMoveReply:
        # A caller that may choose the destination can read KVCache.
        self._grants.require(request.grant, move_send(request, self._grants.agent))
        what, layout = self._what(request)
        # Both ends compute the size from the layout, so a difference shows that their layouts
        # differ.
        if request.nbytes != what.nbytes:
            raise BadRequest(f"these parts take {what.nbytes} bytes, not {request.nbytes}")
        wire = OutgoingSpec(
            transfer_id_of(request.transfer_id),
            hex_bytes(request.token, KEY_BYTES, "token"),
            what.fingerprint,
            endpoint_of(request.host, request.port),
            priority=PRIORITIES[request.priority],
            tenant=request.tenant or _REPLICATION_TENANT,
            # The receiver keeps the parts under their exact keys: no lossy codec may take them.
            elements=Elements.BYTES if self._is_lossy else Elements(layout.elements),
            digest=self._digest,
        )
        return SendCacheMoveReply(await self._prefixes.open_send(what, wire, request.lease_s))

    async def status(self, request: CacheMoveStatus) -> CacheMoveStatusReply:
        transfer_id = transfer_id_of(request.transfer_id)
        return await self._mover.status(transfer_id, request.role, request.lease_s, request.wait_s)

    async def end(self, request: EndCacheMove) -> EndCacheMoveReply:
        transfer_id = transfer_id_of(request.transfer_id)
        reason = request.reason[:MAX_REASON_CHARS] or "ended by its caller"
        return EndCacheMoveReply(self._mover.end(transfer_id, reason))

    async def drop(self, request: DropCached) -> DropCachedReply:
        _, _, shape = self._cut(request)
        _, keys = _keys(request.block_keys)
        num_parts = await self._prefixes.drop_cached(shape, keys, request.keep_blocks)
        return DropCachedReply(num_parts)

    @property
    def _prefixes(self) -> PrefixMoves:
        if self._prefixes_or_none is None:
            raise BadRequest("this agent has no prefix cache (cache_gib is 0)")
        return self._prefixes_or_none

    def _what(self, request: ReserveCacheMove | SendCacheMove) -> tuple[MovedParts, KVLayout]:
        fingerprint, layout, shape = self._cut(request)
        root, keys = _keys(request.block_keys)
        parts = tuple((index, part) for index, part in request.parts)
        return MovedParts(fingerprint, shape, root, tuple(keys), parts), layout

    def _cut(
        self, request: ReserveCacheMove | SendCacheMove | DropCached
    ) -> tuple[bytes, KVLayout, CacheShape]:
        """The KV layout that the request names, and the shape of its namespace's blocks."""
        fingerprint = hex_bytes(request.layout_fingerprint, KEY_BYTES, "layout_fingerprint")
        namespace = hex_bytes(request.namespace, None, "namespace")
        return fingerprint, *self._book.cached_layout(fingerprint, namespace)


def _keys(joined: bytes) -> tuple[bytes, list[bytes]]:
    """The root key, and the keys of the blocks."""
    try:
        root, *keys = split_keys(joined)
    except ValueError as error:
        raise BadRequest(f"block_keys: {error}") from error
    if len(keys) > MAX_CACHE_BLOCKS or len(set(keys)) < len(keys):
        raise BadRequest(f"block_keys: {len(keys)} keys; at most {MAX_CACHE_BLOCKS}, none twice")
    return root, keys


def control_methods(
    mover: Mover,
    prefixes: PrefixMoves | None,
    book: InstanceBook,
    grants: AgentGrants,
    *,
    digest: bool,
    is_lossy: bool,
) -> list[tuple[type[msgspec.Struct], type[msgspec.Struct], Callable[[Any], Awaitable[Any]]]]:
    """Request, reply and handler of each method."""
    control = CacheMoveControl(mover, prefixes, book, grants, digest=digest, is_lossy=is_lossy)
    return [
        (ReserveCacheMove, ReserveCacheMoveReply, control.reserve),
        (SendCacheMove, SendCacheMoveReply, control.send),
        (CacheMoveStatus, CacheMoveStatusReply, control.status),
        (EndCacheMove, EndCacheMoveReply, control.end),
        (DropCached, DropCachedReply, control.drop),
    ]
