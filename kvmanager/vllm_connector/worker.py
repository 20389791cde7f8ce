"""The connector's half in each vLLM worker: copies finished pages out and landed pages in.

During the forward pass vLLM calls `save_kv_layer` after every attention layer. The pages of that
layer that this chunk has filled go to the arena and are announced to the agent at once. vLLM has no
such hook for recurrent layers, and their states are final only with the last chunk: they follow in
`wait_for_save`. Loads run on a thread of their own, beside the engine's steps. `cache.worker` does
the part of the prefix cache.

Nothing here raises into the engine. A producer's failure aborts its transfer. A consumer's failure
is reported, so that vLLM computes the prompt.
"""

import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import Welcome
from kvmanager.arena import Arena, ArenaSpace
from kvmanager.layout import KVKind, KVLayout, LayerExtent
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError
from kvmanager.vllm_connector.cache.worker import CacheWorker
from kvmanager.vllm_connector.metadata import LoadStep, PrfaasMetadata, SendStep, TransferRef
from kvmanager.vllm_connector.pages import PageCopier
from kvmanager.vllm_connector.slabs import PartView, Slab, clear_slab
from kvmanager.vllm_connector.stats import TransferStats

logger = logging.getLogger("prfaas.kvmanager.connector")

MAX_LOST = 1024


@dataclass(frozen=True, slots=True)
class BrokenSend:
    """A copy into an outbox that failed after `store` had returned."""

    ref: TransferRef
    reason: str


@dataclass(slots=True)
class Outgoing:
    """One outbox that this worker fills, with the number of pages sent of each layer."""

    space: ArenaSpace
    extents: dict[str, LayerExtent]
    num_sent_pages: dict[str, int] = field(default_factory=dict)


class WorkerSide:
    """Called by vLLM through the facade, with vLLM's own names."""

    def __init__(
        self,
        layout: KVLayout,
        tp_rank: int,
        client: EngineClient,
        views: Mapping[str, tuple[PartView, ...]],
    ) -> None:
        """`views` show this rank's memory of each part by layer: all of `layout`, on one device."""
        self._layout = layout
        self._tp_rank = tp_rank
        self._client = client
        self._views = views
        self._device = next(iter(views.values()))[0].device
        self._access = ArenaAccess(client, self._device)
        self._sending = threading.Lock()
        # By opening of the outbox. None: this worker gave it up, so later steps skip it.
        self._outgoing: dict[tuple[bytes, int], Outgoing | None] = {}
        # Outboxes up to this attempt are not begun: they may have ended while this worker had no
        # connection. Without a connection no outbox is begun.
        self._may_begin_after: float = math.inf
        # Later attempts that failed before their first step.
        self._lost: set[int] = set()
        # Attention layers whose hook vLLM has called in the running step.
        self._hooked: set[str] = set()
        self._stats = TransferStats()
        self._cache = CacheWorker(layout, client, self._access, views, stats=lambda: self._stats)
        self._results_lock = threading.Lock()
        self._finished_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._grace_s = 0.0  # the time for which the agent keeps what a lost connection owned
        # Loads take long, and the thread that ends copies must not call the copier (`PageCopier`).
        self._load_queue: queue.SimpleQueue[LoadStep | BrokenSend | None] = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._run_loads, name="prfaas-load", daemon=True)

        logger.info("moving %s, %s", layout.describe(), self._device)

    def start(self) -> None:
        """Connect to the agent in the background, and be ready to load."""
        self._client.start(self)
        self._loader.start()

    def close(self) -> None:
        self._load_queue.put(None)
        if self._loader.is_alive():
            self._loader.join(timeout=5)
        self._access.close()
        self._client.close()

    # Events of the agent, on the client's thread.

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        logger.info("agent connected, arena epoch %s", welcome.arena_epoch)
        self._access.prepare(arena)
        with self._sending:
            self._grace_s = welcome.grace_s
            self._may_begin_after = welcome.last_attempt
            self._lost.clear()
        self._cache.on_connected()

    def on_disconnected(self) -> None:
        """Give up every outbox, and return when no copy is under way: the agent may soon use the
        memory for something else.
        """
        logger.warning("agent disconnected")
        with self._sending:
            self._may_begin_after = math.inf
            self._outgoing = dict.fromkeys(self._outgoing)
            self._access.drain()
        self._cache.on_disconnected()

    def on_agent_gone(self) -> None:
        self._access.forget()

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        """An outbox has failed: stop writing, and answer once no copy is under way."""
        logger.warning("transfer %s failed: %s", transfer_id.hex(), reason)
        with self._sending:
            if (transfer_id, attempt) in self._outgoing:
                self._outgoing[transfer_id, attempt] = None
            else:
                self._remember_lost(attempt)
            self._access.drain()
        self._client.release(transfer_id, attempt)

    def _remember_lost(self, attempt: int) -> None:
        """Remember a failed attempt, whose request must not begin to write."""
        self._lost.add(attempt)
        if len(self._lost) > MAX_LOST:
            # Attempts rise with time. The oldest can be forgotten if no outbox that old is begun.
            oldest = min(self._lost)
            self._lost.remove(oldest)
            self._may_begin_after = max(self._may_begin_after, oldest)

    # Producer.

    def start_step(self, meta: PrfaasMetadata) -> None:
        """Begin the step's loads and end outboxes. vLLM calls it before the forward pass."""
        for load in meta.loads:
            self._load_queue.put(load)
        for ended in meta.ended:
            with self._sending:
                self._outgoing.pop(ended.opening, None)
                if ended.failure:
                    self._access.drain()
            if ended.failure:
                self._client.abort(*ended.opening, ended.failure)

    def save_kv_layer(self, meta: PrfaasMetadata, layer_name: str) -> None:
        """Send the pages that the running step has completed in this attention layer."""
        self._hooked.add(layer_name)
        for step in meta.sends:
            self._guarded_send(step, layer_name)

    def wait_for_save(self, meta: PrfaasMetadata) -> None:
        """Send what no call of `save_kv_layer` has sent: recurrent states after the last chunk, and
        layers whose hook vLLM did not call, as in a full CUDA graph. After the last chunk, say that
        the prefill is over, once its copies are. Then copy the parts that the step has completed
        into the prefix cache.
        """
        hooked, self._hooked = self._hooked, set()
        # vLLM calls this in a `finally`, also when the forward pass has raised.
        if (error := sys.exc_info()[0]) is not None:
            self._give_up_step(meta, f"the engine's step failed: {error.__name__}")
            return
        for step in meta.sends:
            for _, layer in self._layout.layers:
                if layer.name not in hooked:
                    self._guarded_send(step, layer.name)
            if step.is_last:
                self._end_prefill(step.ref)
        self._cache.store(meta.stores)

    def _give_up_step(self, meta: PrfaasMetadata, reason: str) -> None:
        """Send and store nothing of a step whose pages may hold anything."""
        for send in meta.sends:
            self._fail(send.ref, reason)
        self._cache.store([replace(s, cached=replace(s.cached, parts=())) for s in meta.stores])

    def _end_prefill(self, ref: TransferRef) -> None:
        """Tell the agent that the prefill is over, once all copies that have begun have ended: the
        time that a prefill takes is learnt from it.
        """
        try:
            _, copier = self._access.open(ref.arena_epoch)
            # Copies end in the order in which they begin, so this one of nothing ends last.
            copier.store((), lambda error: self._prefill_ended(ref))
        except Exception as error:
            logger.info("the prefill of %s ends without copies: %r", ref.transfer_id.hex(), error)
            self._prefill_ended(ref)

    def _prefill_ended(self, ref: TransferRef) -> None:
        self._client.prefill_end(*ref.opening, self._tp_rank)

    def _guarded_send(self, step: SendStep, layer_name: str) -> None:
        ref = step.ref
        try:
            with self._sending:
                if ref.attempt in self._lost:
                    return
                if ref.opening not in self._outgoing:
                    self._outgoing[ref.opening] = self._open(ref)
                outgoing = self._outgoing[ref.opening]
                if outgoing is not None and layer_name in outgoing.extents:
                    self._send(step, outgoing, outgoing.extents[layer_name])
        except StaleArenaError as error:
            logger.warning("transfer %s is not sent: %s", ref.transfer_id.hex(), error)
            self._fail(ref, str(error))
        except Exception as error:
            # The engine must go on whatever happens to one transfer.
            logger.exception("sending layer %s of %s", layer_name, ref.transfer_id.hex())
            self._fail(ref, f"{type(error).__name__}: {error}")

    def _open(self, ref: TransferRef) -> Outgoing:
        if ref.attempt <= self._may_begin_after:
            raise StaleArenaError("the outbox was opened before this connection to the agent")
        space, _ = self._space(ref)
        if not self._client.attach(*ref.opening):
            raise StaleArenaError("the agent is gone")
        return Outgoing(
            space,
            {extent.layer.name: extent for extent in self._extents(ref)},
        )

    def _fail(self, ref: TransferRef, reason: str) -> None:
        with self._sending:
            self._outgoing[ref.opening] = None
            self._access.drain()
        self._stats.add_failed_send()
        self._client.abort(*ref.opening, reason)

    def _send(self, step: SendStep, outgoing: Outgoing, extent: LayerExtent) -> None:
        blocks = step.blocks[extent.group_index]
        first = outgoing.num_sent_pages.get(extent.layer.name, 0)
        stop = self._num_final_pages(step, extent)
        if stop <= first:
            return
        outgoing.num_sent_pages[extent.layer.name] = stop
        self._check_blocks(blocks[first:stop], extent)
        slabs = self._slabs(extent, blocks[first:stop], first, outgoing.space, is_sent=True)
        if not slabs:
            return  # another rank sends this layer
        self._stats.add_sent(sum(slab.nbytes for slab in slabs))
        ranges = [range_ for slab in slabs for range_ in slab.ranges()]

        def copied(error: BaseException | None) -> None:
            if error is None:
                self._client.ready(*step.ref.opening, ranges)
            else:
                self._load_queue.put(BrokenSend(step.ref, f"{type(error).__name__}: {error}"))

        _, copier = self._access.open(step.ref.arena_epoch)
        copier.store(slabs, copied)

    def _slabs(
        self,
        extent: LayerExtent,
        blocks: Sequence[int],
        first_page: int,
        space: ArenaSpace,
        *,
        is_sent: bool,
    ) -> list[Slab]:
        """The tokens of an extent in these blocks, the first of which is page `first_page` of it:
        all of this rank's units, or those that it sends.
        """
        group = self._layout.groups[extent.group_index]
        size, page = group.tokens_per_block, extent.pages.start + first_page
        tokens = range(
            max(extent.tokens.start, page * size),
            min(extent.tokens.stop, (page + len(blocks)) * size),
        )
        found = []
        for view, part in zip(self._views[extent.layer.name], extent.parts, strict=True):
            units = view.sent_units if is_sent else view.units
            before = part.part.items(range(page * size, page * size)).start
            slab = Slab.of(view, units, blocks, before, part.part.items(tokens), part, space)
            if slab.nbytes:
                found.append(slab)
        return found

    def _num_final_pages(self, step: SendStep, extent: LayerExtent) -> int:
        """The number of the layer's pages that no later chunk will change."""
        if step.is_last:
            return len(extent.pages)
        group = self._layout.groups[extent.group_index]
        if group.kind is KVKind.RECURRENT:
            return 0
        return max(0, step.computed_tokens // group.tokens_per_block - extent.pages.start)

    # Consumer.

    def transfer_results(self) -> KVConnectorTransferResults:
        """Loads that ended since the last call; failed ones are in both sets, as vLLM asks."""
        with self._results_lock:
            results = KVConnectorTransferResults(
                finished_recving=self._finished_loads, failed_recving=self._failed_loads
            )
            self._finished_loads, self._failed_loads = set(), set()
        return results

    def take_stats(self) -> TransferStats | None:
        stats, self._stats = self._stats, TransferStats()
        return None if stats.is_empty() else stats

    def _run_loads(self) -> None:
        while (step := self._load_queue.get()) is not None:
            if isinstance(step, BrokenSend):
                self._fail(step.ref, step.reason)
                continue
            failed = False
            try:
                self._load(step)
            except Exception:
                logger.exception("loading request %s; computing it here", step.request_id)
                if step.ref is None:
                    self._stats.add_failed_cache_load()
                else:
                    self._stats.add_failed_load()
                failed = True
            with self._results_lock:
                self._finished_loads.add(step.request_id)
                if failed:
                    self._failed_loads.add(step.request_id)

    def _load(self, step: LoadStep) -> None:
        if step.ref is None and step.cached is None:
            raise StaleArenaError("the scheduler's side lost what it was to load")
        if step.cached is not None:
            self._cache.load(step.cached)
        if step.ref is not None:
            self._load_landing(step, step.ref)
        # The scheduler's connection owns the source, and this worker does not see its loss. Within
        # the grace time the agent keeps the bytes even then.
        if time.monotonic() > step.given_s + self._grace_s:
            raise StaleArenaError(f"the load was over only after {self._grace_s:g} s")

    def _load_landing(self, step: LoadStep, ref: TransferRef) -> None:
        space, copier = self._space(ref)
        nbytes = 0
        for extent in self._extents(ref):
            blocks = step.blocks[extent.group_index]
            skipped = len(extent.pages) - len(blocks)
            if not blocks:
                continue
            self._check_blocks(blocks, extent)
            slabs = self._slabs(extent, blocks, skipped, space, is_sent=False)
            copier.load(slabs)
            nbytes += sum(slab.nbytes for slab in slabs)
            self._clear_behind(extent, blocks[-1], space)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._stats.add_loaded(nbytes)

    def _clear_behind(self, extent: LayerExtent, block: int, space: ArenaSpace) -> None:
        """Clear the rest of an extent's last page, as vLLM does with pages that it fills itself:
        what another layer left there may be no number, and attention multiplies it with 0.
        """
        size = self._layout.groups[extent.group_index].tokens_per_block
        if self._layout.groups[extent.group_index].kind is KVKind.RECURRENT:
            return
        page = (extent.pages.stop - 1) * size
        for view, part in zip(self._views[extent.layer.name], extent.parts, strict=True):
            items = range(part.items.stop, part.part.items(range(page, page + size)).stop)
            first = part.part.items(range(page, page)).start
            if items:
                clear_slab(Slab.of(view, view.units, [block], first, items, part, space))

    @staticmethod
    def _check_blocks(blocks: Sequence[int], extent: LayerExtent) -> None:
        """Raise ValueError for block 0, vLLM's null block, which stands for a page that the engine
        does not keep. A producer may lack pages where the receiver's windows begin at a multiple of
        larger pages than its own, and its own cache had the rest.
        """
        if 0 in blocks:
            raise ValueError(
                f"the engine gave no block for a page that layer {extent.layer.name} needs"
            )

    # Arena.

    def _extents(self, ref: TransferRef) -> Iterator[LayerExtent]:
        return self._layout.extents(
            ref.num_tokens,
            ref.cached_tokens,
            ref.window_step,
            with_draft=self._has_draft(ref),
        )

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
