"""A tiny Qwen3.5: GDN layers, full attention and a vision tower, in bfloat16, from its seed alone.

Serve it with `IMAGE_ARGS` and the environment `vision_environment()`: transformers' image processor
needs the torchvision of `vision_shim`. An image of 64 by 64 pixels becomes 16 tokens, one for each
square of 16 pixels.
"""

import base64
import copy
import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deploy.lab.demo.tiny_specs import MODELS, Parameter, TinyModel

_BASE = MODELS["qwen3-next-tiny"]
_LAYER_TYPES = ("linear_attention", "full_attention", "linear_attention")
_TEXT: Mapping[str, Any] = {
    **_BASE.config,
    "num_hidden_layers": len(_LAYER_TYPES),
    "layer_types": list(_LAYER_TYPES),
    "mlp_only_layers": list(range(len(_LAYER_TYPES))),
}
# The positions of time, height and width, in quarters of the rotated halves of a head.
_ROPE = {**_TEXT["rope_parameters"], "mrope_section": [4, 2, 2], "mrope_interleaved": True}

VISION_START_ID, VISION_END_ID, IMAGE_ID, VIDEO_ID = range(259, 263)
_SPECIAL = {
    VISION_START_ID: "<|vision_start|>",
    VISION_END_ID: "<|vision_end|>",
    IMAGE_ID: "<|image_pad|>",
    VIDEO_ID: "<|video_pad|>",
}
PLACEHOLDER = "".join(_SPECIAL[one] for one in (VISION_START_ID, IMAGE_ID, VISION_END_ID))
"""An image in the text of a prompt."""

_HIDDEN = 64
_HEADS = 2
_DEPTH = 2
_PATCH = 8
_MERGE = 2
_FRAMES = 2
_GRID = 8
PIXELS_PER_TOKEN = (_PATCH * _MERGE) ** 2
MAX_IMAGE_TOKENS = 256

CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": VISION_START_ID,
    "vision_end_token_id": VISION_END_ID,
    "head_dtype": "float32",
    "text_config": {
        **{name: _TEXT[name] for name in _TEXT if "expert" not in name},
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_parameters": _ROPE,
    },
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": _DEPTH,
        "hidden_size": _HIDDEN,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": _HIDDEN,
        "num_heads": _HEADS,
        "in_channels": 3,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": _FRAMES,
        "out_hidden_size": _TEXT["hidden_size"],
        "num_position_embeddings": _GRID**2,
    },
}
_PROCESSING = {
    "patch_size": _PATCH,
    "temporal_patch_size": _FRAMES,
    "merge_size": _MERGE,
    "size": {
        "shortest_edge": 4 * PIXELS_PER_TOKEN,
        "longest_edge": MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN,
    },
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}

# Every part of a message is text, or an image.
_CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}" + PLACEHOLDER + "{% endif %}{% endfor %}{% endif %}"
)


class TinyVision(TinyModel):
    """The language model's weights follow the rules of the demo's models."""

    def documents(self) -> dict[str, dict[str, Any]]:
        documents = copy.deepcopy(TinyModel.documents(self))
        tokens = documents["tokenizer.json"]["added_tokens"]
        tokens += [tokens[0] | {"id": one, "content": text} for one, text in _SPECIAL.items()]
        settings = documents["tokenizer_config.json"]
        settings["chat_template"] = settings["chat_template"].replace(
            "{{ message['content'] }}", _CONTENT
        )
        image = {"image_processor_type": "Qwen2VLImageProcessor"}
        video = {"video_processor_type": "Qwen3VLVideoProcessor"}
        return documents | {
            "preprocessor_config.json": _PROCESSING | image,
            "video_preprocessor_config.json": _PROCESSING | video,
            "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
        }

    def parameters(self) -> Iterator[Parameter]:
        for one in replace(_BASE, config=_TEXT).parameters():
            renamed = replace(one, name=one.name.replace("model.", "model.language_model.", 1))
            if ".in_proj_" in one.name:
                yield from _parts_of_projection(renamed)
            else:
                yield renamed
        yield from _vision("model.visual", self.config["vision_config"])


def _parts_of_projection(fused: Parameter) -> Iterator[Parameter]:
    """Qwen3-Next keeps in one tensor of a GDN layer what Qwen3.5 keeps in two."""
    key = _TEXT["linear_num_key_heads"] * _TEXT["linear_key_head_dim"]
    value = _TEXT["linear_num_value_heads"] * _TEXT["linear_value_head_dim"]
    heads = _TEXT["linear_num_value_heads"]
    parts = (
        {"qkv": 2 * key + value, "z": value} if "qkvz" in fused.name else {"b": heads, "a": heads}
    )
    kind = "qkvz" if "qkvz" in fused.name else "ba"
    for part, num_rows in parts.items():
        name = fused.name.replace(f"in_proj_{kind}", f"in_proj_{part}")
        yield replace(fused, name=name, shape=(num_rows, fused.shape[1]))


def _vision(name: str, tower: Mapping[str, Any]) -> Iterator[Parameter]:
    pixels = 3 * _FRAMES * _PATCH * _PATCH
    width, hidden = tower["hidden_size"], tower["out_hidden_size"]
    merged = width * _MERGE**2
    kernel = (width, 3, _FRAMES, _PATCH, _PATCH)
    yield Parameter(f"{name}.patch_embed.proj.weight", kernel, std=1.0 / math.sqrt(pixels))
    yield Parameter(f"{name}.patch_embed.proj.bias", (width,))
    yield Parameter(f"{name}.pos_embed.weight", (_GRID**2, width), std=0.3)
    for index in range(tower["depth"]):
        block = f"{name}.blocks.{index}"
        for norm in ("norm1", "norm2"):
            yield Parameter(f"{block}.{norm}.weight", (width,), mean=1.0)
            yield Parameter(f"{block}.{norm}.bias", (width,))
        yield from _affine(f"{block}.attn.qkv", 3 * width, width)
        for layer in ("attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            yield from _affine(f"{block}.{layer}", width, width)
    yield Parameter(f"{name}.merger.norm.weight", (width,), mean=1.0)
    yield Parameter(f"{name}.merger.norm.bias", (width,))
    yield from _affine(f"{name}.merger.linear_fc1", merged, merged)
    # GELU halves the variance, so that images weigh as much as text.
    yield from _affine(f"{name}.merger.linear_fc2", hidden, merged, gain=2.0)


def _affine(name: str, num_out: int, num_in: int, gain: float = 1.0) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (num_out, num_in), std=gain / math.sqrt(num_in))
    yield Parameter(f"{name}.bias", (num_out,))


TINY_VISION = TinyVision(
    name="qwen3.5-vision-tiny",
    kind="recurrent",
    seed=20267,
    dtype="bfloat16",
    config=CONFIG,
    engine_args=_BASE.engine_args,
)

IMAGE_ARGS = ("--limit-mm-per-prompt", '{"image": 8, "video": 0}')
"""What an engine needs beside `TINY_VISION.engine_args`."""


def vision_environment() -> dict[str, str]:
    """What an engine needs in its environment: a PYTHONPATH with the torchvision of tests first."""
    shim = str(Path(__file__).with_name("vision_shim"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (shim, os.environ.get("PYTHONPATH"))))}


def image_url(seed: int, width: int = 64, height: int = 64) -> str:
    """A PNG of random pixels as a data URI."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
