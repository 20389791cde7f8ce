"""Workers of engines that are cut differently: one sends, and another one gets the same KVCache."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_client import RecordingClient

from kvmanager.agent.engines.protocol import Welcome
from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart
from kvmanager.pool.shape import CacheShape
from kvmanager.vllm_connector.metadata import (
    CachedParts,
    LoadStep,
    PartPages,
    PrfaasMetadata,
    SendStep,
    StoreStep,
    TransferRef,
)
from kvmanager.vllm_connector.slabs import PartView, Piece
from kvmanager.vllm_connector.worker import WorkerSide

TID = bytes(range(16))
NUM_TOKENS, STEPS = 75, (20, 40, 75)
NUM_BLOCKS = 18
ARENA_RUNS = ((3, 1), (0, 1), (5, 4))

FULL = KVLayer("layers.1", (KVPart("kv", 2, 60, "bytes"),))
LATENT = KVLayer("layers.10", (KVPart("latent", 1, 100, "bytes", 4),))
WINDOW = KVLayer("layers.0", (KVPart("kv", 4, 40, "bytes"),))
STATE = KVLayer(
    "layers.2", (KVPart("query", 2, 140, "bytes", 0), KVPart("state", 4, 90, "bytes", 0))
)


def layout(tp_size: int, block_tokens: int, *, has_states: bool = True) -> KVLayout:
    groups: tuple[KVGroup, ...] = (
        KVGroup(KVKind.FULL, block_tokens, (FULL,)),
        KVGroup(KVKind.WINDOW, block_tokens, (WINDOW,), window_tokens=33),
        KVGroup(KVKind.RECURRENT, 1, (STATE,)),
        KVGroup(KVKind.MLA, block_tokens, (LATENT,)),
    )
    groups = tuple(g for g in groups if has_states or g.kind is not KVKind.RECURRENT)
    found = KVLayout("m", "files:0", "digest", tp_size, groups)
    found.validate()
    return found


def whole(layer: KVLayer, number: int) -> torch.Tensor:
    """The bytes of all items of a part: (units, items, bytes), of 128 tokens."""
    part = layer.parts[number]
    generator = torch.Generator().manual_seed(sum(map(ord, layer.name)) + 100 * number)
    num_items = 128 // part.tokens_per_item if part.tokens_per_item else 1
    shape = (part.num_units, num_items, part.item_bytes)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)


class Rank:
    """One worker, whose pages have tokens before heads, and padding."""

    def __init__(self, layout: KVLayout, tp_rank: int, arena: Arena, *, is_full: bool) -> None:
        self.layout, self.tp_rank = layout, tp_rank
        self.client = RecordingClient(arena)
        self.memory: dict[tuple[str, int], torch.Tensor] = {}
        views: dict[str, tuple[PartView, ...]] = {}
        for group_index, layer in layout.layers:
            views[layer.name] = ()
            for number, part in enumerate(layer.parts):
                held = part.held_units(layout.tp_size, tp_rank)
                items = len(part.items(range(layout.groups[group_index].tokens_per_block)))
                shape = (items, len(held), part.item_bytes)
                pages = torch.zeros(NUM_BLOCKS, torch.Size(shape).numel() + 5, dtype=torch.uint8)
                memory = pages[:, :-5].unflatten(1, shape).transpose(1, 2)
                if is_full:
                    blocks = self.table(group_index, range(128))
                    data = whole(layer, number)[held.start : held.stop]
                    memory[blocks] = data.unflatten(1, (len(blocks), items)).transpose(0, 1)
                self.memory[layer.name, number] = memory
                sent = part.sent_units(layout.tp_size, tp_rank)
                views[layer.name] += (PartView(part, held, sent, (Piece(memory),)),)
        client: Any = self.client
        self.side = WorkerSide(layout, client, views)
        self.side.start()
        welcome = Welcome(
            arena.epoch,
            str(arena.path),
            arena.nbytes,
            arena.block_bytes,
            last_attempt=0,
            grace_s=60,
        )
        self.side.on_connected(welcome, arena)

    def table(self, group_index: int, tokens: range) -> list[int]:
        """The blocks with these tokens: every second one, backwards."""
        group = self.layout.groups[group_index]
        if group.kind is KVKind.RECURRENT:
            return [4]
        size = group.tokens_per_block
        return list(range(NUM_BLOCKS - 1, 0, -2))[tokens.start // size : -(-tokens.stop // size)]

    def tables(self, first_token: int, num_tokens: int) -> tuple[list[int], ...]:
        tokens = range(first_token, num_tokens)
        return tuple(self.table(index, tokens) for index in range(len(self.layout.groups)))

    def send(self, ref: TransferRef) -> list[tuple[int, int]]:
        """Send in steps, and return the ranges that were announced."""
        for computed in STEPS:
            wanted = [
                group.tokens(NUM_TOKENS, ref.cached_tokens, ref.window_step)
                for group in self.layout.groups
            ]
            blocks = tuple(
                self.table(index, range(tokens.start, computed))
                for index, tokens in enumerate(wanted)
            )
            meta = PrfaasMetadata(sends=[SendStep(ref, blocks, computed)])
            self.side.start_step(meta)
            for _, layer in self.layout.layers:
                if layer is not STATE:
                    self.side.save_kv_layer(meta, layer.name)
            self.side.wait_for_save(meta)
        said = self.client.take()
        assert said[-1] == ("prefill_end", TID, ref.attempt)
        return [range_ for message in said if message[0] == "ready" for range_ in message[3]]

    def load(self, step: LoadStep) -> None:
        self.side.begin_step(
            PrfaasMetadata(loads=[step], kept_s={step.request_id: time.monotonic()}), 0.0
        )
        self.side.close()  # its threads have done what they were given
        results = self.side.transfer_results()
        assert (results.finished_recving, results.failed_recving) == ({step.request_id}, set())

    def check(self, first_tokens: dict[KVKind, int], stop: int) -> None:
        """All that was loaded is there, and no other byte was written."""
        for group_index, layer in self.layout.layers:
            group = self.layout.groups[group_index]
            for number, part in enumerate(layer.parts):
                held = part.held_units(self.layout.tp_size, self.tp_rank)
                memory = self.memory[layer.name, number]
                blocks = self.table(group_index, range(128))
                data = whole(layer, number)[held.start : held.stop].clone()
                items = part.items(range(first_tokens[group.kind], stop))
                data[:, : items.start] = 0
                data[:, items.stop :] = 0
                expected = torch.zeros_like(memory)
                expected[blocks] = data.unflatten(1, (len(blocks), -1)).transpose(0, 1)
                assert torch.equal(memory, expected), layer.name


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    found = Arena.create(tmp_path, 12, 4096, prefault=False)
    yield found
    found.close()


def transfer_of(found: KVLayout, cached_tokens: int) -> bytes:
    """The bytes of a transfer to an engine with this layout: layer, part, unit, item."""
    extents = (
        (extent.layer, number, part.items)
        for extent in found.extents(NUM_TOKENS, cached_tokens)
        for number, part in enumerate(extent.parts)
    )
    return b"".join(
        bytes(whole(layer, number)[:, items.start : items.stop].contiguous().numpy())
        for layer, number, items in extents
    )


CUTS = [
    ((1, 16), (2, 32)),
    ((2, 16), (1, 16)),
    ((2, 32), (2, 16)),
    ((4, 16), (1, 32)),
    ((1, 32), (4, 16)),
    ((4, 64), (2, 16)),
    ((4, 16), (4, 64)),
    ((2, 64), (1, 64)),
]
"""(tensor-parallel size, tokens of a block) of the sender and the receiver."""


@pytest.mark.parametrize("cached_tokens", [0, 24])
@pytest.mark.parametrize(("sender", "receiver"), CUTS)
def test_a_transfer_has_the_same_bytes_for_all_engines(
    arena: Arena, sender: tuple[int, int], receiver: tuple[int, int], cached_tokens: int
) -> None:
    ours, theirs = layout(*sender), layout(*receiver)
    assert ours.fingerprint() == theirs.fingerprint()
    nbytes = theirs.transfer_bytes(NUM_TOKENS, cached_tokens)
    step = theirs.window_step
    assert ours.transfer_bytes(NUM_TOKENS, cached_tokens, step) == nbytes
    ref = TransferRef(TID, NUM_TOKENS, arena.epoch, ARENA_RUNS, 1, cached_tokens, step)
    ranges: list[tuple[int, int]] = []
    for tp_rank in range(ours.tp_size):
        rank = Rank(ours, tp_rank, arena, is_full=True)
        ranges += rank.send(ref)
        rank.side.close()
    ranges.sort()
    assert all(offset + length == other for (offset, length), (other, _) in pairwise(ranges))
    assert (ranges[0][0], sum(ranges[-1])) == (0, nbytes)
    found = b"".join(bytes(view) for view in arena.view(ARENA_RUNS, nbytes).views(0, nbytes))
    assert found == transfer_of(theirs, cached_tokens)
    first_tokens = {
        group.kind: group.tokens(NUM_TOKENS, cached_tokens).start for group in theirs.groups
    }
    for tp_rank in range(theirs.tp_size):
        rank = Rank(theirs, tp_rank, arena, is_full=False)
        blocks = tuple(
            rank.table(index, group.tokens(NUM_TOKENS, cached_tokens))
            for index, group in enumerate(theirs.groups)
        )
        rank.load(LoadStep("r", ref, blocks))
        rank.check(first_tokens, NUM_TOKENS)


def test_a_sender_without_a_page_of_the_receivers_window_fails_the_transfer(arena: Arena) -> None:
    """Its own cache had the prompt but for the last tokens, and keeps no page before their window.
    The receiver would keep what it got as a whole page for later prompts.
    """
    ours, theirs = layout(1, 16), layout(1, 64)
    step = theirs.window_step
    ref = TransferRef(TID, NUM_TOKENS, arena.epoch, ARENA_RUNS, 1, window_step=step)
    rank = Rank(ours, 0, arena, is_full=True)
    blocks = tuple(
        [0, *rank.table(index, group.tokens(NUM_TOKENS, 0, step))[1:]]
        if group.kind is KVKind.WINDOW
        else rank.table(index, group.tokens(NUM_TOKENS, 0, step))
        for index, group in enumerate(ours.groups)
    )
    meta = PrfaasMetadata(sends=[SendStep(ref, blocks, NUM_TOKENS)])
    rank.side.start_step(meta)
    rank.side.wait_for_save(meta)
    rank.side.close()
    (abort,) = [said for said in rank.client.take() if said[0] == "abort"]
    assert "no block for a page" in abort[3]


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_rest_of_the_last_page_is_cleared(arena: Arena, size: int) -> None:
    """What was there may be no number, with which 0 times it is no number either."""
    ours, theirs = layout(1, 16), layout(1, size)
    step = theirs.window_step
    ref = TransferRef(TID, NUM_TOKENS, arena.epoch, ARENA_RUNS, 1, window_step=step)
    sender = Rank(ours, 0, arena, is_full=True)
    sender.send(ref)
    sender.side.close()
    rank = Rank(theirs, 0, arena, is_full=False)
    for memory in rank.memory.values():
        memory.fill_(255)
    blocks = tuple(
        rank.table(index, group.tokens(NUM_TOKENS, 0, step))
        for index, group in enumerate(theirs.groups)
    )
    rank.load(LoadStep("r", ref, blocks))
    end = -(-NUM_TOKENS // size) * size
    for group_index, layer in theirs.layers:
        if theirs.groups[group_index].kind is not KVKind.RECURRENT:
            for number, part in enumerate(layer.parts):
                memory = rank.memory[layer.name, number]
                num_behind = part.items(range(end)).stop - part.items(range(NUM_TOKENS)).stop
                behind = memory[blocks[group_index][-1], :, memory.shape[2] - num_behind :]
                assert not behind.any(), layer.name
                others = [block for block in range(NUM_BLOCKS) if block not in blocks[group_index]]
                assert bool((memory[others] == 255).all()), layer.name


def test_a_receiver_leaves_out_the_pages_that_it_has(arena: Arena) -> None:
    ours, theirs = layout(2, 16), layout(1, 32)
    step = theirs.window_step
    ref = TransferRef(TID, NUM_TOKENS, arena.epoch, ARENA_RUNS, 1, window_step=step)
    for tp_rank in range(2):
        sender = Rank(ours, tp_rank, arena, is_full=True)
        sender.send(ref)
        sender.side.close()
    rank = Rank(theirs, 0, arena, is_full=False)
    rank.load(LoadStep("r", ref, rank.tables(64, NUM_TOKENS)))
    rank.check(dict.fromkeys(KVKind, 64), NUM_TOKENS)


@pytest.mark.parametrize(("sender", "receiver"), CUTS)
def test_a_cached_block_has_the_same_bytes_for_all_engines(
    arena: Arena, sender: tuple[int, int], receiver: tuple[int, int]
) -> None:
    has_states = sender[1] == receiver[1]  # an engine has states at the ends of its own blocks
    ours, theirs = layout(*sender, has_states=has_states), layout(*receiver, has_states=has_states)
    shape = CacheShape.of(ours)
    assert shape == CacheShape.of(theirs)
    tokens = range(shape.block_tokens)

    def parts(rank: Rank) -> CachedParts:
        pages = []
        for number, part in enumerate(shape.parts):
            blocks = tuple(rank.table(group, tokens) for group in part.groups)
            pages.append(PartPages(0, number, ((3 * number + 1, 2), (3 * number, 1)), blocks))
        return CachedParts(arena.epoch, time.monotonic(), tuple(pages))

    for tp_rank in range(ours.tp_size):
        rank = Rank(ours, tp_rank, arena, is_full=True)
        rank.side.wait_for_save(PrfaasMetadata(stores=[StoreStep(1, parts(rank), is_last=True)]))
        written = [(0, number) for number in range(len(shape.parts))]
        assert rank.client.take() == [("cache_written", 1, written, True)]
        rank.side.close()
    for tp_rank in range(theirs.tp_size):
        rank = Rank(theirs, tp_rank, arena, is_full=False)
        rank.load(LoadStep("r", cached=parts(rank)))
        rank.check(dict.fromkeys(KVKind, 0), tokens.stop)
