"""Bytes of one layer's cache, whole and on one tensor-parallel rank, for every kind of layer.

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
        head_bytes = (heads.key_dim + heads.value_dim) * ITEM_BYTES[self.dtypes.kv]
        return LayerKv(
            index=index,
            kind=KVKind.WINDOW if window_tokens else KVKind.FULL,
            bytes_per_token=heads.num_kv * head_bytes,
            window_tokens=window_tokens,
            rank_bytes_per_token=self._rank_kv_heads(heads) * head_bytes,
        )

    def mla(self, index: int, num_heads: int, latent_dim: int) -> LayerKv:
        """One latent vector a token, `kv_lora_rank + qk_rope_head_dim` values, on every rank."""
        self._share("num_attention_heads", num_heads)
        latent_bytes = latent_dim * ITEM_BYTES[self.dtypes.kv]
        return LayerKv(
            index=index,
            kind=KVKind.MLA,
            bytes_per_token=latent_bytes,
            rank_bytes_per_token=latent_bytes,
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
        self._share("linear_num_value_heads", num_value_heads)
        return self._recurrent(
            index,
            # A causal convolution over k inputs keeps the last k - 1.
            conv_items=conv_dim * (conv_kernel - 1),
            state_items=num_value_heads * value_dim * key_dim,
            state_dtype=self.dtypes.ssm or ssm_dtype or self.dtypes.conv,
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
        self._share(field, num_heads)
        state_dtype = (self.dtypes.ssm if takes_ssm_dtype else None) or "float32"
        if state_dtype == "float16":
            raise ValueError("mamba_ssm_cache_dtype float16: KDA states are float32 or bfloat16")
        return self._recurrent(
            index,
            # Queries, keys and values each have a convolution of their own.
            conv_items=3 * num_heads * head_dim * (conv_kernel - 1),
            state_items=num_heads * head_dim * head_dim,
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
        self._share("mamba_num_heads", num_heads)
        if num_groups > 1:
            self._share("n_groups", num_groups)
        # The convolution is over x, B and C; B and C are shared by the heads of a group.
        group_items = 2 * num_groups * state_dim * (conv_kernel - 1)
        return self._recurrent(
            index,
            conv_items=num_heads * head_dim * (conv_kernel - 1) + group_items,
            state_items=num_heads * head_dim * state_dim,
            state_dtype=self.dtypes.ssm or ssm_dtype or self.dtypes.conv,
            copied_items=group_items if num_groups == 1 else 0,
        )

    def lightning(self, index: int, *, num_heads: int, head_dim: int) -> LayerKv:
        """Lightning attention: a matrix for each head and no convolution, in the dtype of the
        convolution states of others (vLLM: `mamba_cache_dtype`, by default the model's)."""
        self._share("num_attention_heads", num_heads)
        return self._recurrent(
            index,
            conv_items=0,
            state_items=num_heads * head_dim * head_dim,
            state_dtype=self.dtypes.conv,
        )

    def _recurrent(
        self,
        index: int,
        *,
        conv_items: int,
        state_items: int,
        state_dtype: str,
        copied_items: int = 0,
    ) -> LayerKv:
        """`copied_items` are those of the convolution that every rank has."""
        copied_bytes = copied_items * ITEM_BYTES[self.dtypes.conv]
        nbytes = conv_items * ITEM_BYTES[self.dtypes.conv] + state_items * ITEM_BYTES[state_dtype]
        return LayerKv(
            index=index,
            kind=KVKind.RECURRENT,
            fixed_bytes=nbytes,
            rank_fixed_bytes=(nbytes - copied_bytes) // self.tp_size + copied_bytes,
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
