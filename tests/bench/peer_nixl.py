"""NIXL over UCX as a peer: the sender writes, or the receiver reads, as vLLM's connector does.

Descriptor lists are prepared once per block size outside of timing, again as that connector does.
UCX's settings are environment variables, which `peers` sets. `options`: operation.
"""

from __future__ import annotations

import base64
import os
import time
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config
from peer_end import Job, Place, Side, block_offsets

POLL_S = 50e-6
"""Between looks at a transfer of many blocks, so that the caller leaves the cores to UCX."""


class End:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._agent = nixl_agent(f"{place.side}-{os.getpid()}", nixl_agent_config())
        region = (place.buffer.address, place.buffer.nbytes, 0, "")
        self._registered = self._agent.register_memory([region], "DRAM")
        self._other = ""
        self._other_address = 0
        self._operation = place.options["operation"]
        self._drives = place.side == ("sender" if self._operation == "WRITE" else "receiver")
        self._prepared: dict[int, tuple[Any, Any]] = {}

    def hello(self) -> dict[str, Any]:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._place.buffer.address}

    def connect(self, other: dict[str, Any]) -> None:
        self._other = self._agent.add_remote_agent(base64.b64decode(other["metadata"]))
        self._other_address = other["address"]

    def prepare(self, job: Job) -> None:
        if self._drives and job.block_bytes not in self._prepared:
            side, other = self._place.side, self._place.other_side
            own = self._descriptors("", self._place.buffer.address, job, side)
            theirs = self._descriptors(self._other, self._other_address, job, other)
            self._prepared[job.block_bytes] = (own, theirs)

    def _descriptors(self, agent: str, address: int, job: Job, side: Side) -> Any:
        offsets = block_offsets(self._place.buffer.nbytes, job.block_bytes, side)
        blocks = [(address + at, job.block_bytes, 0) for at in offsets]
        return self._agent.prep_xfer_dlist(agent, blocks, "DRAM")

    def run(self, job: Job) -> None:
        own, theirs = self._prepared[job.block_bytes]
        indices = list(range(job.first, job.first + job.num_blocks))
        handle = self._agent.make_prepped_xfer(self._operation, own, indices, theirs, indices)
        state = self._agent.transfer(handle)
        while state == "PROC":
            if job.num_blocks > 1:
                time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    def settle(self) -> None: ...


def open_end(place: Place) -> End:
    return End(place)
