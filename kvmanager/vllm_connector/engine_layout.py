"""Turns vLLM's KV cache configuration into a `KVLayout`, once, at the edge.

Knows vLLM's spec classes and nothing of transfers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, LayoutError
from kvmanager.vllm_connector.drafters import (
    draft_digest,
    is_draft_layer,
    kept_config,
    refuse_drafter,
)
from kvmanager.vllm_connector.media_settings import media_settings
from kvmanager.vllm_connector.memory_order import parts_of, views_of
from kvmanager.vllm_connector.slabs import PartView
from kvmanager.vllm_connector.stages import Stage, joined
from kvmanager.vllm_connector.weights import weights_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

RECURRENT_TOKENS_PER_BLOCK = 1
"""A recurrent group moves one state, whatever the engine's block size is. That size differs with
prefix caching on and off, so the layout leaves it out, and engines of both kinds can exchange
KVCache.
"""

_SPEC_FIELDS = (
    "dtype",
    "dtypes",
    "cache_dtype_str",
    "kv_quant_mode",
    "sliding_window",
    "mamba_type",
    "model_version",
)
"""Fields of vLLM's specs that say what the bytes of a page mean, beside its size."""


def stage_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Stage:
    """The transferable KVCache of the layers in this configuration: of the whole engine, or of one
    of its pipeline stages.

    Raises `LayoutError` for KVCache that the connector cannot move: cross attention, chunked local
    attention, context parallelism, and drafters whose KVCache is not known (`drafters`).
    """
    _refuse_unsupported(vllm_config)
    groups, page_order = kv_cache_config.transfer_groups, kv_cache_config.kv_cache_layout
    return Stage(
        tuple(_group(group, vllm_config, page_order or "default") for group in groups),
        {name: _reading(spec) for group in groups for name, spec in _layer_specs(group)},
    )


def layout_of(vllm_config: "VllmConfig", stages: Sequence[Stage]) -> KVLayout:
    """The layout of the engine that consists of these stages.

    Raises `LayoutError` for heads that the ranks cannot divide and for stages of other engines,
    `WeightsError` for weights that cannot be identified.
    """
    engine = joined(stages)
    served_names = vllm_config.model_config.served_model_name
    layout = KVLayout(
        model_id=served_names if isinstance(served_names, str) else served_names[0],
        weights=weights_identity(vllm_config),
        config_digest=_config_digest(vllm_config, engine),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        groups=engine.groups,
        draft_digest=draft_digest(vllm_config),
    )
    layout.validate()
    return layout


def _refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Raise `LayoutError` that names a setting with which KVCache cannot be moved."""
    parallel = vllm_config.parallel_config
    # Units are divided among tensor-parallel ranks, layers among pipeline stages, and nothing is
    # divided among any others.
    sizes = {
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    for option, size in sizes.items():
        if size > 1:
            raise LayoutError(f"{option} {size} is not supported: use --tensor-parallel-size")
    # Two halves of a batch run at once, and their layers' hooks do not say which one they are of.
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        raise LayoutError("dual batch overlap is not supported: remove --enable-dbo")
    refuse_drafter(vllm_config)


def registered_views(
    layout: KVLayout,
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    config: "KVCacheConfig",
    tp_rank: int,
) -> dict[str, tuple[PartView, ...]]:
    """The parts of this stage's layers by name, in the tensors that vLLM registered. Raises
    `LayoutError`.
    """
    specs = {name: spec for group in config.transfer_groups for name, spec in _layer_specs(group)}
    return {
        layer.name: views_of(
            layer,
            specs[layer.name],
            kv_caches[layer.name],
            config.num_blocks,
            layout.tp_size,
            tp_rank,
        )
        for _, layer in layout.layers
        if layer.name in specs
    }


def state_block_index(spec: KVCacheSpec, mamba_cache_mode: str, computed_tokens: int) -> int:
    """The index in a recurrent group's block table of the state after `computed_tokens` tokens.

    In vLLM's `mamba_cache_mode` "none" a request has one state block. In the other modes, which
    prefix caching needs, positions index the table, and the running state is in the block of the
    last computed token.
    """
    if mamba_cache_mode == "none":
        return 0
    return (computed_tokens - 1) // spec.block_size


def _config_digest(vllm_config: "VllmConfig", engine: Stage) -> str:
    """Digest of what, beside the weights, decides the KVCache of given tokens: the model's
    configuration with all overrides (rope scaling, windows) and vLLM's own settings.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = kept_config(model.hf_config.to_dict())
    values: list[object] = [config, model.disable_sliding_window, cache.kv_cache_dtype_skip_layers]
    if "longrope" in repr(config):
        values.append(model.max_model_len)  # by which vLLM chooses the factors
    values += media_settings(vllm_config)
    # In one order, whatever stages and groups the layers are in.
    values += sorted(
        (name, reading)
        for name, reading in engine.readings.items()
        if not is_draft_layer(name, vllm_config)
    )
    return blake3(repr(values).encode()).hexdigest()[:32]


def _reading(spec: KVCacheSpec) -> tuple[str, ...]:
    """How one layer's pages are to be read."""
    return tuple(str(getattr(spec, name, None)) for name in _SPEC_FIELDS)


def _group(group: "KVCacheGroupSpec", vllm_config: "VllmConfig", page_order: str) -> KVGroup:
    specs = dict(_layer_specs(group))
    # A pipeline stage may have no layer of a group, which is of some kind nevertheless.
    spec = next(iter(specs.values()), _any_spec(group.kv_cache_spec))
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    recurrent = isinstance(spec, MambaSpec)
    return KVGroup(
        kind=kind_of(spec),
        tokens_per_block=RECURRENT_TOKENS_PER_BLOCK if recurrent else spec.block_size,
        window_tokens=window,
        layers=tuple(
            KVLayer(
                name, parts_of(layer, vllm_config, page_order), is_draft_layer(name, vllm_config)
            )
            for name, layer in specs.items()
        ),
    )


def _layer_specs(group: "KVCacheGroupSpec") -> Iterator[tuple[str, KVCacheSpec]]:
    spec = group.kv_cache_spec
    for name in group.layer_names:
        yield name, spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _any_spec(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def kind_of(spec: KVCacheSpec) -> KVKind:
    match spec:
        case MambaSpec():
            return KVKind.RECURRENT
        case ChunkedLocalAttentionSpec() | CrossAttentionSpec():
            raise LayoutError(f"{type(spec).__name__} layers cannot be transferred")
        # Before AttentionSpec, which is the base class of this and of the next one.
        case SlidingWindowSpec():
            return KVKind.WINDOW
        case MLAAttentionSpec():
            return KVKind.MLA
        case AttentionSpec():
            return KVKind.FULL
        case _:
            raise LayoutError(f"{type(spec).__name__} layers cannot be transferred")


def data_bytes(spec: KVCacheSpec) -> int:
    """Bytes of data at the start of one page. vLLM pads the pages of all groups to one size."""
    if isinstance(spec, AttentionSpec | MambaSpec):
        return int(spec.real_page_size_bytes)
    return int(spec.page_size_bytes)
