"""The tiny hybrid models: their configurations and the rule that draws each weight.

This file knows the checkpoint names and shapes that vLLM expects of two architectures. It does not
know how weights become files (`tiny_models`), and needs neither torch nor transformers.

The rules have one reason: greedy output of a random model is only useful as a check if every part
of the prompt, and every part of the KVCache, can change it. Four choices ensure that.

- Attention is sharp: query times key has a standard deviation of about 3.5 before the softmax, so
  each query picks a handful of keys out of thousands instead of averaging them all away, and other
  queries pick others.
- GDN heads forget slowly: their decay times are spread from a few tokens to thousands, so the
  state at the end of a prompt still carries its beginning.
- Logits are computed in float32: in bfloat16 the two best of 95 are equal every few tokens.
- Only printable ASCII can win the greedy choice: the other rows of the output head are zero.
  Output is readable, streams byte by byte, and never ends early on a stop token.

They cannot ensure independence of rounding. In bfloat16 the chunked GDN kernel gives
other last bits than the one-token kernel, and than itself when a chunk does not end at a multiple
of `GDN_CHUNK_TOKENS`; in a model this sensitive such bits reach the logits as a relative change of
about one percent, enough to swap near-equal candidates. With chunks that end at those multiples
the kernels agree bit for bit. The float32 window model has no such limit.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal

from deploy.lab.demo.byte_tokenizer import (
    EOS_ID,
    PAD_ID,
    PRINTABLE_IDS,
    VOCAB_SIZE,
    tokenizer_files,
)

FORMAT_VERSION = 1
"""A part of every fingerprint. Raise it if files change while config and parameters do not."""

GDN_CHUNK_TOKENS = 64
"""Prefill of a recurrent model in pieces changes no bit if pieces end at multiples of this."""

_ATTENTION_LOGIT_STD = 3.5
_OUTPUT_LOGIT_STD = 4.0
_MAX_LEN_TOKENS = 8192
_SLOWEST_GDN_TOKENS = 4096.0
_FASTEST_GDN_TOKENS = 8.0
_GDN_DT_BIAS = 1.0

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One checkpoint tensor: normal with standard deviation `std` around `mean`, or `values`.

    If `rows` is not empty, only these rows are drawn, and the others are zero. `source`: the name
    that the values are drawn by, so that two tensors may have the same ones.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    values: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model that can be built from its seed alone, and how to serve it.

    `engine_args` are the vLLM arguments that the model needs beside its path. `window_tokens` is 0
    if no layer has a sliding window.
    """

    name: str
    kind: Literal["recurrent", "window"]
    seed: int
    dtype: Literal["bfloat16", "float32"]
    config: Config
    engine_args: tuple[str, ...]
    max_model_len: int = _MAX_LEN_TOKENS
    window_tokens: int = 0

    def fingerprint(self) -> str:
        """A hex digest of everything that the built files depend on."""
        parameters = [asdict(parameter) for parameter in self.parameters()]
        parts = [FORMAT_VERSION, self.name, self.seed, self.dtype, self.documents(), parameters]
        return sha256(json.dumps(parts).encode()).hexdigest()

    def documents(self) -> dict[str, dict[str, Any]]:
        """The JSON files beside the weights, by name."""
        return {"config.json": dict(self.config), **tokenizer_files()}

    def parameters(self) -> Iterator[Parameter]:
        """All tensors of the checkpoint, in file order."""
        return _qwen3_next(self.config) if self.kind == "recurrent" else _mimo_v2(self.config)


# --- rules shared by both architectures -----------------------------------------------------------


def _linear(name: str, num_out: int, num_in: int, gain: float = 1.0) -> Parameter:
    """A projection that maps inputs of unit variance to outputs of standard deviation `gain`."""
    return Parameter(f"{name}.weight", (num_out, num_in), std=gain / math.sqrt(num_in))


def _norm(name: str, size: int, mean: float) -> Parameter:
    return Parameter(f"{name}.weight", (size,), mean=mean)


def _embedding(config: Config) -> Parameter:
    shape = (config["vocab_size"], config["hidden_size"])
    return Parameter("model.embed_tokens.weight", shape, std=1.0)


def _output_head(config: Config) -> Parameter:
    hidden = config["hidden_size"]
    shape = (config["vocab_size"], hidden)
    std = _OUTPUT_LOGIT_STD / math.sqrt(hidden)
    return Parameter("lm_head.weight", shape, std=std, rows=PRINTABLE_IDS)


def _gated_mlp(name: str, hidden: int, inner: int) -> Iterator[Parameter]:
    yield _linear(f"{name}.gate_proj", inner, hidden)
    yield _linear(f"{name}.up_proj", inner, hidden)
    yield _linear(f"{name}.down_proj", hidden, inner)


# --- Qwen3-Next: gated delta net (recurrent) and full attention -----------------------------------


def _qwen3_next(config: Config) -> Iterator[Parameter]:
    hidden = config["hidden_size"]
    yield _embedding(config)
    for index, layer_type in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        # Qwen3-Next's RMSNorm multiplies by 1 + weight, so 0 changes nothing.
        yield _norm(f"{layer}.input_layernorm", hidden, mean=0.0)
        if layer_type == "linear_attention":
            yield from _gated_delta_net(f"{layer}.linear_attn", config)
        else:
            yield from _gated_attention(f"{layer}.self_attn", config)
        yield _norm(f"{layer}.post_attention_layernorm", hidden, mean=0.0)
        if index in config["mlp_only_layers"]:
            yield from _gated_mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _shared_expert_moe(f"{layer}.mlp", config)
    yield _norm("model.norm", hidden, mean=0.0)
    yield _output_head(config)


def _gated_delta_net(name: str, config: Config) -> Iterator[Parameter]:
    hidden = config["hidden_size"]
    num_value_heads = config["linear_num_value_heads"]
    key_dim = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_dim = num_value_heads * config["linear_value_head_dim"]
    conv_dim = 2 * key_dim + value_dim
    kernel = config["linear_conv_kernel_dim"]
    yield _linear(f"{name}.in_proj_qkvz", conv_dim + value_dim, hidden)
    yield _linear(f"{name}.in_proj_ba", 2 * num_value_heads, hidden)
    yield Parameter(f"{name}.conv1d.weight", (conv_dim, 1, kernel), std=1.0 / math.sqrt(kernel))
    yield Parameter(f"{name}.A_log", (num_value_heads,), values=_decay_logs(num_value_heads))
    yield Parameter(f"{name}.dt_bias", (num_value_heads,), mean=_GDN_DT_BIAS)
    yield _norm(f"{name}.norm", config["linear_value_head_dim"], mean=1.0)
    yield _linear(f"{name}.out_proj", hidden, value_dim, gain=2.0)


def _decay_logs(num_heads: int) -> tuple[float, ...]:
    """A_log of each head. The state shrinks by exp(-exp(A_log) * softplus(dt)) per token, so these
    values spread the heads' decay times geometrically between the fastest and the slowest.
    """
    softplus = math.log1p(math.exp(_GDN_DT_BIAS))
    ratio = _SLOWEST_GDN_TOKENS / _FASTEST_GDN_TOKENS
    steps = max(num_heads - 1, 1)
    times = [_FASTEST_GDN_TOKENS * ratio ** (head / steps) for head in range(num_heads)]
    return tuple(-math.log(tokens * softplus) for tokens in times)


def _gated_attention(name: str, config: Config) -> Iterator[Parameter]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    # Queries and keys are normalised to unit variance, then scaled by 1 + weight.
    sharpness = math.sqrt(_ATTENTION_LOGIT_STD) - 1.0
    yield _linear(f"{name}.q_proj", 2 * q_size, hidden)
    yield _linear(f"{name}.k_proj", kv_size, hidden)
    yield _linear(f"{name}.v_proj", kv_size, hidden)
    yield _norm(f"{name}.q_norm", head_dim, mean=sharpness)
    yield _norm(f"{name}.k_norm", head_dim, mean=sharpness)
    yield _linear(f"{name}.o_proj", hidden, q_size, gain=3.0)


def _shared_expert_moe(name: str, config: Config) -> Iterator[Parameter]:
    hidden = config["hidden_size"]
    yield _linear(f"{name}.gate", config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from _gated_mlp(f"{name}.experts.{expert}", hidden, config["moe_intermediate_size"])
    inner = config["shared_expert_intermediate_size"]
    yield from _gated_mlp(f"{name}.shared_expert", hidden, inner)
    yield _linear(f"{name}.shared_expert_gate", 1, hidden)


# --- MiMo-V2-Flash: sliding window with sinks and full attention ----------------------------------


def _mimo_v2(config: Config) -> Iterator[Parameter]:
    hidden = config["hidden_size"]
    yield _embedding(config)
    for index, windowed in enumerate(config["hybrid_layer_pattern"]):
        layer = f"model.layers.{index}"
        yield _norm(f"{layer}.input_layernorm", hidden, mean=1.0)
        yield from _plain_attention(f"{layer}.self_attn", config, windowed=bool(windowed))
        yield _norm(f"{layer}.post_attention_layernorm", hidden, mean=1.0)
        if config["moe_layer_freq"][index]:
            yield from _routed_moe(f"{layer}.mlp", config)
        else:
            yield from _gated_mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
    yield _norm("model.norm", hidden, mean=1.0)
    yield _output_head(config)


def _plain_attention(name: str, config: Config, *, windowed: bool) -> Iterator[Parameter]:
    hidden = config["hidden_size"]
    prefix = "swa_" if windowed else ""
    num_heads = config[f"{prefix}num_attention_heads"]
    head_dim = config[f"{prefix}head_dim"]
    kv_size = config[f"{prefix}num_key_value_heads"] * head_dim
    sharpness = math.sqrt(_ATTENTION_LOGIT_STD)
    yield _linear(f"{name}.q_proj", num_heads * head_dim, hidden, gain=sharpness)
    yield _linear(f"{name}.k_proj", kv_size, hidden, gain=sharpness)
    yield _linear(f"{name}.v_proj", kv_size, hidden)
    yield _linear(f"{name}.o_proj", hidden, num_heads * head_dim, gain=2.0 if windowed else 4.0)
    if windowed and config["add_swa_attention_sink_bias"]:
        yield Parameter(f"{name}.attention_sink_bias", (num_heads,), std=1.0)


def _routed_moe(name: str, config: Config) -> Iterator[Parameter]:
    hidden, num_experts = config["hidden_size"], config["n_routed_experts"]
    yield _linear(f"{name}.gate", num_experts, hidden)
    yield Parameter(f"{name}.gate.e_score_correction_bias", (num_experts,))
    for expert in range(num_experts):
        yield from _gated_mlp(f"{name}.experts.{expert}", hidden, config["moe_intermediate_size"])


# --- the models -----------------------------------------------------------------------------------


def _common_config(hidden: int, num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": _MAX_LEN_TOKENS,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "head_dtype": "float32",
    }


def _qwen3_next_config(num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Six layers, full attention at the second and the fifth: a recurrent layer follows each."""
    layer_types = ["linear_attention"] * 6
    layer_types[1] = layer_types[4] = "full_attention"
    return {
        **_common_config(hidden=256, num_layers=len(layer_types)),
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "layer_types": layer_types,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "num_attention_heads": num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "intermediate_size": 256,
        "mlp_only_layers": [0, 1, 2, 4, 5],
        "decoder_sparse_step": 1,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }


def _mimo_v2_config(pattern: tuple[int, ...], num_heads: int, head_dim: int) -> dict[str, Any]:
    """`pattern` has 1 for a sliding-window layer and 0 for a full-attention layer."""
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    heads |= {"head_dim": head_dim, "v_head_dim": head_dim}
    sparse_layer = 3
    return {
        **_common_config(hidden=256, num_layers=len(pattern)),
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "torch_dtype": "float32",
        "hybrid_layer_pattern": list(pattern),
        "layer_types": ["sliding_attention" if bit else "full_attention" for bit in pattern],
        "sliding_window": _WINDOW_TOKENS,
        "sliding_window_size": _WINDOW_TOKENS,
        "add_swa_attention_sink_bias": True,
        "layernorm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5_000_000.0,
        "swa_rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        **heads,
        **{f"swa_{key}": value for key, value in heads.items()},
        "intermediate_size": 256,
        "moe_layer_freq": [int(layer == sparse_layer) for layer in range(len(pattern))],
        "mlp_layer_types": [
            "sparse" if layer == sparse_layer else "dense" for layer in range(len(pattern))
        ],
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "moe_intermediate_size": 128,
    }


_WINDOW_TOKENS = 128

# The recurrent state is kept in float32 on every machine, so that one model has one KV layout.
_RECURRENT_ARGS = ("--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32")
_WINDOW_ARGS = ("--dtype", "float32", "--block-size", "32")


def _recurrent_model(name: str, *, seed: int, num_kv_heads: int, head_dim: int) -> TinyModel:
    return TinyModel(
        name=name,
        kind="recurrent",
        seed=seed,
        dtype="bfloat16",
        config=_qwen3_next_config(num_kv_heads, head_dim),
        engine_args=_RECURRENT_ARGS,
    )


def _window_model(name: str, *, seed: int, config: Config) -> TinyModel:
    return TinyModel(
        name=name,
        kind="window",
        seed=seed,
        dtype="float32",
        config=config,
        engine_args=_WINDOW_ARGS,
        window_tokens=_WINDOW_TOKENS,
    )


MODELS: Mapping[str, TinyModel] = {
    model.name: model
    for model in (
        # 2 KiB of KVCache a prompt token and 138 KiB of state.
        _recurrent_model("qwen3-next-tiny", seed=20261, num_kv_heads=4, head_dim=64),
        # 2 KiB a token in the full-attention layers, 3 KiB a token within the window.
        _window_model(
            "mimo-v2-tiny",
            seed=20262,
            config=_mimo_v2_config((1, 0, 1, 1, 0, 1), num_heads=4, head_dim=64),
        ),
        # 8 KiB a token.
        _recurrent_model("qwen3-next-bench", seed=20263, num_kv_heads=8, head_dim=128),
        # 16 KiB a token. Prefill attention costs n/2 operations for each byte of KVCache in
        # bfloat16 and half that in float32, so on a CPU without bfloat16 units only this one
        # emits KVCache as fast as large models do.
        _window_model(
            "mimo-v2-bench",
            seed=20264,
            config=_mimo_v2_config((1, 0, 1, 1, 0, 1), num_heads=4, head_dim=256),
        ),
    )
}
