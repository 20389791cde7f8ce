"""vLLM's recurrent states as parts: the shares of the convolution, and the heads of the state."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_specs import BF16, FP32, NUM_BLOCKS, UINT8, config, part, parts, random_bits, views
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    KVCacheLayout,
    KVCacheTensor,
    MambaSpec,
    create_kv_cache_views,
)

from kvmanager.layout import KVPart, LayoutError
from kvmanager.vllm_connector.slabs import PartView

GDN = MambaAttentionBackendEnum.GDN_ATTN
MAMBA2 = MambaAttentionBackendEnum.MAMBA2


@pytest.fixture(params=["SD", "DS"])
def conv_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    order: str = request.param
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: order == "DS")
    return order


ROWS = 3


def state_spec(
    kind: MambaAttentionBackendEnum,
    channels: int,
    state: tuple[int, ...],
    order: str,
    **changes: Any,
) -> MambaSpec:
    convolution = (channels, ROWS) if order == "DS" else (ROWS, channels)
    return MambaSpec(
        block_size=16,
        shapes=(convolution, state),
        dtypes=(BF16, FP32),
        mamba_type=kind,
        **changes,
    )


def padded_state(spec: MambaSpec) -> list[torch.Tensor]:
    """Both tensors of a state in pages with padding, as vLLM makes them."""
    sizes = [torch.Size(shape).numel() for shape in spec.shapes]
    first = sizes[0] * 2
    page = first + sizes[1] * 4 + 8
    raw = torch.randint(
        0, 100, (NUM_BLOCKS * page,), dtype=UINT8, generator=torch.Generator().manual_seed(3)
    )
    found = []
    for dtype, shape, start in zip(spec.dtypes, spec.shapes, (0, first), strict=True):
        rows = raw.view(NUM_BLOCKS, page)[:, start:]
        size = torch.Size(shape).numel()
        found.append(rows.view(dtype)[:, :size].unflatten(1, shape))
    return found


def channels_of(convolution: torch.Tensor, order: str) -> torch.Tensor:
    """(blocks, channels, rows of the convolution)."""
    return convolution if order == "DS" else convolution.transpose(1, 2)


def check_states(
    found: tuple[PartView, ...], tensors: list[torch.Tensor], order: str, expected: list[Any]
) -> None:
    """`expected`: name, held units and channels of a unit of each share of the convolution."""
    channels, at = channels_of(tensors[0], order), 0
    for view, (name, units, size) in zip(found[:-1], expected, strict=True):
        assert (view.part.name, list(view.units)) == (name, units)
        (piece,) = view.pieces
        for number in range(len(units)):
            share = channels[:, at : at + size]
            assert torch.equal(piece.memory[:, number, 0], share.transpose(1, 2))
            at += size
    assert at == channels.shape[1]
    (piece,) = found[-1].pieces
    assert torch.equal(piece.memory[:, :, 0], tensors[1])


@pytest.mark.shows(kind="gated delta net", more="by heads, both orders of the convolution")
def test_a_gdn_state_is_queries_keys_and_values_by_head(conv_order: str) -> None:
    """2 key heads of size 4 and 4 value heads of size 6 on one rank, of 2."""
    spec = state_spec(GDN, 2 * 2 * 4 + 4 * 6, (4, 6, 4), conv_order)
    tensors = padded_state(spec)
    found = views(spec, tensors, config(2), 1)
    assert [view.part for view in found] == [
        KVPart("query", 4, ROWS * 4 * 2, "bfloat16 x 3 x 4", 0),
        KVPart("key", 4, ROWS * 4 * 2, "bfloat16 x 3 x 4", 0),
        KVPart("value", 8, ROWS * 6 * 2, "bfloat16 x 3 x 6", 0),
        KVPart("state", 8, 6 * 4 * 4, "float32 x 6 x 4", 0),
    ]
    expected = [("query", [2, 3], 4), ("key", [2, 3], 4), ("value", [4, 5, 6, 7], 6)]
    check_states(found, tensors, conv_order, expected)
    alone = state_spec(GDN, 2 * (2 * 2 * 4 + 4 * 6), (8, 6, 4), conv_order)
    assert parts(alone, config(1)) == tuple(view.part for view in found)


def test_states_are_found_in_the_raw_pages_that_vllm_registers(conv_order: str) -> None:
    """Whatever the padding of pages; vLLM's own layers find their states in the same way."""
    spec = state_spec(GDN, 2 * 2 * 4 + 4 * 6, (4, 6, 4), conv_order)
    spec = dataclasses.replace(spec, page_size_padded=spec.real_page_size_bytes + 24)
    stride = spec.page_size_bytes
    place = KVCacheTensor(
        size=NUM_BLOCKS * stride, layers=["layer.3"], layer_stride=stride, block_stride=stride
    )
    generator = torch.Generator().manual_seed(4)
    raw = torch.randint(0, 100, (place.size,), dtype=torch.int8, generator=generator)
    (cache,) = create_kv_cache_views(raw, spec, NUM_BLOCKS, KVCacheLayout.LBHNC, place)
    layer: Any = SimpleNamespace(
        get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes
    )
    MambaBase.bind_kv_cache(layer, cache)
    expected = [("query", [2, 3], 4), ("key", [2, 3], 4), ("value", [4, 5, 6, 7], 6)]
    check_states(views(spec, cache, config(2), 1), list(layer.kv_cache), conv_order, expected)


@pytest.mark.parametrize("num_guesses", [1, 3])
def test_the_rows_of_guessed_tokens_are_no_part_of_a_state(
    conv_order: str, num_guesses: int
) -> None:
    """vLLM's convolutions keep the state of a prompt in the first rows."""
    channels, state = 2 * 2 * 4 + 4 * 6, (4, 6, 4)
    shapes = mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
        2, 4, 8, 4, 6, 4, num_guesses
    )
    wide = dataclasses.replace(
        state_spec(GDN, channels, state, conv_order),
        shapes=shapes,
        num_speculative_blocks=num_guesses,
    )
    plain = state_spec(GDN, channels, state, conv_order)
    assert parts(wide, config(2)) == parts(plain, config(2))
    tensors = padded_state(wide)
    found = views(wide, tensors, config(2), 1)
    first = tensors[0][:, :, :ROWS] if conv_order == "DS" else tensors[0][:, :ROWS]
    expected = [("query", [2, 3], 4), ("key", [2, 3], 4), ("value", [4, 5, 6, 7], 6)]
    check_states(found, [first, tensors[1]], conv_order, expected)


def test_vllm_gives_gdn_states_these_shapes(conv_order: str) -> None:
    shapes = mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(2, 4, 8, 4, 6, 4)
    assert shapes == state_spec(GDN, 2 * 2 * 4 + 4 * 6, (4, 6, 4), conv_order).shapes


@pytest.mark.shows(kind="Mamba 2", more="by heads and groups")
def test_a_mamba_2_state_is_values_and_groups(conv_order: str) -> None:
    """4 heads of size 6 and 2 groups of size 8 on one rank, of 2."""
    spec = state_spec(MAMBA2, 4 * 6 + 2 * 2 * 8, (4, 6, 8), conv_order)
    tensors = padded_state(spec)
    found = views(spec, tensors, config(2), 1)
    assert [view.part.num_units for view in found] == [8, 4, 4, 8]
    expected = [("value", [4, 5, 6, 7], 6), ("b", [2, 3], 8), ("c", [2, 3], 8)]
    check_states(found, tensors, conv_order, expected)


@pytest.mark.parametrize("name", ["n_groups", "mamba_n_groups", "mamba_ngroups"])
def test_the_only_group_of_mamba_2_is_sent_once(conv_order: str, name: str) -> None:
    spec = state_spec(MAMBA2, 4 * 6 + 2 * 8, (4, 6, 8), conv_order)
    tensors = padded_state(spec)
    found = views(spec, tensors, config(2, text={name: 1}), 1)
    assert [view.part.num_units for view in found] == [8, 1, 1, 8]
    assert [len(view.sent_units) for view in found] == [4, 0, 0, 4]
    check_states(
        found, tensors, conv_order, [("value", [4, 5, 6, 7], 6), ("b", [0], 8), ("c", [0], 8)]
    )
    alone = state_spec(MAMBA2, 8 * 6 + 2 * 8, (8, 6, 8), conv_order)
    assert parts(alone, config(1)) == tuple(view.part for view in found)


def test_vllm_gives_mamba_2_states_these_shapes(conv_order: str) -> None:
    of = mamba_utils.MambaStateShapeCalculator.mamba2_state_shape
    shapes = of(2, 48, n_groups=4, num_heads=8, head_dim=6, state_size=8, conv_kernel=4)
    assert shapes == state_spec(MAMBA2, 4 * 6 + 2 * 2 * 8, (4, 6, 8), conv_order).shapes
    shapes = of(2, 48, n_groups=1, num_heads=8, head_dim=6, state_size=8, conv_kernel=4)
    assert shapes == state_spec(MAMBA2, 4 * 6 + 2 * 8, (4, 6, 8), conv_order).shapes


def test_every_rank_may_have_the_only_one_of_its_groups(conv_order: str) -> None:
    spec = state_spec(MAMBA2, 4 * 6 + 2 * 8, (4, 6, 8), conv_order)
    found = parts(spec, config(2, text={"n_groups": 2}))
    assert [one.num_units for one in found] == [8, 2, 2, 8]
    assert parts(spec, config(2))[0].encoding.startswith("opaque cpu tp 2"), "1 or 2 groups"


@pytest.mark.shows(kind="lightning attention", more="by heads")
def test_a_linear_attention_state_is_divided_by_heads() -> None:
    spec = MambaSpec(
        block_size=16,
        shapes=((4, 8, 8),),
        dtypes=(FP32,),
        mamba_type=MambaAttentionBackendEnum.LINEAR,
    )
    (view,) = views(spec, [random_bits(NUM_BLOCKS, 4, 8, 8, dtype=FP32)], config(2), 1)
    assert view.part == KVPart("state", 8, 256, "float32 x 8 x 8", 0)
    assert view.units == range(4, 8)


@pytest.mark.parametrize(
    "kind", [MambaAttentionBackendEnum.MAMBA1, MambaAttentionBackendEnum.SHORT_CONV]
)
@pytest.mark.shows(
    kind="Mamba 1, short convolutions",
    more="whole pages, between engines that are cut the same",
)
def test_states_of_other_kinds_are_only_equal_for_equal_engines(
    kind: MambaAttentionBackendEnum,
) -> None:
    one = state_spec(kind, 40, (5, 8), "SD")
    found = part(one, config(2))
    assert found == KVPart(
        "state", 2, 3 * 40 * 2 + 40 * 4, "opaque cpu tp 2 bfloat16 (3, 40) float32 (5, 8)", 0
    )
    others = [part(one, config(1)), part(state_spec(kind, 40, (5, 8), "DS"), config(2))]
    assert len({found, *others}) == 3


def test_a_state_of_another_kind_is_all_of_its_page_but_the_padding() -> None:
    spec = state_spec(MambaAttentionBackendEnum.MAMBA1, 40, (5, 8), "SD")
    tensors = padded_state(spec)
    (view,) = views(spec, tensors, config(2), 1)
    assert (view.units, view.sent_units) == (range(1, 2), range(1, 2))
    found = view.pieces[0].memory.view(NUM_BLOCKS, -1)
    whole = [tensor.flatten(1).contiguous().view(UINT8) for tensor in tensors]
    assert torch.equal(found, torch.cat(whole, 1))


def test_a_state_that_all_ranks_have_is_sent_once() -> None:
    spec = state_spec(MambaAttentionBackendEnum.SHORT_CONV, 40, (5, 8), "SD", tp_replicated=True)
    found = part(spec, config(4))
    assert found == part(spec, config(1))
    assert found.num_units == 1


def test_tensors_of_another_state_are_refused(conv_order: str) -> None:
    spec = state_spec(GDN, 2 * 2 * 4 + 4 * 6, (4, 6, 4), conv_order)
    with pytest.raises(LayoutError, match=r"layer\.3: not the shapes \(\("):
        views(spec, padded_state(spec)[:1], config(2))
