"""The engines, memory and bounds that the landings and outboxes of one agent share.

It does not know the states of a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmanager.transfers.blocks import OutOfBlocks, Run
from kvmanager.transfers.holds import BlockHolds, Key, Kind
from kvmanager.transfers.records import (
    MOVES,
    BadRequest,
    EnginePeer,
    LandingRecord,
    NoArenaRoom,
    OutboxRecord,
)


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Bounds of one agent. A cap of None means as much as the arena holds."""

    landing_bytes: int | None = None
    tenant_landing_bytes: int | None = None
    max_lease_s: float = 3600.0
    """Longest lease of a landing or an outbox, seconds."""
    drain_s: float = 30.0
    """Time for which the memory of a failed transfer waits for an engine that may still copy,
    seconds.
    """
    report_keep_s: float = 60.0


@dataclass(slots=True)
class SharedBooks:
    """The engine connections and the arena memory of one agent's transfers."""

    holds: BlockHolds
    block_bytes: int
    limits: TableLimits
    peers: dict[int, EnginePeer] = field(default_factory=dict)
    """All connections by number, including lost ones whose processes may still write."""
    lingering_until_s: dict[int, float] = field(default_factory=dict)
    """The lost connections, with the time at which their processes count as gone."""

    @property
    def connected(self) -> set[int]:
        return self.peers.keys() - self.lingering_until_s.keys()

    def lease_s(self, wanted_s: float) -> float:
        """The granted lease. Raises BadRequest for an impossible one."""
        if not wanted_s > 0:  # true for NaN too
            raise BadRequest(f"a lease of {wanted_s} s")
        return min(wanted_s, self.limits.max_lease_s)

    def whole_blocks(self, nbytes: int) -> int:
        """Blocks that a transfer takes. Raises BadRequest for a transfer of 0 bytes."""
        if nbytes < 1:
            raise BadRequest(f"a transfer of {nbytes} bytes")
        return -(-nbytes // self.block_bytes)

    def held_bytes(self, kind: Kind) -> int:
        """Bytes of whole blocks that transfers of this kind hold, ended ones included."""
        return self.holds.num_blocks(kind) * self.block_bytes

    def take(self, key: Key, num_blocks: int) -> list[Run]:
        """Memory for a new transfer; raises NoArenaRoom."""
        try:
            return self.holds.take(key, num_blocks)
        except OutOfBlocks as error:
            raise NoArenaRoom(f"the arena is full: {error}") from error

    def is_forgettable(self, end: LandingRecord | OutboxRecord, now_s: float) -> bool:
        """Whether an end is over, has given back its memory, and could be asked for long enough."""
        is_over = end.state not in MOVES and end.key not in self.holds
        keep_until_s = now_s - self.limits.report_keep_s
        return is_over and end.ended_s is not None and end.ended_s <= keep_until_s


def why_over(end: LandingRecord | OutboxRecord | None) -> str:
    """The answer to an engine that asks about an end that is not alive."""
    if end is None:
        return "no such transfer at this agent"
    return f"the transfer is over: {end.state}" + (f" ({end.error})" if end.error else "")
