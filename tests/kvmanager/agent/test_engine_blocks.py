import gc
import random
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simple_layouts import paged, state

from kvmanager.agent.engines.blocks import EngineBlocks
from kvmanager.agent.engines.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventSequence,
    KVEvent,
    MessageOrder,
    decode_batch,
)
from kvmanager.agent.engines.merged_blocks import MergedBlocks
from kvmanager.hashing import block_keys, root_key
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.pool.shape import CacheShape

NAMESPACE = b"namespace"
KV, WINDOW, STATE = 1, 2, 4
LAYER = (paged("layer", 64),)
STATES = (state("state", 64),)


def layout(*groups: KVGroup) -> KVLayout:
    return KVLayout("model", "files:0", "0", 1, groups)


FULL = layout(KVGroup(KVKind.FULL, 16, LAYER))
WINDOWED = layout(
    KVGroup(KVKind.FULL, 16, LAYER), KVGroup(KVKind.WINDOW, 16, LAYER, window_tokens=33)
)
HYBRID = layout(KVGroup(KVKind.FULL, 32, LAYER), KVGroup(KVKind.RECURRENT, 1, STATES))

SIZE = {"full_attention": 16, "sliding_window": 16, "mamba": 32}
GROUP = {"full_attention": 0, "sliding_window": 1, "mamba": 1}


def name(tokens: list[int], salt: str = "") -> bytes:
    """An engine's hash of a prefix."""
    return repr((tokens, salt)).encode()


def stored(
    tokens: list[int],
    start: int,
    *,
    kind: str = "full_attention",
    size: int | None = None,
    only: set[int] | None = None,
    salt: str = "",
    **changes: Any,
) -> BlockStored:
    """The blocks of tokens[start:], as one group reports them; `only` these ends are there."""
    size = size or SIZE[kind]
    ends = [
        end for end in range(start + size, len(tokens) + 1, size) if only is None or end in only
    ]
    extras: list[list[Any] | None] = [[salt] if salt and end == size else None for end in ends]
    event = BlockStored(
        block_hashes=[name(tokens[:end], salt) for end in ends],
        parent_block_hash=name(tokens[:start], salt) if start else None,
        token_ids=tokens[start : len(tokens) // size * size],
        block_size=size,
        medium="GPU",
        extra_keys=extras or None,
        group_idx=GROUP[kind],
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=33 if kind == "sliding_window" else None,
    )
    return msgspec.structs.replace(event, **changes)


def removed(tokens: list[int], group: int = 0, salt: str = "") -> BlockRemoved:
    return BlockRemoved([name(tokens, salt)], "GPU", group)


def batch(*events: KVEvent) -> EventBatch:
    return EventBatch(0.0, list(events))


def keys(tokens: list[int], size: int = 64, salt: str = "") -> list[bytes]:
    root = root_key(NAMESPACE, tenant=salt)
    return [key[:8] for key in block_keys(tokens, size, root)]


class Followed:
    """An engine's blocks, and what all the changes told so far add up to."""

    def __init__(self, of: KVLayout, **settings: Any) -> None:
        self.blocks = EngineBlocks(of, NAMESPACE, **settings)
        self.held: dict[bytes, int] = {}

    def apply(self, *events: KVEvent) -> dict[bytes, int]:
        self._take(self.blocks.apply(batch(*events)))
        return self.held

    def clear(self) -> dict[bytes, int]:
        self._take(self.blocks.clear())
        return self.held

    def _take(self, changes: Iterable[tuple[bytes, int]]) -> None:
        self.held |= dict(changes)
        self.held = {key: bits for key, bits in self.held.items() if bits}


PROMPT = [index * 7 % 1000 for index in range(200)]


def test_blocks_of_ours_are_held_when_all_engine_blocks_in_them_are() -> None:
    engine = Followed(FULL)
    assert engine.apply(stored(PROMPT[:112], 0)) == dict.fromkeys(keys(PROMPT[:64]), KV)
    assert engine.apply(stored(PROMPT, 112)) == dict.fromkeys(keys(PROMPT), KV)


def test_removing_any_engine_block_takes_the_block_of_ours_away() -> None:
    engine = Followed(FULL)
    engine.apply(stored(PROMPT, 0))
    first, second, third = keys(PROMPT)
    assert engine.apply(removed(PROMPT[:80])) == {first: KV, third: KV}
    assert engine.apply(stored(PROMPT[:80], 64)) == {first: KV, second: KV, third: KV}


def test_prompts_that_part_inside_a_block_have_blocks_of_their_own() -> None:
    engine = Followed(FULL)
    other = PROMPT[:32] + [5] * 32
    engine.apply(stored(PROMPT[:64], 0), stored(other, 32))
    assert engine.held == {keys(PROMPT[:64])[0]: KV, keys(other)[0]: KV}
    assert engine.apply(removed(PROMPT[:16])) == {}  # of both
    assert engine.apply(stored(PROMPT[:16], 0)) == {
        keys(PROMPT[:64])[0]: KV,
        keys(other)[0]: KV,
    }


def test_an_unknown_parent_says_nothing_until_it_is_known() -> None:
    engine = Followed(FULL)
    assert engine.apply(stored(PROMPT[:128], 64)) == {}
    engine.apply(stored(PROMPT[:64], 0))
    assert engine.apply(stored(PROMPT[:128], 64)) == dict.fromkeys(keys(PROMPT[:128]), KV)


def test_tenants_have_keys_of_their_own() -> None:
    engine = Followed(FULL)
    engine.apply(stored(PROMPT[:64], 0, salt="alice"), stored(PROMPT[:64], 0))
    assert set(engine.held) == {*keys(PROMPT[:64], salt="alice"), *keys(PROMPT[:64])}


def test_prompts_of_a_lora_adapter_are_not_known_by_its_name_alone() -> None:
    event = stored(PROMPT[:64], 0, lora_name="poet", extra_keys=[["poet"]] * 4)
    assert Followed(FULL).apply(event) == {}
    assert Followed(FULL, adapters={"other": "files:1"}).apply(event) == {}


def test_prompts_of_a_known_adapter_have_keys_of_its_identity() -> None:
    engine = Followed(FULL, adapters={"poet": "files:1"})
    plain = stored(PROMPT[:64], 0)
    extras = [["poet", "alice"], *[["poet"]] * 3]
    of_poet: dict[str, Any] = {
        "lora_name": "poet",
        "block_hashes": [name(PROMPT[:end], "poet and alice") for end in range(16, 65, 16)],
    }
    engine.apply(plain, stored(PROMPT[:64], 0, extra_keys=extras, **of_poet))
    root = root_key(NAMESPACE, tenant="alice", lora="files:1")
    (key,) = block_keys(PROMPT[:64], 64, root)
    assert set(engine.held) == {key[:8], *keys(PROMPT[:64])}
    # Whatever else a block depends on ends what is known, as it does without an adapter.
    with_image = [["poet", ["image", 3]], *[["poet"]] * 3]
    other = Followed(FULL, adapters={"poet": "files:1"})
    assert other.apply(stored(PROMPT[:64], 0, extra_keys=with_image, **of_poet)) == {}


@pytest.mark.parametrize("extra", [["image", 3], b"digest of embeddings", "late salt"])
def test_inputs_beside_tokens_end_what_is_known(extra: Any) -> None:
    extras: list[list[Any] | None] = [None] * 4 + [[extra]] + [None] * 7
    engine = Followed(FULL)
    engine.apply(stored(PROMPT, 0, extra_keys=extras))
    assert engine.held == {keys(PROMPT)[0]: KV}
    engine.apply(stored(PROMPT, 128))
    assert engine.held == {keys(PROMPT)[0]: KV}


def test_an_image_in_the_first_block_ends_it_at_once() -> None:
    engine = Followed(FULL)
    assert engine.apply(stored(PROMPT, 0, extra_keys=[[["image", 0]]] + [None] * 11)) == {}


def test_tokens_that_are_none_are_dropped() -> None:
    event = stored(PROMPT[:64], 0, token_ids=[-1] * 64)
    assert Followed(FULL).apply(event) == {}


@pytest.mark.parametrize("change", [{"medium": "CPU"}, {"locality": "REMOTE"}])
def test_other_tiers_are_not_gpu_memory(change: dict[str, str]) -> None:
    engine = Followed(FULL)
    assert engine.apply(stored(PROMPT, 0, **change)) == {}
    engine.apply(stored(PROMPT[:64], 0))
    gone = msgspec.structs.replace(removed(PROMPT[:64]), **change)
    assert engine.apply(gone) == {keys(PROMPT)[0]: KV}


def test_a_window_is_held_where_it_reaches_back_from_the_end() -> None:
    engine = Followed(WINDOWED)
    window = stored(PROMPT[:128], 0, kind="sliding_window", only={96, 112, 128})
    # The group that leaves blocks out comes first.
    engine.apply(window, stored(PROMPT[:128], 0))
    first, second = keys(PROMPT[:128])
    assert engine.held == {first: KV, second: KV | WINDOW}
    assert engine.apply(removed(PROMPT[:96], group=1))[second] == KV | WINDOW  # 32 tokens do
    assert engine.apply(removed(PROMPT[:112], group=1))[second] == KV


def test_a_state_is_held_exactly_at_its_boundary() -> None:
    assert CacheShape.of(HYBRID).block_tokens == 32
    engine = Followed(HYBRID)
    state = stored(PROMPT[:160], 0, kind="mamba", only={160})
    engine.apply(stored(PROMPT[:160], 0, size=32), state)
    *before, last = keys(PROMPT[:160], 32)
    assert engine.held == dict.fromkeys(before, KV) | {last: KV | STATE}
    assert engine.apply(removed(PROMPT[:160], group=1))[last] == KV


def test_a_repeated_report_of_a_hit_claims_only_its_end() -> None:
    engine = Followed(HYBRID)
    engine.apply(stored(PROMPT[:160], 0, size=32))
    engine.apply(stored(PROMPT[:96], 0, kind="mamba"))
    third = keys(PROMPT[:160], 32)[2]
    assert {key for key, bits in engine.held.items() if bits & STATE} == {third}


def test_a_kind_of_which_a_group_is_missing_is_not_held() -> None:
    two = layout(KVGroup(KVKind.FULL, 16, LAYER), KVGroup(KVKind.FULL, 16, LAYER))
    engine = Followed(two)
    assert engine.apply(stored(PROMPT[:64], 0)) == {}
    second = stored(PROMPT[:64], 0, group_idx=1)
    assert engine.apply(second) == dict.fromkeys(keys(PROMPT[:64]), KV)


def test_groups_with_smaller_blocks_refine_what_larger_ones_named() -> None:
    mixed = layout(KVGroup(KVKind.FULL, 64, LAYER), KVGroup(KVKind.FULL, 16, LAYER))
    engine = Followed(mixed)
    engine.apply(stored(PROMPT[:128], 0, size=64))
    engine.apply(stored(PROMPT[:128], 0, group_idx=1))
    assert engine.held == dict.fromkeys(keys(PROMPT[:128]), KV)
    assert set(engine.apply(removed(PROMPT[:16], group=1))) == {keys(PROMPT[:128])[1]}


def test_an_end_of_a_prompt_stored_as_part_of_a_block_is_a_place_to_go_on_from() -> None:
    engine = Followed(HYBRID)
    engine.apply(stored(PROMPT[:64], 0, size=32))
    engine.apply(stored(PROMPT[:80], 64, kind="mamba", size=16))
    engine.apply(stored(PROMPT[:96], 80, kind="mamba", size=16))
    third = keys(PROMPT[:96], 32)[2]
    assert engine.held[third] == STATE


def test_clearing_forgets_everything() -> None:
    """An engine clears its cache when no request holds a block: all prompts begin anew."""
    engine = Followed(FULL)
    engine.apply(stored(PROMPT[:128], 0))
    assert engine.apply(AllBlocksCleared()) == {}
    assert engine.apply(stored(PROMPT[:128], 64)) == {}
    engine.apply(stored(PROMPT[:64], 0), AllBlocksCleared(), stored(PROMPT[:128], 0))
    assert engine.held == dict.fromkeys(keys(PROMPT[:128]), KV)
    assert engine.clear() == {}
    assert engine.blocks.num_blocks == 0


def test_memory_is_bounded_by_what_the_engine_holds() -> None:
    engine = Followed(FULL, max_blocks=64)
    for turn in range(100):
        tokens = [turn] * 64
        engine.apply(stored(tokens, 0))
        assert engine.blocks.num_blocks <= 64
        if turn:
            engine.apply(*(removed([turn - 1] * end) for end in (16, 32, 48, 64)))
    assert engine.held == {keys([99] * 64)[0]: KV}


def test_more_than_fits_is_not_learnt_until_something_goes() -> None:
    engine = Followed(FULL, max_blocks=64)
    for turn in range(17):
        engine.apply(stored([turn] * 64, 0))
    assert set(engine.held) == {keys([turn] * 64)[0] for turn in range(16)}
    engine.apply(*(removed([3] * end) for end in (16, 32, 48, 64)))
    engine.apply(stored([99] * 64, 0))
    assert set(engine.held) == {keys([turn] * 64)[0] for turn in [*range(3), *range(4, 16), 99]}


def test_a_prompt_that_goes_on_is_not_forgotten_to_make_room_for_its_next_block() -> None:
    engine = Followed(FULL, max_blocks=4)
    engine.apply(stored(PROMPT[:64], 0))
    engine.apply(removed(PROMPT[:64]))
    assert engine.apply(stored(PROMPT[:80], 64)) == {}
    assert engine.blocks.num_blocks == 4
    engine.apply(*(removed(PROMPT[:end]) for end in (16, 32, 48)))
    engine.apply(stored([5] * 64, 0))
    assert engine.held == {keys([5] * 64)[0]: KV}, "from its end the old prompt has made room"


def seconds_of_batches(num_blocks: int, max_blocks: int) -> list[float]:
    """What each batch took that stores 128 engine blocks and drops them again."""
    engine = EngineBlocks(FULL, NAMESPACE, max_blocks=max_blocks)
    took_s = []
    for start in range(0, num_blocks, 128):
        names: list[bytes | int] = [start + number for number in range(128)]
        event = BlockStored(
            block_hashes=names,
            parent_block_hash=None,
            token_ids=[start] * (16 * len(names)),
            block_size=16,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        begin_s = time.thread_time()
        engine.apply(batch(event, BlockRemoved(names, group_idx=0)))
        took_s.append(time.thread_time() - begin_s)
        assert engine.num_blocks <= max_blocks
    return took_s


def test_no_batch_pays_for_what_is_known_already() -> None:
    """Going through 40,000 known blocks takes 80 ms; what else a machine does hits any batch."""
    gc.disable()
    runs = [seconds_of_batches(45_000, 40_000) for _ in range(3)]
    gc.enable()
    assert max(map(min, zip(*runs, strict=True))) < 0.03


def test_clearing_hands_out_what_was_held_bit_by_bit() -> None:
    engine = Followed(FULL)
    engine.apply(stored(PROMPT, 0))
    gone = engine.blocks.clear()
    assert engine.blocks.num_blocks == 0
    assert dict(gone) == dict.fromkeys(keys(PROMPT), 0)


@st.composite
def histories(draw: st.DrawFn) -> list[KVEvent]:
    """Two prompts that part somewhere, stored and removed by an engine with two groups."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    part = rng.randrange(0, 161, 16)
    prompts = [PROMPT[:192], PROMPT[:part] + [3] * (192 - part)]
    events: list[KVEvent] = []
    for _ in range(rng.randrange(1, 30)):
        tokens, kind = rng.choice(prompts), rng.choice(("full_attention", "sliding_window"))
        start = rng.randrange(0, 192, 16)
        end = rng.randrange(start + 16, 193, 16)
        only = set(range(16, 193, 16))
        if kind == "sliding_window":
            only = {position for position in only if rng.random() < 0.7}
        if rng.random() < 0.6:
            events.append(stored(tokens[:end], start, kind=kind, only=only))
        else:
            events.append(removed(tokens[:end], GROUP[kind]))
    return events


@settings(max_examples=150, deadline=None)
@given(histories())
def test_nothing_is_claimed_that_is_not_there(events: list[KVEvent]) -> None:
    engine = Followed(WINDOWED)
    there: set[tuple[int, bytes]] = set()
    for event in events:
        engine.apply(event)
        assert isinstance(event, BlockStored | BlockRemoved)
        named = {(event.group_idx or 0, block) for block in event.block_hashes}
        there = there | named if isinstance(event, BlockStored) else there - named
    starts = {part: PROMPT[:part] + [3] * (192 - part) for part in range(0, 161, 16)}
    for tokens in [PROMPT[:192], *starts.values()]:
        for index, key in enumerate(keys(tokens)):
            bits = engine.held.get(key, 0)
            end = (index + 1) * 64
            if bits & KV:
                assert all((0, name(tokens[:at])) in there for at in range(end - 48, end + 1, 16))
            if bits & WINDOW:
                assert all((1, name(tokens[:at])) in there for at in (end - 16, end))


def test_what_vllm_encodes_is_decoded() -> None:
    payload = msgspec.msgpack.encode(
        [
            1.5,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [b"h" * 32],
                    "parent_block_hash": None,
                    "token_ids": list(range(16)),
                    "block_size": 16,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [["salt"]],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                    "session_id": "one of the fields that nobody needs",
                },
                {"type": "BlockRemoved", "block_hashes": [12345], "medium": "GPU"},
                {"type": "AllBlocksCleared"},
            ],
            0,
        ]
    )
    first, second, third = decode_batch(payload).events
    assert isinstance(first, BlockStored)
    assert first.extra_keys == [["salt"]]
    assert isinstance(second, BlockRemoved)
    assert second.block_hashes == [12345]
    assert isinstance(third, AllBlocksCleared)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "X"}]])])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_batch(payload)


def test_the_order_of_messages() -> None:
    sequence = EventSequence()
    assert sequence.live(0) is MessageOrder.NEXT
    sequence.applied(0)
    assert sequence.live(3) is MessageOrder.LOST
    sequence.applied(5)  # replayed
    assert sequence.live(4) is MessageOrder.KNOWN
    assert sequence.live(5) is MessageOrder.KNOWN
    assert sequence.live(6) is MessageOrder.NEXT
    sequence.applied(6)
    assert sequence.live(2) is MessageOrder.RESTARTED


def test_engines_of_a_host_hold_what_any_of_them_holds() -> None:
    merged = MergedBlocks()
    assert merged.instance_changed("a", [(b"x", KV), (b"y", KV)]) == [(b"x", KV), (b"y", KV)]
    assert merged.instance_changed("b", [(b"x", KV | STATE)]) == [(b"x", KV | STATE)]
    assert merged.instance_changed("a", [(b"x", 0)]) == [(b"x", KV | STATE)]
    assert merged.instance_changed("a", [(b"x", WINDOW)]) == [(b"x", KV | WINDOW | STATE)]
    assert list(merged.instance_left("b")) == [(b"x", WINDOW)]
    assert sorted(merged.instance_left("a")) == [(b"x", 0), (b"y", 0)]
    assert list(merged.instance_left("a")) == []
