"""The encoder cache connector without an engine: what it refuses, and which bytes it loads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from kvmanager.vllm_connector.encode import PrfaasECConnector
from kvmanager.vllm_connector.encode.connector import EmbeddingMetadata


def connector(role: ECConnectorRole, *, is_producer: bool = False, **extra: str) -> Any:
    """Of an engine whose agent is not there."""
    transfer = SimpleNamespace(
        is_ec_producer=is_producer,
        is_ec_consumer=not is_producer,
        ec_connector_extra_config=extra,
    )
    model = SimpleNamespace(dtype=torch.bfloat16, seed=1)
    config = SimpleNamespace(ec_transfer_config=transfer, model_config=model)
    return PrfaasECConnector(config, role)


def request(*identifiers: str) -> Any:
    features = [
        SimpleNamespace(
            identifier=identifier, mm_position=SimpleNamespace(offset=10 * index, length=4)
        )
        for index, identifier in enumerate(identifiers)
    ]
    return SimpleNamespace(
        request_id="r", mm_features=features, get_num_encoder_embeds=lambda index: 4
    )


def test_the_socket_of_the_agent_must_be_named() -> None:
    with pytest.raises(ValueError, match=r"ec_connector_extra_config\.agent_socket"):
        connector(ECConnectorRole.SCHEDULER)


def test_without_its_agent_an_engine_encodes_at_once() -> None:
    made = connector(ECConnectorRole.SCHEDULER, agent_socket="/nonexistent", weights="w")
    images = request("cat", "dog")
    assert made.ensure_cache_available(images, 0)
    assert not made.has_cache_item("cat")
    made.update_state_after_alloc(images, 0)
    assert made.build_connector_meta(None) == EmbeddingMetadata()
    made.update_state_after_free(images, 0)
    assert made.request_finished(images) == (False, None)
    made.shutdown()


def test_a_producer_offers_what_its_worker_may_have_and_never_loads() -> None:
    made = connector(
        ECConnectorRole.SCHEDULER, is_producer=True, agent_socket="/nonexistent", weights="w"
    )
    # The first image is in the KVCache already.
    assert made.ensure_cache_available(request("cat", "dog"), 4)
    assert not made.has_cache_item("dog")
    assert made.build_connector_meta(None) == EmbeddingMetadata(offers=["dog"])
    assert made.build_connector_meta(None) == EmbeddingMetadata()


def test_a_worker_loads_the_rows_of_the_step() -> None:
    made = connector(ECConnectorRole.WORKER, agent_socket="/nonexistent", weights="w")
    rows = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    data = rows.view(torch.uint8).numpy().tobytes()
    made.bind_connector_metadata(EmbeddingMetadata(loads={"cat": (data, 4)}))
    cache: dict[str, torch.Tensor] = {}
    made.start_load_caches(cache)
    assert torch.equal(cache["cat"], rows)
    made.save_caches(cache, "cat")  # it encodes for nobody
