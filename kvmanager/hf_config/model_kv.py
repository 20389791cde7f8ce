"""How much KVCache a model makes: per layer, per kind of layer, and for a prompt of n tokens.

These are values only. They come from the `*_families`, or from an engine's own specs.

Tensor parallelism. vLLM gives every rank the same amount of cache. Attention heads are shared out;
with more ranks than KV heads each head is kept by several ranks. The latent vector of MLA cannot be
shared out: every rank keeps a whole copy of the same bytes. A transfer carries each head and each
latent vector once (`kvmanager.layout`), so bytes to transfer are the same for any number of ranks.
`rank_*` is what one rank holds, copies included.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmanager.layout import KVKind


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's cache. `index` counts the model's layers from 0.

    A layer of kind FULL or MLA holds `bytes_per_token` for every token, a WINDOW layer for the last
    `window_tokens`, a RECURRENT layer `fixed_bytes` whatever the length. Of these a rank holds
    `rank_bytes_per_token` and `rank_fixed_bytes`.
    """

    index: int
    kind: KVKind
    bytes_per_token: int = 0
    fixed_bytes: int = 0
    window_tokens: int = 0
    rank_bytes_per_token: int = 0
    rank_fixed_bytes: int = 0

    def held_tokens(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens have bytes of their own in this cache."""
        return min(num_tokens, self.window_tokens) if self.kind is KVKind.WINDOW else num_tokens

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes to transfer after `num_tokens` tokens."""
        return self.fixed_bytes + self.bytes_per_token * self.held_tokens(num_tokens)

    def rank_bytes_for(self, num_tokens: int) -> int:
        """Bytes that one rank holds after `num_tokens` tokens."""
        return self.rank_fixed_bytes + self.rank_bytes_per_token * self.held_tokens(num_tokens)


@dataclass(frozen=True, slots=True)
class ModelKv:
    """The cache of a whole model at one tensor-parallel size and one set of dtypes.

    `dtype` is the model's, `kv_dtype` that of attention layers. `layers` are those with a cache, in
    order. `assumed` lists what the config file left out and which default was taken instead.
    """

    name: str
    num_layers: int
    dtype: str
    kv_dtype: str
    tp_size: int
    layers: tuple[LayerKv, ...]
    assumed: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """What each token adds for ever, to transfer: the full-attention and MLA layers."""
        return sum(layer.bytes_per_token for layer in self.layers if _grows(layer))

    @property
    def rank_bytes_per_token(self) -> int:
        """As `bytes_per_token`, on one rank."""
        return sum(layer.rank_bytes_per_token for layer in self.layers if _grows(layer))

    @property
    def fixed_bytes(self) -> int:
        """All recurrent states, to transfer: what even a prompt of one token has."""
        return sum(layer.fixed_bytes for layer in self.layers)

    @property
    def rank_fixed_bytes(self) -> int:
        """As `fixed_bytes`, on one rank."""
        return sum(layer.rank_fixed_bytes for layer in self.layers)

    def num_layers_by_kind(self) -> dict[KVKind, int]:
        """Only kinds that occur, in the order of `KVKind`."""
        counts = Counter(layer.kind for layer in self.layers)
        return {kind: counts[kind] for kind in KVKind if counts[kind]}

    def bytes_for(self, num_tokens: int) -> int:
        """S_kv(l) of the paper: bytes to transfer after `num_tokens` tokens, without padding.

        `KVLayout.transfer_bytes` is the exact size on the wire. It is the same but for windows, of
        which `window_tokens` - 1 tokens and the rest of the first one's block travel.
        """
        return sum(layer.bytes_for(num_tokens) for layer in self.layers)

    def rank_bytes_for(self, num_tokens: int) -> int:
        """Bytes that one rank holds after `num_tokens` tokens."""
        return sum(layer.rank_bytes_for(num_tokens) for layer in self.layers)

    def bytes_by_kind(self, num_tokens: int) -> dict[KVKind, int]:
        """`bytes_for` split by kind; the values add up to it."""
        totals = dict.fromkeys(self.num_layers_by_kind(), 0)
        for layer in self.layers:
            totals[layer.kind] += layer.bytes_for(num_tokens)
        return totals


def differences(expected: Sequence[LayerKv], actual: Iterable[LayerKv]) -> list[str]:
    """One line for each layer of which the two disagree; empty when they are the same."""
    left = {layer.index: layer for layer in expected}
    right = {layer.index: layer for layer in actual}
    return [
        f"layer {index}: {_words(left.get(index))}, the engine has {_words(right.get(index))}"
        for index in sorted(left.keys() | right.keys())
        if left.get(index) != right.get(index)
    ]


def _grows(layer: LayerKv) -> bool:
    return layer.kind in (KVKind.FULL, KVKind.MLA)


def _words(layer: LayerKv | None) -> str:
    if layer is None:
        return "no cache"
    if layer.kind is KVKind.RECURRENT:
        return f"{layer.kind} {layer.fixed_bytes} B"
    window = f" of {layer.window_tokens} tokens" if layer.kind is KVKind.WINDOW else ""
    return f"{layer.kind}{window} {layer.bytes_per_token} B/token"
