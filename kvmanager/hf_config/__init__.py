"""KVCache sizes from a Hugging Face config.json alone: no weights, no engine, no GPU.

`read_model_kv(parsed_json, dtype=..., tp_size=...)` gives a `ModelKv`: every layer with a cache,
its kind, its bytes for each token, for ever or within a window, and its fixed state. Pure: reads no
files and imports no engine; `kvmanager.vllm_connector.spec_check` builds the same from vLLM itself,
for comparison.
"""

from kvmanager.hf_config.embeddings import embedding_token_bytes
from kvmanager.hf_config.fields import ConfigError
from kvmanager.hf_config.model_kv import LayerKv, ModelKv, differences
from kvmanager.hf_config.options import CACHE_DTYPES, STATE_DTYPES
from kvmanager.hf_config.reader import read_model_kv

__all__ = [
    "CACHE_DTYPES",
    "STATE_DTYPES",
    "ConfigError",
    "LayerKv",
    "ModelKv",
    "differences",
    "embedding_token_bytes",
    "read_model_kv",
]
