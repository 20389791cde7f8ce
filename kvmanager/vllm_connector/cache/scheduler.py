"""The prefix cache in vLLM's scheduler process: decides what to load, what to store, and when.

The agent is asked for the cached prefix of a request (`CacheFind`), and then for memory for the
blocks that it lacks (`CacheReserve`). Both happen before the request is scheduled, because window
pages and recurrent states exist only around the step that computes them. The cached prefix is
loaded as far as it goes beyond the engine's own prefix cache. After each step the workers are told
which parts are complete.

An engine never depends on this cache. Waiting for the agent is bounded, a failure ends only one
request's use of the cache, and nothing is raised into the engine.

Answers of the agent arrive on the client's thread, everything else on the scheduler's; `_lock`
guards all state. Does not copy anything, and knows no landings.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import MAX_CACHE_BLOCKS, CacheFound, CacheSlots, Slot, Welcome
from kvmanager.pool.shape import CacheShape
from kvmanager.vllm_connector.cache.keys import RequestKeys, may_be_cached
from kvmanager.vllm_connector.cache.plan import CachePages, Tables
from kvmanager.vllm_connector.cache.requests import Find, Stage, Tracked
from kvmanager.vllm_connector.cache.stores import CacheStores
from kvmanager.vllm_connector.metadata import CachedParts, PartPages, StoreStep
from kvmanager.vllm_connector.weights import Adapters

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("prfaas.kvmanager.connector")

DEFAULT_FIND_TIMEOUT_S: Final = 2.0
DEFAULT_MIN_LOAD_TOKENS: Final = 64
RESERVE_TIMEOUT_S: Final = 0.25
HOLD_TIMEOUT_S: Final = 1.0
MAX_AHEAD_BLOCKS: Final = 1024
"""Most blocks for which memory is asked before their requests are scheduled; more than one step
computes. Memory for a whole queue of requests would keep the cache from all others.
"""


@dataclass(frozen=True, slots=True)
class PrefixCacheOptions:
    """`namespace`: empty when this engine does not use the prefix cache. A prefix of fewer than
    `min_load_tokens` beyond the engine's own cache is computed instead of loaded. Without `loads`
    the engine only stores.
    """

    namespace: bytes = b""
    loads: bool = True
    min_load_tokens: int = DEFAULT_MIN_LOAD_TOKENS
    find_timeout_s: float = DEFAULT_FIND_TIMEOUT_S


class CacheScheduler:
    """The use of the prefix cache by all requests. Every answer of the agent sets `agent_said`."""

    def __init__(
        self,
        shape: CacheShape,
        pages: CachePages,
        options: PrefixCacheOptions,
        agent_said: threading.Event,
        client: EngineClient,
        *,
        adapters: Adapters,
        speculates: bool = False,
    ) -> None:
        """`speculates`: steps behind a prompt end with guessed tokens, which may be wrong."""
        self._block_tokens = shape.block_tokens
        self._has_states = shape.state_part is not None
        self._pages = pages
        self._options = options
        self._agent_said = agent_said
        self._client = client
        self._adapters = adapters
        self._speculates = speculates
        self._lock = threading.RLock()
        # Handles begin at the time, because a restarted engine has the name of the one before it,
        # and the agent may still hold that one's handles.
        self._handles = itertools.count(time.time_ns() // 1000)
        self._stores = CacheStores(shape, pages, self._handles, client)
        self._tracked: dict[str, Tracked] = {}
        self._finds: dict[int, Tracked] = {}
        self._ahead: dict[str, int] = {}
        self._loading: dict[str, Find] = {}
        self.is_stopped = False

    # Events of the agent, on the client's thread.

    def on_connected(self, welcome: Welcome) -> None:
        with self._lock:
            self._stores.placement = welcome.placement if self._options.namespace else None
            self._stores.epoch = welcome.arena_epoch

    def on_disconnected(self) -> None:
        """Forget all answers, which do not hold any more. The workers end the handles they know."""
        with self._lock:
            self._stores.placement = None
            self._finds.clear()
            self._loading.clear()
            for tracked in self._tracked.values():
                tracked.find, tracked.hit_tokens = None, 0
                self._stores.end(tracked)
                if tracked.stage in (Stage.FINDING, Stage.HOLDING, Stage.RESERVING):
                    tracked.stage = Stage.READY
        self._agent_said.set()

    def on_found(self, found: CacheFound) -> None:
        with self._lock:
            tracked = self._finds.pop(found.handle, None)
            if tracked is not None and tracked.find is not None:
                with self._sheltered(tracked.request.request_id):
                    tracked.find.found = found
                    self._accept(tracked, found)
        self._agent_said.set()

    def on_slots(self, slots: CacheSlots) -> None:
        with self._lock:
            self._stores.answered(slots)
        self._agent_said.set()

    # vLLM's scheduler, in the order of a request's life.

    def add(self, request: Request, *, landing_tokens: int = 0) -> None:
        """A new request. `landing_tokens` of it come from a landing, whose full blocks the agent
        copies into the cache by itself.
        """
        if self.is_stopped or not self._options.namespace or not may_be_cached(request):
            return
        with self._sheltered(request.request_id):
            adapter = self._adapters.identity(request.lora_request)
            if adapter is None:
                return
            keys = RequestKeys(request, self._block_tokens, self._options.namespace, adapter)
            tracked = Tracked(request, keys)
            self._tracked[request.request_id] = tracked
            tracked.restart()
            if landing_tokens:
                tracked.stage = Stage.LANDING
                tracked.kv_blocks = landing_tokens // self._block_tokens
                tracked.hit_tokens = tracked.kv_blocks * self._block_tokens
            else:
                self._find(tracked)

    def matched(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond the engine's own `num_computed_tokens`; None: ask again later."""
        matched: int | None = 0
        with self._sheltered(request.request_id):
            tracked = self._tracked.get(request.request_id)
            if tracked is not None:
                is_ready = self._advance(tracked)
                matched = self._offer(tracked, num_computed_tokens) if is_ready else None
        return matched

    def load(self, request: Request, tables: Tables, num_tokens: int) -> CachedParts | None:
        """The pages for the last `num_tokens` that `matched` offered; None: the source is gone."""
        parts: CachedParts | None = None
        with self._sheltered(request.request_id):
            tracked = self._tracked.get(request.request_id)
            if tracked is not None and tracked.find is not None and tracked.find.found is not None:
                tracked.stage = Stage.LOADING
                parts = self._load(tracked, tracked.find.found.slots, tables, num_tokens)
                self._loading[request.request_id] = tracked.find
                tracked.find = None
        return parts

    def loaded(self, request_id: str) -> None:
        """A load has ended, successfully or not, so its source is not read any more."""
        with self._lock:
            find = self._loading.pop(request_id, None)
            if find is not None:
                self._client.cache_free(find.handle)
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.stage is Stage.LOADING:
                tracked.stage = Stage.READY

    def preempted(self, request_id: str) -> None:
        """The request lost its blocks and waits again. The agent may have most of them."""
        with self._sheltered(request_id):
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._end(tracked)
                tracked.restart()
                self._find(tracked)

    def step(
        self,
        request_id: str,
        computed_tokens: int,
        end_tokens: int,
        tables: Callable[[], Tables | None],
        offered: Mapping[tuple[int, int], int],
    ) -> list[StoreStep]:
        """The stores behind a step in which the request computes [computed_tokens, end_tokens).

        `tables` is called only when needed; `StepTables` explains `offered`.
        """
        steps: list[StoreStep] = []
        with self._sheltered(request_id):
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._begin(tracked)
                # A state behind wrong guesses is no state of the answer. Pages are: only blocks of
                # known tokens are stored, and a right token's page was computed with it.
                if not self._speculates or end_tokens <= tracked.num_tokens:
                    tracked.note_step(computed_tokens, end_tokens)
                else:
                    tracked.state_ends.clear()
                self._stores.reserve_answer(tracked, end_tokens)
                steps = self._stores.complete(tracked, end_tokens, tables, offered)
        return steps

    def take_ended(self) -> list[StoreStep]:
        """Take the last steps of handles that the workers know and that need no more copies."""
        with self._lock:
            return self._stores.take_ended()

    def finished(self, request_id: str) -> None:
        """The request is over; its blocks may be freed at once, unless they are being loaded."""
        with self._lock:
            self._drop(request_id)

    def stop(self) -> None:
        """Stop loading and storing: the keys do not identify the engine's KVCache any more."""
        with self._lock:
            self.is_stopped = True
            for request_id in list(self._tracked):
                self._drop(request_id)

    # From arrival to the first step.

    def _find(self, tracked: Tracked) -> None:
        # vLLM always computes the last token, so a cached block that ends with it is of no use.
        num_blocks = min((tracked.num_tokens - 1) // self._block_tokens, MAX_CACHE_BLOCKS)
        keys = tracked.keys.keys[:num_blocks]
        reads = self._options.loads and not tracked.request.skip_reading_prefix_cache
        is_asked = bool(keys) and reads
        if is_asked and self._stores.placement is not None:
            find = Find(next(self._handles), time.monotonic())
            self._finds[find.handle] = tracked
            tracked.find, tracked.stage = find, Stage.FINDING
            if self._client.cache_find(find.handle, keys):
                return
            del self._finds[find.handle]
            tracked.find = None
        self._reserve(tracked)

    def _accept(self, tracked: Tracked, found: CacheFound) -> None:
        tracked.kv_blocks = found.kv_blocks
        tracked.hit_tokens = found.num_blocks * self._block_tokens
        kv_tokens = found.kv_blocks * self._block_tokens
        if tracked.hit_tokens < kv_tokens and found.kv_blocks < len(tracked.keys.keys):
            tracked.branch_tokens = kv_tokens
        self._reserve(tracked)

    def _reserve(self, tracked: Tracked) -> None:
        """Ask for memory for the blocks that the prompt will compute, unless others have asked for
        much.
        """
        num_blocks = len(tracked.keys.keys) - tracked.kv_blocks
        if self._ahead and sum(self._ahead.values()) + num_blocks > MAX_AHEAD_BLOCKS:
            tracked.stage = Stage.HOLDING
            return
        self._stores.reserve_prompt(tracked)
        tracked.stage = Stage.RESERVING if tracked.stores else Stage.READY
        tracked.waits_since_s = time.monotonic()
        if tracked.stores:
            self._ahead[tracked.request.request_id] = num_blocks

    def _advance(self, tracked: Tracked) -> bool:
        """Whether the request may be scheduled now, since its answers are here or took too long."""
        now_s = time.monotonic()
        if tracked.stage is Stage.LANDING:
            tracked.restart()
            self._find(tracked)
        if tracked.stage is Stage.FINDING and tracked.find is not None:
            if now_s - tracked.find.asked_s < self._options.find_timeout_s:
                return False
            self._free(tracked)
            self._reserve(tracked)
        if tracked.stage is Stage.HOLDING:
            self._reserve(tracked)
        if tracked.stage is Stage.HOLDING:
            tracked.waits_since_s = tracked.waits_since_s or now_s
            if now_s - tracked.waits_since_s < HOLD_TIMEOUT_S:
                return False
        if tracked.stage is Stage.RESERVING:
            is_answered = all(store.slots is not None for store in tracked.stores)
            if not is_answered and now_s - tracked.waits_since_s < RESERVE_TIMEOUT_S:
                return False
        tracked.stage = Stage.READY
        return True

    def _offer(self, tracked: Tracked, num_computed_tokens: int) -> int:
        resumed_tokens = max(tracked.hit_tokens, num_computed_tokens)
        if self._has_states and (tracked.branch_tokens or 0) > resumed_tokens:
            # vLLM ends a step where two prompts in its own cache part ("shared prefix boundary"),
            # so that the state there can be kept. It cannot see where this prompt parts from the
            # agent's cache, so that boundary is set here. vLLM sets the attribute again before each
            # call of `get_num_new_matched_tokens`.
            request = tracked.request
            known_tokens = getattr(request, "shared_prefix_boundary", 0)
            request.shared_prefix_boundary = max(known_tokens, tracked.branch_tokens or 0)
        if tracked.find is None:
            return 0
        num_tokens = tracked.hit_tokens - num_computed_tokens
        if num_tokens >= max(1, self._options.min_load_tokens):
            return num_tokens
        self._free(tracked)
        return 0

    def _load(
        self, tracked: Tracked, slots: Sequence[Slot], tables: Tables, num_tokens: int
    ) -> CachedParts:
        assert tracked.find is not None
        end_tokens = tracked.hit_tokens
        parts = []
        for index, part, runs in slots:
            pages = self._pages.to_load(
                index, part, tables, num_tokens=end_tokens, local_tokens=end_tokens - num_tokens
            )
            if any(pages):
                parts.append(PartPages(index, part, tuple(runs), pages))
        return CachedParts(self._stores.epoch, tracked.find.asked_s, tuple(parts))

    def _begin(self, tracked: Tracked) -> None:
        """The request is scheduled: its cached prefix is loaded by now, or not wanted."""
        if tracked.stage is Stage.RUNNING:
            return
        tracked.stage = Stage.RUNNING
        self._ahead.pop(tracked.request.request_id, None)
        self._free(tracked)
        if not tracked.is_planned:
            self._stores.reserve_prompt(tracked)

    # Ends.

    def _free(self, tracked: Tracked) -> None:
        """Free the cached prefix, or the answer that is yet to come."""
        if tracked.find is not None:
            self._finds.pop(tracked.find.handle, None)
            self._client.cache_free(tracked.find.handle)
        tracked.find = None

    def _end(self, tracked: Tracked) -> None:
        self._ahead.pop(tracked.request.request_id, None)
        self._free(tracked)
        self._stores.end(tracked)

    def _drop(self, request_id: str) -> None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._end(tracked)

    @contextlib.contextmanager
    def _sheltered(self, request_id: str) -> Iterator[None]:
        """Hold the lock. An error ends the request's use of the cache and nothing else."""
        with self._lock:
            try:
                yield
            except Exception:
                logger.exception("request %s goes on without the prefix cache", request_id)
                with contextlib.suppress(Exception):
                    self._drop(request_id)
