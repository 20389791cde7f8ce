"""Tenants' limits over all gateways of a region: what one gateway lets in counts in the others.

A request of a tenant with limits asks Redis once before it is let in, and whoever asks first gets
what is left. So all gateways together let in what one would, at the price of one round trip to
Redis for each such request, or two if the end of another one of the same tenant is being told. The
alternative, a part of each limit held by each gateway, costs no
round trip but refuses what another gateway has room for, above all where a limit is a few requests.
Requests of tenants without limits do not ask. The end of a request is told in the background.

A gateway that is gone holds nothing: what it had in flight counts until it was not heard of for
`GONE_S`. While Redis does not answer, each gateway holds its share of the limits by itself, and
says afterwards what it has in flight and has let in.

The rules are those of `scheduler.live.tenants`, which also holds what this gateway itself has.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from redis.exceptions import RedisError

from deploy.gateway.sharing.redis_region import CLOCK, GONE_S, RegionInRedis
from scheduler.live.tenants import TenantLimit, TenantReason, TenantRefusal
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

ACCOUNT_KEPT_S: Final = 3600
"""How long an account is kept after it was last used, seconds. Then its bucket is full again."""
GATHER_S: Final = 0.02
"""How long ends of requests are gathered before they are told, seconds."""

# Every script begins with this. KEYS: account, beats. ARGV: gateway, gone ms, tokens/s or -1, the
# burst. -> requests and tokens in flight of all gateways, those of this one, the level of the
# bucket. A level or time that is no number is as if it was not there: the bucket is full. A
# gateway's part that cannot be is dropped.
_OPEN: Final = (
    CLOCK
    + """
typed(KEYS[1], 'hash')
typed(KEYS[2], 'hash')
local function number(text, otherwise)
  local found = tonumber(text)
  if found and found > -1e15 and found < 1e15 then return found end
  return otherwise
end
local requests, tokens, own_requests, own_tokens = 0, 0, 0, 0
local rate, burst = tonumber(ARGV[3]), tonumber(ARGV[4])
local level, at = burst, now
local account = redis.call('HGETALL', KEYS[1])
for i = 1, #account, 2 do
  local name, said = account[i], account[i + 1]
  if name == 'level' then level = number(said, burst)
  elseif name == 'at' then at = number(said, now)
  else
    local r, t = string.match(said, '^(%d+) (%d+)$')
    r, t = number(r or ''), number(t or '')
    if not r or not (name == ARGV[1] or live(redis.call('HGET', KEYS[2], name), ARGV[2])) then
      redis.call('HDEL', KEYS[1], name)
    elseif t then
      requests, tokens = requests + r, tokens + t
      if name == ARGV[1] then own_requests, own_tokens = r, t end
    end
  end
end
if rate >= 0 then level = math.min(burst, level + rate * math.max(0, now - at) / 1000) end
local function close(new_requests, new_tokens)
  if new_requests > 0 then
    redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %.0f', new_requests, new_tokens))
  else
    redis.call('HDEL', KEYS[1], ARGV[1])
  end
  if rate >= 0 then
    redis.call('HSET', KEYS[1], 'level', string.format('%.17g', level), 'at',
      string.format('%.0f', now))
  end
  redis.call('EXPIRE', KEYS[1], ARGV[5])
end
"""
)

# Further ARGV: how long it is kept, tokens, the most requests or -1, the most tokens or -1, and
# what has changed of requests, tokens and the level since this gateway told it.
# -> {"", ""}, or the limit that would be broken and what there is of it now.
_TAKE_SCRIPT: Final = (
    _OPEN
    + """
local new, most_requests, most_tokens = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
requests, own_requests = requests + ARGV[9], math.max(0, own_requests + ARGV[9])
tokens, own_tokens = tokens + ARGV[10], math.max(0, own_tokens + ARGV[10])
level = level + ARGV[11]
local broken, there = '', ''
if most_requests >= 0 and requests >= most_requests then
  broken, there = 'requests', string.format('%.0f', requests)
elseif most_tokens >= 0 and tokens > 0 and tokens + new > most_tokens then
  broken, there = 'tokens', string.format('%.0f', tokens)
elseif rate >= 0 and level < math.min(new, burst) then
  broken, there = 'rate', string.format('%.17g', level)
else
  own_requests, own_tokens, level = own_requests + 1, own_tokens + new, level - new
end
close(own_requests, own_tokens)
return {broken, there}
"""
)

# Further ARGV: how long it is kept, changes of requests, tokens and the level, and whether the
# first two replace what there was.
_SETTLE_SCRIPT: Final = (
    _OPEN
    + """
level = level + tonumber(ARGV[8])
if ARGV[9] == '1' then own_requests, own_tokens = 0, 0 end
close(math.max(0, own_requests + ARGV[6]), math.max(0, own_tokens + ARGV[7]))
"""
)


@dataclass(slots=True)
class _Change:
    """Changes of a tenant's account. Tokens that were not used raise the level."""

    requests: int = 0
    tokens: int = 0
    level_tokens: float = 0.0


class SharedBudgets:
    """The accounts of tenants with limits, as one gateway uses them, on one event loop."""

    def __init__(self, region: RegionInRedis, limit: Callable[[str], TenantLimit]) -> None:
        """`limit` gives the present limits of a tenant."""
        self._region = region
        self._take = region.redis.register_script(_TAKE_SCRIPT)
        self._limit = limit
        self._is_joined = False
        self._held: defaultdict[str, _Change] = defaultdict(_Change)
        """What this gateway has in flight, by tenant. The level is what was let in alone.

        A tenant leaves it when Redis has been, or is being, told that nothing is left. Until then
        `join` tells what is there.
        """
        self._changes: defaultdict[str, _Change] = defaultdict(_Change)
        self._in_transit: frozenset[str] = frozenset()
        """The tenants of whom changes are being told."""
        self._transit = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._telling: asyncio.Task[None] | None = None

    @property
    def is_joined(self) -> bool:
        """Whether Redis is asked."""
        return self._is_joined

    def start(self) -> None:
        """Tell ends of requests from now on."""
        self._telling = start_task(self._tell_on(), "tenants' budgets")

    async def close(self) -> None:
        """Tell what has ended until now. Idempotent."""
        task, self._telling = self._telling, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, *self._tasks, return_exceptions=True)
        if self._is_joined:
            await self._tell_changes()

    async def take(self, tenant: str, num_tokens: int) -> TenantRefusal | None:
        """Count a request of `num_tokens` in, or say why the limits of its tenant refuse it. One
        that was counted is given back once. When cancelled, nothing stays counted.
        """
        if not self._is_joined:
            self._count(tenant, num_tokens, alone=True)
            return None
        # A script that was sent runs, whatever becomes of the request: its answer must be heard.
        asking = start_task(self._ask(tenant, num_tokens), "a tenant's budget", self._tasks)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda done: self._not_wanted(done, tenant, num_tokens))
            raise

    def give_back(self, tenant: str, num_tokens: int, used_tokens: int | None) -> None:
        """A request that was counted is over, and was work of `used_tokens` if that is known."""
        unused = 0 if used_tokens is None else num_tokens - used_tokens
        held = self._held[tenant]
        held.requests -= 1
        held.tokens -= num_tokens
        if not self._is_joined:
            held.level_tokens += unused
            return
        change = self._changes[tenant]
        change.requests -= 1
        change.tokens -= num_tokens
        change.level_tokens += unused
        if not held.requests:
            del self._held[tenant]
        self._wake.set()

    def went_alone(self) -> None:
        """Redis does not answer: count here alone."""
        if self._is_joined:
            self._is_joined = False
            # What was not told is told with everything else, once Redis is back.
            for tenant, change in self._changes.items():
                self._held[tenant].level_tokens += change.level_tokens
            self._changes.clear()

    async def join(self) -> None:
        """Redis answers: tell all that this gateway has, and ask from now on. Raises RedisError,
        OSError; it is still alone then.
        """
        told = {
            tenant: _Change(held.requests, held.tokens, held.level_tokens)
            for tenant, held in self._held.items()
        }
        await self._settle(told, replaces=True)
        # Without an await: requests that began or ended meanwhile are told as changes.
        self._is_joined = True
        for tenant, change in told.items():
            held = self._held[tenant]
            self._changes[tenant] = _Change(
                held.requests - change.requests,
                held.tokens - change.tokens,
                held.level_tokens - change.level_tokens,
            )
        for tenant in self._held.keys() - told.keys():
            held = self._held[tenant]
            self._changes[tenant] = _Change(held.requests, held.tokens, held.level_tokens)
        for tenant, held in list(self._held.items()):
            held.level_tokens = 0.0
            if not held.requests:
                del self._held[tenant]
        self._wake.set()

    async def _ask(self, tenant: str, num_tokens: int) -> TenantRefusal | None:
        limit = self._limit(tenant)
        most = [-1 if bound is None else bound for bound in (limit.max_requests, limit.max_tokens)]
        if tenant in self._in_transit:
            async with self._transit:  # what is being told makes room
                pass
        # With it goes what has ended since: one client may ask again at once.
        change = self._changes.pop(tenant, _Change())
        since = change.requests, change.tokens, change.level_tokens
        try:
            keys, arguments = self._call(tenant, num_tokens, *most, *since)
            broken, there = await self._take(keys, arguments)
        except (RedisError, OSError) as error:
            logger.debug("%s: let in alone: %s", tenant, error)
            self._held[tenant].level_tokens += change.level_tokens
            # Whether it was counted there is not known, so all is told again.
            self.went_alone()
            self._count(tenant, num_tokens, alone=True)
            return None
        if not broken:
            self._count(tenant, num_tokens, alone=False)
            return None
        return _refusal(broken.decode(), float(there), num_tokens, limit)

    def _count(self, tenant: str, num_tokens: int, *, alone: bool) -> None:
        held = self._held[tenant]
        held.requests += 1
        held.tokens += num_tokens
        if alone:
            held.level_tokens -= num_tokens

    def _not_wanted(
        self, done: asyncio.Task[TenantRefusal | None], tenant: str, num_tokens: int
    ) -> None:
        if not done.cancelled() and done.exception() is None and done.result() is None:
            self.give_back(tenant, num_tokens, 0)

    async def _tell_on(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            if self._is_joined:
                await self._tell_changes()

    async def _tell_changes(self) -> None:
        changes, self._changes = self._changes, defaultdict(_Change)
        self._in_transit = frozenset(changes)
        try:
            async with self._transit:
                await self._settle(changes)
        except (RedisError, OSError) as error:
            logger.debug("ends of requests are told later: %s", error)
            for tenant, change in changes.items():
                self._held[tenant].level_tokens += change.level_tokens
            self.went_alone()
        finally:
            self._in_transit = frozenset()

    async def _settle(self, changes: Mapping[str, _Change], *, replaces: bool = False) -> None:
        calls = [
            self._call(tenant, item.requests, item.tokens, item.level_tokens, int(replaces))
            for tenant, item in changes.items()
        ]
        await self._region.run(_SETTLE_SCRIPT, calls)

    def _call(self, tenant: str, *arguments: Any) -> tuple[list[str], list[Any]]:
        """The keys and arguments of a script for a tenant."""
        region, limit = self._region, self._limit(tenant)
        keys = [region.key(f"b:{tenant}"), region.key("beats")]
        rate = -1.0 if limit.tokens_per_s is None else limit.tokens_per_s
        first: list[Any] = [region.me, int(1000 * GONE_S), rate, limit.burst_tokens, ACCOUNT_KEPT_S]
        return keys, [*first, *arguments]


def _refusal(broken: str, there: float, num_tokens: int, limit: TenantLimit) -> TenantRefusal:
    """The refusal as `TenantLedger` words it."""
    if broken == "requests":
        assert limit.max_requests is not None
        numbers: dict[str, int | float] = {
            "requests": int(there),
            "max_requests": limit.max_requests,
        }
        return TenantRefusal(TenantReason.REQUESTS, None, MappingProxyType(numbers))
    if broken == "tokens":
        assert limit.max_tokens is not None
        numbers = {"tokens": int(there), "new_tokens": num_tokens, "max_tokens": limit.max_tokens}
        return TenantRefusal(TenantReason.TOKENS, None, MappingProxyType(numbers))
    assert limit.tokens_per_s is not None
    numbers = {"level_tokens": there, "new_tokens": num_tokens, "per_s": limit.tokens_per_s}
    wait_s = (min(float(num_tokens), limit.burst_tokens) - there) / limit.tokens_per_s
    return TenantRefusal(TenantReason.RATE, wait_s, MappingProxyType(numbers))
