"""Makes a `ModelKv` from a parsed config.json: finds the model's family and defaults of its fields.

It knows the names of model types and architectures. The `*_families` know what the fields mean.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvmanager.hf_config.attention_families import (
    dense_layers,
    listed_layers,
    mimo_layers,
    mla_layers,
)
from kvmanager.hf_config.fields import ConfigError, Fields
from kvmanager.hf_config.hybrid_families import (
    bailing_kda_mla_layers,
    bailing_lightning_gqa_layers,
    bailing_lightning_mla_layers,
    kimi_linear_layers,
    minimax_lightning_layers,
    nemotron_h_layers,
    qwen_gdn_layers,
)
from kvmanager.hf_config.model_kv import LayerKv, ModelKv
from kvmanager.hf_config.options import CacheOptions, resolve_dtypes
from kvmanager.hf_config.sizes import LayerSizes

LayerReader = Callable[[Fields, LayerSizes], Iterator[LayerKv]]

_DENSE_TYPES: Final = (
    "bailing_moe",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "llama",
    "minimax_m2",
    "mistral",
    "mixtral",
    "olmo2",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen2_moe",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
    "seed_oss",
)

_BY_MODEL_TYPE: Final[dict[str, LayerReader]] = {
    **dict.fromkeys(_DENSE_TYPES, dense_layers),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), mla_layers),
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), mimo_layers),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), qwen_gdn_layers),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), qwen_gdn_layers),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), minimax_lightning_layers),
    "bailing_moe_linear": bailing_lightning_gqa_layers,
    "kimi_linear": kimi_linear_layers,
    "nemotron_h": nemotron_h_layers,
}

# Models of one model_type whose caches differ; only `architectures` tells them apart.
_BY_ARCHITECTURE: Final[dict[str, LayerReader]] = {
    "BailingMoeV2_5ForCausalLM": bailing_lightning_mla_layers,
    "BailingMoeV3ForCausalLM": bailing_kda_mla_layers,
    "BailingMoeLinearForCausalLM": bailing_lightning_gqa_layers,
    "BailingMoeLinearV2ForCausalLM": bailing_lightning_gqa_layers,
    "MiniMaxM1ForCausalLM": minimax_lightning_layers,
    "MiniMaxText01ForCausalLM": minimax_lightning_layers,
}
_AMBIGUOUS_TYPES: Final = ("bailing_hybrid",)

# Defaults of the transformers config classes, for fields that published files leave out.
_CLASS_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {"head_dim": 128, "mamba_ssm_cache_dtype": "float32"},
    **{
        name: {"sliding_window": 4096, "use_sliding_window": False}
        for name in _DENSE_TYPES
        if name.startswith("qwen")
    },
}

# Where multimodal configs keep the language model, outermost first.
_INNER_CONFIGS: Final = ("thinker_config", "text_config", "llm_config", "language_config")


def read_model_kv(
    config: Mapping[str, Any],
    *,
    dtype: str = "auto",
    tp_size: int = 1,
    mamba_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str = "auto",
) -> ModelKv:
    """The KVCache of the model whose parsed config.json is `config`.

    `CacheOptions` says what the options mean. Raises ConfigError, which names the field and its
    value, when the file does not say what its layers keep, or when tensor parallelism cannot share
    them out; ValueError for options that do not exist.
    """
    options = CacheOptions(dtype, tp_size, mamba_cache_dtype, mamba_ssm_cache_dtype)
    levels = config_levels(config)
    text = levels[-1]
    model_type = text.value("model_type") or levels[0].value("model_type")
    architectures = [name for level in reversed(levels) for name in _architectures(level)]
    dtypes = resolve_dtypes(options, *reversed(levels))
    read = _reader(text, model_type, architectures)
    layers = tuple(read(text, LayerSizes(dtypes, options.tp_size)))
    if not layers:
        raise ConfigError("num_hidden_layers", text.value("num_hidden_layers"), "no cached layers")
    return ModelKv(
        name=str(architectures[-1] if architectures else model_type),
        num_layers=_num_layers(text, layers),
        dtype=dtypes.model,
        kv_dtype=dtypes.kv,
        tp_size=options.tp_size,
        layers=layers,
        assumed=tuple(text.assumed),
    )


def config_levels(config: Mapping[str, Any]) -> list[Fields]:
    """The config and the language model's configs inside it, outermost first."""
    levels = [_fields(config, "")]
    path = ""
    for name in _INNER_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            config, path = inner, f"{path}{name}."
            levels.append(_fields(config, path))
    return levels


def _fields(config: Mapping[str, Any], path: str) -> Fields:
    return Fields(config, _CLASS_DEFAULTS.get(str(config.get("model_type"))), path)


def _architectures(fields: Fields) -> list[str]:
    value = fields.value("architectures")
    return [str(name) for name in value] if isinstance(value, list) else []


def _reader(text: Fields, model_type: Any, architectures: list[str]) -> LayerReader:
    for name in architectures:
        if name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    if model_type in _AMBIGUOUS_TYPES:
        known = ", ".join(name for name in _BY_ARCHITECTURE if name.startswith("Bailing"))
        raise text.error("architectures", f"model_type {model_type} has several; known: {known}")
    return _BY_MODEL_TYPE.get(str(model_type), listed_layers)


def _num_layers(text: Fields, layers: tuple[LayerKv, ...]) -> int:
    """All of the model's layers, those without a cache included."""
    if text.has("num_hidden_layers"):
        return text.num_layers()
    return layers[-1].index + 1
