"""The keys that the gateways of one region have in Redis, and the scripts that change them.

Keys, under `prfaas:gw1:REGION:`

    beats     hash: gateway -> when it was last heard of (Redis's clock, ms)
    works     hash: gateway -> its `Beat`: its name, and what it has under way
    leader    "GATEWAY TOKEN" of the gateway that leads, for as long as its lease lasts
    token     the highest number that a leader had
    plan      the `SharedPlan` of the leader
    learned   the `SharedState`: what the region has learnt, for gateways that start
    seen      stream of `Observations`, in the order in which gateways told them
    b:TENANT  hash: what a tenant has left, and what each gateway has of it in flight (`budgets`)

Everything expires or is bounded. Redis must be one server and not a cluster, because a script reads
several keys. It holds counts, lengths and names of tenants and instances, never a prompt.

Whoever may write there can send anything. So scripts drop keys and fields that are not what they
should be, and `decoded` refuses what is too long or has a number that nobody can calculate with.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvmanager.directory.redis_client import connect
from scheduler.live.sharing.events import Observed
from scheduler.live.sharing.learned_state import LearnedState, PlanState
from scheduler.live.sharing.peer_work import Work
from scheduler.replay.recording import plain

FORMAT: Final = 1
"""Part of every name, so that programs that keep it differently do not meet."""
TIMEOUT_S: Final = 1.0
"""How long an answer of Redis is waited for, seconds."""
GONE_S: Final = 3.0
"""A gateway that was not heard of for so long is gone, seconds."""
LEASE_S: Final = 5.0
"""How long a gateway leads after it was last heard of, seconds."""
MAX_BATCHES: Final = 20_000
"""How many batches of observations are kept for gateways that are cut off for a while."""
READ_BATCHES: Final = 200
KEPT_S: Final = 7 * 24 * 3600
"""How long the plan and what was learnt are kept without any gateway, seconds."""
MAX_BEAT_BYTES: Final = 1 << 20
"""A gateway with `MAX_ITEMS` legs and prompts under way stays below it."""
MAX_BATCH_BYTES: Final = 1 << 18
MAX_STATE_BYTES: Final = 16 << 20
MAX_NUMBER: Final = 1e30
"""Larger numbers are refused: their squares and products must stay finite."""
MAX_INTEGER: Final = 1 << 53
"""What is added to a larger one might not fit into a message any more."""
MAX_CALLS: Final = 500
"""How many calls go to Redis together."""

Message = TypeVar("Message", bound=msgspec.Struct)

# Scripts begin with it. `now` is the time in ms. `live(beat, gone)`: whether a gateway with this
# beat is there. A beat from the future would never grow old, and comparisons with NaN are false.
CLOCK: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function live(beat, gone)
  beat = tonumber(beat or '')
  return beat and beat + gone >= now and beat - gone <= now
end
local function typed(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
"""

# KEYS: beats, works, leader, token, plan, learned, seen. ARGV: gateway, gone ms, beat, lease ms,
# the plan or "", how long that is kept.
# -> time ms, [gateway, beat, ...] of the others, plan, who leads, its token.
_BEAT_SCRIPT: Final = (
    CLOCK
    + """
local kinds = {'hash', 'hash', 'string', 'string', 'string', 'string', 'stream'}
for i, kind in ipairs(kinds) do typed(KEYS[i], kind) end
-- Tokens begin with the time in ms and go up by one; a day of clocks that differ is allowed.
local function token_of(text)
  local token = tonumber(text or '')
  return token and token >= 0 and token <= now + 86400000 and token
end
local me = ARGV[1]
redis.call('HSET', KEYS[1], me, string.format('%.0f', now))
redis.call('HSET', KEYS[2], me, ARGV[3])
local beats, others = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #beats, 2 do
  if not live(beats[i + 1], ARGV[2]) then
    redis.call('HDEL', KEYS[1], beats[i])
    redis.call('HDEL', KEYS[2], beats[i])
  elseif beats[i] ~= me then
    others[#others + 1] = beats[i]
    others[#others + 1] = redis.call('HGET', KEYS[2], beats[i]) or ''
  end
end
local leader, token = string.match(redis.call('GET', KEYS[3]) or '', '^(%S+) (%d+)$')
local left_ms = redis.call('PTTL', KEYS[3])
-- A leader that nobody can be, or one without an end, would keep all others from leading.
if leader == me and token_of(token) then
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
elseif not token_of(token) or left_ms < 0 or left_ms > tonumber(ARGV[4]) then
  -- Not below the time in ms: a server that lost its data must not give out old numbers again.
  local last = token_of(redis.call('GET', KEYS[4])) or 0
  token = string.format('%.0f', math.max(last, now) + 1)
  redis.call('SET', KEYS[4], token)
  redis.call('SET', KEYS[3], me .. ' ' .. token, 'PX', ARGV[4])
  leader = me
end
if leader == me and ARGV[5] ~= '' then redis.call('SET', KEYS[5], ARGV[5], 'EX', ARGV[6]) end
return {string.format('%.0f', now), others, redis.call('GET', KEYS[5]) or '', leader, token}
"""
)

# KEYS: beats, works, leader. ARGV: gateway.
_LEAVE_SCRIPT: Final = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
local held = redis.call('GET', KEYS[3])
if held and string.match(held, '^%S+') == ARGV[1] then redis.call('DEL', KEYS[3]) end
"""


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=plain)


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A gateway says a few times a second that it lives: its name for operators, and its work."""

    name: str
    work: Work


class SharedPlan(msgspec.Struct, frozen=True, array_like=True):
    """The plan of a leader. `number` goes up with each change of it."""

    token: int
    number: int
    plan: PlanState


class SharedState(msgspec.Struct, frozen=True, array_like=True):
    """What was learnt: of which models, when it was kept (Redis's clock, ms), and the last batch of
    the stream that is part of it.
    """

    about: str
    made_ms: int
    position: bytes
    state: LearnedState


class Observations(msgspec.Struct, frozen=True, array_like=True):
    """A batch of the observations of a gateway, from number `first` on."""

    gateway: str
    first: Annotated[int, msgspec.Meta(ge=0)]
    observed: list[Observed]


@dataclass(frozen=True, slots=True)
class Heard:
    """The answer to a beat: Redis's time, the others' beats, the leader's plan, and who leads."""

    time_ms: int
    others: dict[bytes, bytes]
    plan: bytes
    leader: str
    token: int


class RegionInRedis:
    """The keys of one region, as gateway `me` uses them. Raises RedisError and OSError."""

    def __init__(self, redis: Redis, region: str, me: str) -> None:
        self.redis = redis
        self.me = me
        self._prefix = f"prfaas:gw{FORMAT}:{region}:"
        self._beat: AsyncScript = redis.register_script(_BEAT_SCRIPT)

    def key(self, name: str) -> str:
        """The whole name of a key."""
        return self._prefix + name

    async def beat(self, beat: bytes, *, plan: bytes) -> Heard:
        """Say that this gateway lives, and hear of the others. Takes or renews the lease, and keeps
        its plan if it leads.
        """
        names = ("beats", "works", "leader", "token", "plan", "learned", "seen")
        arguments: list[Any] = [
            self.me,
            int(1000 * GONE_S),
            beat,
            int(1000 * LEASE_S),
            plan,
            KEPT_S,
        ]
        answer: Any = await self._beat([self.key(name) for name in names], arguments)
        time_ms, others, kept, leader, token = answer
        return Heard(int(time_ms), dict(_pairs(others)), kept, _name(leader), int(token))

    async def leave(self) -> None:
        """Say that this gateway ends, so that nobody waits for it."""
        keys = [self.key(name) for name in ("beats", "works", "leader")]
        await self.redis.eval(_LEAVE_SCRIPT, len(keys), *keys, self.me)

    async def tell(self, batches: Iterable[Observations]) -> None:
        """Append batches of own observations, in one round trip."""
        key = self.key("seen")
        async with self.redis.pipeline(transaction=False) as calls:
            for batch in batches:
                fields: Any = {"b": _encoder.encode(batch)}
                calls.xadd(key, fields, maxlen=MAX_BATCHES, approximate=True)
            await _answers(calls)

    async def run(self, script: str, calls: Sequence[tuple[list[str], list[Any]]]) -> None:
        """Run a script with the keys and arguments of each of `calls`, `MAX_CALLS` of them in one
        round trip. Raises the first error.
        """
        digest = AsyncScript(self.redis, script).sha
        for start in range(0, len(calls), MAX_CALLS):
            async with self.redis.pipeline(transaction=False) as together:
                for number, (keys, arguments) in enumerate(calls[start : start + MAX_CALLS]):
                    # The first call brings the text, so that the server has it for the others.
                    run = together.evalsha if number else together.eval
                    run(digest if number else script, len(keys), *keys, *arguments)
                await _answers(together)

    async def hear(self, position: bytes) -> list[tuple[bytes, bytes]]:
        """The next batches after `position`, with theirs; empty at the end of the stream."""
        answer: Any = await self.redis.xread({self.key("seen"): position}, count=READ_BATCHES)
        if not answer:
            return []
        ((_, batches),) = answer.items() if isinstance(answer, dict) else answer
        return [(at, fields.get(b"b", b"")) for at, fields in batches]

    async def keep(self, state: SharedState) -> None:
        """Keep what was learnt."""
        await self.redis.set(self.key("learned"), msgspec.msgpack.encode(state), ex=KEPT_S)

    async def kept(self) -> bytes | None:
        """The encoded `SharedState` that was kept; None if there is none."""
        found: Any = await self.redis.get(self.key("learned"))
        return found if isinstance(found, bytes) else None


def decoded(data: bytes, kind: type[Message], max_bytes: int) -> Message:
    """A message of another gateway. ValueError: it is too long or of another kind, or one of its
    numbers is no number that can be calculated with.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes; at most {max_bytes} are read")
    message = msgspec.msgpack.decode(data, type=kind)
    pending: list[Any] = [msgspec.msgpack.decode(data, strict=False)]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, float | int):
            most = MAX_NUMBER if isinstance(item, float) else MAX_INTEGER
            if not abs(item) <= most:
                raise ValueError(f"it has the number {item!r}")
    return message


async def _answers(calls: Any) -> list[Any]:
    """The answers of a pipeline within the time for one command. Raises the first error."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            answers: list[Any] = await calls.execute()
            return answers
    except TimeoutError as error:
        raise RedisTimeoutError(f"no answer within {TIMEOUT_S:g} s") from error


def _name(name: bytes) -> str:
    """The name of a gateway, which may be anything in a message of a stranger."""
    return name.decode(errors="replace")


def region_at(url: str, region: str) -> RegionInRedis:
    """The keys of a region in the server at `url`, for a gateway that starts. It has a new name
    there, so that work of an earlier gateway does not count as its own. ValueError: no such URL.
    """
    return RegionInRedis(connect(url, timeout_s=TIMEOUT_S), region, secrets.token_hex(8))


def _pairs(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs of a list that Redis sends instead of a mapping."""
    return list(zip(items[::2], items[1::2], strict=True))
