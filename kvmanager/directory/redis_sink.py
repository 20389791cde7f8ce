"""Keeps a directory in a Redis server up to date. `redis_store` describes its data.

Does not know agents: a `DirectoryFollower` passes their feeds on. The scripts check everything on
which several writers could disagree, because Redis runs them one at a time.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvmanager.agent.messages import CacheFeed
from kvmanager.directory.directory import FROM_THE_BEGINNING, Position, check_feed, joined_flags
from kvmanager.directory.errors import StoreError
from kvmanager.directory.messages import SHORT_KEY_BYTES, NodeName
from kvmanager.directory.redis_store import NodeRecord, RedisSettings, parse_record

_BATCH_KEYS: Final = 1000
"""Blocks written by one script: a few milliseconds in which Redis serves nobody else."""

# KEYS: lease, nodes. ARGV: writer, lease ms, node.
# -> {1, record or ""} and the lease is ours, or {0}.
_LEASE_SCRIPT: Final = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return {0, ''} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, redis.call('HGET', KEYS[2], ARGV[3]) or ''}
"""

# A node's snapshot begins. KEYS: lease, live, nodes, holders. ARGV: writer, lease ms, TTL in
# seconds, node, the number that readers go by or "". -> the number to write under, or 0 without the
# lease. Also drops the nodes of which nobody has said anything for a TTL: their blocks are gone.
_BEGIN_SCRIPT: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for at = 2, 3 do
  local said = redis.call('HGETALL', KEYS[at])
  for i = 1, #said, 2 do
    local ms = tonumber(string.match(said[i + 1], '^%d+')) or 0
    if ms + ARGV[3] * 1000 < now then redis.call('HDEL', KEYS[at], said[i]) end
  end
end
local holder = redis.call('INCR', KEYS[4]) % 4294967295 + 1
local numbers = ARGV[5] .. struct.pack('<I4', holder)
redis.call('HSET', KEYS[2], ARGV[4], string.format('%.0f ', now) .. numbers)
redis.call('EXPIRE', KEYS[2], ARGV[3])
return holder
"""

# KEYS: lease, live, what names of blocks begin with. ARGV: writer, lease ms, block TTL in seconds,
# short keys, their flags, holder. -> 1, 0 without the lease, -1 when the holder is not live.
_WRITE_SCRIPT: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local keys, flags, holder = ARGV[4], ARGV[5], ARGV[6]
local live = {}
for _, said in ipairs(redis.call('HVALS', KEYS[2])) do
  for at = (string.find(said, ' ', 1, true) or #said) + 1, #said, 4 do
    live[string.sub(said, at, at + 3)] = true
  end
end
if not live[holder] then return -1 end
live[holder] = nil
for i = 1, #keys / 8 do
  local name = KEYS[3] .. string.sub(keys, 8 * i - 7, 8 * i)
  local old = redis.call('GET', name) or ''
  local new = {}
  for at = 1, #old, 6 do
    if live[string.sub(old, at, at + 3)] then new[#new + 1] = string.sub(old, at, at + 5) end
  end
  local mine = string.sub(flags, 2 * i - 1, 2 * i)
  if mine ~= '\\0\\0' then new[#new + 1] = holder .. mine end
  if #new == 0 then
    if old ~= '' then redis.call('DEL', name) end
  else
    redis.call('SET', name, table.concat(new), 'EX', ARGV[3])
  end
end
return 1
"""

# From now on readers go by this holder, and no other number of the node is live. KEYS: lease, live,
# nodes. ARGV: writer, lease ms, TTL in seconds, node, holder, record. -> as _WRITE_SCRIPT.
_PUBLISH_SCRIPT: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local said = redis.call('HGET', KEYS[2], ARGV[4]) or ''
if not string.find(said, ARGV[5], string.find(said, ' ', 1, true) or 1, true) then return -1 end
local time = redis.call('TIME')
local ms = string.format('%.0f ', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[2], ARGV[4], ms .. ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[3], ARGV[4], ms .. ARGV[6])
redis.call('EXPIRE', KEYS[3], ARGV[3])
return 1
"""

# KEYS: lease, live, nodes. ARGV: writer, node. Another writer's node is left alone.
_FORGET_SCRIPT: Final = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[2])
return 1
"""


@dataclass(slots=True)
class _Written:
    """How far this writer is with a node, in holder numbers (0: none).

    `holder` is being written and `shown` is what readers go by: two numbers while a snapshot is on
    its way.
    """

    holder: int
    shown: int
    snapshot_s: float
    position: Position = FROM_THE_BEGINNING
    lag_s: float = 0.0

    def is_complete(self, feed: CacheFeed) -> bool:
        """Whether readers may go by `holder` after this feed."""
        return self.shown == self.holder or not feed.more


class RedisSink:
    """A `FeedSink` that writes into Redis. Raises `StoreError` when that does not work."""

    def __init__(self, redis: Redis, settings: RedisSettings | None = None) -> None:
        self._redis = redis
        self._settings = settings or RedisSettings()
        self._writer = secrets.token_bytes(8)
        self._written: dict[NodeName, _Written] = {}

    async def position(self, node: NodeName) -> Position | None:
        keys = [self._settings.lease(node), self._settings.nodes]
        owned, raw = await self._run(_LEASE_SCRIPT, keys, [self._lease_ms, str(node)])
        if not owned:
            self._written.pop(node, None)
            return None
        shown = _holder_in(raw)
        written = self._written.get(node)
        # With another number this writer is new, or another one had the lease meanwhile, or the
        # server has lost its data. Which blocks are there is unknown, so a snapshot is due.
        if written is None or written.shown != shown:
            self._written[node] = _Written(shown, shown, time.monotonic())
            return FROM_THE_BEGINNING
        # Each snapshot renews the TTL of all its blocks, long before it ends.
        if time.monotonic() - written.snapshot_s > self._settings.key_ttl_s / 3:
            return FROM_THE_BEGINNING
        return written.position

    async def apply(self, node: NodeName, feed: CacheFeed) -> bool:
        try:
            check_feed(node, feed)
            return await self._apply(node, feed)
        except Exception:
            self._written.pop(node, None)
            raise

    async def forget(self, node: NodeName) -> None:
        self._written.pop(node, None)
        keys = [self._settings.lease(node), self._settings.live, self._settings.nodes]
        await self._run(_FORGET_SCRIPT, keys, [str(node)])

    async def _apply(self, node: NodeName, feed: CacheFeed) -> bool:
        written = self._written.get(node)
        if feed.is_snapshot:
            written = self._written[node] = await self._begun(node, written)
        elif written is None or not _continues(written.position, feed):
            self._written.pop(node, None)
            return False
        keys, flags = feed.keys + feed.embeddings, joined_flags(feed)
        num_keys = len(keys) // SHORT_KEY_BYTES
        for start in range(0, num_keys, _BATCH_KEYS):
            stop = start + _BATCH_KEYS
            await self._write(
                node,
                written,
                keys[SHORT_KEY_BYTES * start : SHORT_KEY_BYTES * stop],
                flags[2 * start : 2 * stop],
            )
        written.position = (feed.epoch, feed.seq)
        if num_keys:
            written.lag_s = feed.age_s
        if written.is_complete(feed):
            await self._publish(node, written)
        return True

    async def _begun(self, node: NodeName, former: _Written | None) -> _Written:
        """A new holder number for a snapshot. That of a snapshot that broke off is dropped."""
        shown = former.shown if former is not None else 0
        keys = [
            self._settings.lease(node),
            self._settings.live,
            self._settings.nodes,
            self._settings.holders,
        ]
        arguments = [
            self._lease_ms,
            self._settings.key_ttl_s,
            str(node),
            _packed(shown) if shown else b"",
        ]
        holder = int(await self._run(_BEGIN_SCRIPT, keys, arguments))
        _check_written(node, holder)
        return _Written(holder, shown, time.monotonic())

    async def _write(self, node: NodeName, written: _Written, keys: bytes, flags: bytes) -> None:
        arguments = [
            self._lease_ms,
            self._settings.key_ttl_s,
            keys,
            flags,
            _packed(written.holder),
        ]
        names = [self._settings.lease(node), self._settings.live, self._settings.blocks]
        _check_written(node, await self._run(_WRITE_SCRIPT, names, arguments))

    async def _publish(self, node: NodeName, written: _Written) -> None:
        # Before the script: if it fails, `apply` forgets the node and a new snapshot follows.
        written.shown = written.holder
        record = NodeRecord(written.holder, *written.position, written.lag_s)
        keys = [self._settings.lease(node), self._settings.live, self._settings.nodes]
        arguments = [
            self._lease_ms,
            self._settings.key_ttl_s,
            str(node),
            _packed(written.holder),
            msgspec.msgpack.encode(record),
        ]
        _check_written(node, await self._run(_PUBLISH_SCRIPT, keys, arguments))

    @property
    def _lease_ms(self) -> int:
        return int(1000 * self._settings.lease_s)

    async def _run(self, script: str, keys: list[bytes], arguments: list[Any]) -> Any:
        try:
            return await self._redis.eval(script, len(keys), *keys, self._writer, *arguments)
        except (RedisError, OSError) as error:
            raise StoreError(f"Redis: {error}") from error


def _continues(position: Position, feed: CacheFeed) -> bool:
    epoch, seq = position
    return bool(epoch) and feed.epoch == epoch and feed.seq >= seq


def _holder_in(raw: bytes) -> int:
    """The holder number in a node's record; 0 without a readable record."""
    try:
        return parse_record(raw)[1].holder
    except StoreError:
        return 0


def _check_written(node: NodeName, answer: int) -> None:
    """Raise `StoreError` if a script's answer says that it did nothing."""
    if answer == 0:
        raise StoreError(f"{node}: another writer follows it now")
    if answer < 0:
        raise StoreError(f"{node}: Redis has lost what was written of it")


def _packed(holder: int) -> bytes:
    return holder.to_bytes(4, "little")
