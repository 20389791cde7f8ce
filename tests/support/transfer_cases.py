"""A transfer table with three connected engines, for the tests of transfers."""

import pytest

from kvmanager.transfers.blocks import BlockAllocator
from kvmanager.transfers.holds import Kind
from kvmanager.transfers.records import EnginePeer, LandingSpec, OutboxSpec
from kvmanager.transfers.shared import TableLimits
from kvmanager.transfers.table import TransferTable

BLOCK = 10
FP = b"f" * 32
IDS = [bytes([i]) * 16 for i in range(4)]
TID = IDS[0]


def landing_spec(transfer_id: bytes = TID, nbytes: int = 25, lease_s: float = 60.0) -> LandingSpec:
    return LandingSpec(transfer_id, b"t" * 32, nbytes, 3, FP, b"d" * 32, lease_s)


def outbox_spec(transfer_id: bytes = TID, nbytes: int = 25, lease_s: float = 60.0) -> OutboxSpec:
    return OutboxSpec(transfer_id, nbytes, 3, FP, lease_s)


def peer(conn_id: int, instance: str = "a", *, tp: tuple[int, int] = (0, 1)) -> EnginePeer:
    return EnginePeer(conn_id, instance, "worker", tp[0], tp[1], FP)


@pytest.fixture(name="table")
def connected_table() -> TransferTable:
    table = TransferTable(BlockAllocator(8), BLOCK, TableLimits(drain_s=30, report_keep_s=60))
    for conn_id, instance in ((1, "a"), (2, "a"), (3, "b")):
        table.connect(peer(conn_id, instance))
    return table


def used(table: TransferTable, kind: Kind = Kind.LANDING) -> int:
    table.check_invariants()
    return table.holds.num_blocks(kind)
