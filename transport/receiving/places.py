"""Which connections a receiver keeps when there are more than it serves.

Anybody may connect, so a connection has to earn its place:

1. It is *unauthenticated*. With TLS that lasts until the other end has shown a certificate of the
   region, without TLS until step 3.
2. It is *authenticated* (with TLS only), and has no transfer yet.
3. It is *known*: the registry accepted a transfer on it, or on another open connection of the same
   process. A process greets with the same random instance on all its connections, and only
   receivers that it chose have seen it.

A known connection keeps its place while there are others. When all places are taken, the party (the
name in the certificate, without TLS the network) with the most known connections loses one to a
newcomer: one that serves no transfer, or any if the party has more than its share. So nobody keeps
all places, with whatever transfers were accepted.

Steps 1 and 2 have a quarter of all places each. When that is used up, the network with the most
connections of this step loses its oldest one to the newcomer: an attacker with one address can only
push out connections from that address. There a true sender must be faster than the attacker's next
connections. To give it that time, and to bound the work that a flood causes, no connection is
closed in its first MIN_STAY_S for a newcomer of a network that has as many; the newcomer is.

Guarded by the receiver's lock; time is an argument. Knows no socket and no frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

MIN_STAY_S = 0.5
"""A few round trips between continents: enough for a handshake, a greeting and an OPEN."""


@dataclass(frozen=True, slots=True)
class _Newcomer:
    network: str
    since_s: float
    """When it took the step that it is in."""
    is_authenticated: bool = False


class Places:
    """The places of one receiver's connections, by number."""

    def __init__(
        self,
        max_connections: int,
        *,
        share: int | None = None,
        is_idle: Callable[[int], bool] = lambda number: False,
    ) -> None:
        """`share`: known connections that a party may keep when others want places; None: any
        number. `is_idle`: whether a known connection serves no transfer.
        """
        self._share = max_connections if share is None else share
        self._is_idle = is_idle
        self._max_connections = max_connections
        self._max_newcomers = max(1, max_connections // 4)
        self._newcomers: dict[int, _Newcomer] = {}
        """Those that are not known, in the order of `since_s`."""
        self._instances: dict[int, bytes] = {}
        """The greetings of newcomers and of known connections."""
        self._known: dict[int, str] = {}
        """The parties of known connections, oldest first."""
        self._parties: dict[int, str] = {}
        """Those of all that were greeted."""
        self.num_turned_away = 0
        self.turned_away_party = ""
        """Whose the last one was that was turned away."""

    def __len__(self) -> int:
        return len(self._newcomers) + len(self._known)

    def admit(self, number: int, network: str, now_s: float) -> int | None:
        """A new connection from `network`. Returns the one that must be closed, which may be
        `number` itself, or None.
        """
        self._newcomers[number] = _Newcomer(network, now_s)
        return self._turned_away_for(number, now_s)

    def authenticated(self, number: int, now_s: float) -> int | None:
        """The other end is an agent of the region. Returns as `admit` does."""
        newcomer = self._newcomers.pop(number, None)
        if newcomer is None:  # turned away meanwhile
            return None
        self._newcomers[number] = replace(newcomer, since_s=now_s, is_authenticated=True)
        return self._turned_away_for(number, now_s)

    def greeted(self, number: int, instance: bytes, *, has_opened: bool, party: str = "") -> bool:
        """The other end greeted with `instance`; `has_opened`: a transfer of it was accepted.
        Returns whether it is known from now on.
        """
        if number not in self._newcomers:
            return number in self._known
        self._instances[number], self._parties[number] = instance, party
        if not has_opened and all(self._instances[one] != instance for one in self._known):
            return False
        for one, greeting in self._instances.items():
            if greeting == instance and self._newcomers.pop(one, None) is not None:
                self._known[one] = self._parties[one]
        return True

    def leave(self, number: int) -> None:
        """The connection has ended, or is about to."""
        self._newcomers.pop(number, None)
        self._instances.pop(number, None)
        self._parties.pop(number, None)
        self._known.pop(number, None)

    def _turned_away_for(self, number: int, now_s: float) -> int | None:
        newcomer = self._newcomers[number]
        rivals = {
            rival: other
            for rival, other in self._newcomers.items()
            if other.is_authenticated == newcomer.is_authenticated
        }
        if len(rivals) <= self._max_newcomers:
            if len(self) <= self._max_connections:
                return None
            if (known := self._known_to_go()) is not None:
                return self._turn_away(known, self._known[known])
        crowds = Counter(rival.network for rival in rivals.values())
        most = max(crowds.values())
        loser = next(rival for rival, other in rivals.items() if crowds[other.network] == most)
        is_young = now_s - rivals[loser].since_s < MIN_STAY_S
        if is_young and crowds[newcomer.network] == most:
            loser = number
        return self._turn_away(loser, rivals[loser].network)

    def _known_to_go(self) -> int | None:
        """The known connection that a newcomer may replace when all places are taken."""
        sizes = Counter(self._known.values())
        for party, size in sizes.most_common():
            own = [number for number, owner in self._known.items() if owner == party]
            idle = next(filter(self._is_idle, own), None)
            if idle is not None:
                return idle
            if size > self._share:
                return own[0]
        return None

    def _turn_away(self, number: int, party: str) -> int:
        self.num_turned_away += 1
        self.turned_away_party = party
        self.leave(number)
        return number
