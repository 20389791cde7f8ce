"""vLLM's attention caches as parts: what each kind of layer keeps, and where every unit lies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_specs import (
    BF16,
    FP32,
    HEADS,
    NUM_BLOCKS,
    UINT8,
    attention,
    config,
    latent,
    part,
    parts,
    random_bits,
    views,
)
from page_views import PiecewiseSpace, slab_of_pages
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    HiSparseResidentSpec,
    KVQuantMode,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from kvmanager.layout import KVLayer, KVPart, LayoutError
from kvmanager.vllm_connector import memory_order as module
from kvmanager.vllm_connector.memory_order import views_of
from kvmanager.vllm_connector.slabs import BlockIds, PartView, copy_slab


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping for GPUs, whose backends all keep the content of a head and token together."""
    platform = SimpleNamespace(
        is_cpu=lambda: False, device_type="cuda", get_device_capability=lambda: "9.0"
    )
    monkeypatch.setattr(module, "current_platform", platform)


# ---- the CPU's attention


@pytest.fixture
def vec(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of CPUs without matrix instructions, whichever this machine has."""
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *arguments: "vec")


@pytest.fixture
def written_by(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes keys and values of all slots into a new cache with vLLM's own operation."""

    def write(
        isa: str, block_size: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, PartView]:
        # What vLLM chooses depends on the machine.
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *arguments: isa)
        tokens, heads, head_size = key.shape
        num_blocks = tokens // block_size
        cache = torch.zeros(num_blocks, heads, block_size, 2 * head_size, dtype=key.dtype)
        by_row = cache.view(num_blocks, heads, 2 * block_size, -1)
        keys, values = by_row.chunk(2, dim=2)
        slots = torch.arange(tokens)
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
        spec = attention(heads, block_size=block_size, head_size=head_size, dtype=key.dtype)
        layer = KVLayer("layer", parts(spec, config(total_kv_heads=heads)))
        (view,) = views_of(layer, spec, cache, num_blocks, 1, 0)
        return cache, view

    return write


CPU_CASES = [
    ("vec", 32, 64),
    ("vec", 64, 64),
    ("vec", 96, 128),
    ("vec16", 16, 64),
    ("vec16", 48, 64),
    ("vec16", 32, 80),
    ("vec16", 48, 80),
]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize(("isa", "block_size", "head_size"), CPU_CASES)
@pytest.mark.shows(
    kind="attention of the CPU's backend",
    dtype="float32, float16, bfloat16",
    more="written by vLLM's own operator",
)
def test_keys_and_values_of_the_cpus_attention_are_where_the_view_says(
    written_by: Any, isa: str, block_size: int, head_size: int, dtype: torch.dtype
) -> None:
    key = random_bits(4 * block_size, HEADS, head_size, dtype=dtype)
    value = random_bits(4 * block_size, HEADS, head_size, dtype=dtype, seed=2)
    _, view = written_by(isa, block_size, key, value)
    assert view.units == range(HEADS)
    for piece, expected in zip(view.pieces, (key, value), strict=True):
        found = piece.memory.transpose(1, 2).reshape(expected.shape)
        assert torch.equal(found, expected)


def test_a_cpu_engine_with_other_blocks_gets_what_it_would_have_written(written_by: Any) -> None:
    key, value = random_bits(192, HEADS, 64), random_bits(192, HEADS, 64, seed=2)
    _, sender = written_by("vec", 32, key, value)
    expected, _ = written_by("vec16", 48, key, value)
    found, receiver = written_by("vec16", 48, torch.zeros_like(key), torch.zeros_like(value))
    space = PiecewiseSpace(192 * HEADS * sender.part.item_bytes)
    copy_slab(slab_of_pages(sender, range(6), space, 0), into_space=True)
    copy_slab(slab_of_pages(receiver, range(4), space, 0), into_space=False)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("vec")
def test_a_block_of_the_engine_may_be_several_blocks_of_the_kernel() -> None:
    spec = attention(block_size=64)
    cache = random_bits(2 * NUM_BLOCKS, HEADS, 32, 16)
    (view,) = views(spec, cache, config())
    assert (view.rows_per_block, view.items_per_row) == (2, 32)
    assert BlockIds.of([3, 1]).rows(view.rows_per_block).tolist() == [6, 7, 2, 3]


def test_an_order_of_the_cpu_that_is_not_known_travels_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *arguments: "amx")
    spec = attention(block_size=32)
    found = part(spec, config())
    assert found == KVPart(
        "pages",
        1,
        HEADS * 32 * 32,
        "opaque cpu tp 1 LBHNC default of None None slots of None B amx bfloat16 none",
        32,
    )
    cache = random_bits(NUM_BLOCKS, HEADS, 32, 16)
    (view,) = views(spec, cache, config())
    assert view.items_per_row == 1
    assert torch.equal(
        view.pieces[0].memory.view(NUM_BLOCKS, -1), cache.view(NUM_BLOCKS, -1).view(UINT8)
    )


def test_quantised_caches_of_the_cpu_are_opaque_and_name_their_number_format() -> None:
    spec = attention(block_size=32, dtype=UINT8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    found = {part(spec, config(cache_dtype=name)) for name in ("fp8", "fp8_e4m3", "fp8_e5m2")}
    assert len(found) == 2
    assert all(one.encoding.startswith("opaque cpu tp 1") for one in found)


@pytest.mark.usefixtures("vec")
def test_a_head_that_is_not_one_run_of_the_cpus_memory_is_refused() -> None:
    cache = random_bits(NUM_BLOCKS, 32, HEADS, 16).transpose(1, 2)
    with pytest.raises(LayoutError, match=r"layer\.3: the keys and values of a head are not one"):
        views(attention(block_size=32), cache, config())


# ---- attention on GPUs, and MLA


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_head_major", [True, False])
@pytest.mark.shows(kind="attention of GPU backends", more="heads or tokens first")
def test_on_gpus_heads_and_tokens_may_lie_in_either_order(is_head_major: bool) -> None:
    spec = attention()
    if is_head_major:
        cache = random_bits(NUM_BLOCKS, HEADS, 16, 16)
    else:
        cache = random_bits(NUM_BLOCKS, 16, HEADS, 16).transpose(1, 2)
    (view,) = views(spec, cache, config())
    assert view.part == KVPart("kv", HEADS, 32, "bfloat16")
    space = PiecewiseSpace(16 * HEADS * 32)
    copy_slab(slab_of_pages(view, [4], space, 0), into_space=True)
    assert bytes(space.memory) == bytes(cache[4].contiguous().view(UINT8).numpy())


@pytest.mark.usefixtures("gpu")
def test_head_sizes_of_keys_and_values_may_differ() -> None:
    found = part(attention(head_size=12, head_size_v=8), config())
    assert found.item_bytes == 40


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tp_size", [1, 2, 8])
@pytest.mark.shows(kind="MLA", prefill="TP 1, 2, 8", decode="TP 1, 2, 8", more="sent once")
def test_mla_is_one_unit_that_the_first_rank_sends(tp_size: int) -> None:
    cache = random_bits(NUM_BLOCKS, 1, 16, 24)
    found = [views(latent(), cache, config(tp_size, 128), rank)[0] for rank in range(tp_size)]
    assert {view.part for view in found} == {KVPart("latent", 1, 48, "bfloat16")}
    assert [len(view.sent_units) for view in found] == [1] + [0] * (tp_size - 1)
    assert all(view.units == range(1) for view in found)


def test_mla_on_the_cpu_is_row_by_row() -> None:
    """`CPUMLAImpl.do_kv_cache_update` writes a token's vector into `cache.view(-1, size)[slot]`."""
    cache = random_bits(NUM_BLOCKS, 1, 16, 24)
    (view,) = views(latent(), cache, config())
    (piece,) = view.pieces
    assert torch.equal(piece.memory.reshape(-1, 24), cache.view(-1, 24))


@pytest.mark.usefixtures("gpu")
def test_compressed_tokens_are_one_item() -> None:
    found = part(latent(tokens_per_state=4), config())
    assert found.tokens_per_item == 4


@pytest.mark.usefixtures("gpu")
@pytest.mark.shows(
    kind="quantised attention of GPU backends",
    dtype="FP8",
    more="scales beside each head and token",
)
def test_quantised_heads_and_tokens_are_items_where_their_scales_are_with_them() -> None:
    spec = attention(dtype=UINT8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    assert part(spec, config(cache_dtype="fp8")).encoding == "fp8_per_tensor fp8_e4m3"
    assert part(spec, config(cache_dtype="fp8_e5m2")).encoding == "fp8_per_tensor fp8_e5m2"
    sparse = latent(
        dtype=UINT8,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )
    expected = KVPart("latent", 1, 656, "fp8_per_tensor fp8_ds_mla")
    assert part(sparse, config(8)) == expected


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "spec",
    [
        latent(head_size=132, dtype=UINT8, cache_role=SparseCacheRole.INDEXER),
        latent(dtype=UINT8),
        latent(model_version="deepseek_v4", dtype=UINT8, state_content_bytes=584),
        SlidingWindowMLASpec(
            block_size=16,
            num_kv_heads=1,
            head_size=24,
            dtype=BF16,
            max_tp_shards=1,
            sliding_window=32,
            model_version="deepseek_v4",
        ),
        latent(dtype=UINT8, kv_quant_mode=KVQuantMode.NVFP4_DS_MLA, state_content_bytes=352),
    ],
)
@pytest.mark.shows(
    kind="sparse attention's indexers, DeepSeek V4", more="whole pages, between equal blocks"
)
def test_pages_that_keep_scales_apart_travel_whole_and_once(spec: AttentionSpec) -> None:
    """Copies of one page on all ranks are sent once, whatever the number of ranks."""
    alone, many = part(spec, config()), part(spec, config(8, 128))
    assert alone == many
    assert alone.encoding.startswith("opaque cuda LBHNC")
    assert (alone.num_units, alone.tokens_per_item) == (1, 16)
    assert alone.item_bytes == spec.real_page_size_bytes


@pytest.mark.usefixtures("gpu")
def test_pages_that_keep_the_keys_of_all_heads_apart_are_only_equal_for_equal_engines() -> None:
    spec = attention(2, num_head_slots=2, state_content_bytes=32)
    alone = part(spec, config())
    assert alone.encoding == "opaque cuda tp 1 LBHNC default of 9.0 2 slots of 32 B bfloat16 none"
    others = [
        part(spec, config(2, 4)),
        part(spec, config(), "LBNHC"),
        part(spec, config(backend=AttentionBackendEnum.ROCM_ATTN)),
        part(attention(2, num_head_slots=2, state_content_bytes=32, block_size=32), config()),
    ]
    assert len({alone, *others}) == 5


@pytest.mark.usefixtures("gpu")
def test_a_page_in_several_pieces_is_refused_with_the_way_out() -> None:
    spec = attention(2, num_head_slots=2, state_content_bytes=32)
    cache = random_bits(2, NUM_BLOCKS, 16, 16).transpose(0, 1)
    with pytest.raises(LayoutError, match="VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC"):
        views(spec, cache, config())


@pytest.mark.usefixtures("gpu")
def test_tensors_that_are_not_the_specs_are_refused_with_their_shapes() -> None:
    with pytest.raises(LayoutError, match="not a view of blocks, heads, tokens and content"):
        views(attention(), random_bits(NUM_BLOCKS, 16, 16), config())
    with pytest.raises(
        LayoutError, match=r"content of 24 elements, not of 32 bytes.*\(6, 2, 16, 24"
    ):
        views(attention(), random_bits(NUM_BLOCKS, HEADS, 16, 24), config())
    with pytest.raises(LayoutError, match="7 rows for 6 blocks"):
        views(attention(), random_bits(NUM_BLOCKS + 1, HEADS, 16, 16), config())
    with pytest.raises(LayoutError, match=r"3 units, not range\(0, 2\)"):
        views(attention(), random_bits(NUM_BLOCKS, 3, 16, 16), config())


def test_a_spec_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="HiSparseResidentSpec layers cannot be transferred"):
        parts(HiSparseResidentSpec(block_size=16, page_size=64), config())


# ---- heads of attention on several ranks


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads", "held", "sent"),
    [
        (1, 2, [[0, 1]], [[0, 1]]),
        (2, 1, [[0], [1]], [[0], [1]]),
        (4, 1, [[0], [0], [1], [1]], [[0], [], [1], []]),
    ],
)
def test_ranks_divide_heads_or_have_copies_of_them(
    tp_size: int, num_kv_heads: int, held: list[list[int]], sent: list[list[int]]
) -> None:
    spec, cache = attention(num_kv_heads), random_bits(NUM_BLOCKS, num_kv_heads, 16, 16)
    found = [views(spec, cache, config(tp_size, 2), rank)[0] for rank in range(tp_size)]
    assert {view.part for view in found} == {KVPart("kv", 2, 32, "bfloat16")}
    assert [list(view.units) for view in found] == held
    assert [list(view.sent_units) for view in found] == sent


@pytest.mark.usefixtures("gpu")
def test_the_number_of_shards_counts_where_vllm_says_it() -> None:
    assert part(attention(1, max_tp_shards=2), config(4, 99)).num_units == 2
    assert part(attention(2, max_tp_shards=2), config(1, 99)).num_units == 2
    assert part(attention(4, max_tp_shards=8), config(2, 99)).num_units == 8


@pytest.mark.usefixtures("gpu")
def test_layers_may_have_other_numbers_of_heads_than_the_model() -> None:
    """MiMo-V2: 4 heads in full attention, 8 in windows."""
    text = {"num_key_value_heads": 4, "swa_num_key_value_heads": 8}

    def window(num_kv_heads: int) -> SlidingWindowSpec:
        return SlidingWindowSpec(
            block_size=16, num_kv_heads=num_kv_heads, head_size=8, dtype=BF16, sliding_window=64
        )

    assert part(window(4), config(2, 4, text=text)).num_units == 8
    assert part(window(1), config(8, 4, text=text)).num_units == 8
    assert part(attention(1), config(8, 4, text=text)).num_units == 4


@pytest.mark.usefixtures("gpu")
def test_where_vllm_does_not_say_which_ranks_have_copies_pages_are_opaque() -> None:
    """A rank that is taken for a copy would send nothing, and its heads be lost."""
    text = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "per_layer_kv_heads": [4, 2]}
    found = part(attention(1), config(4, 4, text=text))
    assert found.encoding.startswith("opaque cuda tp 4")
    assert part(attention(1), config(4, 8)).encoding.startswith("opaque cuda tp 4")
