"""Follows the KV events in which the engines of a host publish changes of their own prefix caches.

It handles sockets and the order of messages; `kvmanager.agent.engines.blocks` knows what events
mean. Nothing waits for this module and nothing fails with it. An engine without events counts as
one that holds nothing.

An endpoint is the address in the engine's `--kv-events-config`, as this host reaches it:
"tcp://host:port" or "ipc:///path". Behind a comma stands the engine's replay endpoint, from which
missed messages are fetched. Messages contain the token ids of prompts, so they should not leave the
host: with "tcp://*:port" an engine listens on all interfaces, with "ipc:///path" on none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
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
"""Most unread messages; vLLM's publisher keeps as many for a slow reader (`hwm`)."""
REPLAY_S: Final = 2.0
"""Longest wait for the next replayed message."""
TOLD_PER_STEP: Final = 1000
"""Changed blocks that are reported in one turn of the event loop, at some 3 us each."""
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0

Changed = Callable[[list[BlockBits]], None]


class EngineCaches:
    """Follows the engines of one agent. Use it on one event loop."""

    def __init__(self, endpoints: Mapping[str, str], changed: Changed) -> None:
        """`endpoints` by instance. `changed` is called with what all of them together hold."""
        self._endpoints = dict(endpoints)
        self._changed = changed
        self._merged = MergedBlocks()
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        """Tasks that still report the blocks of engines that have left."""

    def engine_joined(
        self,
        instance: str,
        layout: KVLayout,
        namespace: bytes,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Follow this engine, which is connected to the agent, if its endpoint is known. `adapters`
        has the identities of its LoRA adapters by name.
        """
        endpoint = self._endpoints.get(instance)
        if endpoint is None or instance in self._tasks or not namespace:
            return

        def tell(changes: list[BlockBits]) -> None:
            # A follower that ends late must not report for an engine that has left.
            if self._tasks.get(instance) is task and changes:
                self._changed(self._merged.instance_changed(instance, changes))

        new_blocks = partial(EngineBlocks, layout, namespace, adapters)
        follower = _Follower(self._context, instance, endpoint, new_blocks, tell)
        task = start_task(follower.run(), f"following the KV events of {instance}")
        self._tasks[instance] = task

    def engine_left(self, instance: str) -> None:
        """The engine is not connected any more: report that it holds nothing."""
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
        # By default ZeroMQ waits without limit for unsent messages when a context ends.
        self._context.destroy(linger=0)


class _Follower:
    """Follows one engine's publisher."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        instance: str,
        endpoint: str,
        new_blocks: Callable[[], EngineBlocks],
        tell: Changed,
    ) -> None:
        self._context = context
        self._instance = instance
        self._endpoint, _, self._replay_endpoint = endpoint.partition(",")
        self._new_blocks = new_blocks
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
                # A failure may only cost the knowledge of this engine's blocks.
                text = f"{type(error).__name__}: {error}"
                logger.warning("cannot follow the KV events of %s: %s", self._instance, text)
            await self._reset()
            await asyncio.sleep(backoff.after(0.0))

    async def _follow(self, events: zmq.asyncio.Socket) -> None:
        events.rcvhwm = MAX_WAITING
        events.subscribe(b"")
        # A SUB socket reconnects silently, so only its monitor shows that the publisher went away.
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
        """Wait for a message or the end of the connection, and process a message."""
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
        # What a replay has brought may come once more on the live socket.
        if number < self._sequence.expected:
            return
        if number > self._sequence.expected:
            # A lost event may have been a removal, so nothing known before it can be trusted.
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
        """Fetch the missed messages that the engine still has, and apply them."""
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
                    if number < 0:  # vLLM's END_SEQ
                        return
                    if number > self._sequence.expected:
                        await _in_steps(self._blocks.clear(), self._tell)
                    if number >= self._sequence.expected:
                        await self._apply(number, payload)
                    await asyncio.sleep(0)  # there may be thousands of messages

    async def _reset(self) -> None:
        """Forget everything about this engine."""
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
    """Report all changes in steps, since there may be a hundred thousand of them."""
    while step := list(itertools.islice(changes, TOLD_PER_STEP)):
        tell(step)
        if len(step) == TOLD_PER_STEP:
            await asyncio.sleep(0)


async def _disconnection(monitor: zmq.asyncio.Socket) -> None:
    """Return when the publisher is gone."""
    await recv_monitor_message(monitor)
