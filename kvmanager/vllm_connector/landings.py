"""Requests whose KVCache was computed elsewhere, from waiting for a landing to giving it back.

A request waits without any engine block until the agent says that its landing is complete. Then it
gets its blocks and is loaded. The landing may leave out KV that the agent's prefix cache has, which
is loaded from there. If a landing fails or is late, the engine computes the prompt.

Agent events arrive on the client's thread and only set a state under `_lock`; everything else runs
on the scheduler's thread. Does not know what else the engine sends, finds or stores.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvmanager.agent.engines.client import EngineClient
from kvmanager.layout import KVKind, KVLayout
from kvmanager.vllm_connector.cache.plan import CachePages, Tables
from kvmanager.vllm_connector.metadata import (
    CachedParts,
    FirstStep,
    LoadStep,
    PartPages,
    Runs,
    TransferRef,
)
from kvmanager.vllm_connector.params import ConsumerParams

logger = logging.getLogger("prfaas.kvmanager.connector")


class LandingState(Enum):
    """`OVER`: this engine does not own the landing any more."""

    WAITING = auto()
    LANDED = auto()
    LOADING = auto()
    OVER = auto()


@dataclass(slots=True)
class Consumer:
    """A request whose KVCache comes from a landing.

    cached_runs: for each block of the first `ref.cached_tokens`, the arena blocks of its KV part.
    """

    ref: TransferRef
    cached_runs: tuple[Runs, ...]
    arrived_s: float
    deadline_s: float
    state: LandingState = LandingState.WAITING
    request_ended: bool = False


class Landings:
    """All landings that one engine waits for or loads."""

    def __init__(
        self,
        layout: KVLayout,
        pages: CachePages,
        block_tokens: int,
        timeout_s: float,
        client: EngineClient,
    ) -> None:
        self._layout = layout
        self._pages = pages
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._client = client
        self._lock = threading.Lock()
        self._consumers: dict[str, Consumer] = {}
        self._request_of: dict[bytes, str] = {}

    # Events of the agent, on the client's thread.

    def on_landed(self, transfer_id: bytes) -> None:
        self._change(transfer_id, LandingState.LANDED)

    def on_failed(self, transfer_id: bytes) -> None:
        self._change(transfer_id, LandingState.OVER)

    def on_disconnected(self) -> None:
        with self._lock:
            for consumer in self._consumers.values():
                # A load under way goes on: the worker checks at its end whether the agent kept the
                # memory.
                if consumer.state in (LandingState.WAITING, LandingState.LANDED):
                    consumer.state = LandingState.OVER

    def _change(self, transfer_id: bytes, state: LandingState) -> None:
        with self._lock:
            consumer = self._consumers.get(self._request_of.get(transfer_id, ""))
            if consumer is not None and consumer.state in (
                LandingState.WAITING,
                LandingState.LANDED,
            ):
                consumer.state = state

    # vLLM's scheduler, in the order of a request's life.

    def watch(self, request_id: str, params: ConsumerParams) -> None:
        """Wait for this landing. The engine owns it once it is complete."""
        ref = TransferRef.of(params)
        now_s = time.monotonic()
        consumer = Consumer(ref, params.cached_runs, now_s, now_s + self._timeout_s)
        with self._lock:
            self._consumers[request_id] = consumer
            self._request_of[ref.transfer_id] = request_id
        if not self._client.watch(ref.transfer_id):
            logger.warning("request %s: no agent; computing it here", request_id)
            self._change(ref.transfer_id, LandingState.OVER)

    def refuse(self, params: ConsumerParams) -> None:
        """Give back a landing that no request will load."""
        # The agent releases a landing only for an engine that watches it.
        self._client.watch(params.id_bytes)
        self._client.release(params.id_bytes)

    def matched(
        self, request_id: str, num_computed_tokens: int, wait: Callable[[], bool]
    ) -> int | None:
        """Tokens to load from the request's landing; None: it may still land.

        `wait` returns True when the agent has sent something, False when there is no time to wait.
        """
        consumer = self._consumers.get(request_id)
        if consumer is None:
            return 0
        state = self._state(consumer)
        while state is LandingState.WAITING and wait():
            state = self._state(consumer)
        if state is LandingState.WAITING:
            if time.monotonic() < consumer.deadline_s:
                return None
            logger.warning(
                "request %s: nothing landed in %.0f s; computing it here",
                request_id,
                self._timeout_s,
            )
        num_new = consumer.ref.num_tokens - num_computed_tokens
        if state is LandingState.LANDED and num_new > 0:
            return num_new
        self._release(consumer)
        return 0

    def _state(self, consumer: Consumer) -> LandingState:
        with self._lock:
            return consumer.state

    def load(self, request_id: str, tables: Tables, num_tokens: int) -> LoadStep | None:
        """The step that loads the last `num_tokens` of the landing; None: there is no landing."""
        consumer = self._consumers.get(request_id)
        if consumer is None:
            return None
        with self._lock:
            if consumer.state is LandingState.OVER:
                return None
            if consumer.state is LandingState.LANDED:
                consumer.state = LandingState.LOADING
        ref = consumer.ref
        first_token = ref.num_tokens - num_tokens
        blocks = tuple(
            self._blocks(index, table, ref, first_token) for index, table in enumerate(tables)
        )
        base = self._base(consumer, tables, first_token)
        return LoadStep(request_id, time.monotonic(), ref, blocks, base)

    def _blocks(
        self, group_index: int, table: list[int], ref: TransferRef, first_token: int
    ) -> list[int]:
        """The blocks to fill. Those that the engine's own prefix cache holds are left out, since
        other requests may be reading them.
        """
        group = self._layout.groups[group_index]
        if group.kind is KVKind.RECURRENT:
            return [table[self._pages.state_index(group_index, ref.num_tokens)]]
        pages = group.pages(ref.num_tokens, ref.cached_tokens, ref.window_step)
        # The node's step may be of larger pages than this engine's, which has no block then for the
        # first pages of a window.
        own = group.pages(ref.num_tokens, ref.cached_tokens)
        first_page = max(pages.start, own.start, first_token // group.tokens_per_block)
        return table[first_page : pages.stop]

    def _base(self, consumer: Consumer, tables: Tables, first_token: int) -> CachedParts | None:
        """The cached KV that the landing leaves out and the engine's own cache lacks."""
        ref = consumer.ref
        parts = []
        for block, runs in enumerate(consumer.cached_runs):
            if (block + 1) * self._block_tokens > first_token:
                pages = self._pages.to_load(
                    block, 0, tables, num_tokens=ref.num_tokens, local_tokens=first_token
                )
                parts.append(PartPages(block, 0, runs, pages))
        # The landing keeps these parts in place, so no connection's age matters: `math.inf`.
        return CachedParts(ref.arena_epoch, math.inf, tuple(parts)) if parts else None

    def loaded(self, request_id: str) -> None:
        """The load has ended, successfully or not."""
        consumer = self._consumers.get(request_id)
        if consumer is not None:
            self._release(consumer)
            if consumer.request_ended:
                self._forget(request_id, consumer)

    def first_step(self, request_id: str) -> FirstStep | None:
        """What workers are told when the request is computed for the first time; None: it had no
        landing.
        """
        consumer = self._consumers.get(request_id)
        if consumer is None:
            return None
        ref = consumer.ref
        return FirstStep(request_id, ref.transfer_id, ref.arena_epoch, consumer.arrived_s)

    def finished(self, request_id: str) -> None:
        """The request is over. A load under way still reads the landing and gives it back later."""
        consumer = self._consumers.get(request_id)
        if consumer is None:
            return
        consumer.request_ended = True
        if consumer.state is not LandingState.LOADING:
            self._release(consumer)
            self._forget(request_id, consumer)

    def _release(self, consumer: Consumer) -> None:
        """Give the landing back, once. The request stays known until it has finished."""
        with self._lock:
            was, consumer.state = consumer.state, LandingState.OVER
        if was is not LandingState.OVER:
            self._client.release(consumer.ref.transfer_id)

    def _forget(self, request_id: str, consumer: Consumer) -> None:
        with self._lock:
            self._consumers.pop(request_id, None)
            self._request_of.pop(consumer.ref.transfer_id, None)
