"""Bytes of one layer's cache on one tensor-parallel rank, for every kind of layer.

Pure arithmetic on dimensions, which the `*_families` read for each layer. The shapes are those that
vLLM allocates: attention in `Attention.get_kv_cache_spec`, recurrent states in
`MambaStateShapeCalculator` and `MambaStateDtypeCalculator` (vllm/model_executor/layers/mamba/
mamba_utils.py), without speculative tokens.
"""

from dataclasses import dataclass

from kvmanager.hf_config.fields import ConfigError
from kvmanager.hf_config.model_kv import LayerKv
from kvmanager.hf_config.options import ITEM_BYTES, CacheDtypes
from kvmanager.layout import KVKind


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a layer. `prefix` comes before the field names in errors."""

    num_query: int
    num_kv: int
    key_dim: int
    value_dim: int
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Makes `LayerKv` values for one choice of dtypes and ranks.

    Every method raises ConfigError naming the field when the ranks cannot share the layer out.
    """

    dtypes: CacheDtypes
    tp_size: int

    def attention(self, index: int, heads: Heads, window_tokens: int = 0) -> LayerKv:
        """Keys and values of every KV head; `window_tokens` 0 is full attention."""
        self._share("num_attention_heads", heads.num_query, prefix=heads.prefix)
        rank_kv_heads = self._rank_kv_heads(heads)
        item_bytes = ITEM_BYTES[self.dtypes.kv]
        return LayerKv(
            index=index,
            kind=KVKind.WINDOW if window_tokens else KVKind.FULL,
            rank_bytes_per_token=rank_kv_heads * (heads.key_dim + heads.value_dim) * item_bytes,
            window_tokens=window_tokens,
            num_sending_ranks=self.tp_size,
        )

    def mla(self, index: int, num_heads: int, latent_dim: int) -> LayerKv:
        """One latent vector a token, `kv_lora_rank + qk_rope_head_dim` values, on every rank."""
        self._share("num_attention_heads", num_heads)
        return LayerKv(
            index=index,
            kind=KVKind.MLA,
            rank_bytes_per_token=latent_dim * ITEM_BYTES[self.dtypes.kv],
        )

    def gated_delta_net(
        self,
        index: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        ssm_dtype: str | None,
    ) -> LayerKv:
        """GDN. `ssm_dtype` is the checkpoint's wish, used when the operator has none."""
        # One convolution over queries, keys and values; queries are as wide as keys.
        conv_dim = 2 * num_key_heads * key_dim + num_value_heads * value_dim
        self._share("linear_num_key_heads", num_key_heads)
        rank_heads = self._share("linear_num_value_heads", num_value_heads)
        state_dtype = self.dtypes.ssm or ssm_dtype or self.dtypes.conv
        return self._recurrent(
            index,
            # A causal convolution over k inputs keeps the last k - 1.
            conv_items=conv_dim // self.tp_size * (conv_kernel - 1),
            state_items=rank_heads * value_dim * key_dim,
            state_dtype=state_dtype,
        )

    def kimi_delta(
        self,
        index: int,
        *,
        num_heads: int,
        head_dim: int,
        conv_kernel: int,
        takes_ssm_dtype: bool,
        field: str,
    ) -> LayerKv:
        """KDA. The state is float32 unless the model is one that heeds `mamba_ssm_cache_dtype`;
        vLLM then takes float32 and bfloat16 only."""
        rank_heads = self._share(field, num_heads)
        state_dtype = (self.dtypes.ssm if takes_ssm_dtype else None) or "float32"
        if state_dtype == "float16":
            raise ValueError("mamba_ssm_cache_dtype float16: KDA states are float32 or bfloat16")
        return self._recurrent(
            index,
            # Queries, keys and values each have a convolution of their own.
            conv_items=3 * rank_heads * head_dim * (conv_kernel - 1),
            state_items=rank_heads * head_dim * head_dim,
            state_dtype=state_dtype,
        )

    def mamba2(
        self,
        index: int,
        *,
        num_heads: int,
        head_dim: int,
        num_groups: int,
        state_dim: int,
        conv_kernel: int,
        ssm_dtype: str | None,
    ) -> LayerKv:
        """Mamba2. A single group is kept by every rank; more than one must be shared out."""
        rank_heads = self._share("mamba_num_heads", num_heads)
        rank_groups = 1 if num_groups == 1 else self._share("n_groups", num_groups)
        # The convolution is over x, B and C; B and C are shared by the heads of a group.
        rank_conv_dim = rank_heads * head_dim + 2 * rank_groups * state_dim
        return self._recurrent(
            index,
            conv_items=rank_conv_dim * (conv_kernel - 1),
            state_items=rank_heads * head_dim * state_dim,
            state_dtype=self.dtypes.ssm or ssm_dtype or self.dtypes.conv,
        )

    def lightning(self, index: int, *, num_heads: int, head_dim: int) -> LayerKv:
        """Lightning attention: a matrix for each head and no convolution, in the dtype of the
        convolution states of others (vLLM: `mamba_cache_dtype`, by default the model's)."""
        rank_heads = self._share("num_attention_heads", num_heads)
        return self._recurrent(
            index,
            conv_items=0,
            state_items=rank_heads * head_dim * head_dim,
            state_dtype=self.dtypes.conv,
        )

    def _recurrent(
        self, index: int, *, conv_items: int, state_items: int, state_dtype: str
    ) -> LayerKv:
        conv_bytes = conv_items * ITEM_BYTES[self.dtypes.conv]
        return LayerKv(
            index=index,
            kind=KVKind.RECURRENT,
            rank_fixed_bytes=conv_bytes + state_items * ITEM_BYTES[state_dtype],
            num_sending_ranks=self.tp_size,
        )

    def _share(self, field: str, total: int, prefix: str = "") -> int:
        if total % self.tp_size:
            raise ConfigError(prefix + field, total, f"not divisible by --tp {self.tp_size}")
        return total // self.tp_size

    def _rank_kv_heads(self, heads: Heads) -> int:
        if heads.num_kv % self.tp_size and self.tp_size % heads.num_kv:
            raise ConfigError(
                f"{heads.prefix}num_key_value_heads",
                heads.num_kv,
                f"must divide --tp {self.tp_size} or be divisible by it",
            )
        # With more ranks than heads, several ranks keep a copy of one head.
        return max(1, heads.num_kv // self.tp_size)
