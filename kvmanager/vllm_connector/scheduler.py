"""The connector's half in vLLM's scheduler process: decides what each step sends and loads.

A producer request is followed from its first chunk to its last: each step's metadata carries the
block tables as they stand. A consumer request waits without any engine block until its agent says
that the landing is whole, then gets its blocks, then is loaded. Whatever goes wrong with a transfer
makes the engine compute the prompt itself: from here no failure ever reaches the engine.

Agent events arrive on the client's thread and only set a state under `_lock`; everything else runs
on the scheduler's thread.
"""

import logging
import threading
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvmanager.agent.engine_client import EngineClient
from kvmanager.agent.protocol import Welcome
from kvmanager.arena import Arena
from kvmanager.hashing import token_digest
from kvmanager.layout import KVKind, KVLayout
from kvmanager.vllm_connector.engine_layout import state_block_index
from kvmanager.vllm_connector.metadata import (
    EndedSend,
    LoadStep,
    PrfaasMetadata,
    SendStep,
    TransferRef,
)
from kvmanager.vllm_connector.params import (
    ConsumerParams,
    ParamsError,
    ProducerParams,
    TransferParams,
    parse,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("prfaas.kvmanager.connector")

IDLE_WAIT_SHARE = 9.0
MIN_IDLE_WAIT_S = 0.004
MAX_IDLE_WAIT_S = 0.025
"""vLLM polls a connector that is not ready without a pause. A scheduling pass with nothing to
compute therefore waits for the landing, and the longer the longer a pass takes: a waiting engine
takes about a tenth of a core from whoever prefills beside it, on slow machines too. The maximum is
what a new request may have to wait for."""


def idle_wait_s(pass_s: float) -> float:
    """How long to wait for a landing after a pass of `pass_s` that had nothing to compute."""
    return min(max(MIN_IDLE_WAIT_S, IDLE_WAIT_SHARE * pass_s), MAX_IDLE_WAIT_S)


class LandingState(Enum):
    WAITING = auto()
    LANDED = auto()
    LOADING = auto()
    OVER = auto()


@dataclass(slots=True)
class Consumer:
    """A request whose KVCache comes from a landing. `OVER`: the landing is not ours any more."""

    ref: TransferRef
    deadline_s: float
    state: LandingState = LandingState.WAITING
    request_ended: bool = False


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
        *,
        mamba_cache_mode: str,
        landing_timeout_s: float,
        produces: bool,
        consumes: bool,
    ) -> None:
        self._layout = layout
        self._produces = produces
        self._consumes = consumes
        self._fingerprint = layout.fingerprint().hex()
        self._config = kv_cache_config
        self._specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
        self._mamba_cache_mode = mamba_cache_mode
        self._landing_timeout_s = landing_timeout_s
        self._client: EngineClient | None = None
        self._lock = threading.Lock()
        self._landing_changed = threading.Event()
        self._engine_is_idle = False
        self._pass_began_s = 0.0
        self._producers: dict[str, Producer] = {}
        self._consumers: dict[str, Consumer] = {}
        self._request_of: dict[bytes, str] = {}
        self._loads: list[LoadStep] = []
        self._ended: list[EndedSend] = []

    def connect(self, client: EngineClient) -> None:
        """Use this client; its events must be wired to the `on_*` methods."""
        self._client = client
        client.start()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # Events of the agent, on the client's thread.

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        logger.info("agent connected, arena epoch %s", welcome.arena_epoch)

    def on_landed(self, transfer_id: bytes) -> None:
        self._change(transfer_id, LandingState.LANDED)

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        logger.warning("transfer %s failed: %s", transfer_id.hex(), reason)
        self._change(transfer_id, LandingState.OVER)

    def on_disconnected(self) -> None:
        with self._lock:
            for consumer in self._consumers.values():
                if consumer.state in (LandingState.WAITING, LandingState.LANDED):
                    consumer.state = LandingState.OVER
        self._landing_changed.set()

    def _change(self, transfer_id: bytes, state: LandingState) -> None:
        with self._lock:
            consumer = self._consumers.get(self._request_of.get(transfer_id, ""))
            if consumer is not None and consumer.state in (
                LandingState.WAITING,
                LandingState.LANDED,
            ):
                consumer.state = state
        self._landing_changed.set()

    # vLLM's scheduler, in the order of a request's life.

    def on_new_request(self, request: "Request") -> None:
        try:
            params = parse(request.kv_transfer_params)
        except ParamsError as error:
            logger.error("request %s: %s; computing it here", request.request_id, error)
            return
        if params is None:
            return
        ref = TransferRef(
            params.id_bytes,
            params.num_tokens,
            params.arena_epoch,
            params.runs,
            params.attempt if isinstance(params, ProducerParams) else 0,
        )
        problem = self._mismatch(request, params)
        if problem:
            logger.error("request %s: %s; computing it here", request.request_id, problem)
            self._refuse(params, problem)
        elif isinstance(params, ProducerParams):
            self._producers[request.request_id] = Producer(ref)
        else:
            self._watch(request.request_id, ref)

    def _mismatch(self, request: "Request", params: TransferParams) -> str:
        """Why these parameters do not belong to this request on this engine, or ''."""
        if not (self._produces if isinstance(params, ProducerParams) else self._consumes):
            return "this engine's kv_role excludes it"
        if params.layout_fingerprint != self._fingerprint:
            return (
                f"KV layout {params.layout_fingerprint[:12]} is not this engine's "
                f"{self._fingerprint[:12]} ({self._layout.describe()})"
            )
        tokens = request.prompt_token_ids or []
        if isinstance(params, ProducerParams):
            if len(tokens) != params.num_tokens:
                return f"{len(tokens)} prompt tokens but the outbox is for {params.num_tokens}"
            return ""
        assert isinstance(params, ConsumerParams)
        if len(tokens) != params.num_tokens + 1:
            return f"{len(tokens)} prompt tokens but the landing holds {params.num_tokens}"
        if token_digest(tokens[:-1]).hex() != params.token_digest:
            return "the landing holds other tokens than this prompt's"
        return ""

    def _refuse(self, params: TransferParams, problem: str) -> None:
        if isinstance(params, ProducerParams):
            self._ended.append(EndedSend(params.id_bytes, problem))
        else:
            self._client_or_raise.watch(params.id_bytes)
            self._client_or_raise.release(params.id_bytes)

    def _watch(self, request_id: str, ref: TransferRef) -> None:
        consumer = Consumer(ref, time.monotonic() + self._landing_timeout_s)
        with self._lock:
            self._consumers[request_id] = consumer
            self._request_of[ref.transfer_id] = request_id
        if not self._client_or_raise.watch(ref.transfer_id):
            logger.warning("request %s: no agent; computing it here", request_id)
            self._change(ref.transfer_id, LandingState.OVER)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        consumer = self._consumers.get(request.request_id)
        if consumer is None:
            return 0, False
        if consumer.state is LandingState.WAITING:
            self._wait_if_idle()
        with self._lock:
            state = consumer.state
        if state is LandingState.WAITING:
            if time.monotonic() < consumer.deadline_s:
                return None, False
            logger.warning(
                "request %s: nothing landed in %.0f s; computing it here",
                request.request_id,
                self._landing_timeout_s,
            )
            self._release(consumer)
            return 0, False
        num_new = consumer.ref.num_tokens - num_computed_tokens
        if state is LandingState.LANDED and num_new > 0:
            return num_new, True
        self._release(consumer)
        return 0, False

    def _wait_if_idle(self) -> None:
        """At most once per scheduling pass that follows one without any work."""
        if self._engine_is_idle:
            self._engine_is_idle = False
            self._landing_changed.wait(idle_wait_s(time.monotonic() - self._pass_began_s))
        self._landing_changed.clear()

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        consumer = self._consumers.get(request.request_id)
        if consumer is None or num_external_tokens == 0:
            return
        with self._lock:
            if consumer.state is LandingState.LANDED:
                consumer.state = LandingState.LOADING
        tables = self._config.select_transfer_block_ids(blocks.get_block_ids())
        first_token = consumer.ref.num_tokens - num_external_tokens
        self._loads.append(
            LoadStep(
                request.request_id,
                consumer.ref,
                tuple(
                    self._load_blocks(index, table, consumer.ref.num_tokens, first_token)
                    for index, table in enumerate(tables)
                ),
            )
        )

    def _load_blocks(
        self, group_index: int, table: list[int], num_tokens: int, first_token: int
    ) -> list[int]:
        """Blocks to fill: never one that the engine's own prefix cache already holds."""
        group = self._layout.groups[group_index]
        if group.kind is KVKind.RECURRENT:
            return [table[self._state_index(group_index, num_tokens)]]
        pages = group.pages(num_tokens)
        first_page = max(pages.start, first_token // group.tokens_per_block)
        return table[first_page : pages.stop]

    def _state_index(self, group_index: int, computed_tokens: int) -> int:
        return state_block_index(self._specs[group_index], self._mamba_cache_mode, computed_tokens)

    def build_connector_meta(self, output: "SchedulerOutput") -> PrfaasMetadata:
        self._engine_is_idle = output.total_num_scheduled_tokens == 0
        self._pass_began_s = time.monotonic()
        meta = PrfaasMetadata(loads=self._loads, ended=self._ended)
        self._loads, self._ended = [], []
        for request in output.scheduled_new_reqs:
            self._add_send(meta, output, request.req_id, request.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._add_send(meta, output, request_id, computed)
        return meta

    def _add_send(
        self, meta: PrfaasMetadata, output: "SchedulerOutput", request_id: str, computed: int
    ) -> None:
        producer = self._producers.get(request_id)
        if producer is None or producer.done:
            return
        state = output.kv_connector_block_state
        tables = state.get_block_ids(request_id) if state is not None else None
        if tables is None:
            return
        computed += output.num_scheduled_tokens[request_id]
        tables = self._config.select_transfer_block_ids(tables)
        step = SendStep(
            producer.ref,
            tuple(
                self._send_blocks(index, table, producer.ref.num_tokens, computed)
                for index, table in enumerate(tables)
            ),
            computed,
        )
        producer.done = step.is_last
        meta.sends.append(step)

    def _send_blocks(
        self, group_index: int, table: list[int], num_tokens: int, computed: int
    ) -> list[int]:
        group = self._layout.groups[group_index]
        if group.kind is KVKind.RECURRENT:
            return [table[self._state_index(group_index, computed)]]
        pages = group.pages(num_tokens)
        return table[pages.start : pages.stop]

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        for request_id in output.finished_recving or ():
            consumer = self._consumers.get(request_id)
            if consumer is not None:
                self._release(consumer)
                if consumer.request_ended:
                    self._forget(request_id, consumer)

    def request_finished(self, request: "Request", *, aborted: bool) -> None:
        """The request is over; its blocks may be freed at once, its pages were copied out."""
        producer = self._producers.pop(request.request_id, None)
        if producer is not None:
            early = aborted or not producer.done
            failure = f"prefill ended early: {request.status.name}" if early else ""
            self._ended.append(EndedSend(producer.ref.transfer_id, failure))
        consumer = self._consumers.get(request.request_id)
        if consumer is None:
            return
        consumer.request_ended = True
        if consumer.state is not LandingState.LOADING:
            self._release(consumer)
            self._forget(request.request_id, consumer)

    def _release(self, consumer: Consumer) -> None:
        """Give the landing back, once; the request stays known until it has finished."""
        with self._lock:
            was, consumer.state = consumer.state, LandingState.OVER
        if was is not LandingState.OVER:
            self._client_or_raise.release(consumer.ref.transfer_id)

    def _forget(self, request_id: str, consumer: Consumer) -> None:
        with self._lock:
            self._consumers.pop(request_id, None)
            self._request_of.pop(consumer.ref.transfer_id, None)

    @property
    def _client_or_raise(self) -> EngineClient:
        assert self._client is not None, "connect() comes first"
        return self._client
