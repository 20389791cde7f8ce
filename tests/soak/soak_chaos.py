"""What goes wrong in a soak, when, and for how long. Does not know which transfers there are."""

from __future__ import annotations

import heapq
import logging
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from transport_doubles import greeting

from tests.soak.soak_process import Worker
from transport import Endpoint
from transport.testing.proxy import Direction, HurtfulProxy

logger = logging.getLogger("prfaas.soak")

MEAN_PAUSE_S = 0.8
LONGEST_S = 6.0


class Schedule:
    """What is to be done later, by the caller's clock."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._due)

    def at(self, due_s: float, act: Callable[[], None]) -> None:
        self._num_made += 1
        heapq.heappush(self._due, (due_s, self._num_made, act))

    def run(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()


@dataclass(frozen=True, slots=True)
class Hands:
    """What chaos may lay hands on. `restart(worker, is_graceful)` is the soak's, which must know
    about it; a killed worker stays away until it is started.
    """

    proxy: HurtfulProxy
    sender: Worker
    receiver: Worker
    schedule: Schedule
    restart: Callable[[Worker, bool, float], None]


class Chaos:
    """Draws one fault after the other."""

    def __init__(self, hands: Hands, dice: random.Random) -> None:
        self._hands = hands
        self._dice = dice
        self.num_faults: Counter[str] = Counter()
        self._link_busy_until_s = 0.0
        self._next_s = 0.0
        link = [
            (8, self._reset),
            (4, self._cut),
            (4, self._flap),
            (7, self._stall),
            (5, self._black_hole),
            (6, self._half_open),
            (8, self._corrupt),
            (5, self._reorder),
            (3, self._slow_link),
        ]
        peer = [
            (6, self._slow_memory),
            (4, self._strangers),
            (4, self._freeze),
            (4, self._starve),
            (2, self._kill),
            (2, self._restart),
        ]
        self._weights = [weight for weight, _ in link + peer]
        self._faults = [fault for _, fault in link + peer]
        self._link_faults = {fault for _, fault in link}

    def step(self, now_s: float) -> None:
        """Do what is due; call it often."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._dice.expovariate(1 / MEAN_PAUSE_S)
        fault = self._dice.choices(self._faults, self._weights)[0]
        if fault in self._link_faults and now_s < self._link_busy_until_s:
            return  # one fault of the link at a time, so that each is healed alone
        self.num_faults[fault.__name__.strip("_")] += 1
        logger.info("fault: %s", fault.__name__.strip("_"))
        fault(now_s)

    def _for(self, now_s: float, shortest_s: float, longest_s: float) -> float:
        """How long a fault of the link lasts; it is healed then."""
        for_s = self._dice.uniform(shortest_s, longest_s)
        self._link_busy_until_s = now_s + for_s
        self._hands.schedule.at(now_s + for_s, self._hands.proxy.heal)
        return for_s

    def _reset(self, now_s: float) -> None:
        self._hands.proxy.reset()

    def _cut(self, now_s: float) -> None:
        self._hands.proxy.cut()

    def _flap(self, now_s: float) -> None:
        for_s = self._for(now_s, 0.3, 1.5)
        for tenth in range(int(for_s * 10)):
            self._hands.schedule.at(now_s + tenth / 10, self._hands.proxy.cut)

    def _stall(self, now_s: float) -> None:
        self._hands.proxy.stall(*self._directions())
        self._for(now_s, 0.1, LONGEST_S)

    def _black_hole(self, now_s: float) -> None:
        self._hands.proxy.swallow(*self._directions())
        self._for(now_s, 0.1, LONGEST_S)

    def _half_open(self, now_s: float) -> None:
        self._hands.proxy.vanish(*self._directions())
        self._for(now_s, 2.0, LONGEST_S)

    def _corrupt(self, now_s: float) -> None:
        self._hands.proxy.damage = _flip(self._dice.randrange(4 * 1024 * 1024), self._dice.random())
        self._for(now_s, 0.5, 1.0)

    def _reorder(self, now_s: float) -> None:
        step_s = self._dice.uniform(0.005, 0.2)
        self._hands.proxy.delay_s = lambda connection, _: step_s * (connection % 3)
        self._for(now_s, 0.5, 3.0)

    def _slow_link(self, now_s: float) -> None:
        self._hands.proxy.bytes_per_read = self._dice.choice([200, 1000, 5000])
        self._for(now_s, 0.3, 2.0)

    def _slow_memory(self, now_s: float) -> None:
        pause_s = self._dice.choice([0.002, 0.02, 0.2])
        self._hands.receiver.tell("slow", pause_s=pause_s, for_s=self._dice.uniform(0.2, 2.0))

    def _strangers(self, now_s: float) -> None:
        port = self._hands.receiver.port
        for words in (greeting(7, 9), b"GET / HTTP/1.1\r\n\r\n" * 4, self._dice.randbytes(300)):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2) as sock:
                sock.sendall(words)

    def _freeze(self, now_s: float) -> None:
        worker = self._worker()
        worker.signal(signal.SIGSTOP)
        thaw_s = now_s + self._dice.uniform(0.1, LONGEST_S)
        self._hands.schedule.at(thaw_s, lambda: worker.signal(signal.SIGCONT))

    def _starve(self, now_s: float) -> None:
        worker = self._worker()
        for_s = self._dice.uniform(0.2, 2.0)
        worker.tell("starve", for_s=for_s)
        worker.starved_until_s = now_s + for_s + LONGEST_S  # it may be frozen meanwhile
        self._hands.schedule.at(worker.starved_until_s, lambda: None)
        self._hands.proxy.reset()

    def _kill(self, now_s: float) -> None:
        self._hands.restart(self._worker(), False, self._dice.uniform(0.0, 2.0))

    def _restart(self, now_s: float) -> None:
        worker = self._worker()
        if now_s >= worker.starved_until_s:  # it needs descriptors to count its descriptors
            self._hands.restart(worker, True, self._dice.uniform(0.0, 1.0))

    def _worker(self) -> Worker:
        return self._dice.choice([self._hands.sender, self._hands.receiver])

    def _directions(self) -> tuple[Direction, ...]:
        choices: list[tuple[Direction, ...]] = [(), ("forward",), ("backward",)]
        return self._dice.choice(choices)


def _flip(position: int, share: float) -> Callable[[bytes, bool], bytes]:
    """Damage to one byte some way into what passes in one direction."""
    left = [position if share < 0.7 else position % 5000]
    hurts_forward = share < 0.7

    def damage(data: bytes, is_forward: bool) -> bytes:
        if is_forward is not hurts_forward:
            return data
        index, left[0] = left[0], left[0] - len(data)
        if not 0 <= index < len(data):
            return data
        hurt = bytearray(data)
        hurt[index] ^= 1 << index % 8
        return bytes(hurt)

    return damage


def endpoint_of(worker: Worker) -> Endpoint:
    return Endpoint("127.0.0.1", worker.port)
