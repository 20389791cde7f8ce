"""Which pages and bytes make up the KVCache of n tokens."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simple_layouts import paged, state

from kvmanager.hashing import token_digest
from kvmanager.layout import KVGroup, KVKind, KVLayout, LayoutError

FULL = KVGroup(KVKind.FULL, 16, (paged("a.0", 1000), paged("a.1", 1000)))
WINDOW = KVGroup(KVKind.WINDOW, 16, (paged("w.0", 300),), window_tokens=128)
RECURRENT = KVGroup(KVKind.RECURRENT, 1, (state("r.0", 777), state("r.1", 777)))


def layout(*groups: KVGroup, tp_size: int = 1) -> KVLayout:
    return KVLayout("m", "files:0", "digest", tp_size, groups)


def test_a_name_is_no_part_of_the_identity_and_weights_are() -> None:
    plain = layout(FULL)
    named = msgspec.structs.replace(plain, model_id="another")
    assert named.fingerprint() == plain.fingerprint()
    swapped = msgspec.structs.replace(plain, weights="files:1")
    assert swapped.fingerprint() != plain.fingerprint()
    assert "files:1" in swapped.describe()


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
    group = KVGroup(KVKind.WINDOW, block, (paged("w", 1, block),), window_tokens=window)
    seen = {p // block for p in range(max(0, num_tokens - window + 1), num_tokens)}
    assert seen <= set(group.pages(num_tokens))
    assert len(group.pages(num_tokens)) <= len(seen) + 1


def test_recurrent_moves_one_state() -> None:
    assert RECURRENT.bytes_for(1) == RECURRENT.bytes_for(9999) == 2 * 777


def test_a_block_of_the_engines_pool_has_room_for_the_largest_group() -> None:
    assert layout(WINDOW, FULL, RECURRENT).block_bytes == 2000
    assert layout(RECURRENT, WINDOW, tp_size=2).block_bytes == 2 * 1554


@given(st.integers(1, 3000), st.integers(1, 4))
def test_extents_tile_the_transfer(num_tokens: int, tp_size: int) -> None:
    whole = layout(FULL, WINDOW, RECURRENT, tp_size=tp_size)
    offset = 0
    for rank in range(tp_size):
        for extent in whole.extents(num_tokens, rank):
            assert extent.offset == offset
            offset += extent.nbytes
    assert offset == whole.transfer_bytes(num_tokens)


def test_encoding_round_trips_and_the_fingerprint_tells_layouts_apart() -> None:
    one = layout(FULL, WINDOW)
    assert KVLayout.decode(one.encode()) == one
    assert KVLayout.decode(one.encode()).fingerprint() == one.fingerprint()
    assert one.fingerprint() != layout(FULL, WINDOW, tp_size=2).fingerprint()
    assert one.fingerprint() != layout(WINDOW, FULL).fingerprint()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (layout(), "0 groups"),
        (layout(FULL, tp_size=0), "tp_size 0"),
        (layout(KVGroup(KVKind.WINDOW, 16, (paged("w", 1),))), "window 0 tokens"),
        (layout(KVGroup(KVKind.FULL, 16, (paged("a.7", 0),))), "a.7"),
        (layout(KVGroup(KVKind.FULL, 0, (paged("a", 1, 0),))), "without tokens per block"),
    ],
)
def test_an_impossible_layout_names_what_is_wrong(bad: KVLayout, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        KVLayout.decode(bad.encode())


def test_garbage_is_not_a_layout() -> None:
    with pytest.raises(LayoutError, match="not a KV layout"):
        KVLayout.decode(b"\x93\x01\x02")


def test_a_transfer_holds_a_token() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        layout(FULL).transfer_bytes(0)


def test_token_digest_depends_on_order_and_refuses_what_is_no_id() -> None:
    assert token_digest([1, 2]) != token_digest([2, 1])
    assert token_digest([258]) != token_digest([2, 1])
    with pytest.raises(ValueError, match="-1"):
        token_digest([3, -1])
