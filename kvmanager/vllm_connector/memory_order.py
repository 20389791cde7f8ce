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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec

from kvmanager.layout import KVLayer, KVPart, LayoutError
from kvmanager.vllm_connector.slabs import PartView, Piece

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COLUMN_KEYS = ("vec", "vec16")
"""Instruction sets of vLLM's CPU attention that keep a block's keys as [head size, block size]."""
_HEADS_FIELD = "num_key_value_heads"
"""In the names of the fields of a model's configuration that give numbers of KV heads."""
_GROUP_FIELDS = ("n_groups", "mamba_n_groups")
"""Names of the number of B and C groups in the configurations of Mamba 2 models."""


def parts_of(spec: KVCacheSpec, config: VllmConfig) -> tuple[KVPart, ...]:
    """The parts of a layer with this spec. Raises `LayoutError` for specs that are not known."""
    match spec:
        case MambaSpec():
            return _state_parts(spec, config)
        case AttentionSpec():
            return (_attention_part(spec, config),)
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


_OPAQUE = "opaque"


def _attention_part(spec: AttentionSpec, config: VllmConfig) -> KVPart:
    encoding = _attention_encoding(spec)
    num_units = _num_kv_heads(spec, config)
    tokens_per_item = spec.tokens_per_state
    is_known = encoding is not None and num_units is not None
    if not is_known or tokens_per_item < 1 or spec.num_heads != spec.num_kv_heads:
        return _opaque_part(spec, config)
    name = "latent" if isinstance(spec, MLAAttentionSpec) else "kv"
    return KVPart(name, num_units, spec.state_content_size_bytes, encoding, int(tokens_per_item))


def _attention_encoding(spec: AttentionSpec) -> str | None:
    """How an item of one head and token is to be read; None: its bytes are not together."""
    dtype = str(spec.dtype).removeprefix("torch.")
    cache_dtype = getattr(spec, "cache_dtype_str", None)
    if spec.kv_quant_mode:
        quantised = f"{spec.kv_quant_mode.name.lower()} {cache_dtype or dtype}"
        # The CPU's kernels order quantised keys in a way of their own.
        return None if current_platform.is_cpu() else quantised
    if isinstance(spec, MLAAttentionSpec):
        return dtype if cache_dtype in (None, "auto", dtype) else f"{dtype} {cache_dtype}"
    if current_platform.is_cpu() and _cpu_order(spec) not in _COLUMN_KEYS:
        return None
    return dtype


def _cpu_order(spec: AttentionSpec) -> str:
    """vLLM's name for the order that its CPU attention uses for this layer."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(spec.dtype, spec.block_size, spec.head_size)


def _num_kv_heads(spec: AttentionSpec, config: VllmConfig) -> int | None:
    """The KV heads over all ranks, copies counted once; None: vLLM does not say."""
    tp_size = config.parallel_config.tensor_parallel_size
    if tp_size == 1 or spec.max_tp_shards is not None:
        return spec.num_kv_heads * min(tp_size, spec.max_tp_shards or 1)
    if spec.num_kv_heads > 1:
        return spec.num_kv_heads * tp_size  # a rank has copies only where it has one head
    # Layers of one model may have different numbers of heads.
    text = config.model_config.hf_text_config.to_dict()
    totals = {int(value) for name, value in text.items() if _HEADS_FIELD in name and value}
    fitting = {total for total in totals if tp_size % total == 0}
    return fitting.pop() if len(fitting) == 1 else None


def _opaque_part(spec: KVCacheSpec, config: VllmConfig) -> KVPart:
    """Whole pages, which only engines that are cut in the same way can exchange."""
    tp_size = config.parallel_config.tensor_parallel_size
    how = [_OPAQUE, current_platform.device_type, f"tp {tp_size}"]
    if isinstance(spec, MambaSpec):
        dtypes = ",".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        return KVPart("state", tp_size, spec.real_page_size_bytes, " ".join([*how, dtypes]), 0)
    assert isinstance(spec, AttentionSpec)
    if current_platform.is_cpu():
        how.append(_cpu_order(spec))
    how += [str(spec.dtype).removeprefix("torch."), spec.kv_quant_mode.name.lower()]
    return KVPart("pages", tp_size, spec.real_page_size_bytes, " ".join(how), spec.block_size)


def _state_parts(spec: MambaSpec, config: VllmConfig) -> tuple[KVPart, ...]:
    tp_size = 1 if spec.tp_replicated else config.parallel_config.tensor_parallel_size
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    sizes = [dtype.itemsize for dtype in spec.dtypes]
    split = _convolution(spec, config)
    if split is not None:
        rows = _convolution_rows(spec)
        parts = [
            KVPart(name, total, rows * channels * sizes[0], f"{dtypes[0]} x {rows} x {channels}", 0)
            for name, total, _, channels in split
        ]
        heads, *inner = spec.shapes[1]
        shape = " x ".join(map(str, inner))
        state = KVPart(
            "state", heads * tp_size, math.prod(inner) * sizes[1], f"{dtypes[1]} x {shape}", 0
        )
        return (*parts, state)
    if spec.mamba_type is MambaAttentionBackendEnum.LINEAR and len(spec.shapes) == 1:
        heads, *inner = spec.shapes[0]
        shape = " x ".join(map(str, inner))
        return (
            KVPart(
                "state", heads * tp_size, math.prod(inner) * sizes[0], f"{dtypes[0]} x {shape}", 0
            ),
        )
    return (_opaque_part(spec, config),)


def _convolution_dim(spec: MambaSpec) -> int:
    """Channels of the convolution on one rank, whichever of its two dimensions comes first."""
    return spec.shapes[0][1 - _rows_axis(spec)]


def _convolution_rows(spec: MambaSpec) -> int:
    return spec.shapes[0][_rows_axis(spec)]


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
    if not is_known or len(spec.shapes) != 2 or len(spec.shapes[1]) != 3 or spec.tp_replicated:
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
    total = _num_groups(config)
    if total is None or groups != max(1, total // tp_size):
        return None
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
    if not current_platform.is_cpu() or isinstance(spec, MLAAttentionSpec):
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
    """The tensors have the shape (rows, *shape of the spec)."""
    if len(tensors) != len(spec.shapes) or any(
        tuple(tensor.shape[1:]) != tuple(shape)
        for tensor, shape in zip(tensors, spec.shapes, strict=False)
    ):
        raise ValueError(f"not the shapes {spec.shapes}")
    pieces = []
    if len(parts) > 1:
        # (blocks, rows of the convolution, channels)
        convolution = tensors[0] if _rows_axis(spec) == 0 else tensors[0].transpose(1, 2)
        rows, at = convolution.shape[1], 0
        for part in parts[:-1]:
            units = len(part.held_units(tp_size, 0))
            channels = part.item_bytes // (rows * convolution.element_size())
            share = convolution[:, :, at : at + units * channels]
            at += units * channels
            pieces.append(Piece(share.unflatten(2, (units, channels)).transpose(1, 2).unsqueeze(2)))
    return [*pieces, Piece(tensors[-1].unsqueeze(2))]


def _opaque_page(tensor: torch.Tensor, spec: KVCacheSpec, num_blocks: int) -> Piece:
    """A page's data as one run of bytes. vLLM pads the pages of all groups to one size."""
    nbytes = int(spec.real_page_size_bytes)  # type: ignore[attr-defined]
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
