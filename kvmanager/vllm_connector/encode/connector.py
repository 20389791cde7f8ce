"""`PrfaasECConnector`: vLLM's encoder cache over the node agent (vLLM's `ec_connector/base.py`).

    --ec-transfer-config '{"ec_connector": "PrfaasECConnector",
                           "ec_connector_module_path": "kvmanager.vllm_connector.encode",
                           "ec_role": "ec_producer",
                           "ec_connector_extra_config": {"agent_socket": "/run/prfaas/agent.sock",
                                                         "instance": "encode-0"}}'

An engine with `ec_producer` only encodes, one with `ec_consumer` loads what others have encoded and
encodes the rest itself, `ec_both` does both. An engine may have `PrfaasConnector` beside it.

Producers save in vLLM's worker, before the answer to the request leaves the engine: whoever has the
answer may send the request to a consumer. Every tensor-parallel rank has the same embeddings, so
the first one saves them. Consumers find in vLLM's scheduler, and the step carries the bytes.

Engines share embeddings if they have the same weights, by their files or by the name `weights` in
`ec_connector_extra_config`, and the same settings for images. An image without a `uuid` is also
named after the model's path, by vLLM.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.version import __version__ as vllm_version

from kvmanager.agent.engines.embedding_client import EmbeddingClient
from kvmanager.agent.engines.protocol import EncoderHello
from kvmanager.vllm_connector.encode.identity import encoder_identity
from kvmanager.vllm_connector.encode.sides import (
    DEFAULT_ANSWER_TIMEOUT_S,
    EmbeddingFinder,
    EmbeddingSaver,
)
from kvmanager.vllm_connector.versions.check import check_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("prfaas.kvmanager.ec_connector")


@dataclass
class EmbeddingMetadata(ECConnectorMetadata):
    """The scheduler's message to the workers for one step."""

    loads: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """By identifier the bytes of an embedding and the number of its rows."""
    offers: list[str] = field(default_factory=list)
    """The images of requests that begin to run in a producer: the worker may have them encoded
    already.
    """


class PrfaasECConnector(ECConnectorBase):
    """Saves embeddings of images to the node agent and loads them from it."""

    def __new__(cls, vllm_config: VllmConfig, role: ECConnectorRole) -> Self:
        # An engine that only encodes has no other connector of ours, which would compare.
        check_vllm(vllm_version, warns=role is ECConnectorRole.SCHEDULER)
        return super().__new__(cls)

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config = vllm_config.ec_transfer_config
        extra = config.ec_connector_extra_config
        if not extra.get("agent_socket"):
            raise ValueError(
                "PrfaasECConnector needs ec_connector_extra_config.agent_socket: "
                "the path that `prfaas agent --socket` listens on"
            )
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._finder: EmbeddingFinder | None = None
        self._saver: EmbeddingSaver | None = None
        self._metadata = EmbeddingMetadata()
        is_scheduler = role is ECConnectorRole.SCHEDULER
        encoder = encoder_identity(vllm_config)
        hello = EncoderHello(
            instance=extra.get("instance") or f"encoder-{uuid.uuid4().hex[:8]}",
            role="scheduler" if is_scheduler else "worker",
            pid=os.getpid(),
            engine=f"vllm {vllm_version}",
            encoder=encoder,
        )
        timeout_s = float(extra.get("answer_timeout_s", DEFAULT_ANSWER_TIMEOUT_S))
        client = EmbeddingClient(extra["agent_socket"], hello)
        if is_scheduler and self.is_consumer:
            self._finder = EmbeddingFinder(client, encoder, timeout_s)
            self._finder.start()
        elif not is_scheduler and self.is_producer and get_tensor_model_parallel_rank() == 0:
            self._saver = EmbeddingSaver(client, encoder, timeout_s)
            self._saver.start()

    def shutdown(self) -> None:
        for side in (self._finder, self._saver):
            if side is not None:
                side.close()

    # Worker side.

    def start_save_caches(self, **kwargs: Any) -> None:
        """Save images that this worker encoded before and the agent may have evicted since."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingMetadata)
        encoder_cache = kwargs["encoder_cache"]
        for identifier in metadata.offers:
            if identifier in encoder_cache:
                self.save_caches(encoder_cache, identifier)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        if self._saver is None:
            return
        output = encoder_cache[mm_hash]
        if output.dtype != self._dtype:
            # The reader has only the model's type to read the bytes by.
            logger.warning("an embedding of %s is not kept: the model has another type", mm_hash)
            return
        self._saver.save(mm_hash, output.nbytes, lambda: _bytes_of(output))

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        from vllm.platforms import current_platform

        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmbeddingMetadata)
        for identifier, (data, num_rows) in metadata.loads.items():
            rows = torch.frombuffer(bytearray(data), dtype=self._dtype).view(num_rows, -1)
            encoder_cache[identifier] = rows.to(current_platform.device_type)

    # Scheduler side.

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        wanted = {
            feature.identifier: request.get_num_encoder_embeds(index) * self._dtype.itemsize
            for index, feature in enumerate(request.mm_features)
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        }
        return self._finder is None or self._finder.are_known(request.request_id, wanted)

    def has_cache_item(self, identifier: str) -> bool:
        return self._finder is not None and self._finder.data(identifier) is not None

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        identifier = request.mm_features[index].identifier
        data = None if self._finder is None else self._finder.data(identifier)
        if data is not None:
            self._metadata.loads[identifier] = data, request.get_num_encoder_embeds(index)

    def update_state_after_free(self, request: Request, index: int) -> None:
        if self._finder is not None:
            self._finder.drop(request.request_id, [request.mm_features[index].identifier])

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self._finder is not None:
            self._finder.drop(request.request_id, [one.identifier for one in request.mm_features])
        return False, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EmbeddingMetadata:
        metadata, self._metadata = self._metadata, EmbeddingMetadata()
        if self.is_producer:
            # Once for each request: a request that waits or is prefilled in chunks is asked about
            # in every step.
            for new in scheduler_output.scheduled_new_reqs:
                metadata.offers += [feature.identifier for feature in new.mm_features]
        return metadata


def _bytes_of(output: torch.Tensor) -> memoryview:
    rows = output.detach().to("cpu").contiguous().view(torch.uint8)
    return memoryview(rows.numpy().reshape(-1))
