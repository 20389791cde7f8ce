"""The connector of vLLM's encoder cache: encoders put embeddings of images, others load them."""

from kvmanager.vllm_connector.encode.connector import PrfaasECConnector

__all__ = ["PrfaasECConnector"]
