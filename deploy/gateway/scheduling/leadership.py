"""Which gateway of a region acts on the long term: it converts instances and sets the plan.

One leads, by a lease that it renews. With the lease it has a number, which no later leader's is
below. Every order to change a role carries the number, and fronts refuse an order with a lower one
than they have seen. So a leader that was frozen, and does not know yet that another one has taken
over, does no harm. A gateway that cannot reach the others at all goes on leading if it did: nobody
can take over where nobody can be reached, and if somebody could, fronts refuse its orders.

Pure; time is an argument. It does not know how leases are kept.
"""

from __future__ import annotations

import math


class Leadership:
    """Whether one gateway leads. A gateway that shares nothing always does."""

    def __init__(self, *, is_shared: bool = False, token: int = 0) -> None:
        self.token = token
        """The number of its last lease; before the first the one given here. A gateway that shares
        nothing has no lease: the time of its start in ms is above the numbers of all gateways that
        led before it, which are times as well.
        """
        self.leader = ""
        """The name of the gateway that leads, "" while that is not known."""
        self._is_ours = not is_shared
        self._is_cut_off = False
        self._until_s = math.inf if not is_shared else -math.inf

    def leads(self, now_s: float) -> bool:
        """Whether it may act now."""
        return self._is_ours and (self._is_cut_off or now_s < self._until_s)

    @property
    def why_not(self) -> str:
        """Why this gateway does not act, while it does not lead."""
        if self.leader:
            return f"the gateway {self.leader} leads the region and converts instances"
        return "no gateway leads the region now, as far as this one knows"

    def granted(self, token: int, until_s: float, name: str) -> None:
        """The lease is ours until then; `name` is this gateway's."""
        self._is_ours, self._is_cut_off, self.leader = True, False, name
        self.token, self._until_s = token, until_s

    def taken(self, leader: str) -> None:
        """The lease is another gateway's, or free ("")."""
        self._is_ours, self._is_cut_off, self.leader = False, False, leader

    def cut_off(self) -> None:
        """Nobody can be asked who leads."""
        self._is_cut_off = True
