"""Bytes of an encoder's output, from a parsed config.json.

An embedding has one vector of the language model's width for each token of its medium. Qwen3-VL
adds one for each layer that gets features of its own (deepstack).
"""

from collections.abc import Mapping
from typing import Any

from kvmanager.hf_config.fields import Fields
from kvmanager.hf_config.options import ITEM_BYTES, CacheOptions, resolve_dtypes
from kvmanager.hf_config.reader import config_levels

_ENCODERS = ("vision_config", "audio_config", "vision_tower_config")


def embedding_token_bytes(config: Mapping[str, Any], dtype: str = "auto") -> int:
    """Bytes of one media token's embedding; 0 for a model that takes text alone.

    `dtype` as in `read_model_kv`, of which only the model's own counts here. Raises ConfigError.
    """
    levels = config_levels(config)
    encoders = [level.inner(name) for level in levels for name in _ENCODERS if level.has(name)]
    if not encoders:
        return 0
    dtypes = resolve_dtypes(CacheOptions(dtype), *reversed(levels))
    vectors = 1 + max(map(_num_deepstack, encoders))
    return levels[-1].integer("hidden_size") * ITEM_BYTES[dtypes.model] * vectors


def _num_deepstack(encoder: Fields) -> int:
    layers = encoder.value("deepstack_visual_indexes")
    return len(layers) if isinstance(layers, list) else 0
