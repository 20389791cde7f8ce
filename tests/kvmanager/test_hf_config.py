"""KVCache sizes from config.json: the public models' numbers, sharing out, and unclear files.

The configs here hold only the fields that matter, with the values of the public models.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.config_files.units import format_tokens, parse_tokens
from kvmanager.hf_config import (
    ConfigError,
    LayerKv,
    ModelKv,
    differences,
    embedding_token_bytes,
    read_model_kv,
)
from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart

Config = dict[str, Any]

FULL, MLA, WINDOW, RECURRENT = KVKind.FULL, KVKind.MLA, KVKind.WINDOW, KVKind.RECURRENT
BF16: Config = {"dtype": "bfloat16"}

QWEN3_NEXT_80B: Config = {
    **BF16,
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
QWEN35_27B: Config = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        **QWEN3_NEXT_80B,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "layer_types": ["linear_attention"] * 3 * 16 + ["full_attention"] * 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "mamba_ssm_dtype": "float32",
    },
}
MIMO_V2_FLASH: Config = {
    "torch_dtype": "bfloat16",
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hybrid_layer_pattern": [0 if i == 0 or i % 6 == 5 else 1 for i in range(48)],
    "sliding_window_size": 128,
    **{f"{prefix}num_attention_heads": 64 for prefix in ("", "swa_")},
    **{f"{prefix}head_dim": 192 for prefix in ("", "swa_")},
    **{f"{prefix}v_head_dim": 128 for prefix in ("", "swa_")},
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "attention_chunk_size": 128,
}
GPT_OSS_120B: Config = {
    **BF16,
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
GEMMA3_27B: Config = {
    **BF16,
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
}
RING_25_1T: Config = {
    **BF16,
    "model_type": "bailing_hybrid",
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "num_hidden_layers": 80,
    "layer_group_size": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
RING_MINI_LINEAR: Config = {
    **BF16,
    "model_type": "bailing_moe_linear",
    "architectures": ["BailingMoeLinearV2ForCausalLM"],
    "num_hidden_layers": 20,
    "layer_group_size": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
NEMOTRON_3_NANO: Config = {
    **BF16,
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*" + "EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
MINIMAX_M2: Config = {
    **BF16,
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "attn_type_list": [1] * 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 3072,
}
MINIMAX_TEXT_01: Config = {
    **MINIMAX_M2,
    "model_type": "minimax_text_01",
    "architectures": ["MiniMaxText01ForCausalLM"],
    "num_hidden_layers": 80,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "num_attention_heads": 64,
}
QWEN3_235B: Config = {
    **BF16,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 94,
}
LLAMA_31_8B: Config = {
    **BF16,
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
DEEPSEEK_V3: Config = {
    **BF16,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def kimi_linear(full: list[int], num_layers: int, num_heads: int = 32) -> Config:
    """Kimi Linear with these full-attention layers, counted from 1."""
    return {
        **BF16,
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, num_layers + 1) if layer not in full],
            "num_heads": num_heads,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }


KIMI_LINEAR_48B = kimi_linear([4, 8, 12, 16, 20, 24, 27], 27)

GDN_STATE_BYTES = (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 2
GDN_27B_STATE_BYTES = (2 * 16 * 128 + 48 * 128) * 3 * 2 + 48 * 128 * 128 * 4
KDA_STATE_BYTES = 3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4
MAMBA2_STATE_BYTES = (64 * 64 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4


@pytest.mark.parametrize(
    ("config", "layers", "bytes_per_token", "fixed_bytes"),
    [
        (QWEN3_NEXT_80B, {FULL: 12, RECURRENT: 36}, 12 * 2048, 36 * GDN_STATE_BYTES),
        (QWEN35_27B, {FULL: 16, RECURRENT: 48}, 16 * 4096, 48 * GDN_27B_STATE_BYTES),
        (KIMI_LINEAR_48B, {MLA: 7, RECURRENT: 20}, 7 * 1152, 20 * KDA_STATE_BYTES),
        (MIMO_V2_FLASH, {FULL: 9, WINDOW: 39}, 9 * 4 * 320 * 2, 0),
        (GPT_OSS_120B, {FULL: 18, WINDOW: 18}, 18 * 2048, 0),
        (GEMMA3_27B, {FULL: 10, WINDOW: 52}, 10 * 8192, 0),
        (RING_25_1T, {MLA: 10, RECURRENT: 70}, 10 * 1152, 70 * 64 * 128 * 128 * 2),
        (RING_MINI_LINEAR, {FULL: 4, RECURRENT: 16}, 4 * 2048, 16 * 16 * 128 * 128 * 2),
        (NEMOTRON_3_NANO, {FULL: 6, RECURRENT: 23}, 6 * 1024, 23 * MAMBA2_STATE_BYTES),
        (MINIMAX_M2, {FULL: 62}, 62 * 4096, 0),
        (MINIMAX_TEXT_01, {FULL: 10, RECURRENT: 70}, 10 * 4096, 70 * 64 * 128 * 128 * 2),
        (QWEN3_235B, {FULL: 94}, 94 * 2048, 0),
        (LLAMA_31_8B, {FULL: 32}, 32 * 4096, 0),
        (DEEPSEEK_V3, {MLA: 61}, 61 * 1152, 0),
    ],
)
def test_public_models(
    config: Config, layers: dict[KVKind, int], bytes_per_token: int, fixed_bytes: int
) -> None:
    model = read_model_kv(config)
    assert model.num_layers_by_kind() == layers
    assert model.bytes_per_token == model.rank_bytes_per_token == bytes_per_token
    assert model.fixed_bytes == model.rank_fixed_bytes == fixed_bytes


def test_the_papers_model_has_17280_bytes_a_token() -> None:
    """An internal 1T model of Kimi Linear's kind: 15 MLA layers x 576 values x 2 bytes."""
    model = read_model_kv(kimi_linear(list(range(4, 61, 4)), 60))
    assert model.num_layers_by_kind() == {MLA: 15, RECURRENT: 45}
    assert model.bytes_per_token == 17_280
    assert model.bytes_for(131_072) - model.bytes_for(1_024) == 17_280 * (131_072 - 1_024)


def test_kimi_counts_layers_from_one() -> None:
    kinds = {layer.index: layer.kind for layer in read_model_kv(KIMI_LINEAR_48B).layers}
    assert [index for index, kind in kinds.items() if kind is MLA] == [3, 7, 11, 15, 19, 23, 26]


def test_windows_stop_growing() -> None:
    model = read_model_kv(MIMO_V2_FLASH)
    window_bytes_per_token = 39 * 8 * (192 + 128) * 2
    assert model.bytes_by_kind(100)[WINDOW] == 100 * window_bytes_per_token
    assert model.bytes_by_kind(128)[WINDOW] == model.bytes_by_kind(9_999)[WINDOW]
    assert model.bytes_for(9_999) == 9_999 * model.bytes_per_token + 128 * window_bytes_per_token
    assert {layer.window_tokens for layer in model.layers if layer.kind is WINDOW} == {128}


def test_layers_without_a_cache_are_left_out() -> None:
    model = read_model_kv(NEMOTRON_3_NANO)
    assert (model.num_layers, len(model.layers)) == (52, 29)
    assert [layer.index for layer in model.layers if layer.kind is FULL] == [5, 12, 19, 26, 33, 42]


@given(st.integers(0, 200_000))
def test_kinds_add_up_to_the_whole(length: int) -> None:
    for config in (MIMO_V2_FLASH, KIMI_LINEAR_48B, QWEN3_NEXT_80B):
        model = read_model_kv(config)
        assert sum(model.bytes_by_kind(length).values()) == model.bytes_for(length)


def test_kinds_come_from_the_file_not_from_a_ratio() -> None:
    listed = QWEN3_NEXT_80B | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "full_attention", "linear_attention", "full_attention"],
    }
    assert read_model_kv(listed).num_layers_by_kind() == {FULL: 3, RECURRENT: 1}
    interval = QWEN3_NEXT_80B | {"num_hidden_layers": 10, "full_attention_interval": 3}
    assert read_model_kv(interval).num_layers_by_kind() == {FULL: 3, RECURRENT: 7}
    tail = RING_MINI_LINEAR | {"num_hidden_layers": 22}
    assert [layer.kind for layer in read_model_kv(tail).layers[-3:]] == [FULL] * 3


def test_defaults_of_config_classes_are_told() -> None:
    assert read_model_kv(GEMMA3_27B).assumed == ("text_config.sliding_window_pattern = 6",)
    told = GEMMA3_27B["text_config"] | {"sliding_window_pattern": 2}
    model = read_model_kv(GEMMA3_27B | {"text_config": told})
    assert (model.assumed, model.num_layers_by_kind()) == ((), {FULL: 31, WINDOW: 31})
    assert "mamba_ssm_cache_dtype = float32" in read_model_kv(NEMOTRON_3_NANO).assumed


# --- dtypes ---------------------------------------------------------------------------------------


def test_dtypes_of_attention_layers() -> None:
    sizes = {
        dtype: read_model_kv(LLAMA_31_8B, dtype=dtype).bytes_per_token
        for dtype in ("auto", "bfloat16", "float16", "float32", "fp8")
    }
    two = 32 * 4096
    assert sizes == {
        "auto": two,
        "bfloat16": two,
        "float16": two,
        "float32": 2 * two,
        "fp8": two // 2,
    }


def test_fp8_leaves_recurrent_states_alone() -> None:
    model, fp8 = read_model_kv(QWEN35_27B), read_model_kv(QWEN35_27B, dtype="fp8")
    assert fp8.fixed_bytes == model.fixed_bytes
    assert 2 * fp8.bytes_per_token == model.bytes_per_token
    assert (fp8.dtype, fp8.kv_dtype) == ("bfloat16", "fp8")


def test_dtypes_of_recurrent_states() -> None:
    """vLLM's two options: all of it, and the state without the convolution's."""
    conv = (2 * 16 * 128 + 32 * 128) * 3
    state = 32 * 128 * 128

    def one_layer(**options: str) -> int:
        return read_model_kv(QWEN3_NEXT_80B, **options).layers[0].fixed_bytes

    assert one_layer(mamba_cache_dtype="float32") == 4 * (conv + state)
    assert one_layer(mamba_ssm_cache_dtype="float32") == 2 * conv + 4 * state
    assert one_layer(dtype="float32", mamba_ssm_cache_dtype="bfloat16") == 4 * conv + 2 * state


def test_kda_keeps_float32_unless_the_variant_heeds_the_option() -> None:
    half = {"mamba_ssm_cache_dtype": "bfloat16"}
    assert read_model_kv(KIMI_LINEAR_48B, **half) == read_model_kv(KIMI_LINEAR_48B)
    linear = KIMI_LINEAR_48B["linear_attn_config"] | {"use_full_rank_gate": True}
    full_rank = KIMI_LINEAR_48B | {"linear_attn_config": linear}
    saved = read_model_kv(full_rank).fixed_bytes - read_model_kv(full_rank, **half).fixed_bytes
    assert saved == 20 * 32 * 128 * 128 * 2


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
)
def test_a_checkpoint_with_an_fp8_kv_cache(quantization: Config) -> None:
    config = LLAMA_31_8B | {"quantization_config": quantization}
    assert read_model_kv(config).bytes_per_token == 32 * 2048
    assert read_model_kv(config, dtype="bfloat16").bytes_per_token == 32 * 4096


# --- tensor parallelism ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp_size", "rank_bytes"), [(1, 4096), (4, 1024), (8, 512), (16, 512), (32, 512)]
)
def test_kv_heads_are_replicated_when_there_are_too_few_and_sent_once(
    tp_size: int, rank_bytes: int
) -> None:
    model = read_model_kv(LLAMA_31_8B, tp_size=tp_size)
    assert model.rank_bytes_per_token == 32 * rank_bytes
    assert model.bytes_per_token == 32 * 4096


@pytest.mark.parametrize(
    "config", [KIMI_LINEAR_48B, QWEN3_NEXT_80B, GPT_OSS_120B, NEMOTRON_3_NANO, DEEPSEEK_V3]
)
def test_a_transfer_has_the_same_bytes_for_any_number_of_ranks(config: Config) -> None:
    one, eight = read_model_kv(config), read_model_kv(config, tp_size=8)
    for num_tokens in (1, 1000, 100_000):
        assert eight.bytes_for(num_tokens) == one.bytes_for(num_tokens)
        assert eight.bytes_by_kind(num_tokens) == one.bytes_by_kind(num_tokens)
        held = 8 * eight.rank_bytes_for(num_tokens)
        assert held >= one.rank_bytes_for(num_tokens) == one.bytes_for(num_tokens)


def test_mla_is_on_every_rank_and_sent_once() -> None:
    model = read_model_kv(KIMI_LINEAR_48B, tp_size=8)
    assert model.rank_bytes_per_token == model.bytes_per_token == 7 * 1152
    assert model.fixed_bytes == 20 * KDA_STATE_BYTES == 8 * model.rank_fixed_bytes
    assert model.rank_bytes_for(1000) == 7_000 * 1152 + model.rank_fixed_bytes


@pytest.mark.parametrize("tp_size", [1, 8])
@pytest.mark.parametrize(
    ("config", "kind", "part"),
    [
        (DEEPSEEK_V3, MLA, KVPart("latent", 1, 1152, "bfloat16")),
        (LLAMA_31_8B, FULL, KVPart("kv", 8, 512, "bfloat16")),
    ],
)
def test_a_layout_of_the_model_has_the_same_bytes(
    config: Config, kind: KVKind, part: KVPart, tp_size: int
) -> None:
    model = read_model_kv(config, tp_size=tp_size)
    layers = tuple(KVLayer(f"layers.{layer.index}", (part,)) for layer in model.layers)
    layout = KVLayout("m", "files:0", "0", tp_size, (KVGroup(kind, 16, layers),))
    layout.validate()
    assert layout.transfer_bytes(1001) == model.bytes_for(1001)
    assert layout.block_bytes == tp_size * 16 * model.rank_bytes_per_token


def test_recurrent_states_are_shared_out() -> None:
    for config in (QWEN3_NEXT_80B, RING_25_1T, NEMOTRON_3_NANO):
        one, four = read_model_kv(config), read_model_kv(config, tp_size=4)
        assert four.fixed_bytes == one.fixed_bytes == 4 * four.rank_fixed_bytes


def test_a_single_mamba_group_is_on_every_rank() -> None:
    config = NEMOTRON_3_NANO | {"n_groups": 1}
    conv_of_group = 2 * 128 * 3 * 2
    one, four = read_model_kv(config), read_model_kv(config, tp_size=4)
    assert 4 * four.rank_fixed_bytes == one.fixed_bytes + 23 * 3 * conv_of_group
    assert four.fixed_bytes == one.fixed_bytes


@pytest.mark.parametrize(
    ("config", "tp_size", "field"),
    [
        (LLAMA_31_8B, 3, "num_attention_heads"),
        (LLAMA_31_8B | {"num_attention_heads": 48}, 6, "num_key_value_heads"),
        (MIMO_V2_FLASH | {"swa_num_attention_heads": 60}, 8, "swa_num_attention_heads"),
        (NEMOTRON_3_NANO | {"mamba_num_heads": 60}, 8, "mamba_num_heads"),
        (NEMOTRON_3_NANO | {"n_groups": 6}, 4, "n_groups"),
        (kimi_linear([2], 2, num_heads=30), 4, "linear_attn_config.num_heads"),
    ],
)
def test_what_ranks_cannot_share(config: Config, tp_size: int, field: str) -> None:
    with pytest.raises(ConfigError, match=f"--tp {tp_size}") as caught:
        read_model_kv(config, tp_size=tp_size)
    assert caught.value.field == field


# --- files that do not say it ---------------------------------------------------------------------


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        ({"model_type": "rwkv", **BF16}, "model_type", "is 'rwkv': not known here"),
        ({**BF16}, "model_type", "missing: not known here"),
        (without(LLAMA_31_8B, "dtype"), "dtype", "say --dtype bfloat16"),
        (LLAMA_31_8B | {"dtype": "int8"}, "dtype", "is 'int8'"),
        (without(LLAMA_31_8B, "num_hidden_layers"), "num_hidden_layers", "missing"),
        (LLAMA_31_8B | {"num_key_value_heads": 0}, "num_key_value_heads", "is 0: a whole number"),
        (LLAMA_31_8B | {"kv_lora_rank": 512}, "kv_lora_rank", "MLA"),
        (DEEPSEEK_V3 | {"index_topk": 2048}, "index_topk", "indexer"),
        (
            GPT_OSS_120B | {"layer_types": ["sliding_attention", "chunked_attention"]},
            "layer_types[1]",
            "'chunked_attention': known here: full_attention",
        ),
        (GPT_OSS_120B | {"num_hidden_layers": 35}, "layer_types", "36 entries for .* 35"),
        (without(QWEN3_NEXT_80B, "full_attention_interval"), "full_attention_interval", "missing"),
        (without(MIMO_V2_FLASH, "hybrid_layer_pattern"), "hybrid_layer_pattern", "a list"),
        (
            NEMOTRON_3_NANO | {"hybrid_override_pattern": "M*X"},
            "hybrid_override_pattern",
            "'X' is not one of",
        ),
        (RING_25_1T | {"num_hidden_layers": 81}, "layer_group_size", "whole number of groups"),
        (without(RING_25_1T, "architectures"), "architectures", "BailingMoeV3ForCausalLM"),
        (MINIMAX_M2 | {"attn_type_list": [1, 0]}, "attn_type_list[1]", "softmax"),
        (
            LLAMA_31_8B | {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
            "quantization_config.kv_cache_quant_algo",
            "only FP8",
        ),
    ],
)
def test_unclear_configs_name_the_field(config: Config, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_model_kv(config)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_kimi_lists_must_cover_every_layer_once() -> None:
    config = kimi_linear([4], 4)
    config["linear_attn_config"]["kda_layers"] = [1, 2, 4]
    with pytest.raises(ConfigError, match="layer 3 must be in exactly one"):
        read_model_kv(config)


def test_an_unknown_type_is_read_when_it_lists_its_layers() -> None:
    config = GPT_OSS_120B | {"model_type": "brand_new"}
    assert read_model_kv(config).layers == read_model_kv(GPT_OSS_120B).layers
    config["layer_types"] = ["linear_attention", "full_attention"] * 18
    with pytest.raises(ConfigError, match="state"):
        read_model_kv(config)


def test_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="dtype 'int4' is not one of"):
        read_model_kv(LLAMA_31_8B, dtype="int4")
    with pytest.raises(ValueError, match="KDA"):
        read_model_kv(
            kimi_linear([2], 2)
            | {
                "linear_attn_config": kimi_linear([2], 2)["linear_attn_config"]
                | {"use_full_rank_gate": True}
            },
            mamba_ssm_cache_dtype="float16",
        )


def test_differences_name_the_layer() -> None:
    def layers(*sizes: int) -> tuple[LayerKv, ...]:
        return tuple(LayerKv(index, FULL, size) for index, size in enumerate(sizes))

    assert differences(layers(1, 2), layers(1, 2)) == []
    assert differences(layers(1, 2), layers(1, 3, 4)) == [
        "layer 1: full 2 B/token, the engine has full 3 B/token",
        "layer 2: no cache, the engine has full 4 B/token",
    ]


def test_a_model_is_a_value() -> None:
    model = read_model_kv(LLAMA_31_8B)
    assert isinstance(model, ModelKv)
    assert hash(model) == hash(read_model_kv(LLAMA_31_8B))


# --- numbers of tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("32Ki", 32_768),
        ("32ki", 32_768),
        ("32K", 32_000),
        ("32k", 32_000),
        ("19.4K", 19_400),
        ("1.5Ki", 1_536),
        ("1M", 1_000_000),
        ("1Mi", 1_048_576),
        (" 131072 ", 131_072),
    ],
)
def test_tokens_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "-1", "0", "1.5", "0.0001K", "32KB", "32 Gi", "1e3"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="token"):
        parse_tokens(text)


@given(st.integers(1, 10**9))
def test_tokens_are_written_exactly(num_tokens: int) -> None:
    assert parse_tokens(format_tokens(num_tokens)) == num_tokens


def test_tokens_are_written_shortly() -> None:
    assert [format_tokens(n) for n in (131_072, 32_000, 32_001, 2**20)] == [
        "128Ki",
        "32K",
        "32001",
        "1Mi",
    ]


LLAVA: Config = {
    "torch_dtype": "float16",
    "vision_config": {"hidden_size": 1024},
    "text_config": {"model_type": "llama", "hidden_size": 4096},
}


class TestEmbeddings:
    """Bytes of an encoder's output for each token of its medium."""

    def test_a_token_has_a_vector_of_the_language_models_width(self) -> None:
        assert embedding_token_bytes(LLAVA) == 4096 * 2
        assert embedding_token_bytes(LLAVA, "float32") == 4096 * 4
        # KVCache in FP8 leaves embeddings as they are.
        assert embedding_token_bytes(LLAVA, "fp8") == 4096 * 2

    def test_deepstack_adds_a_vector_for_each_of_its_layers(self) -> None:
        vision = {"deepstack_visual_indexes": [8, 16, 24]}
        assert embedding_token_bytes(LLAVA | {"vision_config": vision}) == 4 * 4096 * 2

    def test_models_of_text_have_none(self) -> None:
        assert embedding_token_bytes({**BF16, "hidden_size": 4096}) == 0

    def test_a_missing_width_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"text_config\.hidden_size missing"):
            embedding_token_bytes(LLAVA | {"text_config": {"model_type": "llama"}})
