"""Mooncake's Transfer Engine over TCP as a peer: the sender writes into the receiver's memory.

Its settings are environment variables (MC_TCP_*), which `peers` sets.
"""

from __future__ import annotations

from typing import Any

from mooncake.engine import TransferEngine
from peer_end import Job, Place, block_offsets

MAX_BATCH = 2048
"""Blocks handed over at a time: the engine turns a batch away that its queues cannot hold whole."""


class End:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._engine = TransferEngine()
        self._host = place.own_address()
        if self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("TransferEngine.initialize failed")
        if self._engine.register_memory(place.buffer.address, place.buffer.nbytes):
            raise RuntimeError("TransferEngine.register_memory failed")
        self._other = ""
        self._other_address = 0

    def hello(self) -> dict[str, Any]:
        session = f"{self._host}:{self._engine.get_rpc_port()}"
        return {"session": session, "address": self._place.buffer.address}

    def connect(self, other: dict[str, Any]) -> None:
        self._other = other["session"]
        self._other_address = other["address"]

    def prepare(self, job: Job) -> None: ...

    def run(self, job: Job) -> None:
        place = self._place
        order = block_offsets(place.buffer.nbytes, job.block_bytes, place.other_side)
        own = [place.buffer.address + at for at in place.buffer.offsets(job)]
        theirs = [self._other_address + at for at in order[job.first : job.first + job.num_blocks]]
        for start in range(0, job.num_blocks, MAX_BATCH):
            some = slice(start, start + MAX_BATCH)
            sizes = [job.block_bytes] * len(own[some])
            failed = self._engine.batch_transfer_sync_write(
                self._other, own[some], theirs[some], sizes
            )
            if failed:
                raise RuntimeError(f"batch_transfer_sync_write returned {failed}")

    def settle(self) -> None: ...


def open_end(place: Place) -> End:
    return End(place)
