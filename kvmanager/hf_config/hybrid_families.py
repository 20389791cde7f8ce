"""Models that mix attention with layers that keep a state of fixed size.

Each reader takes the fields of one model type and yields its layers that have a cache, in order.
Which layer is which is read from the file, never from a usual ratio.
"""

from collections.abc import Iterator

from kvmanager.hf_config.attention_families import (
    FULL_NAMES,
    RECURRENT_NAMES,
    check_length,
    mla_latent_dim,
    read_heads,
)
from kvmanager.hf_config.fields import Fields
from kvmanager.hf_config.model_kv import LayerKv
from kvmanager.hf_config.sizes import LayerSizes

_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_WORDS = dict.fromkeys((*FULL_NAMES, *RECURRENT_NAMES, "mlp", "moe"))


def qwen_gdn_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """Qwen3-Next and Qwen3.5: gated delta net and full attention."""
    heads = read_heads(config)
    for index, recurrent in enumerate(_qwen_recurrent_layers(config)):
        if recurrent:
            yield sizes.gated_delta_net(
                index,
                num_key_heads=config.integer("linear_num_key_heads"),
                num_value_heads=config.integer("linear_num_value_heads"),
                key_dim=config.integer("linear_key_head_dim"),
                value_dim=config.integer("linear_value_head_dim"),
                conv_kernel=config.integer("linear_conv_kernel_dim"),
                ssm_dtype=_state_dtype(config, "mamba_ssm_dtype"),
            )
        else:
            yield sizes.attention(index, heads)


def kimi_linear_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """Kimi Linear and the text model of Kimi K3: KDA and MLA.

    The two lists of `linear_attn_config` count layers from 1. Only the variant with a full-rank
    gate heeds vLLM's `mamba_ssm_cache_dtype`.
    """
    linear = config.inner("linear_attn_config")
    kda = _kda_layers(config, linear)
    num_heads, latent_dim = config.integer("num_attention_heads"), mla_latent_dim(config)
    for index in range(config.num_layers()):
        if index + 1 in kda:
            yield sizes.kimi_delta(
                index,
                num_heads=linear.integer("num_heads"),
                head_dim=linear.integer("head_dim"),
                conv_kernel=linear.integer("short_conv_kernel_size"),
                takes_ssm_dtype=bool(linear.value("use_full_rank_gate")),
                field="linear_attn_config.num_heads",
            )
        else:
            yield sizes.mla(index, num_heads, latent_dim)


def bailing_lightning_mla_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """Ring-2.5 and Ling-2.5: lightning attention, and MLA at the end of each group of layers."""
    num_layers, group = config.num_layers(), config.integer("layer_group_size")
    if num_layers % group:
        raise config.error(
            "layer_group_size",
            f"{num_layers} layers are no whole number of groups, and vLLM and the model's own "
            "code differ in what the layers after the last group are",
        )
    num_heads, latent_dim = config.integer("num_attention_heads"), mla_latent_dim(config)
    for index, recurrent in enumerate(_grouped_recurrent_layers(config)):
        if recurrent:
            yield _lightning(config, sizes, index)
        else:
            yield sizes.mla(index, num_heads, latent_dim)


def bailing_lightning_gqa_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """Ring-linear-2.0 and Ling-linear-2.0: lightning attention and attention with KV heads."""
    heads = read_heads(config)
    for index, recurrent in enumerate(_grouped_recurrent_layers(config)):
        if recurrent:
            yield _lightning(config, sizes, index)
        else:
            yield sizes.attention(index, heads)


def bailing_kda_mla_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """The third generation of Ling and Ring: KDA with the model's own heads, and MLA."""
    num_heads, latent_dim = config.integer("num_attention_heads"), mla_latent_dim(config)
    for index, recurrent in enumerate(_grouped_recurrent_layers(config)):
        if recurrent:
            yield sizes.kimi_delta(
                index,
                num_heads=num_heads,
                head_dim=config.integer("head_dim"),
                conv_kernel=config.integer("short_conv_kernel_size"),
                takes_ssm_dtype=False,
                field="num_attention_heads",
            )
        else:
            yield sizes.mla(index, num_heads, latent_dim)


def minimax_lightning_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """MiniMax-Text-01 and M1: lightning attention where the list has 0 or linear_attention."""
    if config.has("attn_type_list"):
        kinds = config.integers("attn_type_list", {0: "lightning", 1: "softmax"})
        check_length(config, "attn_type_list", len(kinds))
        recurrent_layers = [kind == 0 for kind in kinds]
    else:
        recurrent_layers = _listed_recurrent_layers(config)
    heads = read_heads(config)
    for index, recurrent in enumerate(recurrent_layers):
        yield _lightning(config, sizes, index) if recurrent else sizes.attention(index, heads)


def nemotron_h_layers(config: Fields, sizes: LayerSizes) -> Iterator[LayerKv]:
    """Nemotron-H and Nemotron 3: Mamba2, attention, and layers without a cache."""
    heads = read_heads(config)
    for index, kind in enumerate(_nemotron_kinds(config)):
        if kind in RECURRENT_NAMES:
            yield sizes.mamba2(
                index,
                num_heads=config.integer("mamba_num_heads"),
                head_dim=config.integer("mamba_head_dim"),
                num_groups=config.integer("n_groups"),
                state_dim=config.integer("ssm_state_size"),
                conv_kernel=config.integer("conv_kernel"),
                ssm_dtype=_state_dtype(config, "mamba_ssm_cache_dtype"),
            )
        # The other kinds, MLP and MoE, keep nothing.
        elif kind in FULL_NAMES:
            yield sizes.attention(index, heads)


def _lightning(config: Fields, sizes: LayerSizes, index: int) -> LayerKv:
    """One head for each query head, whatever the number of KV heads elsewhere."""
    heads = read_heads(config)
    return sizes.lightning(index, num_heads=heads.num_query, head_dim=heads.key_dim)


def _qwen_recurrent_layers(config: Fields) -> list[bool]:
    if config.has("layer_types"):
        return _listed_recurrent_layers(config)
    num_layers = config.num_layers()
    interval = config.integer("full_attention_interval")
    return [(index + 1) % interval != 0 for index in range(num_layers)]


def _listed_recurrent_layers(config: Fields) -> list[bool]:
    known = dict.fromkeys((*RECURRENT_NAMES, *FULL_NAMES))
    kinds = config.strings("layer_types", known)
    check_length(config, "layer_types", len(kinds))
    return [kind in RECURRENT_NAMES for kind in kinds]


def _grouped_recurrent_layers(config: Fields) -> list[bool]:
    """The last layer of each group, and every layer after the last whole group, is attention."""
    num_layers, group = config.num_layers(), config.integer("layer_group_size")
    num_grouped = num_layers // group * group
    return [index < num_grouped and (index + 1) % group != 0 for index in range(num_layers)]


def _kda_layers(config: Fields, linear: Fields) -> set[int]:
    kda, full = linear.layer_numbers("kda_layers"), linear.layer_numbers("full_attn_layers")
    num_layers = config.num_layers()
    wrong = (kda & full) | ((kda | full) ^ set(range(1, num_layers + 1)))
    if wrong:
        raise linear.error(
            "kda_layers",
            f"layer {min(wrong)} must be in exactly one of kda_layers and full_attn_layers, which "
            f"count layers from 1 to num_hidden_layers {num_layers}",
        )
    return kda


def _nemotron_kinds(config: Fields) -> list[str]:
    if not config.has("hybrid_override_pattern"):
        name = "layers_block_type" if config.has("layers_block_type") else "layer_types"
        return config.strings(name, _NEMOTRON_WORDS)
    pattern = str(config.value("hybrid_override_pattern"))
    unknown = sorted(set(pattern) - _NEMOTRON_LETTERS.keys())
    if unknown:
        raise config.error(
            "hybrid_override_pattern",
            f"{unknown[0]!r} is not one of {', '.join(map(repr, _NEMOTRON_LETTERS))}",
        )
    check_length(config, "hybrid_override_pattern", len(pattern))
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _state_dtype(config: Fields, name: str) -> str | None:
    if not config.has(name):
        return None
    value = config.value(name)
    if value not in ("float32", "bfloat16", "float16"):
        raise config.error(name, "known here: float32, bfloat16, float16")
    return str(value)
