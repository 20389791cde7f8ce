"""The exact description of one model's KVCache and of the bytes of a transfer of it.

A `KVLayout` is built once, where the engine is known. Without the engine it then answers two
questions: are two caches interchangeable (`fingerprint`), and which bytes are the KVCache of n
tokens (`transfer_bytes`, `extents`). It does not know tensors, devices, sockets or where anything
is stored.

The bytes of a transfer are ordered by what they mean and not by how an engine is cut: for each
layer in the order of the model, for each part of the layer, for each unit of the part (a KV head,
a head of a state), the items of `KVGroup.tokens(n)` in order. There is no padding. So engines with
other tensor-parallel sizes, block sizes and memory orders send and read the same bytes, and what a
rank owns of a part is one run of bytes for each of its units.

The layers of a drafter (MTP, EAGLE) come last and are in a transfer only if both sides have the
same drafter. So a transfer without them is the beginning of one with them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import msgspec
from blake3 import blake3

from kvmanager.layout_parts import KVGroup, KVKind, KVLayer, KVPart, LayerExtent, PartExtent

FORMAT_VERSION = 2
"""Order of bytes in a transfer. 2: layer, part, unit, item. (1: rank, group, layer, page.)"""

MAX_BLOCK_TOKENS = 1 << 24
"""Tokens in the smallest number of whole blocks of all groups; vLLM's engines have hundreds."""
MAX_BLOCK_BYTES = 1 << 40
"""Bytes of so many tokens on all ranks."""
MAX_WINDOW_TOKENS = 1 << 32
MAX_NAME_CHARS = 256

MAX_WINDOW_STEP_TOKENS = 1 << 16
"""Bounds what another process may say of the pages of its windows."""


_ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class LayoutError(ValueError):
    """A layout that cannot be described or decoded."""


class KVLayout(msgspec.Struct, frozen=True, dict=True):
    """A model's KVCache as one engine (all its tensor-parallel ranks) holds it.

    `tp_size`, the grouping of layers and their blocks' sizes are how this engine is cut. All else
    is what the bytes mean.
    """

    model_id: str
    """The served name, for people. Nothing depends on it."""
    weights: str
    """The identity of the weights (`kvmanager.vllm_connector.weights`)."""
    config_digest: str
    """Digest of all else that decides which KVCache the tokens of a prompt have."""
    tp_size: int
    groups: tuple[KVGroup, ...]
    format_version: int = FORMAT_VERSION
    draft_digest: str = ""
    """Digest of what decides the drafter's KVCache beside the model's; "" without a drafter."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "KVLayout":
        """The layout that `encode` wrote; raises `LayoutError` for anything else."""
        try:
            # First, since the fields of another format are other ones.
            _check_format(msgspec.msgpack.decode(data, type=_Format).format_version)
            layout = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise LayoutError(f"not a KV layout: {error}") from error
        # Another process sent it, and sizes and places in the arena follow from its numbers.
        layout.validate()
        return layout

    def validate(self) -> None:
        """Raise `LayoutError` that names the first impossible value."""
        _check_format(self.format_version)
        if self.tp_size < 1 or not self.groups:
            raise LayoutError(f"tp_size {self.tp_size} and {len(self.groups)} groups: both >= 1")
        for group in self.groups:
            self._check_group(group)
        names = Counter(layer.name for group in self.groups for layer in group.layers)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise LayoutError(f"layer {name} is there {count} times")
        drafts = [layer.is_draft for _, layer in self.layers]
        if any(drafts) != bool(self.draft_digest) or all(drafts):
            raise LayoutError(
                f"{sum(drafts)} of {len(drafts)} layers are a drafter's, with the digest "
                f"{self.draft_digest!r}"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        """The sizes of blocks, which memory is reserved by, stay far from what 64 bits can say."""
        sizes = sorted({group.tokens_per_block for group in self.groups})
        block_tokens = math.lcm(*sizes)
        if self.window_step > MAX_WINDOW_STEP_TOKENS:
            raise LayoutError(
                f"pages of windows begin at multiples of {self.window_step} tokens only"
            )
        if block_tokens > MAX_BLOCK_TOKENS:
            what = f"blocks of {', '.join(map(str, sizes))} tokens end together"
            raise LayoutError(f"{what} after more than {MAX_BLOCK_TOKENS} tokens")
        tokens = range(block_tokens)
        nbytes = sum(layer.held_bytes(tokens, self.tp_size) for _, layer in self.layers)
        if nbytes > MAX_BLOCK_BYTES:
            what = f"{nbytes} bytes for {block_tokens} tokens on {self.tp_size} ranks"
            raise LayoutError(f"{what} are more than {MAX_BLOCK_BYTES}")

    def _check_group(self, group: KVGroup) -> None:
        if group.tokens_per_block < 1 or not group.layers:
            raise LayoutError(f"a {group.kind} group without tokens per block or layers")
        has_window = 0 < group.window_tokens <= MAX_WINDOW_TOKENS
        if not has_window if group.kind is KVKind.WINDOW else group.window_tokens:
            raise LayoutError(f"a {group.kind} group with window {group.window_tokens} tokens")
        for layer in group.layers:
            if len(layer.name) > MAX_NAME_CHARS:
                raise LayoutError(f"the name of a layer has {len(layer.name)} characters")
            if not layer.parts:
                raise LayoutError(f"layer {layer.name} has no parts")
            for part in layer.parts:
                self._check_part(group, layer, part)

    def _check_part(self, group: KVGroup, layer: KVLayer, part: KVPart) -> None:
        of = f"part {part.name} of layer {layer.name}"
        if part.item_bytes < 1 or part.num_units < 1 or part.tokens_per_item < 0:
            raise LayoutError(
                f"{of}: {part.num_units} units, items of {part.item_bytes} bytes and "
                f"{part.tokens_per_item} tokens"
            )
        if (group.kind is KVKind.RECURRENT) != (part.tokens_per_item == 0):
            raise LayoutError(f"{of}: items of {part.tokens_per_item} tokens in a {group.kind}")
        if part.tokens_per_item and group.tokens_per_block % part.tokens_per_item:
            raise LayoutError(
                f"{of}: items of {part.tokens_per_item} tokens in blocks of "
                f"{group.tokens_per_block}"
            )
        if not part.fits(self.tp_size):
            raise LayoutError(
                f"{of}: {self.tp_size} tensor-parallel ranks can neither divide its "
                f"{part.num_units} heads nor have whole copies of them"
            )

    def fingerprint(self) -> bytes:
        """32 bytes; equal exactly when the caches of two engines mean the same, however the engines
        are cut, whatever their models are called and whether they have drafters.
        """
        values = (
            self.format_version,
            self.weights,
            self.config_digest,
            self._meaning(drafts=False),
        )
        return blake3(msgspec.msgpack.encode(values)).digest()

    @cached_property
    def draft_fingerprint(self) -> bytes:
        """32 bytes; equal exactly when also the drafters' caches mean the same. Empty without a
        drafter.
        """
        if not self.draft_digest:
            return b""
        values = (self.fingerprint(), self.draft_digest, self._meaning(drafts=True))
        return blake3(msgspec.msgpack.encode(values)).digest()

    def _meaning(self, *, drafts: bool) -> list[tuple[object, ...]]:
        found = ((self.groups[i], layer) for i, layer in self.layers if layer.is_draft is drafts)
        return [
            (layer.name, group.kind, group.window_tokens, layer.parts) for group, layer in found
        ]

    @cached_property
    def layers(self) -> tuple[tuple[int, KVLayer], ...]:
        """All layers with the index of their group, in the order of the model, drafts last."""
        found = (
            (index, layer) for index, group in enumerate(self.groups) for layer in group.layers
        )
        return tuple(sorted(found, key=lambda item: _order(item[1])))

    @cached_property
    def elements(self) -> str:
        """The data type of most of the cache: "bf16", "fp16", "fp32", or "bytes" for any other."""
        totals: Counter[str] = Counter()
        for index, layer in self.layers:
            for extent in layer.extents(range(self.groups[index].tokens_per_block), 0):
                totals[extent.part.encoding] += extent.nbytes
        return _ELEMENTS.get(totals.most_common(1)[0][0], "bytes")

    @cached_property
    def block_bytes(self) -> int:
        """Data bytes of one block of an engine's KV memory, on all ranks. vLLM takes the blocks of
        all groups from one pool, so that each has room for one of the largest group.
        """
        return max(
            sum(
                layer.held_bytes(range(group.tokens_per_block), self.tp_size)
                for layer in group.layers
            )
            for group in self.groups
        )

    @cached_property
    def window_step(self) -> int:
        """The tokens at whose multiples pages of all window groups begin; 1 without windows."""
        sizes = [g.tokens_per_block for g in self.groups if g.kind is KVKind.WINDOW]
        return math.lcm(*sizes)

    def transfer_bytes(
        self,
        num_tokens: int,
        cached_tokens: int = 0,
        window_step: int = 0,
        *,
        with_draft: bool = True,
    ) -> int:
        """Bytes of a whole transfer of the first `num_tokens` tokens, drafts included unless
        `with_draft` is False.

        `cached_tokens`: leading tokens whose full-attention KVCache the receiver has already, in
        whole items of every such group. Windows and recurrent states always travel, windows from a
        multiple of the receiver's `window_step` on (0: this engine is the receiver). Raises
        ValueError for impossible counts.
        """
        window_step = window_step or self.window_step
        if num_tokens < 1:
            raise ValueError(f"a transfer holds at least 1 token, got {num_tokens}")
        if not 0 <= cached_tokens < num_tokens or any(
            cached_tokens % part.tokens_per_item
            for index, layer in self.layers
            for part in layer.parts
            if self.groups[index].kind in (KVKind.FULL, KVKind.MLA)
        ):
            raise ValueError(f"{cached_tokens} of {num_tokens} tokens cached: not whole items")
        if not 0 < window_step <= MAX_WINDOW_STEP_TOKENS:
            raise ValueError(f"windows in steps of {window_step} tokens")
        return sum(
            layer.bytes_of(self.groups[index].tokens(num_tokens, cached_tokens, window_step))
            for index, layer in self.layers
            if with_draft or not layer.is_draft
        )

    def extents(
        self,
        num_tokens: int,
        cached_tokens: int = 0,
        window_step: int = 0,
        *,
        with_draft: bool = True,
    ) -> Iterator[LayerExtent]:
        """The layers of a transfer in order; the arguments are those of `transfer_bytes`."""
        step = window_step or self.window_step
        tokens = [group.tokens(num_tokens, cached_tokens, step) for group in self.groups]
        pages = [group.pages(num_tokens, cached_tokens, step) for group in self.groups]
        offset = 0
        for index, layer in self.layers:
            if layer.is_draft and not with_draft:
                return
            parts = tuple(layer.extents(tokens[index], offset))
            extent = LayerExtent(index, layer, tokens[index], pages[index], parts)
            offset += extent.nbytes
            yield extent

    def describe(self) -> str:
        """One line for logs and errors."""
        groups = ", ".join(
            f"{len(g.layers)} {g.kind}"
            + (f"({g.window_tokens})" if g.window_tokens else "")
            + f" x {_described(g.layers[0])}"
            + (f" in blocks of {g.tokens_per_block}" if g.kind is not KVKind.RECURRENT else "")
            for g in self.groups
        )
        num_drafts = sum(layer.is_draft for _, layer in self.layers)
        drafts = f", {num_drafts} of them a drafter's" if num_drafts else ""
        return f"{self.model_id} ({self.weights}) tp={self.tp_size} [{groups}]{drafts}"


def _described(layer: KVLayer) -> str:
    return " + ".join(
        f"{part.num_units} x {part.item_bytes} B {part.encoding}" for part in layer.parts
    )


class _Format(msgspec.Struct):
    """The field that the layouts of all releases have."""

    format_version: int = 1


def _check_format(version: int) -> None:
    if version != FORMAT_VERSION:
        wrong = f"KV layout format {version} is not {FORMAT_VERSION}"
        raise LayoutError(f"{wrong}: both sides must run the same release")


def _order(layer: KVLayer) -> tuple[bool, list[tuple[int, str]], str]:
    return layer.is_draft, _by_number(layer.name), layer.name


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that sorts "layers.10" behind "layers.9"."""
    pieces = re.split(r"([0-9]+)", name)  # text and numbers by turns
    return [(int(piece), "") if index % 2 else (-1, piece) for index, piece in enumerate(pieces)]


__all__ = [
    "FORMAT_VERSION",
    "MAX_BLOCK_BYTES",
    "MAX_BLOCK_TOKENS",
    "MAX_NAME_CHARS",
    "MAX_WINDOW_STEP_TOKENS",
    "MAX_WINDOW_TOKENS",
    "KVGroup",
    "KVKind",
    "KVLayer",
    "KVLayout",
    "KVPart",
    "LayerExtent",
    "LayoutError",
    "PartExtent",
]
