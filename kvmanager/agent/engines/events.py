"""Follows what the engines of a host publish about their own prefix caches (vLLM's KV events).

Sockets and order of messages only: what events mean is `kvmanager.agent.engines.blocks`'s. Nothing
waits for this and nothing fails with it; an engine that is not heard of holds nothing as far as we
know.

An endpoint is what `--kv-events-config` of the engine names, as somebody on this host reaches it:
"tcp://host:port" or "ipc:///path". With the engine's replay endpoint behind a comma, messages that
were missed are asked for. Messages name prompts by their token ids, so they should not leave the
host: an engine binds "tcp://*:port" on all interfaces, "ipc:///path" on none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvmanager.agent.engines.blocks import BlockBits, EngineBlocks
from kvmanager.agent.engines.kv_events import EventSequence, MessageOrder, decode_batch
from kvmanager.agent.engines.merged_blocks import MergedBlocks
from kvmanager.layout import KVLayout
from transport.backoff import Backoff
from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.agent")

MAX_WAITING: Final = 100_000
"""Messages that are not read yet; as many as the engine keeps for a slow reader."""
REPLAY_S: Final = 2.0
"""How long the next replayed message is waited for."""
TOLD_PER_STEP: Final = 1000
"""Changed blocks that are told in one turn of the event loop: each costs some 3 us."""
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0

Changed = Callable[[list[BlockBits]], None]


class EngineCaches:
    """The followed engines of one agent. Use it on one event loop."""

    def __init__(self, endpoints: Mapping[str, str], changed: Changed) -> None:
        """`endpoints` by instance; `changed` hears what all of them together hold."""
        self._endpoints = dict(endpoints)
        self._changed = changed
        self._merged = MergedBlocks()
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        """What is left of engines that have gone."""

    def engine_joined(self, instance: str, layout: KVLayout, namespace: bytes) -> None:
        """This engine is connected to the agent: follow it, if an endpoint is known."""
        endpoint = self._endpoints.get(instance)
        if endpoint is None or instance in self._tasks or not namespace:
            return

        def tell(changes: list[BlockBits]) -> None:
            # A follower that ends late must not speak for an engine that has left.
            if self._tasks.get(instance) is task and changes:
                self._changed(self._merged.instance_changed(instance, changes))

        follower = _Follower(self._context, instance, endpoint, layout, namespace, tell)
        task = start_task(follower.run(), f"following the KV events of {instance}")
        self._tasks[instance] = task

    def engine_left(self, instance: str) -> None:
        """The engine is not connected any more, and its memory is not worth a word."""
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()
            gone = _in_steps(self._merged.instance_left(instance), self._changed)
            start_task(gone, f"forgetting what {instance} held", self._telling)

    async def close(self) -> None:
        """Stop following. Idempotent."""
        tasks = [*self._tasks.values(), *self._telling]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)


class _Follower:
    """One engine's publisher."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        instance: str,
        endpoint: str,
        layout: KVLayout,
        namespace: bytes,
        tell: Changed,
    ) -> None:
        self._context = context
        self._instance = instance
        self._endpoint, _, self._replay_endpoint = endpoint.partition(",")
        self._new_blocks = partial(EngineBlocks, layout, namespace)
        self._blocks = self._new_blocks()
        self._sequence = EventSequence()
        self._tell = tell

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        backoff = Backoff(RETRY_S, MAX_RETRY_S)
        while True:
            try:
                async with self._socket(zmq.SUB) as events:
                    await self._follow(events)
                backoff.reset()
            except Exception as error:
                # Whatever it is, it must not cost more than this engine's claims.
                text = f"{type(error).__name__}: {error}"
                logger.warning("cannot follow the KV events of %s: %s", self._instance, text)
            await self._reset()
            await asyncio.sleep(backoff.after(0.0))

    async def _follow(self, events: zmq.asyncio.Socket) -> None:
        events.rcvhwm = MAX_WAITING
        events.subscribe(b"")
        monitor = events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            events.connect(self._endpoint)
            logger.info("following the KV events of %s at %s", self._instance, self._endpoint)
            await self._catch_up()
            lost = asyncio.create_task(_disconnection(monitor))
            try:
                while not lost.done():
                    await self._next(events, lost)
            finally:
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)
            logger.info("the KV events of %s have ended", self._instance)
        finally:
            events.disable_monitor()
            monitor.close(linger=0)

    async def _next(self, events: zmq.asyncio.Socket, lost: asyncio.Task[None]) -> None:
        """Take what comes next, a message or the end."""
        receiving = asyncio.ensure_future(events.recv_multipart())
        try:
            await asyncio.wait({receiving, lost}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                await self._take(receiving.result())
        finally:
            receiving.cancel()

    async def _take(self, frames: Sequence[bytes]) -> None:
        _, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big")
        order = self._sequence.live(number)
        if order is MessageOrder.RESTARTED:
            logger.info("engine %s counts its KV events anew", self._instance)
            await self._reset()
            order = self._sequence.live(number)
        if order is MessageOrder.LOST:
            await self._catch_up()
        if number < self._sequence.expected:
            return
        if number > self._sequence.expected:
            logger.debug("KV events of %s before %d are lost", self._instance, number)
            await _in_steps(self._blocks.clear(), self._tell)
        await self._apply(number, payload)

    async def _apply(self, number: int, payload: bytes) -> None:
        try:
            changes = self._blocks.apply(decode_batch(payload))
        except msgspec.MsgspecError as error:
            logger.warning("KV events of %s make no sense: %s", self._instance, error)
            changes = self._blocks.clear()
        self._sequence.applied(number)
        await _in_steps(changes, self._tell)

    async def _catch_up(self) -> None:
        """Apply what the engine still remembers of the messages that were missed."""
        if not self._replay_endpoint:
            return
        async with self._socket(zmq.DEALER) as replay:
            replay.connect(self._replay_endpoint)
            await replay.send_multipart([b"", self._sequence.expected.to_bytes(8, "big")])
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(REPLAY_S):
                        *_, number_bytes, payload = await replay.recv_multipart()
                    number = int.from_bytes(number_bytes, "big", signed=True)
                    if number < 0:
                        return
                    if number > self._sequence.expected:
                        await _in_steps(self._blocks.clear(), self._tell)
                    if number >= self._sequence.expected:
                        await self._apply(number, payload)
                    await asyncio.sleep(0)  # others' turn: there may be thousands

    async def _reset(self) -> None:
        """Nothing is known of this engine."""
        await _in_steps(self._blocks.clear(), self._tell)
        self._blocks = self._new_blocks()
        self._sequence = EventSequence()

    @contextlib.asynccontextmanager
    async def _socket(self, kind: int) -> AsyncIterator[zmq.asyncio.Socket]:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        try:
            yield socket
        finally:
            socket.close(linger=0)


async def _in_steps(changes: Iterator[BlockBits], tell: Changed) -> None:
    """Tell everything, with others' turns in between: there may be a hundred thousand."""
    while step := list(itertools.islice(changes, TOLD_PER_STEP)):
        tell(step)
        if len(step) == TOLD_PER_STEP:
            await asyncio.sleep(0)


async def _disconnection(monitor: zmq.asyncio.Socket) -> None:
    """Return when the publisher is gone."""
    await recv_monitor_message(monitor)
