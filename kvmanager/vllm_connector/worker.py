"""The connector's half in each vLLM worker: copies finished pages out and landed pages in.

During the forward pass vLLM calls `save_kv_layer` after every attention layer. The pages of that
layer that this chunk has filled go to the arena and are announced to the agent at once. vLLM has no
such hook for recurrent layers, and their states are final only with the last chunk: they follow in
`wait_for_save`. Loads run on a thread of their own, from before a step's forward pass, so that one
that ends within the step is reported with it. `cache.worker` does the part of the prefix cache.

Nothing here raises into the engine. A producer's failure aborts its transfer. A consumer's failure
is reported, so that vLLM computes the prompt.
"""

import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import VERSION_WITH_LOADED, Welcome
from kvmanager.arena import Arena, ArenaSpace
from kvmanager.layout import KVKind, KVLayout, LayerExtent
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError
from kvmanager.vllm_connector.cache.worker import CacheWorker
from kvmanager.vllm_connector.cuda_pages import DEFAULT_STAGING_MIB, copier_for
from kvmanager.vllm_connector.load_spans import LoadSpans
from kvmanager.vllm_connector.metadata import FirstStep, LoadStep, PrfaasMetadata, TransferRef
from kvmanager.vllm_connector.pages import NO_BLOCKS, Copy, Mark, PageCopier
from kvmanager.vllm_connector.sends import (
    BrokenSend,
    GroupSends,
    Outgoing,
    Send,
    StepSends,
    check_blocks,
    slabs_of,
    units_held,
    units_sent,
)
from kvmanager.vllm_connector.slabs import BlockIds, PartView, Slab
from kvmanager.vllm_connector.stats import TransferStats

logger = logging.getLogger("prfaas.kvmanager.connector")

MAX_LOST = 1024
LOAD_WAIT_S = 0.025
"""How long a step that computes nothing waits for a load. A new request may have to wait for it."""


class WorkerSide:
    """Called by vLLM through the facade, with vLLM's own names."""

    def __init__(
        self,
        layout: KVLayout,
        client: EngineClient,
        views: Mapping[str, tuple[PartView, ...]],
        staging_bytes: int = DEFAULT_STAGING_MIB << 20,
    ) -> None:
        """`views` show this worker's memory of each part by layer, on one device. They are of all
        layers of `layout`, or of those of a pipeline stage. `staging_bytes`: see `copier_for`,
        which raises ValueError.
        """
        self._layout = layout
        self._client = client
        self._sent, self._held = units_sent(views), units_held(views)
        every = [view for parts in views.values() for view in parts]
        copier = copier_for(every, staging_bytes, lambda s: self._stats.add_staging_wait(s))
        self._access = ArenaAccess(client, copier)
        self._sending = threading.Lock()
        # By opening of the outbox. None: this worker gave it up, so later steps skip it.
        self._outgoing: dict[tuple[bytes, int], Outgoing | None] = {}
        self._step: tuple[PrfaasMetadata, StepSends] | None = None
        # Outboxes up to this attempt are not begun: they may have ended while this worker had no
        # connection. Without a connection no outbox is begun.
        self._may_begin_after: float = math.inf
        # Later attempts that failed before their first step.
        self._lost: set[int] = set()
        self._stats = TransferStats()
        self._cache = CacheWorker(layout, client, self._access, views, stats=lambda: self._stats)
        self._results_changed = threading.Condition()
        self._num_loading = 0
        self._kept_s: dict[str, float] = {}  # of the latest step's metadata
        self._finished_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._step_began_s = 0.0
        self._load_spans = LoadSpans()
        self._agent_version = 0
        self._grace_s = 0.0  # the time for which the agent keeps what a lost connection owned
        # Loads take long, and the thread that ends copies must not call the copier (`PageCopier`).
        self._load_queue: queue.SimpleQueue[tuple[LoadStep, Mark] | BrokenSend | None]
        self._load_queue = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._run_loads, name="prfaas-load", daemon=True)

        num_layers = f"{len(views)} of {len(layout.layers)} layers"
        logger.info("moving %s of %s, %s", num_layers, layout.describe(), every[0].device)

    def start(self) -> None:
        """Connect to the agent in the background, and be ready to load."""
        self._client.start(self)
        self._loader.start()

    def close(self) -> None:
        self._load_queue.put(None)
        if self._loader.is_alive():
            self._loader.join(timeout=5)
        self._access.copier.close()
        self._client.close()
        self._access.stop_mapping()

    # Events of the agent, on the client's thread.

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        logger.info("agent connected, arena epoch %s", welcome.arena_epoch)
        with self._sending:
            self._grace_s = welcome.grace_s
            self._agent_version = welcome.version
            self._may_begin_after = welcome.last_attempt
            self._lost.clear()
        self._access.map_pages(arena)
        self._cache.on_connected()

    def on_disconnected(self) -> None:
        """Give up every outbox, and return when no copy is under way: the agent may soon use the
        memory for something else.
        """
        logger.warning("agent disconnected")
        self._access.stop_mapping()
        with self._sending:
            self._may_begin_after = math.inf
            for opening in self._outgoing:
                self._give_up(opening)
            self._access.copier.drain()
        self._cache.on_disconnected()

    def on_agent_gone(self) -> None:
        """Do nothing: since `on_disconnected` no copy reads or writes the agent's memory."""

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        """An outbox has failed: stop writing, and answer once no copy is under way."""
        logger.warning("transfer %s failed: %s", transfer_id.hex(), reason)
        with self._sending:
            if (transfer_id, attempt) in self._outgoing:
                self._give_up((transfer_id, attempt))
            else:
                self._remember_lost(attempt)
            self._access.copier.drain()
        self._client.release(transfer_id, attempt)

    def _give_up(self, opening: tuple[bytes, int]) -> None:
        """Begin no more copies into an outbox. Those under way may still write into it."""
        outgoing = self._outgoing.get(opening)
        if outgoing is not None:
            outgoing.is_given_up = True
        self._outgoing[opening] = None

    def _remember_lost(self, attempt: int) -> None:
        """Remember a failed attempt, whose request must not begin to write."""
        self._lost.add(attempt)
        if len(self._lost) > MAX_LOST:
            # Attempts rise with time. The oldest can be forgotten if no outbox that old is begun.
            oldest = min(self._lost)
            self._lost.remove(oldest)
            self._may_begin_after = max(self._may_begin_after, oldest)

    def begin_step(self, meta: PrfaasMetadata, now_s: float) -> None:
        """The worker begins a step at this time (CLOCK_MONOTONIC), and its loads before its forward
        pass. vLLM has given the pages to requests that wait, so no step touches them before
        `transfer_results` has named those.
        """
        self._step_began_s = now_s
        self._kept_s = meta.kept_s
        if meta.loads:
            with self._results_changed:
                self._num_loading += len(meta.loads)
            mark = self._access.copier.mark()
            for load in meta.loads:
                self._load_queue.put((load, mark))

    # Producer.

    def start_step(self, meta: PrfaasMetadata) -> None:
        """End outboxes. vLLM calls it behind the forward pass, or before it where a connector
        beside this one loads within the step.
        """
        for ended in meta.ended:
            with self._sending:
                outgoing = self._outgoing.pop(ended.opening, None)
                if ended.failure:
                    if outgoing is not None:
                        outgoing.is_given_up = True
                    self._access.copier.drain()
            if ended.failure:
                self._client.abort(*ended.opening, ended.failure)

    def save_kv_layer(self, meta: PrfaasMetadata, layer_name: str) -> None:
        """Send the pages that the running step has completed in this attention layer."""
        sends = self._planned(meta).take(layer_name)
        if sends is not None:
            self._send(sends, layer_name)

    def wait_for_save(self, meta: PrfaasMetadata) -> None:
        """Send what no call of `save_kv_layer` has sent: recurrent states after the last chunk, and
        layers whose hook vLLM did not call, as in a full CUDA graph. After the last chunk, say that
        the prefill is over, once its copies are. Then copy the parts that the step has completed
        into the prefix cache.
        """
        plan, self._step = self._planned(meta), None  # kept, it would keep a dead agent's arena
        # vLLM calls this in a `finally`, also when the forward pass has raised.
        if (error := sys.exc_info()[0]) is not None:
            self._give_up_step(meta, f"the engine's step failed: {error.__name__}")
            return
        for layer_name in plan.left():
            sends = plan.take(layer_name)
            if sends is not None:
                self._send(sends, layer_name)
        for step in meta.sends:
            if step.is_last:
                self._end_prefill(step.ref)
        for first in meta.first_steps:
            self._after_copies(first.arena_epoch, partial(self._first_step_over, first))
        self._cache.store(meta.stores)

    def _planned(self, meta: PrfaasMetadata) -> StepSends:
        """What the step sends, planned when it is first asked for."""
        if self._step is not None and self._step[0] is meta:
            return self._step[1]
        opened = [(step, self._opened(step.ref)) for step in meta.sends]
        steps = [(step, outgoing) for step, outgoing in opened if outgoing is not None]
        try:
            plan = StepSends(self._layout, self._sent, steps)
        except Exception as error:
            logger.exception("planning what a step sends")
            plan = StepSends(self._layout, self._sent, ())
            for step, _ in steps:
                self._fail(step.ref, f"{type(error).__name__}: {error}")
        self._step = meta, plan
        return plan

    def _give_up_step(self, meta: PrfaasMetadata, reason: str) -> None:
        """Send and store nothing of a step whose pages may hold anything."""
        for send in meta.sends:
            self._fail(send.ref, reason)
        self._cache.store([replace(s, cached=replace(s.cached, parts=())) for s in meta.stores])

    def _end_prefill(self, ref: TransferRef) -> None:
        """Tell the agent that the prefill is over, once all copies that have begun have ended: the
        time that a prefill takes is learnt from it.
        """
        outgoing = self._outgoing.get(ref.opening)
        began_s = outgoing.began_s if outgoing is not None else 0.0
        self._after_copies(ref.arena_epoch, partial(self._prefill_ended, ref, began_s))

    def _prefill_ended(self, ref: TransferRef, began_s: float) -> None:
        self._client.prefill_end(*ref.opening, time.monotonic() - began_s if began_s else 0.0)

    def _first_step_over(self, first: FirstStep) -> None:
        times = self._load_spans.first_step_over(first, time.monotonic())
        if times is not None and self._agent_version >= VERSION_WITH_LOADED:
            self._client.loaded(first.transfer_id, times)

    def _after_copies(self, arena_epoch: str, done: Callable[[], None]) -> None:
        """Call `done` once the device has done what it was given so far."""
        try:
            _, copier = self._access.open(arena_epoch)
            # Copies end in the order in which they begin, so this one of nothing ends last.
            copier.store((), NO_BLOCKS, lambda: [Copy((), lambda error: done())])
        except Exception as error:
            logger.info("a step ends without copies: %r", error)
            done()

    def _opened(self, ref: TransferRef) -> Outgoing | None:
        """The outbox of a request, attached to at its first step; None: it is given up."""
        try:
            with self._sending:
                if ref.attempt in self._lost:
                    return None
                if ref.opening not in self._outgoing:
                    self._outgoing[ref.opening] = self._open(ref)
                return self._outgoing[ref.opening]
        except StaleArenaError as error:
            logger.warning("transfer %s is not sent: %s", ref.transfer_id.hex(), error)
            self._fail(ref, str(error))
        except Exception as error:
            # The engine must go on whatever happens to one transfer.
            logger.exception("sending %s", ref.transfer_id.hex())
            self._fail(ref, f"{type(error).__name__}: {error}")
        return None

    def _open(self, ref: TransferRef) -> Outgoing:
        if ref.attempt <= self._may_begin_after:
            raise StaleArenaError("the outbox was opened before this connection to the agent")
        space, _ = self._space(ref)
        if not self._client.attach(*ref.opening):
            raise StaleArenaError("the agent is gone")
        return Outgoing(
            space,
            {extent.layer.name: extent for extent in self._extents(ref)},
            self._step_began_s,
        )

    def _fail(self, ref: TransferRef, reason: str) -> None:
        with self._sending:
            self._give_up(ref.opening)
            self._access.copier.drain()
        self._stats.add_failed_send()
        self._client.abort(*ref.opening, reason)

    def _send(self, sends: GroupSends, layer_name: str) -> None:
        """Copy a layer's pages of all requests of the step."""
        reads = [read for read in self._sent[layer_name] if read[1]]
        if not reads:
            return  # another rank sends this layer
        try:
            self._access.copier.store(
                reads,
                sends.blocks,
                lambda: sends.copies(self._layout, layer_name, self._sent, self._copied),
            )
        except Exception as error:
            # The engine must go on whatever happens to its transfers.
            logger.exception("sending layer %s", layer_name)
            for send in sends.sends:
                self._fail(send.ref, f"{type(error).__name__}: {error}")

    def _copied(
        self, send: Send, ranges: Sequence[tuple[int, int]], error: BaseException | None
    ) -> None:
        if error is None:
            self._stats.add_sent(sum(nbytes for _, nbytes in ranges))
            self._client.ready(*send.ref.opening, ranges)
        elif not send.outgoing.is_given_up:
            send.outgoing.is_given_up = True
            # The thread that ends copies must not wait for them, as `_fail` does.
            self._load_queue.put(BrokenSend(send.ref, f"{type(error).__name__}: {error}"))

    # Consumer.

    def transfer_results(self, wait_s: float = 0.0) -> KVConnectorTransferResults:
        """Loads that ended since the last call; failed ones are in both sets, as vLLM asks.

        If loads are under way and none has ended, waits for one, at most `wait_s`.
        """
        with self._results_changed:
            if wait_s and self._num_loading > 0 and not self._finished_loads:
                # Otherwise vLLM asks again at once, and takes the core that the loads need.
                self._results_changed.wait(wait_s)
            self._num_loading -= len(self._finished_loads)
            results = KVConnectorTransferResults(
                finished_recving=self._finished_loads, failed_recving=self._failed_loads
            )
            self._finished_loads, self._failed_loads = set(), set()
        return results

    def take_stats(self) -> TransferStats | None:
        stats, self._stats = self._stats, TransferStats()
        return None if stats.is_empty() else stats

    def _run_loads(self) -> None:
        while (wanted := self._load_queue.get()) is not None:
            if isinstance(wanted, BrokenSend):
                self._fail(wanted.ref, wanted.reason)
                continue
            step, mark = wanted
            failed, began_s = False, time.monotonic()
            try:
                self._load(step, mark)
                if step.ref is not None:
                    self._load_spans.loaded(step.request_id, began_s, time.monotonic())
            except Exception:
                logger.exception("loading request %s; computing it here", step.request_id)
                if step.ref is None:
                    self._stats.add_failed_cache_load()
                else:
                    self._stats.add_failed_load()
                failed = True
            with self._results_changed:
                self._results_changed.notify()
                self._finished_loads.add(step.request_id)
                if failed:
                    self._failed_loads.add(step.request_id)

    def _load(self, step: LoadStep, mark: Mark) -> None:
        if step.ref is None and step.cached is None:
            raise StaleArenaError("the scheduler's side lost what it was to load")
        self._check_kept(step.request_id)
        if step.cached is not None:
            self._cache.load(step.cached, mark)
        if step.ref is not None:
            self._load_landing(step, step.ref, mark)
        # Checked again: it may have been lost during the copy.
        self._check_kept(step.request_id)

    def _check_kept(self, request_id: str) -> None:
        """Raises `StaleArenaError` if the source may have been lost. The scheduler's connection
        owns it, and each step says when that stood. For the grace time after its loss the agent
        keeps the bytes.
        """
        kept_s = self._kept_s.get(request_id, -math.inf)
        if time.monotonic() > kept_s + self._grace_s:
            raise StaleArenaError("vLLM reset its caches, or the agent may have lost the source")

    def _load_landing(self, step: LoadStep, ref: TransferRef, mark: Mark = None) -> None:
        space, copier = self._space(ref)
        tables = [BlockIds.of(blocks) for blocks in step.blocks]
        nbytes = 0

        def slabs() -> Iterator[Slab]:
            nonlocal nbytes
            for extent in self._extents(ref):
                blocks = tables[extent.group_index]
                if not blocks:
                    continue
                check_blocks(blocks, extent)
                skipped = len(extent.pages) - len(blocks)
                views = self._held[extent.layer.name]
                for slab in slabs_of(self._layout, extent, views, blocks, skipped, space):
                    nbytes += slab.nbytes
                    yield slab

        copier.load(slabs(), mark)
        copier.clear(self._rests(ref, step, space))
        self._stats.add_loaded(nbytes)

    def _rests(self, ref: TransferRef, step: LoadStep, space: ArenaSpace) -> Iterator[Slab]:
        """What the last pages have behind the last token. vLLM clears pages that it fills itself:
        what another layer left there may be no number, and attention multiplies it with 0.
        """
        for extent in self._extents(ref):
            group, blocks = self._layout.groups[extent.group_index], step.blocks[extent.group_index]
            if group.kind is KVKind.RECURRENT or not blocks:
                continue
            size, block = group.tokens_per_block, BlockIds.of(blocks[-1:])
            page = range((extent.pages.stop - 1) * size, extent.pages.stop * size)
            held = self._held[extent.layer.name]
            for (view, units), found in zip(held, extent.parts, strict=True):
                of_page = found.part.items(page)
                rest = range(found.items.stop, of_page.stop)
                if rest:
                    yield Slab.of(view, units, block, of_page.start, rest, found, space)

    # Arena.

    def _extents(self, ref: TransferRef) -> Iterator[LayerExtent]:
        """This worker's layers of a transfer, at their places among all layers."""
        extents = self._layout.extents(
            ref.num_tokens,
            ref.cached_tokens,
            ref.window_step,
            with_draft=self._has_draft(ref),
        )
        return (extent for extent in extents if extent.layer.name in self._held)

    def _has_draft(self, ref: TransferRef) -> bool:
        """Whether the transfer ends with the layers of this engine's drafter."""
        return ref.draft != "" and ref.draft == self._layout.draft_fingerprint.hex()

    def _space(self, ref: TransferRef) -> tuple[ArenaSpace, PageCopier]:
        """A transfer's bytes and the copier. Raises `StaleArenaError` when its agent is gone."""
        arena, copier = self._access.open(ref.arena_epoch)
        nbytes = self._layout.transfer_bytes(
            ref.num_tokens,
            ref.cached_tokens,
            ref.window_step,
            with_draft=self._has_draft(ref),
        )
        return arena.view(ref.runs, nbytes), copier
