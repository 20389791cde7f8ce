"""The records of a pool: the place of each part, its base, and which copies may go in which order.

Every change of a part goes through this module, so that counts, queues and the listener agree. It
knows neither pins nor fills as such, only whether a part is pinned or being filled. The base of a
part is the KV that it builds on.

A copy may leave a tier when nobody uses it and no other part needs it:

    arena   not pinned; for a KV part, there is a sound copy on SSD or nothing needs the KV
    SSD     there is a copy in the arena, or it is not pinned, not being read back into the arena,
            and, for a KV part, nothing needs the KV; and nothing on SSD stands on it

With the last copy of a block's KV, its windows and state go too. A copy on SSD needs its base on
SSD. So only copies in the arena need a base that is only in the arena, and they can leave from leaf
to root.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from kvmanager.pool.eviction import EvictionPolicy, EvictionQueue, Lru
from kvmanager.pool.nodes import Geometry, Node, Part
from kvmanager.pool.records import Listener, PoolChange, Tier
from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.transfers.blocks import BlockAllocator, Run, split_runs

Kinds = Counter[tuple[Tier, PartKind]]

NO_USE = -1
"""A guard that protects no block: no use has this number."""


class PartBooks:
    """The presence of every part in every tier. One thread only."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_bytes: int,
        *,
        policy: EvictionPolicy,
        listener: Listener | None,
        max_blocks: int,
        ssd_bytes: int,
    ) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.allocator = allocator
        self.block_bytes = block_bytes
        self.max_blocks = max_blocks
        self.ssd_bytes = ssd_bytes
        """Most bytes on SSD."""
        self.ssd_room_bytes = ssd_bytes
        """Most bytes on SSD for now: less than `ssd_bytes` while the disk has no room for more."""
        self.keeps_arena = False
        """Whether all copies in the arena must stay."""
        self.num_blocks = 0
        """Arena blocks held, those being filled included."""
        self.num_present = 0
        """Blocks of prompts with any part in any tier."""
        self.pinned_blocks = 0
        self.pinned_bytes = 0
        """Arena blocks and bytes of pinned parts."""
        self.nbytes: Kinds = Counter()
        self.evictions: Kinds = Counter()
        self.to_spill: OrderedDict[Part, None] = OrderedDict()
        """Parts that were stored or used in the arena and have no copy on SSD, oldest first."""
        self.to_purge: list[Part] = []
        """Parts with a condemned copy that may be able to go (`kvmanager.pool.purge`)."""
        self.purge_later: list[Part] = []
        """Parts with a condemned copy that may go only when `keeps_arena` has ended."""
        self.num_parts: Counter[Tier] = Counter()
        """Copies in each tier."""
        self._geometries: dict[CacheShape, Geometry] = {}
        self._listener = listener
        self._kv_queue = EvictionQueue(policy.score, self._may_leave_arena)
        self._other_queue = EvictionQueue(policy.score, self._may_leave_arena)
        self._ssd_queue = EvictionQueue(Lru().score, self._may_leave_ssd)

    # ---- finding

    def geometry(self, shape: CacheShape) -> Geometry:
        found = self._geometries.get(shape)
        if found is None:
            found = self._geometries[shape] = Geometry(shape, self.block_bytes)
        return found

    def part(self, key: bytes, number: int) -> Part | None:
        """The part, present or being filled."""
        node = self.nodes.get(key)
        if node is None or not 0 <= number < len(node.parts):
            return None
        return node.parts[number]

    # ---- parts that come into being and vanish

    def add(self, node: Node, number: int, use: int) -> Part:
        """A new part of the node, neither present nor being filled yet."""
        part = Part(node, number, last_used=use)
        node.put(number, part)
        if part.is_kv and node.up is not None:
            node.up.num_needs += 1
        return part

    def node(self, geometry: Geometry, key: bytes, parent: bytes, index: int) -> Node:
        """The node of this key, which is made if there is none."""
        node = self.nodes.get(key)
        if node is None:
            up = self.nodes.get(parent) if geometry.has_kv and index else None
            node = self.nodes[key] = Node(key, parent, index, geometry, up)
        return node

    def forget(self, part: Part) -> None:
        """The part is neither present nor being filled any more."""
        node = part.node
        node.put(part.number, None)
        if part.is_kv and node.up is not None:
            self._release_need(node.up)
        if not any(node.parts):
            del self.nodes[node.key]
            node.unlink()

    def unneeded_by(self, part: Part) -> None:
        """A window or state is not pinned, or not filled, any more. Does nothing for KV."""
        if not part.is_kv:
            self._release_need(part.node)

    # ---- pins

    def pin(self, part: Part) -> None:
        """Add a pin to the part, which must be present."""
        part.num_pins += 1
        if part.num_pins > 1:
            return
        # An unpinned window or state may be dropped with its block's KV; a pinned one keeps the KV.
        if not part.is_kv:
            part.node.num_needs += 1
        if part.runs:
            self._count_pinned(part, 1)

    def unpin(self, part: Part) -> None:
        """Remove a pin."""
        part.num_pins -= 1
        if part.num_pins:
            return
        if part.runs:
            self._count_pinned(part, -1)
        self.unneeded_by(part)
        self.offer(part)

    # ---- copies that come and go

    def arrive(self, part: Part, tier: Tier, runs: tuple[Run, ...] = ()) -> None:
        """Enter a copy in `tier`. `runs`, which the pool holds already, are its arena blocks."""
        node = part.node
        base = node.base(part.number)
        self.num_present += not node.present
        node.present |= 1 << part.number
        if tier is Tier.ARENA:
            part.runs = runs
            node.in_arena |= 1 << part.number
            if part.num_pins:
                self._count_pinned(part, 1)
            self.wants_spill(part)
        else:
            part.on_ssd = True
            part.spill_id = 0
            self.to_spill.pop(part, None)
            if base is not None:
                base.node.num_ssd_needs += 1
        self.nbytes[tier, part.kind] += part.nbytes
        self.num_parts[tier] += 1
        if base is not None and part.goes_with(base, tier):
            self.condemn(part, tier)
        self.offer(part)
        self._tell(True, part, tier, runs)

    def leave(self, part: Part, tier: Tier, *, is_eviction: bool = False) -> None:
        """Drop the copy, which `may_leave` must allow, and the copies that go with it."""
        node = part.node
        is_last = not (part.on_ssd if tier is Tier.ARENA else part.runs)
        if is_last and part.is_kv:
            for other in node.parts[1:]:
                for place in Tier:
                    if other is not None and other.is_in(place):
                        self.leave(other, place, is_eviction=is_eviction)
        if is_eviction:
            self.evictions[tier, part.kind] += 1
        runs = part.runs if tier is Tier.ARENA else ()
        if tier is Tier.ARENA:
            self._leave_arena(part)
        else:
            self._leave_ssd(part)
        self.nbytes[tier, part.kind] -= part.nbytes
        self.num_parts[tier] -= 1
        if is_last:
            node.present &= ~(1 << part.number)
            self.num_present -= not node.present
            self.forget(part)
        self._tell(False, part, tier, runs)

    def may_leave(self, part: Part, tier: Tier) -> bool:
        """Whether the copy may go now, by the rules above; False without such a copy."""
        if tier is Tier.ARENA:
            return not self.keeps_arena and self._may_leave_arena(part)
        takes_others = part.is_kv and not part.runs and part.node.in_arena
        return self._may_leave_ssd(part) and not (self.keeps_arena and takes_others)

    def condemn(self, part: Part, tier: Tier) -> None:
        """Condemn the copy: `purge.drop_condemned` drops it once nobody uses it."""
        if part.is_in(tier) and not part.is_condemned(tier):
            part.condemned |= 1 << tier
            self.to_purge.append(part)

    def offer(self, part: Part) -> None:
        """Queue the part's copies that may go now. Call it after every change of the part."""
        if self._may_leave_arena(part):
            (self._kv_queue if part.is_kv else self._other_queue).offer(part)
        if self._may_leave_ssd(part):
            self._ssd_queue.offer(part)
        if part.condemned and (
            (part.is_condemned(Tier.ARENA) and self._may_leave_arena(part))
            or (part.is_condemned(Tier.SSD) and self._may_leave_ssd(part))
        ):
            self.to_purge.append(part)

    def wants_spill(self, part: Part) -> None:
        """Queue the part for a copy on SSD, if it is in the arena and has none."""
        if self.ssd_bytes and part.runs and not part.on_ssd and not part.is_spilling:
            self.to_spill[part] = None

    # ---- memory

    def allocate(self, sizes: Sequence[int]) -> list[tuple[Run, ...]]:
        """Allocate runs of `sizes` blocks, for which there must be `room`. Neighbouring pieces get
        neighbouring blocks where possible.
        """
        total = sum(sizes)
        self.num_blocks += total
        return split_runs(self.allocator.allocate(total), sizes)

    def claim(self, geometry: Geometry, change: PoolChange) -> bool:
        """Take the memory of a copy that exists already. False: it is not free, or has no room."""
        if change.tier is Tier.SSD:
            return self.ssd_fits(geometry.shape.parts[change.part].nbytes)
        num_blocks = sum(run.length for run in change.runs)
        if num_blocks != geometry.num_blocks[change.part] or num_blocks > self.room():
            return False
        try:
            self.allocator.take(change.runs)
        except ValueError:
            return False
        self.num_blocks += num_blocks
        return True

    def free(self, runs: tuple[Run, ...]) -> None:
        """Give arena memory back."""
        self.allocator.free(runs)
        self.num_blocks -= sum(run.length for run in runs)

    def room(self) -> int:
        """Arena blocks that can be taken at once."""
        return min(self.allocator.num_free, self.max_blocks - self.num_blocks)

    def evict_until(self, is_enough: Callable[[], bool], guarded_use: int = NO_USE) -> bool:
        """Drop arena copies, lowest score first, until `is_enough`. False: no more copies may go.

        Blocks touched by use number `guarded_use` stay.
        """
        aside: list[Part] = []
        while not is_enough() and not self.keeps_arena:
            part = self._pop_lowest()
            if part is None:
                break
            if part.node.last_used == guarded_use:
                aside.append(part)
            else:
                self.leave(part, Tier.ARENA, is_eviction=True)
        for part in aside:
            self.offer(part)
        self._kv_queue.prune(self.num_parts[Tier.ARENA])
        # Parts that left in other ways stay in a queue until they reach its head.
        self._other_queue.prune(self.num_parts[Tier.ARENA])
        return is_enough()

    def make_ssd_room(self, part: Part) -> bool:
        """Drop SSD copies that were used less recently than `part`, until one of it fits."""
        self._ssd_queue.prune(self.num_parts[Tier.SSD])
        while not self.ssd_fits(part.nbytes):
            # With the last copy of a KV part, windows and states would leave the arena, which must
            # not happen while `keeps_arena`.
            if self.keeps_arena or not self.may_go_to_ssd(part):
                return False
            head = self._ssd_queue.head()
            assert head is not None
            self.leave(head[1], Tier.SSD, is_eviction=True)
        return True

    def may_go_to_ssd(self, part: Part) -> bool:
        """Whether there is room for a copy, or a copy that went unused for longer can go."""
        if self.ssd_fits(part.nbytes):
            return True
        head = self._ssd_queue.head()
        return (
            part.nbytes <= self.ssd_room_bytes and head is not None and head[0] < Lru().score(part)
        )

    def ssd_fits(self, nbytes: int) -> bool:
        return nbytes + self.held_ssd_bytes <= self.ssd_room_bytes

    @property
    def held_ssd_bytes(self) -> int:
        return sum(self.nbytes[Tier.SSD, kind] for kind in PartKind)

    def check_queues(self) -> None:
        """Raise AssertionError when a copy may go and is not queued; for tests."""
        for node in self.nodes.values():
            for part in node.parts:
                if part is not None and self._may_leave_arena(part):
                    assert part in (self._kv_queue if part.is_kv else self._other_queue)
                if part is not None and self._may_leave_ssd(part):
                    assert part in self._ssd_queue

    # ---- within

    def _count_pinned(self, part: Part, sign: int) -> None:
        self.pinned_blocks += sign * part.num_blocks
        self.pinned_bytes += sign * part.nbytes

    def _may_leave_arena(self, part: Part) -> bool:
        if not part.runs or part.num_pins:
            return False
        is_copied = part.on_ssd and not part.is_condemned(Tier.SSD)
        return is_copied or part.node.num_needs == 0 or not part.is_kv

    def _may_leave_ssd(self, part: Part) -> bool:
        if not part.on_ssd or (part.is_kv and part.node.num_ssd_needs):
            return False
        if part.runs:
            return True
        if part.num_pins or part.filling is not None:
            return False
        return part.node.num_needs == 0 or not part.is_kv

    def _release_need(self, node: Node) -> None:
        """One part less needs the block's KV."""
        node.num_needs -= 1
        if node.num_needs == 0 and (kv := node.kv) is not None:
            self.offer(kv)

    def _pop_lowest(self) -> Part | None:
        kv, other = self._kv_queue.head(), self._other_queue.head()
        if other is not None and (kv is None or other[0] <= kv[0]):
            self._other_queue.pop()
            return other[1]
        if kv is not None:
            self._kv_queue.pop()
            return kv[1]
        return None

    def _leave_arena(self, part: Part) -> None:
        self.free(part.runs)
        part.runs = ()
        part.condemned &= ~(1 << Tier.ARENA)
        part.node.in_arena &= ~(1 << part.number)
        self.to_spill.pop(part, None)

    def _leave_ssd(self, part: Part) -> None:
        part.on_ssd = False
        part.condemned &= ~(1 << Tier.SSD)
        base = part.node.base(part.number)
        if base is not None:
            base.node.num_ssd_needs -= 1
            self.offer(base)

    def _tell(self, stored: bool, part: Part, tier: Tier, runs: tuple[Run, ...]) -> None:
        if self._listener is not None:
            node = part.node
            shape = node.geometry.shape
            change = PoolChange(
                stored, tier, node.key, node.parent, node.index, part.number, shape, runs
            )
            self._listener(change)
