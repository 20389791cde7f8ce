"""An emulated link as one event loop: a bottleneck, a delay, faults.

It has one thread and one epoll (`sockets.py`). The loop ticks (0.2-1 ms) while bytes flow, so its
cost follows the rate and not the number of packets. TCP ends on both sides of it, so loss and the
congestion control of a long path are not emulated: a connection through it is at full rate at once.
It knows no command lines and no control sockets.
"""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from deploy.lab.emulator.core import LinkShape
from deploy.lab.emulator.faults import (
    Blackhole,
    Command,
    Configure,
    Cut,
    Fault,
    FaultPlan,
    Flip,
    Heal,
    LinkReport,
    Quit,
    Report,
    Reset,
    Stall,
)
from deploy.lab.emulator.pipes import Connection, LinkDirection, Pipe
from deploy.lab.emulator.sockets import Address, LinkSockets

# After this many reads the loop looks at its other sockets and deadlines.
_MAX_PULLS_PER_STEP = 64


class EmulatedLink:
    """Listens, connects on, and moves bytes. `run` serves until `stop` or the quit command."""

    def __init__(
        self, listen: Address, target: Address, shape: LinkShape, *, seed: int = 1
    ) -> None:
        self.directions = (
            LinkDirection("forward", shape, seed),
            LinkDirection("backward", shape, seed + 1),
        )
        self.sockets = LinkSockets(listen, target, self.directions)
        self._plan = FaultPlan()
        self._is_cut = False
        self._heal_at_s: float | None = None
        self._running = True
        self._turn = 0
        self._tick_s = _tick_s(shape)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Serve. When it returns, everything is closed."""
        try:
            while self._running:
                moved_bytes, next_s = self.step(time.monotonic())
                self._wait(moved_bytes, next_s)
        finally:
            self.sockets.close()

    def _wait(self, moved_bytes: int, next_s: float | None) -> None:
        wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
        if moved_bytes:
            wait_s = self._tick_s
        if wait_s is not None and wait_s < 1e-3:
            # epoll counts in milliseconds, and sleep is finer.
            if wait_s:
                time.sleep(wait_s)
            wait_s = 0.0
        self.sockets.wait(-1.0 if wait_s is None else int(wait_s * 1e3) / 1e3)

    def step(self, now_s: float) -> tuple[int, float | None]:
        """Move what can be moved. Returns the bytes moved, and when to call again (None: on an
        event).
        """
        if self._heal_at_s is not None and now_s >= self._heal_at_s:
            self._heal()
        moved_bytes = self._deliver(now_s)
        deadlines: list[float] = [] if self._heal_at_s is None else [self._heal_at_s]
        for index, direction in enumerate(self.directions):
            pulled_bytes, again_s = self._pull(index, direction, now_s)
            moved_bytes += pulled_bytes
            if again_s is not None:
                deadlines.append(again_s)
        if moved_bytes:
            moved_bytes += self._deliver(now_s)
        self._forget_finished()
        for connection in self.sockets.connections:
            for pipe in connection.pipes:
                arrival_s = None if pipe.direction.stalled else pipe.next_arrival_s()
                if arrival_s is not None:
                    deadlines.append(arrival_s)
        return moved_bytes, min(deadlines, default=None)

    def _deliver(self, now_s: float) -> int:
        moved_bytes = 0
        grain_s = self._tick_s / 2
        for connection in tuple(self.sockets.connections):
            for pipe in connection.pipes:
                if connection.connecting or pipe.direction.stalled:
                    continue
                try:
                    moved_bytes += pipe.push(now_s, grain_s)
                except OSError:
                    self.sockets.drop(connection, reset=True)
                    break
        return moved_bytes

    def _pull(self, index: int, direction: LinkDirection, now_s: float) -> tuple[int, float | None]:
        """Read from every connection in turn until the bottleneck is full or nothing is there."""
        again_s: float | None = None
        if direction.stalled:
            return 0, again_s
        willing: list[tuple[Connection, Pipe]] = []
        for connection in self.sockets.connections:
            pipe = connection.pipes[index]
            if not pipe.wants_bytes():
                continue
            if connection.open_at_s > now_s:
                again_s = min(again_s or connection.open_at_s, connection.open_at_s)
            else:
                willing.append((connection, pipe))
        pulled_bytes = 0
        pulls = 0
        while willing and not direction.stalled and not self._is_cut:
            room_bytes = direction.room_bytes(now_s)
            if room_bytes == 0:
                direction.turn_over(starved=True)
                room_at_s = direction.room_at_s(now_s)
                return pulled_bytes, room_at_s if again_s is None else min(again_s, room_at_s)
            if pulls >= _MAX_PULLS_PER_STEP:
                direction.turn_over(starved=True)
                return pulled_bytes, now_s
            pulls += 1
            self._turn += 1
            place = self._turn % len(willing)
            connection, pipe = willing[place]
            pulled_bytes += self._pull_one(connection, pipe, now_s, room_bytes)
            if connection not in self.sockets.connections:
                willing = [pair for pair in willing if pair[0] in self.sockets.connections]
            elif not pipe.wants_bytes():
                willing.pop(place)
        if not pulled_bytes:
            direction.turn_over(starved=False)
        return pulled_bytes, again_s

    def _pull_one(self, connection: Connection, pipe: Pipe, now_s: float, room_bytes: int) -> int:
        direction = pipe.direction
        limit_bytes = min(room_bytes, direction.quantum_bytes)
        until_fault = self._plan.bytes_until_next(direction.name, direction.in_bytes)
        if until_fault is not None:
            # A fault happens exactly at its byte, so a read must end there.
            limit_bytes = min(limit_bytes, max(1, until_fault))
        try:
            nbytes = pipe.pull(now_s, limit_bytes)
        except OSError:
            self._broken(connection, pipe)
            return 0
        if until_fault is not None:
            for fault in self._plan.pop_due(direction.name, direction.in_bytes):
                self._strike(fault, now_s)
        return nbytes

    def _broken(self, connection: Connection, pipe: Pipe) -> None:
        if pipe.direction.swallowing:
            # No peer beyond a black hole learns that this end died.
            pipe.ended = pipe.damaged = True
        else:
            self.sockets.drop(connection, reset=True)

    def _forget_finished(self) -> None:
        for connection in tuple(self.sockets.connections):
            if connection.is_over():
                self.sockets.drop(connection, reset=False)

    def command(self, command: Command) -> LinkReport:
        """Do what is asked. Returns the state after it. ValueError for impossible numbers."""
        now_s = time.monotonic()
        if isinstance(command, Configure):
            self._configure(command, now_s)
        elif isinstance(command, Heal):
            self._heal()
        elif isinstance(command, Quit):
            self.stop()
        elif not isinstance(command, Report):
            self._plan.add(command, {d.name: d.in_bytes for d in self.directions})
            if command.after_bytes == 0:
                for direction in self.directions:
                    # Without `after_bytes` nothing need enter first: it happens now.
                    for fault in self._plan.pop_due(direction.name, direction.in_bytes):
                        self._strike(fault, now_s)
        return self.report(now_s)

    def _configure(self, command: Configure, now_s: float) -> None:
        changes = msgspec.structs.asdict(command)
        shape = self.directions[0].shape
        shape = replace(shape, **{k: v for k, v in changes.items() if v is not None})
        self._tick_s = _tick_s(shape)
        for direction in self.directions:
            direction.configure(shape, now_s)

    def _strike(self, fault: Fault, now_s: float) -> None:
        struck = [d for d in self.directions if fault.direction in (d.name, "both")]
        if isinstance(fault, Cut):
            self._is_cut = True
            self.sockets.close_listener()
            self.sockets.drop_all(reset=False)
        elif isinstance(fault, Reset):
            self.sockets.drop_all(reset=True)
        elif isinstance(fault, Stall):
            for direction in struck:
                direction.stalled = True
        elif isinstance(fault, Blackhole):
            for direction in struck:
                direction.swallowing = True
            self._lose_on_way(struck)
        elif isinstance(fault, Flip):
            struck[0].flip_next = True
        if fault.for_s:
            self._heal_at_s = now_s + fault.for_s

    def _lose_on_way(self, struck: list[LinkDirection]) -> None:
        for connection in self.sockets.connections:
            for pipe in connection.pipes:
                if pipe.direction in struck:
                    pipe.lose_all()

    def _heal(self) -> None:
        self._plan.clear()
        self._heal_at_s = None
        self._is_cut = False
        for direction in self.directions:
            direction.stalled = direction.swallowing = direction.flip_next = False
        # Streams with a hole cannot go on: their ends must reconnect.
        for connection in tuple(self.sockets.connections):
            if any(pipe.damaged for pipe in connection.pipes):
                self.sockets.drop(connection, reset=True)
        self.sockets.open_listener()

    def report(self, now_s: float) -> LinkReport:
        forward, backward = self.directions
        held = [
            sum(connection.pipes[index].queue.num_bytes for connection in self.sockets.connections)
            for index in range(2)
        ]
        return LinkReport(
            now_s=now_s,
            rate_bytes_per_s=forward.shape.rate_bytes_per_s,
            rtt_s=forward.shape.rtt_s,
            jitter_s=forward.shape.jitter_s,
            is_cut=self._is_cut,
            stalled=[d.name for d in self.directions if d.stalled],
            swallowing=[d.name for d in self.directions if d.swallowing],
            planned=len(self._plan),
            open_connections=len(self.sockets.connections),
            accepted_connections=self.sockets.num_accepted,
            failed_connections=self.sockets.num_failed,
            forward=forward.report(held[0]),
            backward=backward.report(held[1]),
            cpu_s=time.process_time(),
        )


def _tick_s(shape: LinkShape) -> float:
    if shape.rate_bytes_per_s == 0 and shape.rtt_s == 0:
        return 0.0
    # A twentieth of the delay: fine enough to keep its shape, coarse enough to save CPU.
    return min(max(shape.one_way_s / 20, 2e-4), 1e-3)
