"""vLLM's specs and a stand-in for its configuration, for tests of the mapping onto parts."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec

from kvmanager.layout import KVLayer, KVPart
from kvmanager.vllm_connector.memory_order import parts_of, views_of
from kvmanager.vllm_connector.slabs import PartView

NUM_BLOCKS = 6
HEADS = 2
BF16, FP32, UINT8 = torch.bfloat16, torch.float32, torch.uint8


def config(
    tp_size: int = 1,
    total_kv_heads: int = HEADS,
    *,
    text: Mapping[str, Any] | None = None,
    cache_dtype: str = "auto",
    backend: AttentionBackendEnum | None = None,
) -> Any:
    """A stand-in for vLLM's configuration. `text`: numbers of the model's own one."""
    numbers = dict(text or {})
    hf_text_config = SimpleNamespace(**numbers, to_dict=lambda: numbers)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=SimpleNamespace(
            dtype=BF16,
            hf_text_config=hf_text_config,
            get_total_num_kv_heads=lambda: total_kv_heads,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        attention_config=SimpleNamespace(backend=backend),
    )


def attention(num_kv_heads: int = HEADS, **changes: Any) -> FullAttentionSpec:
    fields = {"block_size": 16, "head_size": 8, "dtype": BF16} | changes
    return FullAttentionSpec(num_kv_heads=num_kv_heads, **fields)


def latent(**changes: Any) -> MLAAttentionSpec:
    fields = {"block_size": 16, "head_size": 24, "dtype": BF16, "max_tp_shards": 1} | changes
    return MLAAttentionSpec(num_kv_heads=1, **fields)


def parts(spec: KVCacheSpec, config: Any, order: str = "LBHNC") -> tuple[KVPart, ...]:
    return parts_of(spec, config, order)


def part(spec: KVCacheSpec, config: Any, order: str = "LBHNC") -> KVPart:
    (found,) = parts_of(spec, config, order)
    return found


def views(spec: KVCacheSpec, cache: Any, config: Any, tp_rank: int = 0) -> tuple[PartView, ...]:
    tp_size = config.parallel_config.tensor_parallel_size
    layer = KVLayer("layer.3", parts(spec, config))
    return views_of(layer, spec, cache, NUM_BLOCKS, tp_size, tp_rank)


def random_bits(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)
