"""The rules of the cache messages: what engines ask of the prefix cache, and what they are given.

It does not touch memory, sockets or clocks. It changes the pool's records and returns effects for
the shell, which calls back `fetch_ended` and `sealed`.

Finds. A scheduler's connection asks under a handle. It gets one answer, which names the parts that
are pinned for it. Before that, the shell fetches parts that are only on SSD, or gives that up. The
pin ends with the connection's `CacheFree`. If the connection is lost, the pin ends once no process
of the instance can be reading any more.

Fills. Memory is given only while every rank of the instance has a worker connected, because each
worker has to say that it is done. When all ranks have written a part, the shell seals it, and then
it is committed. A fill ends when every rank has sent its last `CacheWritten`. If a connection of
the instance was lost, a rank may never send it. Then the unwritten parts are taken back when each
worker that was connected has sent its last message or its process has ended, and at the latest
after the drain time. So no memory is taken back while a worker may still be writing.

A message that no engine of this protocol would send raises ProtocolError. Messages that may cross
an answer on its way do not: freeing or cancelling what is over, and the last messages for what was
taken back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvmanager.agent.cache.request_records import (
    Abandoned,
    CacheEffect,
    CacheUse,
    ConnHandle,
    Fetch,
    InstanceHandle,
    LacksWorkers,
    OpenFill,
    OpenFind,
    Seal,
    Tell,
)
from kvmanager.agent.cache.wire import check_reserve, keys_of, slots_on_wire
from kvmanager.agent.engines.protocol import (
    CacheCancel,
    CacheFind,
    CacheFound,
    CacheFree,
    CacheMessage,
    CacheReserve,
    CacheSlots,
    CacheWritten,
    ProtocolError,
)
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import BlockPart, Slot, Tier
from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.transfers.records import EnginePeer

# Late messages for these handles are no errors. The bound only limits the memory that they take.
MAX_TAKEN_BACK: Final = 4096


class CacheRequests:
    """All open finds and fills of one agent. One thread only."""

    def __init__(
        self,
        pool: HybridPool,
        *,
        drain_s: float,
        has_slow_tier: bool,
        on_end: Callable[[Sequence[bytes], Iterable[Slot]], object] = lambda _keys, _slots: None,
    ) -> None:
        """`on_end` is called with the keys and slots of a fill that is over. Slots that are not in
        the pool by then are not used any more.
        """
        self.use = CacheUse()
        self._pool = pool
        self._drain_s = drain_s
        self._has_slow_tier = has_slow_tier
        self._on_end = on_end
        self._peers: dict[int, EnginePeer] = {}
        self._shapes: dict[int, CacheShape] = {}
        self._finds: dict[ConnHandle, OpenFind] = {}
        self._fills: dict[InstanceHandle, OpenFill] = {}
        self._left_pins: list[tuple[int, Abandoned]] = []
        self._taken_back: OrderedDict[InstanceHandle, None] = OrderedDict()
        self._lacking: set[str] = set()  # instances that lack workers, so that each is logged once

    # ---- connections

    def connect(self, peer: EnginePeer, shape: CacheShape) -> None:
        """An engine that uses the cache has connected."""
        self._peers[peer.conn_id] = peer
        self._shapes[peer.conn_id] = shape

    def connection_lost(self, conn_id: int, now_s: float) -> None:
        """The connection is closed; its process may live on for a while."""
        peer = self._peers.get(conn_id)
        if peer is None:
            return
        workers = self._workers(peer.instance)
        for find_key in [key for key in self._finds if key[0] == conn_id]:
            find = self._finds.pop(find_key)
            if find.pin_id is not None:
                # The workers of this instance may still be copying out of the pinned blocks.
                left = Abandoned({conn_id, *workers}, now_s + self._drain_s)
                self._left_pins.append((find.pin_id, left))
        del self._peers[conn_id], self._shapes[conn_id]
        for (instance, _), fill in self._fills.items():
            # Without its scheduler nobody tells the workers that a fill ends, and a lost worker
            # never sends its last message.
            silent = peer.role == "scheduler" or peer.rank not in fill.done_ranks
            if instance == peer.instance and fill.abandoned is None and silent:
                writing = {c for c, p in workers.items() if p.rank not in fill.done_ranks}
                fill.abandoned = Abandoned(writing, now_s + self._drain_s)
        self._take_back(now_s)

    def process_gone(self, conn_id: int, now_s: float) -> None:
        """The process behind a lost connection has ended."""
        for _, left in self._left_pins:
            left.conn_ids.discard(conn_id)
        for fill in self._fills.values():
            if fill.abandoned is not None:
                fill.abandoned.conn_ids.discard(conn_id)
        self._take_back(now_s)

    def expire(self, now_s: float) -> None:
        """Take back memory whose drain time is over. Call a few times a second."""
        self._take_back(now_s)

    # ---- messages

    def message(self, conn_id: int, message: CacheMessage, now_s: float) -> list[CacheEffect]:
        """Process a message of an engine. Raises ProtocolError."""
        peer = self._peers.get(conn_id)
        if peer is None:
            raise ProtocolError(f"{type(message).__name__} of an engine that uses no prefix cache")
        wanted = "worker" if isinstance(message, CacheWritten) else "scheduler"
        if peer.role != wanted:
            raise ProtocolError(f"{type(message).__name__} is for a {wanted} to say")
        match message:
            case CacheFind():
                return self._find(peer, message, now_s)
            case CacheFree():
                self._free(conn_id, message.handle)
            case CacheReserve():
                return self._reserve(peer, message, now_s)
            case CacheCancel():
                self._cancel(peer, message.handle)
            case CacheWritten():
                return self._written(peer, message, now_s)
        return []

    def fetch_ended(self, find_key: ConnHandle, now_s: float) -> list[CacheEffect]:
        """Answer a find: the parts that it waited for have arrived, or will not arrive in time."""
        find = self._finds.get(find_key)
        if find is None or find.is_answered:
            return []
        return [self._answer(find_key, find, now_s)]

    def sealed(self, fill_key: InstanceHandle, parts: Iterable[BlockPart], now_s: float) -> None:
        """Commit these slots of a `Seal`, whose checksums were taken."""
        fill = self._fills.get(fill_key)
        if fill is None:
            return
        fill.num_sealing -= 1
        for index, part in parts:
            if not self._pool.commit(fill.fill_id, index, part, now_s):
                continue
            if fill.shape.parts[part].kind is not PartKind.KV:
                fill.new_end = max(fill.new_end, fill.first_block + index + 1)
        self._end_if_over(fill_key, fill)

    # ---- finds

    def _find(self, peer: EnginePeer, message: CacheFind, now_s: float) -> list[CacheEffect]:
        find_key = peer.conn_id, message.handle
        if find_key in self._finds:
            raise ProtocolError(f"handle {message.handle} is in use")
        shape, keys = self._shapes[peer.conn_id], keys_of(message.keys)
        match = self._pool.match(shape, keys)
        self.use.queries += 1
        self.use.query_tokens += len(keys) * shape.block_tokens
        find = self._finds[find_key] = OpenFind(shape, keys, match.arena_blocks)
        # A fetch pays only if parts on SSD make the usable prefix longer.
        if not self._has_slow_tier or match.num_blocks <= match.arena_blocks:
            return [self._answer(find_key, find, now_s)]
        parts = tuple(shape.resume_parts(match.num_blocks))
        return [Fetch(find_key, shape, keys, parts)]

    def _answer(self, find_key: ConnHandle, find: OpenFind, now_s: float) -> Tell:
        shape, keys = find.shape, find.keys
        match = self._pool.match(shape, keys)
        num_blocks, slots = match.arena_blocks, []
        if num_blocks:
            pin = self._pool.pin(shape, keys, shape.resume_parts(num_blocks), now_s)
            find.pin_id = pin.pin_id
            slots = slots_on_wire(pin.slots)
            # A prefix that needs more slots than one message holds is computed instead.
            if len(slots) < len(pin.slots):
                self._unpin(find)
                num_blocks, slots = 0, []
        find.is_answered = True
        # Blocks beyond those that the arena had at first were fetched from SSD for this find.
        from_arena = min(num_blocks, find.arena_blocks)
        self.use.hit_tokens[Tier.ARENA] += from_arena * shape.block_tokens
        self.use.hit_tokens[Tier.SSD] += (num_blocks - from_arena) * shape.block_tokens
        conn_id, handle = find_key
        return Tell(conn_id, CacheFound(handle, num_blocks, match.kv_blocks, slots))

    def _unpin(self, find: OpenFind) -> None:
        if find.pin_id is not None:
            self._pool.unpin(find.pin_id)
            find.pin_id = None

    def _free(self, conn_id: int, handle: int) -> None:
        find = self._finds.pop((conn_id, handle), None)
        if find is not None:
            self._unpin(find)

    # ---- fills

    def _reserve(self, peer: EnginePeer, message: CacheReserve, now_s: float) -> list[CacheEffect]:
        fill_key = peer.instance, message.handle
        if fill_key in self._fills:
            raise ProtocolError(f"handle {message.handle} is in use")
        shape, keys = self._shapes[peer.conn_id], keys_of(message.keys)
        check_reserve(message, shape, keys)
        nothing: list[CacheEffect] = [Tell(peer.conn_id, CacheSlots(message.handle, []))]
        ranks = {worker.rank for worker in self._workers(peer.instance).values()}
        if len(ranks) < peer.world_size:
            if peer.instance not in self._lacking:
                self._lacking.add(peer.instance)
                nothing.append(LacksWorkers(peer.instance, len(ranks), peer.world_size))
            return nothing
        self._lacking.discard(peer.instance)
        given = self._pool.reserve(
            shape, message.parent, message.first_block, keys, message.parts, now_s
        )
        slots = slots_on_wire(given.slots)
        if not slots:
            self._pool.abort(given.fill_id)
            return nothing
        self.use.fills += 1
        self._fills[fill_key] = OpenFill(
            given.fill_id,
            peer.conn_id,
            shape,
            keys,
            message.first_block,
            message.parent,
            message.replaces,
            {(slot.index, slot.part): slot for slot in given.slots[: len(slots)]},
            peer.world_size,
        )
        return [Tell(peer.conn_id, CacheSlots(message.handle, slots))]

    def _cancel(self, peer: EnginePeer, handle: int) -> None:
        fill_key = peer.instance, handle
        fill = self._fills.get(fill_key)
        if fill is None:
            return
        # A worker has heard of the fill and may be writing, so only the workers can end it.
        if fill.writers or fill.done_ranks:
            raise ProtocolError(f"handle {handle} is cancelled after a worker wrote")
        self._end(fill_key, fill)

    def _written(self, peer: EnginePeer, message: CacheWritten, now_s: float) -> list[CacheEffect]:
        fill_key = peer.instance, message.handle
        fill = self._fills.get(fill_key)
        if fill is None:
            # The fill may have been taken back because another rank was lost, which this worker
            # cannot know.
            if fill_key not in self._taken_back:
                raise ProtocolError(f"no handle {message.handle} was given memory")
            return []
        if peer.rank in fill.done_ranks:
            raise ProtocolError(f"rank {peer.rank} wrote after its last word")
        whole = [slot for part in message.parts if (slot := _wrote(fill, part, peer.rank))]
        if message.is_last:
            fill.done_ranks.add(peer.rank)
            if fill.abandoned is not None:
                fill.abandoned.conn_ids.discard(peer.conn_id)
        if whole:
            fill.num_sealing += 1
            return [Seal(fill_key, fill.keys, fill.shape, tuple(whole))]
        self._end_if_over(fill_key, fill)
        self._take_back(now_s)
        return []

    def _end_if_over(self, fill_key: InstanceHandle, fill: OpenFill) -> None:
        if not fill.num_sealing and len(fill.done_ranks) == fill.world_size:
            self._end(fill_key, fill)

    def _end(self, fill_key: InstanceHandle, fill: OpenFill) -> None:
        del self._fills[fill_key]
        self._pool.abort(fill.fill_id)
        self._on_end(fill.keys, fill.slots.values())
        if fill.new_end and fill.replaces:
            self._drop_replaced(fill)

    def _drop_replaced(self, fill: OpenFill) -> None:
        """Drop the windows and the state of the checkpoint that the new one replaces, unless a
        prompt has resumed there.

        Windows that the new checkpoint reaches back over stay.
        """
        # The replaced block lies in this fill, is its parent, or lies before its parent.
        if fill.replaces in fill.keys:
            replaced = fill.first_block + fill.keys.index(fill.replaces)
        else:
            replaced = fill.first_block - (1 if fill.replaces == fill.parent else 2)
        for part in range(len(fill.shape.parts)):
            reach = fill.shape.reach(part)
            if reach is None or replaced >= fill.new_end - reach:
                continue
            # A hit shows that prompts branch or sessions resume there, so the checkpoint pays.
            if not self._pool.num_hits(fill.replaces, part):
                for tier in Tier:
                    self._pool.discard(fill.replaces, part, tier)

    def _take_back(self, now_s: float) -> None:
        for fill_key, fill in list(self._fills.items()):
            # Taking checksums reads the memory, so it is not freed before `sealed`.
            if (
                fill.abandoned is not None
                and fill.abandoned.is_over(now_s)
                and not fill.num_sealing
            ):
                self._end(fill_key, fill)
                self._taken_back[fill_key] = None
                if len(self._taken_back) > MAX_TAKEN_BACK:
                    self._taken_back.popitem(last=False)
        kept = []
        for pin_id, readers in self._left_pins:
            if readers.is_over(now_s):
                self._pool.unpin(pin_id)
            else:
                kept.append((pin_id, readers))
        self._left_pins = kept

    def _workers(self, instance: str) -> dict[int, EnginePeer]:
        return {
            conn_id: peer
            for conn_id, peer in self._peers.items()
            if peer.instance == instance and peer.role == "worker"
        }


def _wrote(fill: OpenFill, part: BlockPart, rank: int) -> Slot | None:
    """Note that a rank wrote a part. Returns its slot if all ranks have now. Raises
    ProtocolError.
    """
    slot = fill.slots.get(part)
    if slot is None:
        raise ProtocolError(f"part {part[1]} of block {part[0]} was not given to be written")
    ranks = fill.writers.setdefault(part, set())
    if rank in ranks:
        raise ProtocolError(f"rank {rank} wrote part {part[1]} of block {part[0]} twice")
    ranks.add(rank)
    return slot if len(ranks) == fill.world_size else None
