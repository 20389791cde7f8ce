"""The directory in a Redis server, for several gateways: a writer's sink and a reader.

It does not know agents or gateways. These keys are in Redis, under the user's prefix and `_FORMAT`:

    PREFIX:2:k:KEY   (8 raw bytes) who holds a block or an embedding: 6 bytes each, holder u32 and
                     flags u16
    PREFIX:2:nodes   hash: "cluster/node" -> when it was last heard of (Redis's clock, ms) and a
                     `NodeRecord`: its holder number, and up to which event it is known
    PREFIX:2:live    hash: "cluster/node" -> when that was said (ms) and its live holder numbers,
                     u32 each: the one that readers go by, and the one of a snapshot on its way
    PREFIX:2:holders how many holder numbers were given out
    PREFIX:2:w:NODE  which writer follows this node, for as long as its lease lasts

A snapshot is written under a new holder number, which becomes the node's when the snapshot is
complete. So readers see the old state and then the new one. A number that is not live means
nothing. Each write of a block drops such numbers from it, so a block never has more than two for
each node. A block that is not written any more expires: blocks live for `key_ttl_s`, and a writer
takes a new snapshot of each node long before that. So the data of writers that are gone expire by
themselves, and nodes without a report for `forget_s` do not count.

Any number of writers may run. The writer that holds a node's lease follows the node, and another
one takes over when the lease ends. Redis must be one server and not a cluster: scripts build the
names of blocks themselves, so that a prompt takes one short message each way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvmanager.directory.coverage import EMBEDDING_FLAG, coverages
from kvmanager.directory.errors import StoreError
from kvmanager.directory.messages import (
    FORGET_S,
    NodeCoverage,
    NodeName,
    NodeState,
    ResumeRule,
    short_key_bytes,
)
from kvmanager.directory.reader import Outage
from kvmanager.directory.redis_client import connect

DEFAULT_PREFIX: Final = "prfaas"

_FORMAT: Final = 2
"""Part of every name, so that programs that keep it differently do not meet."""

# KEYS: nodes, what names of blocks begin with. ARGV: short keys, whether to stop at a block that
# nobody has. -> the time, the hash of nodes, and runs of equal blocks: list of holders, length.
_READ_SCRIPT: Final = """
local keys, runs, last = ARGV[1], {}, nil
for at = 1, #keys, 8 do
  local holders = redis.call('GET', KEYS[2] .. string.sub(keys, at, at + 7)) or ''
  if holders == '' and ARGV[2] == '1' then break end
  if holders ~= last then
    runs[#runs + 1], runs[#runs + 2], last = holders, 0, holders
  end
  runs[#runs] = runs[#runs] + 1
end
return {redis.call('TIME'), redis.call('HGETALL', KEYS[1]), runs}
"""

_HOLDERS_TYPE: Final = np.dtype([("holder", "<u4"), ("flags", "<u2")])


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """`prefix` begins all names. `forget_s` should equal that of the followers. Blocks live for
    `key_ttl_s`; a writer's lease of a node lasts `lease_s`.
    """

    prefix: str = DEFAULT_PREFIX
    forget_s: float = FORGET_S
    key_ttl_s: int = 3600
    lease_s: float = 15.0

    @property
    def nodes(self) -> bytes:
        return self._named("nodes")

    @property
    def live(self) -> bytes:
        return self._named("live")

    @property
    def holders(self) -> bytes:
        return self._named("holders")

    @property
    def blocks(self) -> bytes:
        """The beginning of a block's name, which its short key follows."""
        return self._named("k:")

    def lease(self, node: NodeName) -> bytes:
        return self._named(f"w:{node}")

    def _named(self, what: str) -> bytes:
        return f"{self.prefix}:{_FORMAT}:{what}".encode()


class NodeRecord(msgspec.Struct, frozen=True, array_like=True):
    """One node's record in Redis. `holder` is its number in the lists of blocks."""

    holder: int
    epoch: str
    seq: int
    lag_s: float


_Known = tuple[NodeName, NodeRecord, float]
"""A node, its record, and the seconds since its last report."""
_Run = tuple[bytes, int]
"""The holders of equal neighbouring blocks, and the number of these blocks."""


class RedisDirectory:
    """A `DirectoryReader` of what writers keep in Redis."""

    def __init__(self, redis: Redis, settings: RedisSettings | None = None) -> None:
        self._redis = redis
        self._settings = settings or RedisSettings()
        self._outage = Outage("directory in Redis")

    @classmethod
    def at(cls, url: str, settings: RedisSettings | None = None) -> RedisDirectory:
        """The directory in the server at `url` (redis://, rediss:// or unix://). ValueError."""
        return cls(connect(url), settings)

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        if not keys or self._outage.quiet(time.monotonic()):
            return []
        try:
            nodes, runs = await self._ask(keys, stops_at_hole=rule.has_kv)
            found = _match(rule, nodes, runs)
        except (RedisError, OSError, StoreError) as error:
            self._outage.failed(error, time.monotonic())
            return []
        self._outage.worked()
        return found

    async def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        nobody: list[list[NodeName]] = [[] for _ in keys]
        if not keys or self._outage.quiet(time.monotonic()):
            return nobody
        try:
            nodes, runs = await self._ask(keys)
            columns = {record.holder: column for column, (_, record, _) in enumerate(nodes)}
            found = []
            for value, length in runs:
                held = np.flatnonzero(_row(value, columns) & EMBEDDING_FLAG).tolist()
                found += length * [[nodes[column][0] for column in held]]
        except (RedisError, OSError, StoreError) as error:
            self._outage.failed(error, time.monotonic())
            return nobody
        self._outage.worked()
        return found

    async def nodes(self) -> list[NodeState]:
        try:
            nodes, _ = await self._ask([])
        except (RedisError, OSError, StoreError) as error:
            self._outage.failed(error, time.monotonic())
            return []
        return [_state(name, record, age_s) for name, record, age_s in sorted(nodes)]

    async def close(self) -> None:
        await self._redis.aclose()

    async def _ask(
        self, keys: Sequence[bytes], *, stops_at_hole: bool = False
    ) -> tuple[list[_Known], list[_Run]]:
        """The nodes that have reported lately, and the runs of the blocks in order."""
        names = [self._settings.nodes, self._settings.blocks]
        arguments: list[Any] = [short_key_bytes(keys), int(stops_at_hole)]
        answer: Any = await self._redis.eval(_READ_SCRIPT, len(names), *names, *arguments)
        (seconds, micros), raw_nodes, runs = answer
        nodes = []
        for raw_name, raw in _pairs(raw_nodes):
            heard_s, record = parse_record(raw)
            age_s = max(0.0, int(seconds) + int(micros) / 1e6 - heard_s)
            if age_s <= self._settings.forget_s:
                cluster, _, node = raw_name.decode().partition("/")
                nodes.append((NodeName(cluster, node), record, age_s))
        return nodes, list(_pairs(runs))


def _match(rule: ResumeRule, nodes: list[_Known], runs: list[_Run]) -> list[NodeCoverage]:
    """As `Directory.match_short`, from the raw lists of holders."""
    if not nodes or not runs:
        return []
    columns = {record.holder: column for column, (_, record, _) in enumerate(nodes)}
    flags = np.array([_row(value, columns) for value, _ in runs])
    ends = np.cumsum([length for _, length in runs], dtype=np.int64)
    return coverages(rule, flags, ends, [(name, age_s) for name, _, age_s in nodes])


def _pairs(items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The pairs of a list that Redis sends instead of a mapping."""
    return zip(items[::2], items[1::2], strict=True)


def _row(value: bytes, columns: dict[int, int]) -> npt.NDArray[np.uint16]:
    if len(value) % _HOLDERS_TYPE.itemsize:
        raise StoreError(f"no list of holders: {value[:40]!r}")
    row: npt.NDArray[np.uint16] = np.zeros(len(columns), dtype=np.uint16)
    for holder, flags in np.frombuffer(value, dtype=_HOLDERS_TYPE).tolist():
        # Another number is of a former or unfinished snapshot, or of a node not heard of lately.
        if holder in columns:
            row[columns[holder]] = flags
    return row


def parse_record(raw: bytes) -> tuple[float, NodeRecord]:
    """The time of a node's last report, by Redis's clock in seconds, and its record. Raises
    StoreError.
    """
    heard_ms, _, record = raw.partition(b" ")
    try:
        return int(heard_ms) / 1000, msgspec.msgpack.decode(record, type=NodeRecord)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreError(f"no record of a node: {raw[:40]!r}: {error}") from error


def _state(name: NodeName, record: NodeRecord, age_s: float) -> NodeState:
    return NodeState(
        name.cluster,
        name.node,
        # Redis has blocks by key only: to count those of a node would be to read them all.
        num_blocks=-1,
        num_embeddings=-1,
        epoch=record.epoch,
        seq=record.seq,
        age_s=age_s,
        lag_s=record.lag_s,
        complete=True,
    )
