"""Which pages and bytes make up the KVCache of n tokens, and which rank sends them."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simple_layouts import attention, delta_net, hybrid, layout, mla, paged, state

from kvmanager.hashing import token_digest
from kvmanager.layout import KVGroup, KVKind, KVLayout, KVPart

FULL = KVGroup(KVKind.FULL, 16, (paged("a.0", 1000), paged("a.1", 1000)))
WINDOW = KVGroup(KVKind.WINDOW, 16, (paged("w.0", 300),), window_tokens=128)
RECURRENT = KVGroup(KVKind.RECURRENT, 1, (state("r.0", 777), state("r.1", 777)))


# ---- identity


def test_engines_that_are_cut_otherwise_have_one_fingerprint() -> None:
    plain = hybrid()
    assert hybrid(tp_size=4).fingerprint() == plain.fingerprint()
    assert hybrid(block=528).fingerprint() == plain.fingerprint()
    named = msgspec.structs.replace(plain, model_id="another")
    assert named.fingerprint() == plain.fingerprint()
    # vLLM groups layers by the sizes of their pages, which TP and block sizes change.
    full, window, recurrent = plain.groups
    split = [msgspec.structs.replace(full, layers=(layer,)) for layer in full.layers]
    regrouped = layout(recurrent, split[1], window, split[0])
    assert regrouped.fingerprint() == plain.fingerprint()
    assert [at[1].name for at in regrouped.layers] == [at[1].name for at in plain.layers]


OTHER_MEANINGS: dict[str, KVLayout] = {
    "weights": msgspec.structs.replace(hybrid(), weights="files:1"),
    "configuration": msgspec.structs.replace(hybrid(), config_digest="other"),
    "KV heads": hybrid(full=attention("layers.1", 4, 128)),
    "head size": hybrid(full=attention("layers.1", 8, 128)),
    "data type": hybrid(full=attention("layers.1", encoding="float16")),
    "window": hybrid(window=256),
    "key heads": hybrid(recurrent=delta_net("layers.0", num_keys=8)),
    "value heads": hybrid(recurrent=delta_net("layers.0", num_values=16)),
    "layer": hybrid(full=attention("layers.3")),
    "kind": layout(KVGroup(KVKind.MLA, 16, hybrid().groups[0].layers), *hybrid().groups[1:]),
    "fewer layers": layout(*hybrid().groups[:2]),
}


@pytest.mark.parametrize("other", OTHER_MEANINGS.values(), ids=OTHER_MEANINGS)
def test_what_the_bytes_mean_is_in_the_fingerprint(other: KVLayout) -> None:
    other.validate()
    assert other.fingerprint() != hybrid().fingerprint()


def test_opaque_pages_are_only_those_of_engines_that_are_cut_alike() -> None:
    one = layout(KVGroup(KVKind.FULL, 16, (paged("a", 1000, 16),)))
    two = layout(KVGroup(KVKind.FULL, 32, (paged("a", 2000, 32),)))
    halves = layout(KVGroup(KVKind.FULL, 16, (paged("a", 500, 16, num_units=2),)), tp_size=2)
    assert len({item.fingerprint() for item in (one, two, halves)}) == 3


def test_a_description_names_weights_ranks_kinds_and_parts() -> None:
    said = hybrid(tp_size=2).describe()
    assert said == (
        "m (files:0) tp=2 [2 full x 8 x 256 B bfloat16 in blocks of 16, "
        "1 window(128) x 4 x 256 B bfloat16 in blocks of 16, "
        "1 recurrent x 16 x 768 B bfloat16 x 3 x 128 + 16 x 768 B bfloat16 x 3 x 128 + "
        "32 x 768 B bfloat16 x 3 x 128 + 32 x 65536 B float32 x 128 x 128]"
    )


@pytest.mark.parametrize(
    ("encoding", "elements"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("fp8 per tensor", "bytes")],
)
def test_elements_are_those_of_most_bytes(encoding: str, elements: str) -> None:
    many = attention("a.0", 64, 128, encoding)
    assert layout(KVGroup(KVKind.FULL, 16, (many, attention("a.1", 1)))).elements == elements


# ---- tokens and pages


@pytest.mark.parametrize(
    ("num_tokens", "pages"), [(1, range(1)), (16, range(1)), (17, range(2)), (160, range(10))]
)
def test_full_attention_needs_every_page(num_tokens: int, pages: range) -> None:
    assert FULL.pages(num_tokens) == pages


@pytest.mark.parametrize(
    ("num_tokens", "pages"),
    [
        (1, range(1)),
        (127, range(8)),
        (128, range(8)),
        (143, range(1, 9)),  # the next token sees positions 16..142
        (144, range(1, 9)),
        (1000, range(54, 63)),
    ],
)
def test_window_needs_the_pages_the_next_token_reaches(num_tokens: int, pages: range) -> None:
    assert WINDOW.pages(num_tokens) == pages


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 64))
def test_window_pages_cover_exactly_the_window(num_tokens: int, window: int, block: int) -> None:
    group = KVGroup(KVKind.WINDOW, 16 * block, (attention("w"),), window_tokens=window)
    seen = {p // (16 * block) for p in range(max(0, num_tokens - window + 1), num_tokens)}
    assert seen <= set(group.pages(num_tokens))
    assert len(group.pages(num_tokens)) <= len(seen) + 1


@given(st.integers(1, 5000), st.integers(1, 300))
def test_a_window_begins_at_a_boundary_of_every_block_size(num_tokens: int, window: int) -> None:
    tokens = KVGroup(KVKind.WINDOW, 16, (attention("w"),), window).tokens(num_tokens)
    needed = max(0, num_tokens - window + 1)
    assert tokens.start % 16 == 0
    assert needed - 16 < tokens.start <= needed
    assert tokens.stop == num_tokens


def test_recurrent_moves_one_state() -> None:
    one = layout(RECURRENT)
    assert one.transfer_bytes(1) == one.transfer_bytes(9999) == 2 * 777


def test_a_block_of_the_engines_pool_has_room_for_the_largest_group() -> None:
    assert layout(WINDOW, FULL, RECURRENT).block_bytes == 2000
    assert layout(RECURRENT, WINDOW, tp_size=2).block_bytes == 2 * 1554


# ---- bytes of a transfer


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_extents_tile_the_transfer_layer_by_layer(num_tokens: int, cached_tokens: int) -> None:
    cached_tokens = min(cached_tokens, num_tokens - 1)
    whole = hybrid()
    offset = 0
    for extent in whole.extents(num_tokens, cached_tokens):
        assert extent.nbytes == sum(part.nbytes for part in extent.parts)
        for part in extent.parts:
            assert part.offset == offset
            for unit in range(part.part.num_units):
                for item in (part.items.start, part.items.stop - 1):
                    before = unit * len(part.items) + item - part.items.start
                    assert part.place(unit, item) == offset + before * part.part.item_bytes
            offset += part.nbytes
    assert offset == whole.transfer_bytes(num_tokens, cached_tokens)


def test_layers_travel_in_the_order_of_the_model() -> None:
    names = [extent.layer.name for extent in hybrid().extents(100)]
    assert names == ["layers.0", "layers.1", "layers.2", "layers.10"]


@given(st.integers(1, 3000), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([16, 48, 528]))
def test_the_bytes_of_a_transfer_do_not_depend_on_how_an_engine_is_cut(
    num_tokens: int, tp_size: int, block: int
) -> None:
    cut, plain = hybrid(tp_size=tp_size, block=block), hybrid()
    cut.validate()
    step = plain.window_step  # of whoever receives it
    assert cut.transfer_bytes(num_tokens, 0, step) == plain.transfer_bytes(num_tokens)
    assert [extent.parts for extent in cut.extents(num_tokens, 0, step)] == [
        extent.parts for extent in plain.extents(num_tokens)
    ]


def test_a_window_is_sent_from_a_page_of_the_receiver_on() -> None:
    """It keeps whole pages for later prompts: half of one would be read as if it were whole."""
    window = KVGroup(KVKind.WINDOW, 16, (attention("layers.0", 2, 8),), window_tokens=33)
    assert window.tokens(90) == range(48, 90)
    assert window.tokens(90, window_step=32) == range(32, 90)
    assert window.pages(90, window_step=32) == range(2, 6)
    found = layout(window, KVGroup(KVKind.WINDOW, 48, (paged("layers.1", 1, 48),), 100))
    assert found.window_step == 48
    with pytest.raises(ValueError, match="in steps of 100000 tokens"):
        found.transfer_bytes(90, 0, 100_000)


def test_mla_and_copies_of_kv_heads_travel_once() -> None:
    """The bytes of DeepSeek V3 and of Llama 3.1 8B, by hand."""

    def at(tp_size: int) -> list[int]:
        deepseek = layout(
            KVGroup(KVKind.MLA, 64, tuple(mla(f"layers.{number}") for number in range(61))),
            tp_size=tp_size,
        )
        llama = layout(
            KVGroup(KVKind.FULL, 16, tuple(attention(f"layers.{n}", 8, 128) for n in range(32))),
            tp_size=tp_size,
        )
        return [item.transfer_bytes(1000) for item in (deepseek, llama)]

    assert at(1) == [1000 * 61 * 1152, 1000 * 32 * 4096]
    assert at(8) == at(16) == at(1)


# ---- who holds and who sends


@given(st.integers(0, 7), st.integers(0, 6), st.integers(1, 7))
def test_each_unit_is_sent_by_one_rank_and_held_by_all_that_need_it(
    more_units: int, more_ranks: int, odd: int
) -> None:
    """Any number of heads that the ranks can divide, and any that they have copies of."""
    num_units, tp_size = odd << more_units, odd << more_ranks
    part = KVPart("kv", num_units, 2, "bfloat16")
    assert part.fits(tp_size)
    held = [part.held_units(tp_size, rank) for rank in range(tp_size)]
    sent = [part.sent_units(tp_size, rank) for rank in range(tp_size)]
    assert Counter(unit for units in sent for unit in units) == Counter(range(num_units))
    copies = max(1, tp_size // num_units)
    assert Counter(unit for units in held for unit in units) == dict.fromkeys(
        range(num_units), copies
    )
    for kept, told in zip(held, sent, strict=True):
        assert len(kept) == max(1, num_units // tp_size)
        assert set(told) <= set(kept)
    # vLLM's order: rank r has the heads from r / tp_size of all on.
    assert [units.start for units in held] == [
        rank * num_units // tp_size for rank in range(tp_size)
    ]


def test_ranks_that_can_neither_divide_the_heads_nor_copy_them_do_not_fit() -> None:
    part = KVPart("kv", 8, 2, "bfloat16")
    assert [tp_size for tp_size in range(1, 18) if part.fits(tp_size)] == [1, 2, 4, 8, 16]


def test_the_memory_of_all_ranks_has_the_copies_too() -> None:
    layer, tokens = attention("a", 2), range(16)
    assert [layer.held_bytes(tokens, tp_size) for tp_size in (1, 2, 8)] == [8192, 8192, 4 * 8192]
    assert layer.bytes_of(tokens) == 8192


def test_a_transfer_holds_a_token() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        layout(FULL).transfer_bytes(0)


@pytest.mark.parametrize(("cached_tokens", "is_whole"), [(0, True), (16, True), (8, False)])
def test_what_is_cached_is_whole_items(cached_tokens: int, is_whole: bool) -> None:
    pages = layout(FULL, RECURRENT)
    if is_whole:
        assert pages.transfer_bytes(32, cached_tokens) == 2 * 777 + 2000 * (2 - cached_tokens // 16)
    else:
        with pytest.raises(ValueError, match="8 of 32 tokens cached: not whole items"):
            pages.transfer_bytes(32, cached_tokens)
    assert hybrid().transfer_bytes(32, 8)  # one token is an item


@pytest.mark.parametrize("cached_tokens", [-16, 32, 48])
def test_at_least_one_token_is_not_cached(cached_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{cached_tokens} of 32 tokens cached"):
        layout(FULL).transfer_bytes(32, cached_tokens)


def test_token_digest_depends_on_order_and_refuses_what_is_no_id() -> None:
    assert token_digest([1, 2]) != token_digest([2, 1])
    assert token_digest([258]) != token_digest([2, 1])
    with pytest.raises(ValueError, match="-1"):
        token_digest([3, -1])
