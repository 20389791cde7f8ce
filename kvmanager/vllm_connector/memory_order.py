"""Maps vLLM's cache of one layer onto the parts of a `KVLayer`, on every rank.

`parts_of` says what a layer keeps, from vLLM's spec alone, as the scheduler's process has no
tensors. `views_of` shows those parts in the tensors that vLLM registers. What the order of bytes
inside of a page is not known of travels as it is ("opaque"): between engines of one backend, block
size and tensor-parallel size.

Sources: vLLM's kv_cache_interface.py ([B, H, N, C] views, K before V), cpu_attn.py (keys of a block
as [head size, block size]), mamba_utils.py (shapes of states, order of their convolutions).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SparseCacheRole,
)

from kvmanager.layout import KVLayer, KVPart, LayoutError
from kvmanager.vllm_connector.slabs import PartView, Piece

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COLUMN_KEYS = ("vec", "vec16")
"""Instruction sets of vLLM's CPU attention that keep a block's keys as [head size, block size]."""
_GROUP_FIELDS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""Names of the number of B and C groups in the configurations of Mamba 2 models."""
_KV_HEADS = re.compile("kv_head|key_value_head|head_kv|attention_groups")
"""Names of numbers of KV heads in models' configurations."""
_SCALES_IN_ITEM = (
    KVQuantMode.FP8_PER_TENSOR,
    KVQuantMode.INT8_PER_TOKEN_HEAD,
    KVQuantMode.FP8_PER_TOKEN_HEAD,
    KVQuantMode.INT4_PER_TOKEN_HEAD,
)
"""Quantised caches in which all bytes of one head and token are together."""
_SHUFFLE = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
"""With it vLLM's ROCm backends keep a page in another order."""
_OPAQUE = "opaque"
"""How the encodings of pages begin whose order of bytes is not known."""


def parts_of(spec: KVCacheSpec, config: VllmConfig, page_order: str) -> tuple[KVPart, ...]:
    """The parts of a layer with this spec. Raises `LayoutError` for specs that are not known.

    page_order: vLLM's name for the order of heads and tokens in memory (`KVCacheLayout`).
    """
    match spec:
        case MambaSpec():
            return _state_parts(spec, config)
        case AttentionSpec():
            return (_attention_part(spec, config, page_order),)
        case _:
            raise LayoutError(f"{type(spec).__name__} layers cannot be transferred")


def views_of(
    layer: KVLayer,
    spec: KVCacheSpec,
    cache: torch.Tensor | Sequence[torch.Tensor],
    num_blocks: int,
    tp_size: int,
    tp_rank: int,
) -> tuple[PartView, ...]:
    """The parts of `cache`, as vLLM passes it to `register_kv_caches`.

    Raises `LayoutError` where the tensors are not those of the spec.
    """
    tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
    try:
        pieces: list[tuple[Piece, ...]]
        if layer.parts[0].encoding.startswith(_OPAQUE):
            pieces = [(_opaque_page(tensors[0], spec, num_blocks),)]
        elif isinstance(spec, MambaSpec):
            pieces = [(piece,) for piece in _state_pieces(layer.parts, spec, tensors, tp_size)]
        else:
            pieces = [_attention_pieces(layer.parts[0], spec, tensors[0])]
        return tuple(
            PartView(
                part,
                part.held_units(tp_size, tp_rank),
                part.sent_units(tp_size, tp_rank),
                of_part,
                _rows_per_block(of_part[0].memory, num_blocks),
            )
            for part, of_part in zip(layer.parts, pieces, strict=True)
        )
    except (ValueError, RuntimeError) as error:
        shapes = [(tuple(tensor.shape), tuple(tensor.stride())) for tensor in tensors]
        raise LayoutError(f"layer {layer.name}: {error}; tensors {shapes}") from error


def _rows_per_block(memory: torch.Tensor, num_blocks: int) -> int:
    ratio, rest = divmod(memory.shape[0], num_blocks)
    if rest or not ratio:
        raise ValueError(f"{memory.shape[0]} rows for {num_blocks} blocks")
    return ratio


# ---- what a layer keeps


def _attention_part(spec: AttentionSpec, config: VllmConfig, page_order: str) -> KVPart:
    encoding, num_units = _attention_encoding(spec, config), _num_kv_heads(spec, config)
    if encoding is None or num_units is None or spec.tokens_per_state < 1:
        backend = config.attention_config.backend
        # vLLM's own choice of a backend depends on the device.
        chosen = (
            backend.name if backend else f"default of {current_platform.get_device_capability()}"
        )
        how = [page_order, chosen, f"{spec.num_head_slots} slots of {spec.state_content_bytes} B"]
        if os.environ.get(_SHUFFLE):
            how.append(f"shuffled {os.environ[_SHUFFLE]}")
        if current_platform.is_cpu():
            how.append(_cpu_order(spec, config))
        how += [str(spec.dtype).removeprefix("torch."), _quantisation(spec, config)]
        is_replicated = spec.max_tp_shards == 1
        return _opaque_part("pages", spec, config, how, is_replicated=is_replicated)
    name = "latent" if _is_latent(spec) else "kv"
    tokens_per_item = int(spec.tokens_per_state)
    return KVPart(name, num_units, spec.state_content_size_bytes, encoding, tokens_per_item)


def _is_latent(spec: AttentionSpec) -> bool:
    """Whether a token has one vector instead of a key and a value, as in MLA."""
    return spec.head_size_v == 0


def _attention_encoding(spec: AttentionSpec, config: VllmConfig) -> str | None:
    """How an item of one head and token is to be read; None: its bytes are not together."""
    # Backends that set the number of slots keep the keys of all heads apart from the values, and
    # sparse attention's indexers and DeepSeek V4 keep a page's scales behind all of its numbers.
    if (
        spec.num_head_slots is not None
        or getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER
        or getattr(spec, "model_version", None) is not None
    ):
        return None
    dtype = str(spec.dtype).removeprefix("torch.")
    if spec.kv_quant_mode:
        # The CPU's kernels order quantised keys in a way of their own.
        is_known = spec.kv_quant_mode in _SCALES_IN_ITEM and not current_platform.is_cpu()
        return _quantisation(spec, config) if is_known else None
    if not spec.dtype.is_floating_point:
        return None
    if current_platform.is_cpu() and not _is_latent(spec):
        is_known = _cpu_order(spec, config) in _COLUMN_KEYS and spec.head_size_v == spec.head_size
        return dtype if is_known else None
    return dtype


def _quantisation(spec: AttentionSpec, config: VllmConfig) -> str:
    """The mode and the number format, which the data type of quantised caches (uint8) hides."""
    if not spec.kv_quant_mode:
        return "none"
    named = getattr(spec, "cache_dtype_str", None) or config.cache_config.cache_dtype
    return f"{spec.kv_quant_mode.name.lower()} {'fp8_e4m3' if named == 'fp8' else named}"


def _cpu_order(spec: AttentionSpec, config: VllmConfig) -> str:
    """vLLM's name for the order that its CPU attention uses for this layer."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size)


def _num_kv_heads(spec: AttentionSpec, config: VllmConfig) -> int | None:
    """The KV heads over all ranks, copies counted once; None: vLLM does not say."""
    tp_size = config.parallel_config.tensor_parallel_size
    if spec.max_tp_shards is not None:
        return spec.num_kv_heads * min(tp_size, spec.max_tp_shards)
    # vLLM makes copies only where there are more ranks than heads, so that each rank has one.
    if tp_size == 1 or spec.num_kv_heads > 1:
        return spec.num_kv_heads * tp_size
    found = {number for number in _kv_head_numbers(spec, config) if number <= tp_size}
    return found.pop() if len(found) == 1 else None


def _kv_head_numbers(spec: AttentionSpec, config: VllmConfig) -> set[int]:
    """What the model's configuration says of the KV heads of this layer, or of all layers where it
    does not tell them apart.
    """
    model = config.model_config
    text = model.hf_text_config.to_dict()
    of_windows = text.get("swa_num_key_value_heads")
    if of_windows and getattr(spec, "sliding_window", None):
        return {int(of_windows)}
    found = {int(model.get_total_num_kv_heads())}
    for name, value in text.items():
        if _KV_HEADS.search(name) and name != "swa_num_key_value_heads":
            found |= {number for number in _list(value) if type(number) is int and number > 0}
    return found


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _opaque_part(
    name: str,
    spec: AttentionSpec | MambaSpec,
    config: VllmConfig,
    how: Sequence[str],
    *,
    is_replicated: bool,
) -> KVPart:
    """Whole pages, which only engines that are cut in the same way can exchange."""
    tp_size = 1 if is_replicated else config.parallel_config.tensor_parallel_size
    cut = [] if is_replicated else [f"tp {tp_size}"]
    encoding = " ".join([_OPAQUE, current_platform.device_type, *cut, *how])
    tokens_per_item = 0 if isinstance(spec, MambaSpec) else spec.block_size
    return KVPart(name, tp_size, spec.real_page_size_bytes, encoding, tokens_per_item)


def _state_parts(spec: MambaSpec, config: VllmConfig) -> tuple[KVPart, ...]:
    tp_size = config.parallel_config.tensor_parallel_size
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    sizes = [dtype.itemsize for dtype in spec.dtypes]
    is_linear = spec.mamba_type is MambaAttentionBackendEnum.LINEAR and len(spec.shapes) == 1
    split = [] if is_linear else _convolution(spec, config)
    if split is None or spec.tp_replicated:
        how = [f"{dtype} {shape}" for dtype, shape in zip(dtypes, spec.shapes, strict=True)]
        return (_opaque_part("state", spec, config, how, is_replicated=spec.tp_replicated),)
    parts = []
    for name, total, _, channels in split:
        rows = _convolution_rows(spec)
        encoding = f"{dtypes[0]} x {rows} x {channels}"
        parts.append(KVPart(name, total, rows * channels * sizes[0], encoding, 0))
    heads, *inner = spec.shapes[-1]
    encoding = " x ".join([dtypes[-1], *map(str, inner)])
    parts.append(
        KVPart("state", heads * tp_size, math.prod(inner) * sizes[-1], encoding, 0),
    )
    return tuple(parts)


def _convolution_dim(spec: MambaSpec) -> int:
    """Channels of the convolution on one rank, whichever of its two dimensions comes first."""
    return spec.shapes[0][1 - _rows_axis(spec)]


def _convolution_rows(spec: MambaSpec) -> int:
    """The rows that hold the last inputs of the convolution. Speculation adds a row behind them for
    each guessed token, which a state at the end of a prompt does not use (vLLM's causal_conv1d).
    """
    return spec.shapes[0][_rows_axis(spec)] - spec.num_speculative_blocks


def _rows_axis(spec: MambaSpec) -> int:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return 1 if is_conv_state_dim_first() else 0


_Channels = tuple[str, int, int, int]
"""A share of a convolution's channels: its name, its units over all ranks, those on one rank, and
the channels of a unit."""


def _convolution(spec: MambaSpec, config: VllmConfig) -> list[_Channels] | None:
    """The shares of a rank's convolution in their order; None: not known for this kind of state."""
    tp_size = config.parallel_config.tensor_parallel_size
    is_known = spec.mamba_type in (
        MambaAttentionBackendEnum.GDN_ATTN,
        MambaAttentionBackendEnum.MAMBA2,
    )
    if not is_known or len(spec.shapes) != 2 or len(spec.shapes[1]) != 3:
        return None
    heads, head_dim, state_dim = spec.shapes[1]
    rest, odd = divmod(_convolution_dim(spec) - heads * head_dim, 2)
    if rest <= 0 or odd or rest % state_dim:
        return None
    groups = rest // state_dim
    values = ("value", heads * tp_size, heads, head_dim)
    if spec.mamba_type is MambaAttentionBackendEnum.GDN_ATTN:
        key = (groups * tp_size, groups, state_dim)
        return [("query", *key), ("key", *key), values]
    total = groups * tp_size
    if groups == 1 and tp_size > 1:
        # Either every rank has a group of its own, or all have copies of the only one.
        found = _num_groups(config)
        if found not in (1, tp_size):
            return None
        total = found
    return [values, ("b", total, groups, state_dim), ("c", total, groups, state_dim)]


def _num_groups(config: VllmConfig) -> int | None:
    text: Any = config.model_config.hf_text_config
    found = (getattr(text, name, None) for name in _GROUP_FIELDS)
    return next((int(number) for number in found if number), None)


# ---- where it lies


def _attention_pieces(part: KVPart, spec: AttentionSpec, cache: torch.Tensor) -> tuple[Piece, ...]:
    """`cache` has the shape (rows, heads, states of a row, content)."""
    if cache.dim() != 4:
        raise ValueError("not a view of blocks, heads, tokens and content")
    rows, heads, states, content = cache.shape
    if content * cache.element_size() != part.item_bytes:
        raise ValueError(f"content of {content} elements, not of {part.item_bytes} bytes")
    if not current_platform.is_cpu() or _is_latent(spec):
        return (Piece(cache),)
    size = spec.head_size
    # Row by row a head has its keys, one column for each token, and then its values.
    if cache.stride()[2:] != (content, 1) or content != 2 * size:
        raise ValueError("the keys and values of a head are not one run of memory")
    block, head = cache.stride()[:2]
    keys = cache.as_strided((rows, heads, states, size), (block, head, 1, states))
    values = cache.as_strided(
        (rows, heads, states, size),
        (block, head, size, 1),
        cache.storage_offset() + states * size,
    )
    return Piece(keys), Piece(values, size * cache.element_size())


def _state_pieces(
    parts: Sequence[KVPart], spec: MambaSpec, tensors: Sequence[torch.Tensor], tp_size: int
) -> list[Piece]:
    """The tensors have the shape (rows, *shape of the spec), or are vLLM's raw pages."""
    tensors = _states_of(tensors, spec)
    if len(tensors) != len(spec.shapes) or any(
        tuple(tensor.shape[1:]) != tuple(shape)
        for tensor, shape in zip(tensors, spec.shapes, strict=False)
    ):
        raise ValueError(f"not the shapes {spec.shapes}")
    pieces = []
    if len(parts) > 1:
        # (blocks, rows of the convolution, channels)
        convolution = tensors[0] if _rows_axis(spec) == 0 else tensors[0].transpose(1, 2)
        # The first rows are the items; speculation adds others behind them.
        held = [(part, len(part.held_units(tp_size, 0))) for part in parts[:-1]]
        row_bytes = convolution.shape[2] * convolution.element_size()
        rows, at = sum(part.item_bytes * units for part, units in held) // row_bytes, 0
        for part, units in held:
            channels = part.item_bytes // (rows * convolution.element_size())
            share = convolution[:, :rows, at : at + units * channels]
            at += units * channels
            pieces.append(Piece(share.unflatten(2, (units, channels)).transpose(1, 2).unsqueeze(2)))
    return [*pieces, Piece(tensors[-1].unsqueeze(2))]


def _states_of(tensors: Sequence[torch.Tensor], spec: MambaSpec) -> Sequence[torch.Tensor]:
    """The states in vLLM's raw pages of the shape (rows, 1, 1, bytes of the data), in which they
    lie one behind the other (`MambaBase.bind_kv_cache`).
    """
    pages = tensors[0]
    if pages.dtype is not torch.int8 or pages.shape[1:] != (1, 1, spec.real_page_size_bytes):
        return tensors
    states, at = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        states.append(pages[:, 0, 0, at : at + nbytes].view(dtype).unflatten(1, shape))
        at += nbytes
    return states


def _opaque_page(tensor: torch.Tensor, spec: KVCacheSpec, num_blocks: int) -> Piece:
    """A page's data as one run of bytes. vLLM pads the pages of all groups to one size."""
    nbytes = int(spec.real_page_size_bytes)
    if tensor.dim() == 4 and not _is_one_run(tensor):
        raise ValueError("a block is in several pieces; set VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC")
    rows_per_block = tensor.shape[0] // num_blocks
    stride = tensor.stride()[0] * rows_per_block * tensor.element_size()
    # Bytes of the whole storage: the first tensor of a state has not all of its page.
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage.set_(tensor.untyped_storage())
    return Piece(
        storage.as_strided(
            (num_blocks, 1, 1, nbytes),
            (stride, nbytes, nbytes, 1),
            tensor.storage_offset() * tensor.element_size(),
        )
    )


def _is_one_run(cache: torch.Tensor) -> bool:
    """Whether the dimensions inside a block fill one run of bytes, in any order."""
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
