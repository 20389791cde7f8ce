"""Layers for tests in which it does not matter what the bytes of a page mean."""

from msgspec.structs import replace

from kvmanager.layout import KVLayer, KVLayout, KVPart


def paged(name: str, page_bytes: int, tokens_per_block: int = 16, num_units: int = 1) -> KVLayer:
    """A layer whose pages are opaque bytes: one page for each of `num_units` ranks."""
    part = KVPart("pages", num_units, page_bytes, "opaque", tokens_per_block)
    return KVLayer(name, (part,))


def state(name: str, nbytes: int, num_units: int = 1) -> KVLayer:
    """A recurrent layer whose state is opaque bytes for each of `num_units` ranks."""
    return KVLayer(name, (KVPart("state", num_units, nbytes, "opaque", 0),))


def with_encoding(layout: KVLayout, encoding: str) -> KVLayout:
    """The same layout with other data types in all parts."""
    groups = tuple(
        replace(
            group,
            layers=tuple(
                replace(
                    layer, parts=tuple(replace(part, encoding=encoding) for part in layer.parts)
                )
                for layer in group.layers
            ),
        )
        for group in layout.groups
    )
    return replace(layout, groups=groups)
