"""How an engine turns media into what its model computes with, beside the weights.

vLLM's identifiers of media say nothing of it where the client or the gateway has named them. Knows
vLLM's configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmanager.vllm_connector.weights import processor_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def is_text_only(vllm_config: VllmConfig) -> bool:
    """Whether the engine has no encoder: its model has none, or it was left out with
    `--language-model-only`.
    """
    media = vllm_config.model_config.multimodal_config
    return media is None or media.language_model_only


def media_settings(vllm_config: VllmConfig) -> list[object]:
    """What embeddings depend on; nothing for a model that takes text only."""
    media = vllm_config.model_config.multimodal_config
    if media is None:
        return []
    return [
        media.mm_processor_kwargs,
        media.media_io_kwargs,
        media.mm_encoder_attn_dtype,
        processor_identity(vllm_config),
    ]
