"""Lanes that wait for work: who is woken, and what a loan does to a lane's own thread."""

import threading
import time
from collections.abc import Callable

from transport.sending.waiting_lanes import WaitingLane, WaitingLanes

LONG_S = 60.0


class CountingCondition(threading.Condition):
    """Knows how often somebody began to wait."""

    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(timeout)


class Lanes:
    """Lanes whose threads sleep until they are woken, and the order in which they were."""

    def __init__(
        self,
        num_lanes: int,
        *,
        num_standby: int = 0,
        condition: type[threading.Condition] = threading.Condition,
    ) -> None:
        self.lock = threading.Lock()
        self.waiting: WaitingLanes[WaitingLane] = WaitingLanes()
        self.lanes = [WaitingLane(self.lock) for _ in range(num_lanes)]
        for lane in self.lanes:
            lane.changed = condition(self.lock)
        self.woken: list[int] = []
        self.threads: list[threading.Thread] = []
        for number in range(num_lanes):
            is_standby = number >= num_lanes - num_standby
            thread = threading.Thread(target=self._run, args=(number, is_standby), daemon=True)
            self.threads.append(thread)
            thread.start()
            until(lambda expected=number + 1: len(self.waiting._sleeping) == expected)  # type: ignore[misc]

    def _run(self, number: int, is_standby: bool) -> None:
        with self.lock:
            self.waiting.sleep(self.lanes[number], LONG_S, is_standby=is_standby)
            self.woken.append(number)

    def join(self, *numbers: int) -> None:
        for number in numbers:
            self.threads[number].join(LONG_S)
            assert not self.threads[number].is_alive()

    def borrow(self) -> WaitingLane:
        with self.lock:
            lane = self.waiting.borrow()
        assert lane is not None
        return lane

    def give_back(self, lane: WaitingLane, *, wakes: bool = False) -> None:
        with self.lock:
            self.waiting.give_back(lane, wakes=wakes)


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_the_lane_that_waits_longest_is_woken_first() -> None:
    lanes = Lanes(3)
    with lanes.lock:
        lanes.waiting.wake()
    lanes.join(0)
    with lanes.lock:
        lanes.waiting.wake(5)
    lanes.join(1, 2)
    assert lanes.woken[0] == 0


def test_a_lane_on_standby_is_only_woken_with_all_others_and_never_lent() -> None:
    lanes = Lanes(2, num_standby=1)
    with lanes.lock:
        lanes.waiting.wake(2)
    lanes.join(0)
    with lanes.lock:
        assert lanes.waiting.borrow() is None
        lanes.waiting.wake_all()
    lanes.join(1)


def test_a_lane_sleeps_on_after_a_loan_and_can_be_lent_again() -> None:
    lanes = Lanes(2)
    first = lanes.borrow()
    assert lanes.borrow() is lanes.lanes[1]
    lanes.give_back(first)
    assert lanes.borrow() is first
    assert lanes.woken == []
    with lanes.lock:
        lanes.waiting.wake_all()
    for lane in lanes.lanes:
        lanes.give_back(lane)
    lanes.join(0, 1)


def test_a_lane_that_is_woken_while_lent_runs_after_the_loan() -> None:
    lanes = Lanes(1, condition=CountingCondition)
    lane = lanes.borrow()
    counting = lane.changed
    assert isinstance(counting, CountingCondition)
    with lanes.lock:
        lanes.waiting.wake_all()
    until(lambda: counting.num_waits == 2)
    assert lanes.woken == []
    lanes.give_back(lane)
    lanes.join(0)


def test_a_lane_whose_time_is_over_while_lent_runs_after_the_loan() -> None:
    lock, waiting = threading.Lock(), WaitingLanes[WaitingLane]()
    lane = WaitingLane(lock)
    lane.changed = counting = CountingCondition(lock)

    def run() -> None:
        with lock:
            waiting.sleep(lane, 0.2)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: counting.num_waits > 0)
    with lock:
        borrowed = waiting.borrow()
    if borrowed is not None:  # else it has slept for its time already
        until(lambda: counting.num_waits == 2)
        with lock:
            waiting.give_back(lane, wakes=False)
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_what_a_loan_leaves_over_wakes_the_lane() -> None:
    lanes = Lanes(1)
    lanes.give_back(lanes.borrow(), wakes=True)
    lanes.join(0)


def test_a_lane_that_sleeps_no_more_is_not_lent() -> None:
    lanes = Lanes(1)
    with lanes.lock:
        lanes.waiting.sleep(WaitingLane(lanes.lock), 0.001)
        assert lanes.waiting.borrow() is lanes.lanes[0]
        assert lanes.waiting.borrow() is None
    lanes.give_back(lanes.lanes[0], wakes=True)
    lanes.join(0)
