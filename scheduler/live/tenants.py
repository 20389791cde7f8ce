"""What one tenant may have in flight, and how many tokens a second it may bring.

There are three limits, each optional: requests in flight, tokens in flight, and a token bucket.
Tokens are those of the prompt and of the answers that a request asks for. Once the request is over,
the bucket counts the tokens that it really had. A full bucket lets any one request through and is
then below zero, and a tenant with nothing in flight may always have one request. So no request is
too long for ever. Tenants that are idle and whose bucket is full are forgotten, so memory follows
the active ones.

Pure; time is an argument. This file knows no load of the region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class TenantReason(StrEnum):
    """Why a tenant must wait. Values are stable: they are metric labels."""

    REQUESTS = "tenant_requests"
    TOKENS = "tenant_tokens"
    RATE = "tenant_rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimit:
    """What one tenant may have in flight, and bring per second. None means no limit."""

    max_requests: int | None = None
    """Requests in flight."""
    max_tokens: int | None = None
    """Tokens in flight, of prompts and of the answers asked for (`n` times `max_tokens`)."""
    tokens_per_s: float | None = None
    """Tokens of prompts and answers each second, on average."""
    burst_tokens: float = 0.0
    """Tokens that it may ask for at once after a pause; needed with `tokens_per_s`."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "tokens_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}; it must be above 0, or None for no limit")
        if self.tokens_per_s is not None and not 0 < self.burst_tokens < math.inf:
            raise ValueError(
                f"burst_tokens is {self.burst_tokens!r}; with tokens_per_s it must be above 0"
            )


def divided(limit: TenantLimit, num: int) -> TenantLimit:
    """The share of one of `num` gateways that cannot ask each other. At least one request and one
    token, so that no tenant is shut out.
    """
    rate = None if limit.tokens_per_s is None else limit.tokens_per_s / num
    return TenantLimit(
        max_requests=None if limit.max_requests is None else max(1, limit.max_requests // num),
        max_tokens=None if limit.max_tokens is None else max(1, limit.max_tokens // num),
        tokens_per_s=rate,
        burst_tokens=limit.burst_tokens / num,
    )


@dataclass(frozen=True, slots=True)
class TenantRefusal:
    """A limit that a request would break. `retry_after_s` is None when only the end of another
    request of the tenant helps.
    """

    reason: TenantReason
    retry_after_s: float | None
    numbers: Mapping[str, int | float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(slots=True)
class _Account:
    level_tokens: float
    at_s: float
    num_requests: int = 0
    num_tokens: int = 0


class TenantLedger:
    """What tenants have in flight. Single-threaded. `limits` are by tenant, `default` for the
    rest.
    """

    SWEEP_ABOVE = 1024
    """With more accounts than this, idle ones are searched for at a start."""

    def __init__(
        self, default: TenantLimit | None = None, limits: Mapping[str, TenantLimit] | None = None
    ) -> None:
        self._default = default or TenantLimit()
        self._limits = dict(limits or {})
        self._accounts: dict[str, _Account] = {}
        self._sweep_at = self.SWEEP_ABOVE

    def __len__(self) -> int:
        """The number of tenants that are remembered."""
        return len(self._accounts)

    def set_limits(self, default: TenantLimit, limits: Mapping[str, TenantLimit]) -> None:
        """Use other limits from now on. What is in flight stays and counts. A bucket that is new
        begins full, less what is in flight.
        """
        before = {tenant: self._limit(tenant) for tenant in self._accounts}
        self._default, self._limits = default, dict(limits)
        for tenant, account in self._accounts.items():
            limit = self._limit(tenant)
            # Without a rate nothing was ever gained: the level says only what it has spent.
            if before[tenant].tokens_per_s is None and limit.tokens_per_s is not None:
                account.level_tokens = max(0.0, limit.burst_tokens - account.num_tokens)

    def state(self, now_s: float) -> dict[str, float]:
        """The levels of the buckets that are not full, by tenant. Requests in flight are left out:
        they end with their gateway.
        """
        found = {}
        for tenant, account in self._accounts.items():
            limit = self._limit(tenant)
            level = self._level(limit, account, now_s)
            if limit.tokens_per_s is not None and level < limit.burst_tokens:
                found[tenant] = level
        return found

    def restore(self, levels: Mapping[str, float], now_s: float) -> None:
        """Take over the levels of buckets as they were at `now_s`, for tenants that have brought
        nothing yet.
        """
        for tenant, level in levels.items():
            self._accounts.setdefault(tenant, _Account(level, now_s))

    def in_flight(self, tenant: str) -> tuple[int, int]:
        """(requests, tokens) in flight of a tenant."""
        account = self._accounts.get(tenant)
        return (account.num_requests, account.num_tokens) if account else (0, 0)

    def refusal(self, tenant: str, num_tokens: int, now_s: float) -> TenantRefusal | None:
        """Why this tenant cannot bring `num_tokens` now, or None when it can. Changes nothing."""
        limit, account = self._limit(tenant), self._accounts.get(tenant)
        # A tenant without an account has nothing in flight and a full bucket.
        if account is None:
            return None
        requests, tokens = account.num_requests, account.num_tokens
        if limit.max_requests is not None and requests >= limit.max_requests:
            numbers = {"requests": requests, "max_requests": limit.max_requests}
            return TenantRefusal(TenantReason.REQUESTS, None, MappingProxyType(numbers))
        if limit.max_tokens is not None and tokens and tokens + num_tokens > limit.max_tokens:
            seen = {"tokens": tokens, "new_tokens": num_tokens, "max_tokens": limit.max_tokens}
            return TenantRefusal(TenantReason.TOKENS, None, MappingProxyType(seen))
        return self._too_fast(limit, account, num_tokens, now_s)

    def started(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """A request of the tenant was let in."""
        limit = self._limit(tenant)
        account = self._accounts.get(tenant)
        if account is None:
            self._sweep(now_s)
            account = self._accounts[tenant] = _Account(limit.burst_tokens, now_s)
        account.level_tokens = self._level(limit, account, now_s) - num_tokens
        # If time goes back, the bucket must not fill twice for it.
        account.at_s = max(account.at_s, now_s)
        account.num_requests += 1
        account.num_tokens += num_tokens

    def ended(self, tenant: str, num_tokens: int, used_tokens: int | None = None) -> None:
        """A request that was let in is over, and was work of `used_tokens` if that is known.
        ValueError if the tenant has no such request.
        """
        account = self._accounts.get(tenant)
        if account is None or not account.num_requests or account.num_tokens < num_tokens:
            raise ValueError(f"tenant {tenant!r} has no request of {num_tokens} tokens in flight")
        account.num_requests -= 1
        account.num_tokens -= num_tokens
        if used_tokens is not None:
            account.level_tokens += num_tokens - used_tokens

    def _too_fast(
        self, limit: TenantLimit, account: _Account, num_tokens: int, now_s: float
    ) -> TenantRefusal | None:
        if limit.tokens_per_s is None:
            return None
        level = self._level(limit, account, now_s)
        # A longer request than the bucket holds needs a full bucket, or it would never pass.
        needed = min(float(num_tokens), limit.burst_tokens)
        if level >= needed:
            return None
        numbers = {
            "level_tokens": max(0.0, level),
            "new_tokens": num_tokens,
            "per_s": limit.tokens_per_s,
        }
        wait_s = (needed - level) / limit.tokens_per_s
        return TenantRefusal(TenantReason.RATE, wait_s, MappingProxyType(numbers))

    def _level(self, limit: TenantLimit, account: _Account, now_s: float) -> float:
        """The present level of the bucket, tokens; below 0 after a request longer than the
        bucket.
        """
        gained = (limit.tokens_per_s or 0.0) * max(0.0, now_s - account.at_s)
        return min(limit.burst_tokens, account.level_tokens + gained)

    def _limit(self, tenant: str) -> TenantLimit:
        return self._limits.get(tenant, self._default)

    def _sweep(self, now_s: float) -> None:
        """Forget tenants with nothing in flight and a full bucket, once there are many."""
        if len(self._accounts) < self._sweep_at:
            return
        for tenant, account in list(self._accounts.items()):
            limit = self._limit(tenant)
            owes = limit.tokens_per_s and self._level(limit, account, now_s) < limit.burst_tokens
            if not account.num_requests and not owes:
                del self._accounts[tenant]
        # Doubling the limit keeps the cost of sweeps constant per start, however many stay
        # active.
        self._sweep_at = max(self.SWEEP_ABOVE, 2 * len(self._accounts))
