"""What one end of a transfer peer offers to `peer_worker`, and the memory that it moves.

An end lives in a process of its own. Both ends know the layout of both buffers, so no peer has to
tell its receiver where a block goes. Knows no peer.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Side = Literal["sender", "receiver"]
SIDES: tuple[Side, Side] = ("sender", "receiver")

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer: `num_blocks` blocks from the `first`th on, in the order of `block_offsets`."""

    number: int
    block_bytes: int
    first: int
    num_blocks: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes


class Buffer:
    """`nbytes` of touched memory at one side, cut into blocks that lie in a permuted order."""

    def __init__(self, nbytes: int, side: Side) -> None:
        self.nbytes = nbytes
        self.side = side
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.fill(0)

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.nbytes)

    def randomise(self) -> None:
        """Different bytes in every block."""
        source = random.Random(7)
        for start in range(0, self.nbytes, MIB):
            length = min(MIB, self.nbytes - start)
            self.memory[start : start + length] = source.randbytes(length)

    def offsets(self, job: Job) -> Sequence[int]:
        """Where the job's blocks lie here, in the order in which they make up the transfer."""
        order = block_offsets(self.nbytes, job.block_bytes, self.side)
        return order[job.first : job.first + job.num_blocks]

    def views(self, job: Job) -> list[memoryview]:
        return [self.memory[at : at + job.block_bytes] for at in self.offsets(job)]


@functools.lru_cache(maxsize=32)
def block_offsets(nbytes: int, block_bytes: int, side: Side) -> tuple[int, ...]:
    """The permuted offsets of all blocks of a side's buffer; different ones at each side."""
    order = list(range(0, nbytes - block_bytes + 1, block_bytes))
    random.Random(f"{side} {block_bytes}").shuffle(order)
    return tuple(order)


class End(Protocol):
    """One side of a peer. Every method may raise; the worker then reports it."""

    def hello(self) -> dict[str, Any]:
        """What the other side's `connect` is given."""

    def connect(self, other: dict[str, Any]) -> None: ...

    def prepare(self, job: Job) -> None:
        """Outside of timing, at both sides: get ready for a transfer that will come."""

    def run(self, job: Job) -> float | None:
        """Only the driving side has it: the whole transfer, acknowledged. Seconds it took, where
        the peer has a clock of its own; None to take the caller's.
        """

    def run_blocks(self, job: Job) -> list[float]:
        """The same block by block, each begun when the one before it was acknowledged; seconds of
        each. Only of peers that say `acks_blocks`.
        """

    def settle(self) -> None:
        """Outside of timing, at both sides: wait for what the transfer left behind."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an end is made of. `host` is the receiver's address at both sides."""

    side: Side
    host: str
    buffer: Buffer
    options: dict[str, Any]

    @property
    def other_side(self) -> Side:
        return "receiver" if self.side == "sender" else "sender"

    def own_address(self) -> str:
        """This side's address on the way to the receiver."""
        if self.side == "receiver":
            return self.host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, 9))
            return str(probe.getsockname()[0])
