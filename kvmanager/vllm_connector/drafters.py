"""Speculative decoding as a layout has it: which layers are a drafter's, and their identity.

A drafter (MTP, EAGLE) is one module that guesses the next tokens from the model's hidden states,
and that has KVCache of its own. How many tokens it guesses changes none of it. A guess is verified
by the model, so a wrong KVCache of a drafter costs time and changes no token.

Source: vLLM's config/speculative.py, and `_annotate_eagle_groups` of v1/core/kv_cache_utils.py: a
drafter's layers have no mark in their specs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from kvmanager.layout import LayoutError
from kvmanager.vllm_connector.weights import draft_weights_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WITH_LAYERS: Final = ("mtp", "eagle", "eagle3")
_WITHOUT_LAYERS: Final = ("ngram", "ngram_gpu", "suffix")
_MODULES: Final = ("mtp", "mtp_layers", "mtp_block", "eagle", "draft_model")
"""Pieces of the names of layers that only drafters have."""
_LEFT_OUT: Final = (
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "quantization_config",
)
"""What names a place on disk or a release, and how an engine stores its weights. What the weights
are is their identity.
"""


def refuse_drafter(vllm_config: VllmConfig) -> None:
    """Raise `LayoutError` that names a way of speculation with which KVCache cannot be moved."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_LAYERS:
        return
    if speculative.method not in _WITH_LAYERS:
        allowed = ", ".join((*_WITH_LAYERS, *_WITHOUT_LAYERS))
        raise LayoutError(
            f"--speculative-config: method {speculative.method} is not supported: use one of "
            f"{allowed}"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise LayoutError(
            "--speculative-config is not supported with --pipeline-parallel-size: remove one"
        )
    # The second module would need a token that a prefill does not have: the first of the answer.
    if speculative.use_multi_module_mtp():
        raise LayoutError(
            "--speculative-config: several MTP modules are not supported: set "
            "num_speculative_tokens to 1"
        )


def _has_layers(vllm_config: VllmConfig) -> bool:
    speculative = vllm_config.speculative_config
    # Gemma 4's drafter reads the model's KVCache and has none of its own.
    return (
        speculative is not None
        and speculative.method in _WITH_LAYERS
        and not speculative.use_gemma4_mtp()
    )


def is_draft_layer(name: str, vllm_config: VllmConfig) -> bool:
    """Whether an engine's layer with this name is its drafter's.

    Drafters number their layers behind the model's, or name them otherwise.
    """
    if not _has_layers(vllm_config):
        return False
    if set(name.split(".")) & set(_MODULES):
        return True
    number = re.search(r"(?:^|\.)layers\.([0-9]+)(?:\.|$)", name)
    text = vllm_config.model_config.hf_text_config
    return number is not None and int(number[1]) >= int(text.num_hidden_layers)


def draft_digest(vllm_config: VllmConfig) -> str:
    """Digest of what, beside the model, decides the drafter's KVCache; "" without a drafter.

    Raises `WeightsError` for weights that cannot be identified.
    """
    if not _has_layers(vllm_config):
        return ""
    draft = vllm_config.speculative_config.draft_model_config
    values = [
        vllm_config.speculative_config.method,
        draft_weights_identity(vllm_config),
        kept_config(draft.hf_config.to_dict()),
    ]
    return blake3(repr(values).encode()).hexdigest()[:32]


def kept_config(config: Any) -> Any:
    """A model's configuration in one order of keys, without what KVCache does not depend on."""
    if isinstance(config, dict):
        kept = (item for item in config.items() if item[0] not in _LEFT_OUT)
        return [(key, kept_config(value)) for key, value in sorted(kept, key=str)]
    if isinstance(config, list | tuple):
        return [kept_config(value) for value in config]
    return config
