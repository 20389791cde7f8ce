"""The pages in a landing's bytes, by group, layer and place in the block table."""

import re

from handoff import Landed

from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout

_GROUP = re.compile(
    r"(?P<layers>\d+) (?P<kind>\w+)(\((?P<window>\d+)\))? "
    r"x (?P<page_bytes>\d+) B/(?P<tokens>\d+) tokens"
)

Page = tuple[int, int, int]
"""Group, layer of the group, index into the block table."""


def pages_of(described: str, landed: Landed) -> dict[Page, bytes]:
    """The pages that landed without those of recurrent layers, which hold one state each.

    `described` is `KVLayout.describe()` of the engine that sent them, on one rank. AssertionError
    where the bytes do not fit it.
    """
    layout = _layout(described)
    assert len(landed.data) == layout.transfer_bytes(landed.landing.num_tokens)
    pages: dict[Page, bytes] = {}
    layers_seen: dict[int, int] = {}
    for extent in layout.extents(landed.landing.num_tokens, 0):
        layer = layers_seen.get(extent.group_index, 0)
        layers_seen[extent.group_index] = layer + 1
        if layout.groups[extent.group_index].kind is KVKind.RECURRENT:
            continue
        nbytes = extent.layer.page_bytes
        for number, page in enumerate(extent.pages):
            start = extent.offset + number * nbytes
            pages[extent.group_index, layer, page] = landed.data[start : start + nbytes]
    return pages


def _layout(described: str) -> KVLayout:
    groups = tuple(
        KVGroup(
            kind=KVKind(found["kind"]),
            tokens_per_block=int(found["tokens"]),
            window_tokens=int(found["window"] or 0),
            layers=tuple(
                KVLayer(f"layer {index}", int(found["page_bytes"]))
                for index in range(int(found["layers"]))
            ),
        )
        for found in _GROUP.finditer(described)
    )
    layout = KVLayout("described", "", "", 1, groups)
    layout.validate()
    return layout
