"""The connector's half in vLLM's scheduler process: decides what each step sends, loads and stores.

It follows a producer request from its first chunk to its last; each step's metadata has the present
block tables. A consumer request waits for its landing (`landings`). Every request may use the
agent's prefix cache (`cache.scheduler`). If anything goes wrong with a transfer, the engine
computes the prompt itself. No failure here ever reaches the engine.

Agent events arrive on the client's thread and are passed on to these two; everything else runs on
the scheduler's thread.
"""

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import (
    CacheFound,
    CacheSlots,
    Landed,
    OutboxOpened,
    Welcome,
)
from kvmanager.arena import Arena
from kvmanager.hashing import token_digest
from kvmanager.landing import ENCODES_ONLY
from kvmanager.layout import KVKind, KVLayout
from kvmanager.pool.shape import CacheShape
from kvmanager.vllm_connector.cache.keys import leave_out_last_token, media_of, set_apart
from kvmanager.vllm_connector.cache.plan import CachePages
from kvmanager.vllm_connector.cache.scheduler import CacheScheduler, PrefixCacheOptions
from kvmanager.vllm_connector.engine_layout import state_block_index
from kvmanager.vllm_connector.idle_wait import ANSWER_S, idle_wait_s
from kvmanager.vllm_connector.landings import Landings, WantedLanding
from kvmanager.vllm_connector.metadata import (
    EndedSend,
    LoadStep,
    PrfaasMetadata,
    SendStep,
    TransferRef,
)
from kvmanager.vllm_connector.params import (
    LOADED_BY_ANOTHER,
    ConsumerParams,
    ParamsError,
    ProducerParams,
    TransferParams,
    parse,
)
from kvmanager.vllm_connector.weights import Adapters

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("prfaas.kvmanager.connector")

NO_CACHE = PrefixCacheOptions()
MAX_OUTBOXES = 1024
"""Outboxes that no request has come for yet; most of them are for other engines of the node."""
OUTBOX_WAIT_S = 0.5
"""The agent speaks before the request is sent, but on another socket."""


def _adapter(identity: str) -> str:
    return f"the adapter {identity}" if identity else "the base model"


@dataclass(slots=True)
class Producer:
    """A request whose KVCache goes to an outbox. `done`: its last chunk was scheduled."""

    ref: TransferRef
    done: bool = False


class SchedulerSide:
    """Called by vLLM through the facade, with vLLM's own names."""

    def __init__(
        self,
        layout: KVLayout,
        kv_cache_config: "KVCacheConfig",
        client: EngineClient,
        *,
        mamba_cache_mode: str,
        landing_timeout_s: float,
        produces: bool,
        consumes: bool,
        cache: PrefixCacheOptions = NO_CACHE,
        adapters: Adapters | None = None,
        speculates: bool = False,
    ) -> None:
        """`speculates`: the engine guesses tokens, whose KVCache may be wrong."""
        self._layout = layout
        self._produces = produces
        self._consumes = consumes
        self._draft = layout.draft_fingerprint.hex()
        self._config = kv_cache_config
        self._specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
        self._mamba_cache_mode = mamba_cache_mode
        self._client = client
        self._agent_said = threading.Event()
        self._present: set[str] = set()
        self._engine_is_idle = False
        self._pass_began_s = 0.0
        self._answer_by_s = 0.0
        self._wait_until_s = 0.0
        self._producers: dict[str, Producer] = {}
        self._arena_epoch = ""
        self._outboxes: dict[tuple[bytes, int], TransferRef] = {}
        self._outbox_told = threading.Condition()
        self._loads: list[LoadStep] = []
        # When the agent was last known to keep what each request loads; inf: it does so now.
        self._kept_s: dict[str, float] = {}
        self._kept_lock = threading.Lock()
        self._ended: list[EndedSend] = []
        self._shape = CacheShape.of(layout)
        state_tokens = [spec.block_size for spec in self._specs]
        pages = CachePages(layout, self._shape, self._state_index, state_tokens)
        self._landings = Landings(layout, pages, self._shape, landing_timeout_s, client)
        self._adapters = adapters or Adapters()
        self._cache = CacheScheduler(
            self._shape,
            pages,
            cache,
            self._agent_said,
            client,
            adapters=self._adapters,
            speculates=speculates,
        )

    def start(self) -> None:
        """Connect to the agent in the background."""
        self._client.start(self)

    def close(self) -> None:
        self._client.close()

    # Events of the agent, on the client's thread.

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        logger.info("agent connected, arena epoch %s", welcome.arena_epoch)
        self._arena_epoch = welcome.arena_epoch
        self._landings.on_connected(welcome)
        self._cache.on_connected(welcome)

    def on_outbox_opened(self, opened: OutboxOpened) -> None:
        ref = TransferRef.of(opened, self._arena_epoch)
        with self._outbox_told:
            self._outboxes[ref.opening] = ref
            if len(self._outboxes) > MAX_OUTBOXES:
                del self._outboxes[next(iter(self._outboxes))]
            self._outbox_told.notify_all()

    def on_landed(self, landed: Landed) -> None:
        self._landings.on_landed(landed)
        self._agent_said.set()

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        logger.warning("transfer %s failed: %s", transfer_id.hex(), reason)
        if not attempt:  # a landing; the agent tells workers of outboxes directly
            self._landings.on_failed(transfer_id)
        self._agent_said.set()

    def on_cache_found(self, found: CacheFound) -> None:
        self._cache.on_found(found)

    def on_cache_slots(self, slots: CacheSlots) -> None:
        self._cache.on_slots(slots)

    def on_disconnected(self) -> None:
        with self._outbox_told:
            self._outboxes.clear()
        self._landings.on_disconnected()
        self._cache.on_disconnected()
        self._sources_lost(time.monotonic())
        self._agent_said.set()

    # vLLM's scheduler, in the order of a request's life.

    def on_new_request(self, request: "Request") -> None:
        # Nothing else can be computed meanwhile, so the first pass may wait for the agent.
        if not self._present:
            self._engine_is_idle = True
            self._pass_began_s, self._wait_until_s = time.monotonic(), 0.0
        self._answer_by_s = time.monotonic() + ANSWER_S
        self._present.add(request.request_id)
        # A connector beside this one brings the KVCache, with windows and states of the end alone:
        # blocks before it are not whole, and must not be cached. Nor need those be that nobody
        # will ask for again.
        said = request.kv_transfer_params or {}
        if said.get(LOADED_BY_ANOTHER) or ENCODES_ONLY.items() <= said.items():
            return
        params = self._accepted(request)
        if isinstance(params, ConsumerParams):
            num_tokens = len(request.prompt_token_ids or []) - 1
            wanted = WantedLanding(
                params.id_bytes, params.num_requests, num_tokens, self._digest(request)
            )
            self._landings.watch(request.request_id, wanted)
            if self._landings.is_lossy:
                set_apart(request)
            else:
                self._cache.add(request, landing_tokens=num_tokens)
            return
        if isinstance(params, ProducerParams):
            if params.token_digest:
                leave_out_last_token(request)
            opening = params.id_bytes, params.attempt
            with self._outbox_told:
                ref = self._outboxes.pop(opening, None)
            # None: the connection was lost just now, and the outbox with it.
            if ref is not None:
                self._producers[request.request_id] = Producer(ref)
        self._cache.add(request)

    def _accepted(self, request: "Request") -> ProducerParams | ConsumerParams | None:
        """The request's transfer if it belongs to this engine. Another one is refused."""
        try:
            params = parse(request.kv_transfer_params)
        except ParamsError as error:
            logger.error("request %s: %s; computing it here", request.request_id, error)
            return None
        problem = self._mismatch(request, params) if params is not None else ""
        if not problem:
            return params
        logger.error("request %s: %s; computing it here", request.request_id, problem)
        if isinstance(params, ProducerParams):
            self._ended.append(EndedSend(params.id_bytes, params.attempt, problem))
        elif isinstance(params, ConsumerParams):
            self._landings.refuse(params.id_bytes)
        return None

    def _mismatch(self, request: "Request", params: ProducerParams | ConsumerParams) -> str:
        """Why these parameters do not belong to this request on this engine, or ''."""
        if not (self._produces if isinstance(params, ProducerParams) else self._consumes):
            return "this engine's kv_role excludes it"
        if self._cache.is_stopped:
            return "this engine's weights may have changed since its start"
        if problem := self._other_adapter(request, params):
            return problem
        tokens = request.prompt_token_ids or []
        if isinstance(params, ConsumerParams):
            # vLLM must compute at least one token of a prompt, so a landing never has the last one.
            return "" if len(tokens) > 1 else f"{len(tokens)} prompt tokens cannot have landed"
        return self._other_outbox(request, params)

    def _other_outbox(self, request: "Request", params: ProducerParams) -> str:
        """Why the request cannot fill this outbox, or ''."""
        opening = params.id_bytes, params.attempt
        with self._outbox_told:
            self._outbox_told.wait_for(lambda: opening in self._outboxes, OUTBOX_WAIT_S)
            ref = self._outboxes.get(opening)
        if ref is None:
            return "the node agent has not said where this outbox is"
        try:
            self._layout.transfer_bytes(ref.num_tokens, ref.cached_tokens, ref.window_step)
        except ValueError as error:
            return str(error)
        if ref.draft not in ("", self._draft):
            return "the outbox has room for the KVCache of another drafter"
        num_prompt_tokens = len(request.prompt_token_ids or [])
        if num_prompt_tokens != ref.num_tokens + (1 if params.token_digest else 0):
            return f"{num_prompt_tokens} prompt tokens but the outbox is for {ref.num_tokens}"
        if params.token_digest and self._digest(request).hex() != params.token_digest:
            return "the outbox is for other tokens or media than this prompt's"
        return ""

    def _digest(self, request: "Request") -> bytes:
        tokens = request.prompt_token_ids or []
        return token_digest(tokens[:-1], media_of(request))

    def _other_adapter(self, request: "Request", params: TransferParams) -> str:
        """Why the KVCache would be of another LoRA adapter than the request's here, or ''."""
        own = self._adapters.identity(request.lora_request)
        if own is None:
            assert request.lora_request is not None
            return f"the adapter {request.lora_request.lora_name} cannot be identified"
        # Adapters of one name may differ between two sites, and the base model has none.
        if params.adapter != own:
            return f"the KVCache is to be of {_adapter(params.adapter)}, here it is {_adapter(own)}"
        return ""

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_new = self._landings.matched(
            request.request_id, num_computed_tokens, self._wait_briefly
        )
        if num_new == 0:
            num_new = self._cache.matched(request, num_computed_tokens)
            while num_new is None and self._wait_briefly():
                num_new = self._cache.matched(request, num_computed_tokens)
        return num_new, bool(num_new)

    def _wait_briefly(self) -> bool:
        """If the last pass had no work, or a request is new, wait until the agent sends something.

        False: it sent nothing, or this pass may not wait any longer.
        """
        now_s = time.monotonic()
        if not self._engine_is_idle:
            said = now_s < self._answer_by_s and self._agent_said.wait(self._answer_by_s - now_s)
            self._agent_said.clear()
            return said
        if not self._wait_until_s:
            self._wait_until_s = now_s + idle_wait_s(now_s - self._pass_began_s)
        self._engine_is_idle = self._agent_said.wait(max(0.0, self._wait_until_s - now_s))
        self._agent_said.clear()
        return self._engine_is_idle

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if num_external_tokens == 0:
            return
        # vLLM calls this a second time, with 0 external tokens, for blocks after the load (handled
        # above).
        tables = self._config.select_transfer_block_ids(blocks.get_block_ids())
        # Before the source is taken, so that its loss is noticed from then on.
        with self._kept_lock:
            self._kept_s[request.request_id] = math.inf
        step = self._landings.load(request.request_id, tables, num_external_tokens)
        if step is None:
            cached = self._cache.load(request, tables, num_external_tokens)
            step = LoadStep(request.request_id, cached=cached)
        self._loads.append(step)

    def _sources_lost(self, time_s: float) -> None:
        """What is being loaded was kept for this engine until then; -inf: it must not be used."""
        with self._kept_lock:
            self._kept_s = {name: min(kept_s, time_s) for name, kept_s in self._kept_s.items()}

    def _state_index(self, group_index: int, computed_tokens: int) -> int:
        return state_block_index(self._specs[group_index], self._mamba_cache_mode, computed_tokens)

    def build_connector_meta(self, output: "SchedulerOutput") -> PrfaasMetadata:
        self._engine_is_idle = output.total_num_scheduled_tokens == 0
        self._pass_began_s, self._wait_until_s = time.monotonic(), 0.0
        for request_id in output.preempted_req_ids or ():
            self._cache.preempted(request_id)
        meta = PrfaasMetadata(loads=self._loads, ended=self._ended, stores=self._cache.take_ended())
        meta.is_idle = self._engine_is_idle
        with self._kept_lock:
            now_s = time.monotonic()
            meta.kept_s = {name: min(kept_s, now_s) for name, kept_s in self._kept_s.items()}
        self._loads, self._ended = [], []
        for request in output.scheduled_new_reqs:
            self._add_steps(meta, output, request.req_id, request.num_computed_tokens)
            if (first := self._landings.first_step(request.req_id)) is not None:
                meta.first_steps.append(first)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._add_steps(meta, output, request_id, computed)
        return meta

    def _add_steps(
        self, meta: PrfaasMetadata, output: "SchedulerOutput", request_id: str, computed: int
    ) -> None:
        """Add the sends and stores of this request that follow the step."""
        end = computed + output.num_scheduled_tokens[request_id]
        state = output.kv_connector_block_state
        if state is None:
            return

        def tables() -> tuple[list[int], ...] | None:
            ids = state.get_block_ids(request_id)
            return None if ids is None else self._config.select_transfer_block_ids(ids)

        producer = self._producers.get(request_id)
        if producer is not None and not producer.done:
            self._add_send(meta, producer, tables(), end)
        groups = self._config.transfer_group_ids
        offered = {
            (groups.index(group), boundary): block
            for group, block, boundary in state.boundary_state_offloads.get(request_id, ())
            if group in groups
        }
        meta.stores += self._cache.step(request_id, computed, end, tables, offered)

    def _add_send(
        self,
        meta: PrfaasMetadata,
        producer: Producer,
        tables: tuple[list[int], ...] | None,
        computed: int,
    ) -> None:
        if tables is None:
            return
        step = SendStep(
            producer.ref,
            tuple(
                self._send_blocks(index, table, producer.ref, computed)
                for index, table in enumerate(tables)
            ),
            computed,
        )
        producer.done = step.is_last
        meta.sends.append(step)

    def _send_blocks(
        self, group_index: int, table: list[int], ref: TransferRef, computed: int
    ) -> list[int]:
        group = self._layout.groups[group_index]
        if group.kind is KVKind.RECURRENT:
            return [table[self._state_index(group_index, computed)]]
        pages = group.pages(ref.num_tokens, ref.cached_tokens, ref.window_step)
        return table[pages.start : pages.stop]

    def reset_cache(self) -> None:
        """Stop transfers and the use of the cache, those under way included: the engine's weights
        may have changed, which neither block keys nor the layout show.
        """
        logger.warning(
            "vLLM reset its caches, as it does when weights change: this engine takes no part in "
            "transfers and leaves the node's prefix cache alone until it is started again"
        )
        self._cache.stop()
        for producer in self._producers.values():
            # One that is done has sent KVCache of the old weights only, as its keys say.
            if not producer.done:
                producer.done = True
                failure = "this engine's weights may have changed meanwhile"
                self._ended.append(
                    EndedSend(producer.ref.transfer_id, producer.ref.attempt, failure)
                )
        self._landings.give_up()
        self._sources_lost(-math.inf)

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        # vLLM's KVOutputAggregator names a request here once `get_finished` of every rank has named
        # it.
        for request_id in output.finished_recving or ():
            with self._kept_lock:
                self._kept_s.pop(request_id, None)
            self._landings.loaded(request_id)
            self._cache.loaded(request_id)

    def request_finished(self, request: "Request", *, aborted: bool) -> None:
        """The request is over. Its blocks may be freed at once: its pages were copied out."""
        self._present.discard(request.request_id)
        producer = self._producers.pop(request.request_id, None)
        if producer is not None:
            early = aborted or not producer.done
            failure = f"prefill ended early: {request.status.name}" if early else ""
            ref = producer.ref
            self._ended.append(EndedSend(ref.transfer_id, ref.attempt, failure))
        self._cache.finished(request.request_id)
        self._landings.finished(request.request_id)
