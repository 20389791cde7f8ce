"""Requests whose KVCache was computed elsewhere, from waiting for a landing to giving it back.

A request waits without any engine block until the agent says that its landing is complete, what it
holds, and where. If that is the KVCache of the request's own prompt, it gets its blocks and is
loaded. The landing may leave out KV that the agent's prefix cache has, which
is loaded from there. If a landing fails or is late, the engine computes the prompt.

Several requests may load one landing: vLLM makes one of each choice that a client asks for. The
first of them loads alone, so that the others find its whole blocks in the engine's own prefix cache
and load the rest.

Agent events arrive on the client's thread and only set a state under `_lock`; everything else runs
on the scheduler's thread. Does not know what else the engine sends, finds or stores.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import Landed, Welcome
from kvmanager.layout import KVKind, KVLayout
from kvmanager.pool.shape import CacheShape
from kvmanager.vllm_connector.cache.plan import CachePages, Tables
from kvmanager.vllm_connector.metadata import (
    CachedParts,
    FirstStep,
    LoadStep,
    PartPages,
    Runs,
    TransferRef,
)

logger = logging.getLogger("prfaas.kvmanager.connector")


class LandingState(Enum):
    """`OVER`: this engine does not own the landing any more."""

    WAITING = auto()
    LANDED = auto()
    LOADING = auto()
    OVER = auto()


@dataclass(frozen=True, slots=True)
class WantedLanding:
    """The landing that a request names, the tokens whose KVCache it must hold, and how many
    requests load it.
    """

    transfer_id: bytes
    num_requests: int
    num_tokens: int
    token_digest: bytes


@dataclass(slots=True)
class Landing:
    """A landing, and who loads it.

    ref: where the agent says that it is; None before it has landed.
    cached_runs: for each block of the first `ref.cached_tokens`, the arena blocks of its KV part.
    state: what a request finds that arrives: WAITING, LANDED or OVER.
    num_to_come: requests that have not arrived yet. They are not waited for once one has finished.
    first: the request that loads first, "" before.
    is_owed: whether it must still be given back.
    """

    wanted: WantedLanding
    num_to_come: int
    ref: TransferRef | None = None
    cached_runs: tuple[Runs, ...] = ()
    consumers: dict[str, "Consumer"] = field(default_factory=dict)
    state: LandingState = LandingState.WAITING
    first: str = ""
    is_owed: bool = True

    @property
    def is_needed(self) -> bool:
        """Whether a request loads it or may still do so."""
        return self.num_to_come > 0 or any(
            consumer.state is not LandingState.OVER for consumer in self.consumers.values()
        )

    def move(self, state: LandingState) -> None:
        """It has come to this state, and with it the requests that do not load it yet. A load under
        way goes on: the worker checks at its end whether the agent kept the memory.
        """
        changed: tuple[Landing | Consumer, ...] = (self, *self.consumers.values())
        for one in changed:
            if one.state in (LandingState.WAITING, LandingState.LANDED):
                one.state = state
        is_read = any(one.state is LandingState.LOADING for one in self.consumers.values())
        if self.state is LandingState.OVER and not is_read:
            self.is_owed = False


@dataclass(slots=True)
class Consumer:
    """A request whose KVCache comes from `landing`."""

    landing: Landing
    arrived_s: float
    deadline_s: float
    state: LandingState
    request_ended: bool = False


class Landings:
    """All landings that one engine waits for or loads."""

    def __init__(
        self,
        layout: KVLayout,
        pages: CachePages,
        shape: CacheShape,
        timeout_s: float,
        client: EngineClient,
    ) -> None:
        self._layout = layout
        self._pages = pages
        self._shape = shape
        self._arena_epoch = ""
        self.is_lossy = False
        """Whether KVCache that lands may have lost precision, so that no other request may use
        it.
        """
        self._timeout_s = timeout_s
        self._client = client
        self._lock = threading.Lock()
        self._consumers: dict[str, Consumer] = {}
        self._landings: dict[bytes, Landing] = {}

    # Events of the agent, on the client's thread.

    def on_connected(self, welcome: Welcome) -> None:
        self._arena_epoch, self.is_lossy = welcome.arena_epoch, welcome.is_lossy

    def on_landed(self, landed: Landed) -> None:
        with self._lock:
            landing = self._landings.get(landed.transfer_id)
            if landing is None:
                return
            problem = self._mismatch(landing.wanted, landed)
            if not problem:
                landing.ref = TransferRef.of(landed, self._arena_epoch)
                landing.cached_runs = tuple(map(tuple, landed.cached_runs))
                landing.move(LandingState.LANDED)
                return
            landing.move(LandingState.OVER)
        logger.error("landing %s: %s; computing it here", landed.transfer_id.hex(), problem)
        self._client.release(landed.transfer_id)

    def _mismatch(self, wanted: WantedLanding, landed: Landed) -> str:
        """Why this landing cannot be loaded for a prompt of this engine, or ''."""
        # A caller that mixes up requests would otherwise decode with another prompt's KVCache.
        # Prompts about two pictures have the same token ids.
        if (landed.num_tokens, landed.token_digest) != (wanted.num_tokens, wanted.token_digest):
            return "it holds other tokens or media than this prompt's"
        step, own_step = landed.window_step, self._layout.window_step
        try:
            self._layout.transfer_bytes(landed.num_tokens, landed.cached_tokens, step)
        except ValueError as error:
            return str(error)
        # With smaller steps the engine would get half of a page, and keep it as a whole one.
        if own_step > 1 and (step < 1 or step % own_step):
            return f"its windows begin at steps of {step} tokens, pages here at {own_step}"
        num_cached = len(landed.cached_runs)
        if num_cached and landed.draft != self._layout.draft_fingerprint:
            return "engines with another drafter filled the cached blocks"
        is_kv = self._shape.has_kv or not num_cached
        if not is_kv or num_cached * self._shape.block_tokens != landed.cached_tokens:
            return f"{landed.cached_tokens} cached tokens in {num_cached} blocks"
        return ""

    def on_failed(self, transfer_id: bytes) -> None:
        self._change(transfer_id, LandingState.OVER)

    def on_disconnected(self) -> None:
        with self._lock:
            for landing in self._landings.values():
                landing.move(LandingState.OVER)

    def _change(self, transfer_id: bytes, state: LandingState) -> None:
        with self._lock:
            if (landing := self._landings.get(transfer_id)) is not None:
                landing.move(state)

    # vLLM's scheduler, in the order of a request's life.

    def watch(self, request_id: str, wanted: WantedLanding) -> None:
        """Wait for this landing. The engine owns it once it is complete."""
        now_s, transfer_id = time.monotonic(), wanted.transfer_id
        with self._lock:
            landing = self._landings.get(transfer_id)
            is_first = landing is None
            if landing is None:
                landing = self._landings[transfer_id] = Landing(wanted, wanted.num_requests)
            landing.num_to_come = max(0, landing.num_to_come - 1)
            # The landing was compared with the first prompt that named it.
            is_other = landing.wanted.token_digest != wanted.token_digest
            state = LandingState.OVER if is_other else landing.state
            consumer = Consumer(landing, now_s, now_s + self._timeout_s, state)
            landing.consumers[request_id] = self._consumers[request_id] = consumer
        if is_other:
            logger.error("request %s: its landing is another prompt's", request_id)
        if is_first and not self._client.watch(transfer_id):
            logger.warning("request %s: no agent; computing it here", request_id)
            self._change(transfer_id, LandingState.OVER)

    def refuse(self, transfer_id: bytes) -> None:
        """Give back a landing that no request will load."""
        # The agent releases a landing only for an engine that watches it.
        self._client.watch(transfer_id)
        self._client.release(transfer_id)

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
        num_new = consumer.landing.wanted.num_tokens - num_computed_tokens
        if state is LandingState.LANDED and num_new > 0:
            first = self._consumers.get(consumer.landing.first)
            is_loading = first is not None and first.state is LandingState.LOADING
            return None if is_loading else num_new
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
        landing = consumer.landing
        landing.first = landing.first or request_id
        ref = landing.ref
        assert ref is not None  # it has landed
        first_token = ref.num_tokens - num_tokens
        blocks = tuple(
            self._blocks(index, table, ref, first_token) for index, table in enumerate(tables)
        )
        base = self._base(ref, landing.cached_runs, tables, first_token)
        return LoadStep(request_id, ref, blocks, base)

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

    def _base(
        self, ref: TransferRef, cached_runs: tuple[Runs, ...], tables: Tables, first_token: int
    ) -> CachedParts | None:
        """The cached KV that the landing leaves out and the engine's own cache lacks."""
        parts = []
        for block, runs in enumerate(cached_runs):
            if (block + 1) * self._shape.block_tokens > first_token:
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
        landing, or is not the first that loads it.
        """
        consumer = self._consumers.get(request_id)
        if consumer is None or consumer.landing.first not in ("", request_id):
            return None
        consumer.landing.first = request_id
        transfer_id = consumer.landing.wanted.transfer_id
        return FirstStep(request_id, transfer_id, self._arena_epoch, consumer.arrived_s)

    def finished(self, request_id: str) -> None:
        """The request is over. A load under way still reads the landing and gives it back later."""
        consumer = self._consumers.get(request_id)
        if consumer is None:
            return
        consumer.request_ended = True
        consumer.landing.num_to_come = 0
        if consumer.state is not LandingState.LOADING:
            self._release(consumer)
            self._forget(request_id, consumer)

    def give_up(self) -> None:
        """No request may load a landing any more. Those under way give theirs back at their end."""
        for consumer in self._consumers.values():
            consumer.landing.num_to_come = 0
            if consumer.state is not LandingState.LOADING:
                self._release(consumer)

    def _release(self, consumer: Consumer) -> None:
        """The request does not need its landing any more, and stays known until it has finished.
        The last one gives the landing back, once.
        """
        landing = consumer.landing
        with self._lock:
            consumer.state = LandingState.OVER
            if landing.is_needed or not landing.is_owed:
                return
            landing.state, landing.is_owed = LandingState.OVER, False
        self._client.release(landing.wanted.transfer_id)

    def _forget(self, request_id: str, consumer: Consumer) -> None:
        landing = consumer.landing
        with self._lock:
            self._consumers.pop(request_id, None)
            landing.consumers.pop(request_id, None)
            if not landing.consumers:
                self._landings.pop(landing.wanted.transfer_id, None)
