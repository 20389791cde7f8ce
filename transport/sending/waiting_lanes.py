"""The lanes of a link that sleep until there is work, and the loan of one to another thread.

To wake a thread and to hand it the GIL takes longer than to send a small frame. So a thread with a
small piece of work may borrow a lane that waits for work, and send on its connection itself. While
a lane is lent, its own thread stays asleep and touches nothing. After the loan it sleeps on, unless
it was woken meanwhile.

The link's lock guards everything here. Knows no connection and no transfer.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar


class WaitingLane:
    """What `WaitingLanes` keeps of one lane."""

    def __init__(self, lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
        self.is_woken = False
        self.is_lent = False

    def wake(self) -> None:
        self.is_woken = True
        self.changed.notify()


L = TypeVar("L", bound=WaitingLane)


class WaitingLanes(Generic[L]):
    """The sleeping lanes. Those that may carry DATA are woken, or lent, in the order in which they
    fell asleep.
    """

    def __init__(self) -> None:
        self._sleeping: set[L] = set()
        self._next: deque[L] = deque()

    def sleep(self, lane: L, timeout_s: float | None = None, *, is_standby: bool = False) -> None:
        """Wait until woken, at most this long, and then until the lane is not lent. A lane on
        standby is only woken together with all others.
        """
        lane.is_woken = False
        self._sleeping.add(lane)
        if not is_standby:
            self._next.append(lane)
        try:
            lane.changed.wait(timeout_s)
            while lane.is_lent:
                lane.is_woken = True  # also when the time is over, so that `give_back` wakes it
                lane.changed.wait()
        finally:
            self._sleeping.discard(lane)
            with suppress(ValueError):  # whoever woke or borrowed it has taken it out
                self._next.remove(lane)

    def wake(self, num_lanes: int = 1) -> None:
        """Wake at most `num_lanes`."""
        for _ in range(min(num_lanes, len(self._next))):
            self._next.popleft().wake()

    def wake_all(self) -> None:
        self._next.clear()
        for lane in self._sleeping:
            lane.wake()

    def borrow(self) -> L | None:
        """The lane that waits longest, whose own thread sleeps until `give_back`; None when no lane
        waits.
        """
        if not self._next:
            return None
        lane = self._next.popleft()
        lane.is_lent = True
        return lane

    def give_back(self, lane: L, *, wakes: bool) -> None:
        """End a loan. `wakes`: the lane's own thread has something to do."""
        lane.is_lent = False
        if wakes or lane.is_woken:
            lane.wake()
        else:
            self._next.append(lane)
