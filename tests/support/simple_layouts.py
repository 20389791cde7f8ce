"""Layers for tests in which it does not matter what the bytes of a page mean."""

from kvmanager.layout import KVLayer, KVPart


def paged(name: str, page_bytes: int, tokens_per_block: int = 16, num_units: int = 1) -> KVLayer:
    """A layer whose pages are opaque bytes: one page for each of `num_units` ranks."""
    part = KVPart("pages", num_units, page_bytes, "opaque", tokens_per_block)
    return KVLayer(name, (part,))


def state(name: str, nbytes: int, num_units: int = 1) -> KVLayer:
    """A recurrent layer whose state is opaque bytes for each of `num_units` ranks."""
    return KVLayer(name, (KVPart("state", num_units, nbytes, "opaque", 0),))
