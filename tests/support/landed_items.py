"""What landed of each token, by layer and KV head, in a landing's bytes.

The order of bytes is that of `kvmanager.layout`. It follows from what an engine says of its layout
and from the kinds of the model's layers.
"""

import re
from collections.abc import Sequence

from handoff import Landed

from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart

_GROUP = re.compile(
    r"\d+ (?P<kind>\w+)(\((?P<window>\d+)\))? x (?P<parts>.+?)( in blocks of (?P<tokens>\d+))?"
)
_PART = re.compile(r"(?P<units>\d+) x (?P<nbytes>\d+) B (?P<encoding>.+)")
_KINDS = {
    "full_attention": KVKind.FULL,
    "sliding_attention": KVKind.WINDOW,
    "linear_attention": KVKind.RECURRENT,
}

Item = tuple[int, int, int]
"""Layer, KV head, and number of the item: of the token, or of the page where these are opaque."""


def items_of(described: str, layer_types: Sequence[str], landed: Landed) -> dict[Item, bytes]:
    """The items that landed without those of recurrent layers, which hold one state each.

    `described` is `KVLayout.describe()` of the engine that sent them, `layer_types` those of the
    model's configuration. AssertionError where the bytes do not fit them.
    """
    layout = _layout(described, layer_types)
    assert len(landed.data) == layout.transfer_bytes(landed.landing.num_tokens)
    items: dict[Item, bytes] = {}
    for number, layer in enumerate(layout.extents(landed.landing.num_tokens)):
        if layout.groups[layer.group_index].kind is KVKind.RECURRENT:
            continue
        (extent,) = layer.parts
        for unit in range(extent.part.num_units):
            for item in extent.items:
                start = extent.place(unit, item)
                items[number, unit, item] = landed.data[start : start + extent.part.item_bytes]
    return items


def _layout(described: str, layer_types: Sequence[str]) -> KVLayout:
    kinds: dict[KVKind, tuple[tuple[KVPart, ...], int, int]] = {}
    groups = described[described.index("[") + 1 : described.rindex("]")]
    for text in groups.split(", "):
        found = _GROUP.fullmatch(text)
        assert found, f"no group: {text}"
        tokens = int(found["tokens"] or 0)
        parts = tuple(_part(part, tokens) for part in found["parts"].split(" + "))
        # All layers of a kind are alike in the models of these tests.
        kinds[KVKind(found["kind"])] = parts, tokens or 1, int(found["window"] or 0)
    named: dict[KVKind, list[KVLayer]] = {kind: [] for kind in kinds}
    for number, layer_type in enumerate(layer_types):
        kind = _KINDS[layer_type]
        named[kind].append(KVLayer(f"layer {number}", kinds[kind][0]))
    layout = KVLayout(
        "described",
        "",
        "",
        1,
        tuple(
            KVGroup(kind, tokens, tuple(named[kind]), window_tokens)
            for kind, (_, tokens, window_tokens) in kinds.items()
        ),
    )
    layout.validate()
    return layout


def _part(text: str, tokens_per_block: int) -> KVPart:
    found = _PART.fullmatch(text)
    assert found, f"no part: {text}"
    encoding = found["encoding"]
    # Whole pages travel where the order of bytes inside of one is not known.
    per_item = tokens_per_block if encoding.startswith("opaque") else min(1, tokens_per_block)
    return KVPart("part", int(found["units"]), int(found["nbytes"]), encoding, per_item)
