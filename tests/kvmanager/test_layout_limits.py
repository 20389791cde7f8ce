"""Which layouts are refused, and why: a layout comes from another process."""

from typing import Any

import msgspec
import pytest
from simple_layouts import attention, hybrid, layout, mla, paged, state

from kvmanager.layout import (
    MAX_BLOCK_BYTES,
    MAX_BLOCK_TOKENS,
    KVGroup,
    KVKind,
    KVLayer,
    KVLayout,
    LayoutError,
)

FULL = KVGroup(KVKind.FULL, 16, (paged("a.0", 1000),))


def test_encoding_round_trips() -> None:
    one = hybrid(tp_size=2)
    assert KVLayout.decode(one.encode()) == one
    assert KVLayout.decode(one.encode()).fingerprint() == one.fingerprint()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (layout(), "0 groups"),
        (layout(FULL, tp_size=0), "tp_size 0"),
        (layout(KVGroup(KVKind.FULL, 16, ())), "a full group without tokens per block or layers"),
        (layout(KVGroup(KVKind.FULL, 16, (KVLayer("a.7", ()),))), "layer a.7 has no parts"),
        (layout(KVGroup(KVKind.WINDOW, 16, (paged("w", 1),))), "window 0 tokens"),
        (layout(KVGroup(KVKind.WINDOW, 16, (paged("w", 1),), -1)), "window -1 tokens"),
        (layout(KVGroup(KVKind.FULL, 16, (paged("w", 1),), 9)), "a full group with window 9"),
        (layout(KVGroup(KVKind.FULL, 16, (paged("w", 1),), -9)), "a full group with window -9"),
        (layout(KVGroup(KVKind.FULL, 16, (paged("a.7", 0),))), "a.7: 1 units, items of 0 bytes"),
        (layout(KVGroup(KVKind.FULL, 16, (attention("a.7", 0),))), "a.7: 0 units"),
        (layout(KVGroup(KVKind.FULL, 16, (paged("a.7", 1, -1),))), "a.7: .* and -1 tokens"),
        (layout(KVGroup(KVKind.FULL, 0, (paged("a", 1, 0),))), "without tokens per block"),
        (layout(KVGroup(KVKind.FULL, 16, (state("a", 1),))), "items of 0 tokens in a full"),
        (layout(KVGroup(KVKind.RECURRENT, 1, (mla("s"),))), "items of 1 tokens in a recurrent"),
        (
            layout(KVGroup(KVKind.FULL, 16, (paged("a", 1, 32),))),
            "part pages of layer a: items of 32 tokens in blocks of 16",
        ),
        (
            layout(KVGroup(KVKind.FULL, 16, (attention("a", 6),)), tp_size=4),
            "4 tensor-parallel ranks can neither divide its 6 heads nor have whole copies",
        ),
        (layout(FULL, FULL), "layer a.0 is there 2 times"),
    ],
)
def test_an_impossible_layout_names_what_is_wrong(bad: KVLayout, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        KVLayout.decode(bad.encode())


HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    ("hostile", "named"),
    [
        (layout(KVGroup(KVKind.FULL, HUGE, (attention("a"),))), "end together after more than"),
        (
            layout(
                KVGroup(KVKind.FULL, 8191, (attention("a"),)),
                KVGroup(KVKind.FULL, 8192, (attention("b"),)),
            ),
            f"blocks of 8191, 8192 tokens end together after more than {MAX_BLOCK_TOKENS}",
        ),
        (layout(KVGroup(KVKind.FULL, 16, (attention("a", HUGE),))), "16 tokens on 1 ranks"),
        (layout(KVGroup(KVKind.FULL, 16, (paged("a", HUGE),))), f"more than {MAX_BLOCK_BYTES}"),
        (layout(KVGroup(KVKind.MLA, 16, (mla("a"),)), tp_size=HUGE), f"on {HUGE} ranks"),
        (layout(KVGroup(KVKind.WINDOW, 16, (mla("a"),), HUGE)), f"window {HUGE} tokens"),
        (layout(KVGroup(KVKind.FULL, 16, (mla("9" * 5000),))), "a layer has 5000 characters"),
    ],
)
def test_a_layout_cannot_ask_for_more_than_numbers_can_say(hostile: KVLayout, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        KVLayout.decode(hostile.encode())


def test_the_largest_layouts_still_have_sizes() -> None:
    """The sizes that an agent reports and reserves by stay in 64 bits."""
    large = layout(KVGroup(KVKind.FULL, MAX_BLOCK_TOKENS, (paged("a", 1 << 16, 1),)))
    assert KVLayout.decode(large.encode()) == large
    assert large.block_bytes == MAX_BLOCK_BYTES
    assert large.transfer_bytes(1 << 46) < 1 << 63


@pytest.mark.parametrize("name", ["", "²", "layers.²", "layers.00", "\0", "x" * 256, "9" * 256])
def test_any_name_of_a_layer_has_a_place(name: str) -> None:
    named = layout(KVGroup(KVKind.MLA, 16, (mla(name), mla("layers.0"))))
    swapped = layout(KVGroup(KVKind.MLA, 16, (mla("layers.0"), mla(name))))
    assert KVLayout.decode(named.encode()).fingerprint() == swapped.fingerprint()


def test_the_layout_of_another_release_is_named_as_such() -> None:
    """The fields of one before this release, and of one after it."""
    before: dict[str, Any] = {"model_id": "m", "groups": [{"layers": [{"page_bytes": 1}]}]}
    later = {"format_version": 3}
    for version, data in ((1, before | {"format_version": 1}), (1, before), (3, later)):
        with pytest.raises(LayoutError, match=f"format {version} is not 2: both sides must run"):
            KVLayout.decode(msgspec.msgpack.encode(data))
    with pytest.raises(LayoutError, match="not a KV layout"):
        KVLayout.decode(msgspec.msgpack.encode({"format_version": "2"}))


def test_garbage_is_not_a_layout() -> None:
    with pytest.raises(LayoutError, match="not a KV layout"):
        KVLayout.decode(b"\x93\x01\x02")
