"""Models whose every layer is attention: full, sliding window, or MLA.

Each reader takes the fields of one model type and yields its layers in order. Which layer is which
is read from the file's lists and patterns; where published files leave a field out, `reader` has
the default of the model's config class, and says that it was used.
"""

from collections.abc import Iterator

from kvmanager.hf_config.fields import Fields
from kvmanager.hf_config.model_kv import LayerKv
from kvmanager.hf_config.sizes import Heads, LayerSizes

FULL_NAMES = ("full_attention", "attention")
WINDOW_NAMES = ("sliding_attention",)
RECURRENT_NAMES = ("linear_attention", "mamba")

# Fields with which configs announce caches that the readers below would get wrong. A reader that
# takes `layer_types` at its word need not look: hybrids have them though all layers are attention.
_OTHER_LAYERS = {
    "attn_layer_period": "attention only in every n-th layer",
    "full_attention_interval": "linear attention between full attention",
    "hybrid_override_pattern": "several kinds of layers",
    "layers_block_type": "several kinds of layers",
    "linear_attn_config": "linear attention",
    "mamba_d_state": "Mamba layers",
    "ssm_cfg": "Mamba layers",
    "state_size": "Mamba layers",
}
# The same, whatever layers are called.
_OTHER_MECHANISMS = {
    "attention_chunk_size": "attention in chunks",
    "attention_other_setting": "heads that differ between layers",
    "compress_ratios": "compressed attention",
    "global_head_dim": "heads that differ between layers",
    "hybrid_layer_pattern": "two kinds of attention",
    "index_topk": "sparse attention, whose indexer has a cache of its own",
    "is_encoder_decoder": "cross attention",
    "num_kv_shared_layers": "layers that share one cache",
}


def dense_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """Attention with KV heads: Llama, Qwen, Mistral, gpt-oss, Gemma, MiniMax-M2 and their like."""
    refuse_other_mechanisms(config, "kv_lora_rank", listed=config.has("layer_types"))
    _check_all_softmax(config)
    heads = read_heads(config)
    for index, windowed in enumerate(_windowed_layers(config)):
        yield sizes.attention(index, heads, config.integer("sliding_window") if windowed else 0)


def listed_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """A model type without a reader of its own, when `layer_types` says what each layer is."""
    if not config.has("layer_types"):
        raise config.error(
            "model_type",
            "not known here, and no layer_types says which attention each layer has; write "
            "layer_types (full_attention, sliding_attention) into a copy of the file if that is "
            "what its layers are",
        )
    if any(name in str(config.value("layer_types")) for name in RECURRENT_NAMES):
        raise config.error("model_type", "how large a state its recurrent layers keep is not known")
    yield from dense_layers(config, sizes)


def mla_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """DeepSeek-V2 and V3, Kimi-K2: MLA in every layer."""
    refuse_other_mechanisms(config)
    num_heads, latent_dim = config.integer("num_attention_heads"), mla_latent_dim(config)
    for index in range(config.num_layers()):
        yield sizes.mla(index, num_heads, latent_dim)


def mimo_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """MiMo-V2: `hybrid_layer_pattern` has 1 for a window layer, whose heads are the `swa_` ones."""
    pattern = config.integers("hybrid_layer_pattern", {0: "full", 1: "window"})
    check_length(config, "hybrid_layer_pattern", len(pattern))
    window_field = "sliding_window_size" if config.has("sliding_window_size") else "sliding_window"
    window_tokens = config.integer(window_field)
    full, window = read_heads(config), read_heads(config, prefix="swa_")
    for index, windowed in enumerate(pattern):
        if windowed:
            yield sizes.attention(index, window, window_tokens)
        else:
            yield sizes.attention(index, full)


def read_heads(config: Fields, prefix: str = "") -> Heads:
    """The heads whose fields start with `prefix`. Values are as wide as keys unless said."""
    num_query = config.integer(f"{prefix}num_attention_heads")
    even_share = None if prefix else _even_share(config, num_query)
    key_dim = config.integer(f"{prefix}head_dim", default=even_share)
    return Heads(
        num_query=num_query,
        # Without the field, each query head has keys and values of its own.
        num_kv=config.integer(f"{prefix}num_key_value_heads", default=num_query),
        key_dim=key_dim,
        value_dim=config.integer(f"{prefix}v_head_dim", default=key_dim),
        prefix=prefix,
    )


def mla_latent_dim(config: Fields) -> int:
    """Values that an MLA layer keeps for each token: the compressed KV and the rotary key."""
    return config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")


def refuse_other_mechanisms(config: Fields, *more: str, listed: bool = False) -> None:
    """Raises ConfigError for a field that means caches other than plain attention's. `listed`: the
    caller reads from `layer_types` what each layer is.
    """
    named = {} if listed else _OTHER_LAYERS
    for name, what in (named | _OTHER_MECHANISMS | dict.fromkeys(more, "MLA")).items():
        # Files may carry the field switched off, as 0, false or an empty list.
        if config.has(name) and config.value(name):
            raise config.error(
                name, f"{what}: not known for model_type {config.value('model_type')}"
            )


def check_length(config: Fields, name: str, length: int) -> None:
    """Raises ConfigError when a list for all layers is not as long as there are layers."""
    num_layers = config.num_layers(default=length)
    if length != num_layers:
        raise config.error(name, f"{length} entries for num_hidden_layers {num_layers}")


def _even_share(config: Fields, num_heads: int) -> int | None:
    return config.integer("hidden_size") // num_heads if config.has("hidden_size") else None


def _check_all_softmax(config: Fields) -> None:
    """MiniMax-M2 carries on the list of its linear-attention predecessors, with ones only."""
    if config.has("attn_type_list"):
        config.integers("attn_type_list", {1: "softmax attention"})


def _windowed_layers(config: Fields) -> list[bool]:
    if config.has("layer_types"):
        known = dict.fromkeys((*FULL_NAMES, *WINDOW_NAMES))
        kinds = config.strings("layer_types", known)
        check_length(config, "layer_types", len(kinds))
        return [kind in WINDOW_NAMES for kind in kinds]
    layers = range(config.num_layers())
    if not config.has("sliding_window"):
        return [False for _ in layers]
    if config.has("sliding_window_pattern"):
        # Gemma and Cohere2: the last layer of each group of `pattern` has full attention.
        pattern = config.integer("sliding_window_pattern")
        return [(index + 1) % pattern != 0 for index in layers]
    if config.has("use_sliding_window"):
        if not config.value("use_sliding_window"):
            return [False for _ in layers]
        # Qwen: only the layers from this one on have the window.
        first = config.integer("max_window_layers", default=len(layers))
        return [index >= first for index in layers]
    # Mistral: the window holds for every layer.
    return [True for _ in layers]
