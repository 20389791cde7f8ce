"""The exact description of one model's KVCache and of the bytes of a transfer of it.

A `KVLayout` is built once, where the engine is known. Without the engine it then answers two
questions: are two caches interchangeable (`fingerprint`), and which bytes are the KVCache of n
tokens (`transfer_bytes`, `extents`). It does not know tensors, devices, sockets or where anything
is stored.

The bytes of a transfer are, without padding: for each tensor-parallel rank, for each group, for
each layer of the group, the pages of `KVGroup.pages(n)` in order. So the pages that one layer
finishes together are neighbours, and a rank's share is one contiguous range.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from blake3 import blake3

FORMAT_VERSION = 1
"""Order of bytes in a transfer. 1: rank, group, layer, page."""


class KVKind(StrEnum):
    """How a layer's cache grows with the sequence."""

    FULL = "full"
    MLA = "mla"
    WINDOW = "window"
    RECURRENT = "recurrent"


_ELEMENTS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}


class LayoutError(ValueError):
    """A layout that cannot be described or decoded."""


class KVLayer(msgspec.Struct, frozen=True):
    """One layer: its name in the engine, and the bytes of one page that carry data."""

    name: str
    page_bytes: int


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share a KV kind and a block table (vLLM's KV cache group)."""

    kind: KVKind
    tokens_per_block: int
    layers: tuple[KVLayer, ...]
    window_tokens: int = 0

    def pages(self, num_tokens: int, cached_tokens: int = 0) -> range:
        """Indices into the block table of the pages that the token after `num_tokens` needs.

        Full attention needs every page. The pages of the first `cached_tokens`, whole pages, are
        left out, because the other side has them. A window of W tokens reaches back to position
        `num_tokens - W + 1`. A recurrent layer needs its state after the last token, which is in
        the page of that token's block.
        """
        end = -(-num_tokens // self.tokens_per_block)
        match self.kind:
            case KVKind.RECURRENT:
                return range(max(0, end - 1), end)
            case KVKind.WINDOW:
                first_token = max(0, num_tokens - self.window_tokens + 1)
                return range(min(first_token // self.tokens_per_block, end), end)
            case KVKind.FULL | KVKind.MLA:
                return range(cached_tokens // self.tokens_per_block, end)

    def bytes_for(self, num_tokens: int, cached_tokens: int = 0) -> int:
        """Bytes of this group's share of a transfer of `num_tokens`, on one rank."""
        num_pages = len(self.pages(num_tokens, cached_tokens))
        return num_pages * sum(layer.page_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class LayerExtent:
    """One layer's pages in a transfer: page `pages[i]` starts at `offset` + i pages."""

    group_index: int
    layer: KVLayer
    pages: range
    offset: int

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.layer.page_bytes


class KVLayout(msgspec.Struct, frozen=True):
    """A model's KVCache as one engine (all its tensor-parallel ranks) holds it."""

    model_id: str
    """The served name, for people. Nothing depends on it."""
    weights: str
    """The identity of the weights (`kvmanager.vllm_connector.weights`)."""
    config_digest: str
    """Digest of all else that decides which KVCache the tokens of a prompt have."""
    cache_dtype: str
    """As the engine was configured, "auto/torch.bfloat16" or "fp8/torch.bfloat16"."""
    memory_order: str
    tp_size: int
    groups: tuple[KVGroup, ...]
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "KVLayout":
        """The layout that `encode` wrote; raises `LayoutError` for anything else."""
        try:
            layout = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise LayoutError(f"not a KV layout: {error}") from error
        # Another process sent it, and sizes and places in the arena follow from its numbers.
        layout.validate()
        return layout

    def validate(self) -> None:
        """Raise `LayoutError` that names the first impossible value."""
        if self.format_version != FORMAT_VERSION:
            raise LayoutError(
                f"KV layout format {self.format_version} is not {FORMAT_VERSION}: "
                "both sides must run the same release"
            )
        if self.tp_size < 1 or not self.groups:
            raise LayoutError(f"tp_size {self.tp_size} and {len(self.groups)} groups: both >= 1")
        for group in self.groups:
            if group.tokens_per_block < 1 or not group.layers:
                raise LayoutError(f"a {group.kind} group without tokens per block or layers")
            if (group.kind is KVKind.WINDOW) != (group.window_tokens > 0):
                raise LayoutError(f"a {group.kind} group with window {group.window_tokens} tokens")
            for layer in group.layers:
                if layer.page_bytes < 1:
                    raise LayoutError(f"layer {layer.name} has pages of {layer.page_bytes} bytes")

    def fingerprint(self) -> bytes:
        """32 bytes; equal exactly when the caches of two engines are interchangeable, whatever
        their models are called.
        """
        return blake3(msgspec.structs.replace(self, model_id="").encode()).digest()

    @property
    def elements(self) -> str:
        """The data type of most of the cache: "bf16", "fp16", "fp32", or "bytes" for any other."""
        cache, _, model = self.cache_dtype.partition("/")
        name = (model if cache == "auto" else cache).removeprefix("torch.")
        return _ELEMENTS.get(name, "bytes")

    @property
    def block_bytes(self) -> int:
        """Data bytes of one block of an engine's KV memory, on all ranks. vLLM takes the blocks of
        all groups from one pool, so that each has room for one of the largest group.
        """
        return self.tp_size * max(
            sum(layer.page_bytes for layer in group.layers) for group in self.groups
        )

    def rank_bytes(self, num_tokens: int, cached_tokens: int = 0) -> int:
        """Bytes of one rank's share of a transfer of `num_tokens`."""
        return sum(group.bytes_for(num_tokens, cached_tokens) for group in self.groups)

    def transfer_bytes(self, num_tokens: int, cached_tokens: int = 0) -> int:
        """Bytes of a whole transfer of the first `num_tokens` tokens, all ranks.

        `cached_tokens`: leading tokens whose full-attention KVCache the receiver has already, in
        whole pages of every such group. Windows and recurrent states always travel. Raises
        ValueError for impossible counts.
        """
        if num_tokens < 1:
            raise ValueError(f"a transfer holds at least 1 token, got {num_tokens}")
        if not 0 <= cached_tokens < num_tokens or any(
            cached_tokens % group.tokens_per_block
            for group in self.groups
            if group.kind in (KVKind.FULL, KVKind.MLA)
        ):
            raise ValueError(f"{cached_tokens} of {num_tokens} tokens cached: not whole pages")
        return self.tp_size * self.rank_bytes(num_tokens, cached_tokens)

    def extents(
        self, num_tokens: int, tp_rank: int, cached_tokens: int = 0
    ) -> Iterator[LayerExtent]:
        """The layers of one rank's share in transfer order; offsets count from byte 0 of the
        whole transfer."""
        offset = tp_rank * self.rank_bytes(num_tokens, cached_tokens)
        for index, group in enumerate(self.groups):
            pages = group.pages(num_tokens, cached_tokens)
            for layer in group.layers:
                extent = LayerExtent(index, layer, pages, offset)
                offset += extent.nbytes
                yield extent

    def describe(self) -> str:
        """One line for logs and errors."""
        groups = ", ".join(
            f"{len(g.layers)} {g.kind}"
            + (f"({g.window_tokens})" if g.window_tokens else "")
            + f" x {g.layers[0].page_bytes} B/{g.tokens_per_block} tokens"
            for g in self.groups
        )
        return f"{self.model_id} ({self.weights}) {self.cache_dtype} tp={self.tp_size} [{groups}]"
