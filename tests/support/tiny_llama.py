"""A tiny Llama model in float32 and LoRA adapters for it, each made from its seed alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from deploy.lab.demo.byte_tokenizer import EOS_ID, PAD_ID, PRINTABLE_IDS, VOCAB_SIZE
from deploy.lab.demo.tiny_models import draw
from deploy.lab.demo.tiny_specs import Parameter, TinyModel

NUM_LAYERS = 3
HIDDEN = 256
HEAD_DIM = 64
NUM_HEADS = 4
NUM_KV_HEADS = 2
RANK = 4

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
PROJECTIONS = {
    "q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
    "k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
}
"""The shapes (out, in) of the attention's projections, which the adapters change."""

# As in `tiny_specs`: sharp attention, and an output that depends on all of the prompt.
GAINS = {"q_proj": math.sqrt(3.5), "k_proj": math.sqrt(3.5), "v_proj": 1.0, "o_proj": 3.0}


class TinyLlama(TinyModel):
    """Full attention only. The same rules for its weights as those of the demo's models."""

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter("model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN), std=1.0)
        for index in range(NUM_LAYERS):
            layer = f"model.layers.{index}"
            yield Parameter(f"{layer}.input_layernorm.weight", (HIDDEN,), mean=1.0)
            for name, (num_out, num_in) in PROJECTIONS.items():
                std = GAINS[name] / math.sqrt(num_in)
                yield Parameter(f"{layer}.self_attn.{name}.weight", (num_out, num_in), std=std)
            yield Parameter(f"{layer}.post_attention_layernorm.weight", (HIDDEN,), mean=1.0)
            for name in ("gate_proj", "up_proj", "down_proj"):
                std = 1.0 / math.sqrt(HIDDEN)
                yield Parameter(f"{layer}.mlp.{name}.weight", (HIDDEN, HIDDEN), std=std)
        yield Parameter("model.norm.weight", (HIDDEN,), mean=1.0)
        head = (VOCAB_SIZE, HIDDEN)
        yield Parameter("lm_head.weight", head, std=4.0 / math.sqrt(HIDDEN), rows=PRINTABLE_IDS)


TINY_LLAMA = TinyLlama(
    name="llama-tiny",
    kind="window",
    seed=20265,
    dtype="float32",
    config=CONFIG,
    engine_args=("--dtype", "float32", "--block-size", "32"),
)


def build_adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter of `TINY_LLAMA` that changes every projection of the attention by about half
    of its size.
    """
    path.mkdir(parents=True)
    scale = 2.0
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": scale * RANK,
        "target_modules": list(PROJECTIONS),
        "bias": "none",
        "base_model_name_or_path": str(path),
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    tensors: dict[str, NDArray[np.float32]] = {}
    for index in range(NUM_LAYERS):
        for name, (num_out, num_in) in PROJECTIONS.items():
            layer = f"base_model.model.model.layers.{index}.self_attn.{name}"
            down = Parameter(f"{layer}.lora_A.weight", (RANK, num_in), std=1 / math.sqrt(num_in))
            std = 0.5 * GAINS[name] / (scale * math.sqrt(RANK))
            up = Parameter(f"{layer}.lora_B.weight", (num_out, RANK), std=std)
            tensors |= {one.name: draw(one, seed) for one in (down, up)}
    save_file(tensors, path / "adapter_model.safetensors")
    return path
