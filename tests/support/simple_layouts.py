"""Small layouts: layers of opaque pages, and layers with heads as models have them."""

from msgspec.structs import replace

from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart


def paged(name: str, page_bytes: int, tokens_per_block: int = 16, num_units: int = 1) -> KVLayer:
    """A layer whose pages are opaque bytes: one page for each of `num_units` ranks."""
    part = KVPart("pages", num_units, page_bytes, "opaque", tokens_per_block)
    return KVLayer(name, (part,))


def state(name: str, nbytes: int, num_units: int = 1) -> KVLayer:
    """A recurrent layer whose state is opaque bytes for each of `num_units` ranks."""
    return KVLayer(name, (KVPart("state", num_units, nbytes, "opaque", 0),))


def with_encoding(given: KVLayout, encoding: str) -> KVLayout:
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
        for group in given.groups
    )
    return replace(given, groups=groups)


def layout(*groups: KVGroup, tp_size: int = 1) -> KVLayout:
    return KVLayout("m", "files:0", "digest", tp_size, groups)


def attention(name: str, num_heads: int = 8, dim: int = 64, encoding: str = "bfloat16") -> KVLayer:
    """Keys and values of `dim` numbers for each KV head and token."""
    return KVLayer(name, (KVPart("kv", num_heads, 4 * dim, encoding),))


def mla(name: str) -> KVLayer:
    return KVLayer(name, (KVPart("latent", 1, 1152, "bfloat16"),))


def delta_net(name: str, num_keys: int = 16, num_values: int = 32) -> KVLayer:
    """A gated delta net: its convolution by key heads, its state by value heads."""
    return KVLayer(
        name,
        (
            KVPart("query", num_keys, 768, "bfloat16 x 3 x 128", 0),
            KVPart("key", num_keys, 768, "bfloat16 x 3 x 128", 0),
            KVPart("value", num_values, 768, "bfloat16 x 3 x 128", 0),
            KVPart("state", num_values, 65536, "float32 x 128 x 128", 0),
        ),
    )


def hybrid(
    *,
    tp_size: int = 1,
    block: int = 16,
    window: int = 128,
    full: KVLayer | None = None,
    recurrent: KVLayer | None = None,
) -> KVLayout:
    return layout(
        KVGroup(KVKind.FULL, block, (full or attention("layers.1"), attention("layers.10"))),
        KVGroup(KVKind.WINDOW, block, (attention("layers.2", 4),), window_tokens=window),
        KVGroup(KVKind.RECURRENT, 1, (recurrent or delta_net("layers.0"),)),
        tp_size=tp_size,
    )
