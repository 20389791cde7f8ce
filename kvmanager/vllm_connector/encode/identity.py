"""Which encoder an engine has: what its embeddings depend on beside the image.

Knows vLLM's configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from kvmanager.vllm_connector.drafters import kept_config
from kvmanager.vllm_connector.media_settings import media_settings
from kvmanager.vllm_connector.weights import weights_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def encoder_identity(vllm_config: VllmConfig) -> str:
    """The identity of the engine's encoder; equal only for engines that make the same embedding of
    an image of one identifier.

    Raises `WeightsError` for weights that cannot be identified, and `ValueError` for an encoder
    with LoRA adapters: vLLM's identifiers have the adapter's name, which may mean other weights at
    another engine.
    """
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        raise ValueError(
            "PrfaasECConnector does not share embeddings of adapters: remove "
            "--enable-tower-connector-lora"
        )
    declared = vllm_config.ec_transfer_config.ec_connector_extra_config.get("weights")
    weights = f"declared:{declared}" if declared else weights_identity(vllm_config)
    model = vllm_config.model_config
    values = (
        kept_config(model.hf_config.to_dict()),
        str(model.quantization),
        media_settings(vllm_config),
    )
    settings = blake3(repr(values).encode()).hexdigest()[:32]
    return f"{weights} {model.dtype} {settings}"
