"""Start-time fair queueing (Goyal, Vin and Cheng 1996) on a link, over priority classes, tenants
and transfers.

Each level keeps a virtual time per member: bytes served, divided by the member's weight. The member
that is furthest behind is served next. A member that was idle joins at the time of the others, so
that it can neither catch up on what it missed nor has to wait for it. A member that comes back
before the others had as much still waits for them; otherwise a member that has one frame at a time
would always be next. Classes weigh 31 to 1: request KV takes all but a thirty-second part of a link
that it fills, and background replication never starves.

Pure state; time is an argument. Knows no frame, no connection and no transfer beyond its key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from transport.interfaces import Priority

CLASS_WEIGHTS = {Priority.REQUEST: 31.0, Priority.REPLICATION: 1.0}

MAX_BUDGETS = 4096
"""Most tenants whose budgets are remembered."""

KeyT = TypeVar("KeyT", bound=Hashable)


class TokenBucket:
    """A byte rate with a burst. One send may overdraw it; the next send waits for the debt.

    `rate_bytes_per_s` 0 means no limit.
    """

    def __init__(self, rate_bytes_per_s: float, burst_s: float = 0.01) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._burst_bytes = rate_bytes_per_s * burst_s
        self._level_bytes = self._burst_bytes
        self._at_s = 0.0

    def ready_at(self, now_s: float) -> float:
        """The time of the next allowed send: `now_s` or later."""
        if not self.rate_bytes_per_s:
            return now_s
        self._refill(now_s)
        return now_s + max(0.0, -self._level_bytes) / self.rate_bytes_per_s

    def spend(self, num_bytes: int, now_s: float) -> None:
        if self.rate_bytes_per_s:
            self._refill(now_s)
            self._level_bytes -= num_bytes

    def _refill(self, now_s: float) -> None:
        gained = (now_s - self._at_s) * self.rate_bytes_per_s
        self._level_bytes = min(self._burst_bytes, self._level_bytes + max(0.0, gained))
        self._at_s = max(self._at_s, now_s)


class _Level(Generic[KeyT]):
    """Members of one level and their virtual times, in bytes per weight."""

    def __init__(self) -> None:
        self._times: dict[KeyT, float] = {}
        self._left: dict[KeyT, float] = {}  # members that left ahead of the others
        self._now = 0.0

    def __contains__(self, key: KeyT) -> bool:
        return key in self._times

    def __bool__(self) -> bool:
        return bool(self._times)

    def __len__(self) -> int:
        return len(self._times)

    def join(self, key: KeyT) -> None:
        if key not in self._times:
            self._times[key] = max(self._now, self._left.pop(key, 0.0))

    def leave(self, key: KeyT) -> None:
        time = self._times.pop(key, None)
        if time is None:
            return
        self._left = {other: left for other, left in self._left.items() if left > self._now}
        if not self._times:
            self._left.clear()  # no other member had to wait, so nobody owes anything
        elif time > self._now:
            self._left[key] = time

    def serve(self, key: KeyT, cost: float) -> None:
        time = self._times.get(key)
        if time is not None:
            self._now = max(self._now, time)
            self._times[key] = time + cost

    def in_order(self) -> Iterator[KeyT]:
        """Members, the one furthest behind first."""
        if len(self._times) == 1:
            return iter(tuple(self._times))
        times = self._times
        return iter(sorted(times, key=times.__getitem__))


class FairQueue(Generic[KeyT]):
    """Shares a link among classes, tenants and transfers. The owner chooses the transfers' keys."""

    def __init__(self, tenant_bytes_per_s: float = 0.0) -> None:
        self._tenant_bytes_per_s = tenant_bytes_per_s
        self._classes: _Level[Priority] = _Level()
        self._tenants: dict[Priority, _Level[str]] = {priority: _Level() for priority in Priority}
        self._members: dict[tuple[Priority, str], _Level[KeyT]] = {}
        self._budgets: dict[str, TokenBucket] = {}
        self._num_members = 0

    def __len__(self) -> int:
        return self._num_members

    def has(self, key: KeyT, priority: Priority, tenant: str) -> bool:
        members = self._members.get((priority, tenant))
        return members is not None and key in members

    def join(self, key: KeyT, priority: Priority, tenant: str) -> None:
        """Enter a transfer that has something to send. Does nothing if it is entered already."""
        members = self._members.setdefault((priority, tenant), _Level())
        if key in members:
            return
        self._num_members += 1
        members.join(key)
        self._tenants[priority].join(tenant)
        self._classes.join(priority)

    def leave(self, key: KeyT, priority: Priority, tenant: str) -> None:
        """Remove a transfer that has nothing to send any more."""
        members = self._members.get((priority, tenant))
        if members is None or key not in members:
            return
        self._num_members -= 1
        members.leave(key)
        if members:
            return
        del self._members[priority, tenant]
        self._tenants[priority].leave(tenant)
        if not self._tenants[priority]:
            self._classes.leave(priority)

    def in_order(self, now_s: float) -> Iterator[tuple[KeyT, Priority, str]]:
        """The transfers that may send now, in turn. Tenants in debt are left out."""
        for priority in self._classes.in_order():
            for tenant in self._tenants[priority].in_order():
                if self._ready_at(tenant, now_s) > now_s:
                    continue
                for key in self._members[priority, tenant].in_order():
                    yield key, priority, tenant

    def served(
        self, key: KeyT, priority: Priority, tenant: str, num_bytes: int, now_s: float
    ) -> None:
        """Note that a transfer was given this many bytes to send."""
        members = self._members.get((priority, tenant))
        if members is not None:
            members.serve(key, num_bytes)
            self._tenants[priority].serve(tenant, num_bytes)
            self._classes.serve(priority, num_bytes / CLASS_WEIGHTS[priority])
        if self._tenant_bytes_per_s:
            self._budget(tenant).spend(num_bytes, now_s)

    def ready_at(self, now_s: float) -> float | None:
        """The time at which the first tenant may send: `now_s`, or later when all are in debt; None
        when none has anything to send.
        """
        tenants = {tenant for _, tenant in self._members}
        return min((self._ready_at(tenant, now_s) for tenant in tenants), default=None)

    def _ready_at(self, tenant: str, now_s: float) -> float:
        if not self._tenant_bytes_per_s:
            return now_s
        return self._budget(tenant).ready_at(now_s)

    def _budget(self, tenant: str) -> TokenBucket:
        budget = self._budgets.pop(tenant, None)
        if budget is None:
            if len(self._budgets) >= MAX_BUDGETS:
                self._budgets.pop(next(iter(self._budgets)))  # the one unused for longest
            budget = TokenBucket(self._tenant_bytes_per_s)
        self._budgets[tenant] = budget  # at the end, so that the first is the one unused longest
        return budget
