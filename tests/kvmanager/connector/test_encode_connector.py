"""The encoder cache connector without an engine: what it refuses, and which bytes it loads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from kvmanager.vllm_connector.encode import PrfaasECConnector
from kvmanager.vllm_connector.encode import connector as encode_connector
from kvmanager.vllm_connector.encode.connector import EmbeddingMetadata
from kvmanager.vllm_connector.encode.identity import encoder_identity


def engine(*, is_producer: bool = False, extra: dict[str, str], **model: Any) -> Any:
    """The configuration of an engine that takes images; `model` are changes of its model's."""
    transfer = SimpleNamespace(
        is_ec_producer=is_producer,
        is_ec_consumer=not is_producer,
        ec_connector_extra_config=extra,
    )
    values = {
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_config": SimpleNamespace(to_dict=lambda: {"vision_config": {"depth": 2}}),
        "multimodal_config": MultiModalConfig(),
        "model": "/nonexistent/model",
        "revision": None,
    }
    return SimpleNamespace(
        ec_transfer_config=transfer,
        kv_transfer_config=None,
        model_config=SimpleNamespace(**(values | model)),
        load_config=SimpleNamespace(download_dir=None),
        lora_config=None,
    )


def connector(role: ECConnectorRole, *, is_producer: bool = False, **extra: str) -> Any:
    """Of an engine whose agent is not there."""
    return PrfaasECConnector(engine(is_producer=is_producer, extra=extra), role)


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


def step(*new: Any) -> Any:
    return SimpleNamespace(scheduled_new_reqs=new)


def test_the_socket_of_the_agent_must_be_named() -> None:
    with pytest.raises(ValueError, match=r"ec_connector_extra_config\.agent_socket"):
        connector(ECConnectorRole.SCHEDULER)


def test_without_its_agent_an_engine_encodes_at_once() -> None:
    made = connector(ECConnectorRole.SCHEDULER, agent_socket="/nonexistent", weights="w")
    images = request("cat", "dog")
    assert made.ensure_cache_available(images, 0)
    assert not made.has_cache_item("cat")
    made.update_state_after_alloc(images, 0)
    assert made.build_connector_meta(step()) == EmbeddingMetadata()
    made.update_state_after_free(images, 0)
    assert made.request_finished(images) == (False, None)
    made.shutdown()


def test_a_producer_offers_each_request_once_and_never_loads() -> None:
    made = connector(
        ECConnectorRole.SCHEDULER, is_producer=True, agent_socket="/nonexistent", weights="w"
    )
    images = request("cat", "dog")
    # vLLM asks in every step in which a request waits or is prefilled.
    assert all(made.ensure_cache_available(images, 4) for _ in range(3))
    assert not made.has_cache_item("dog")
    assert made.build_connector_meta(step(images)) == EmbeddingMetadata(offers=["cat", "dog"])
    assert made.ensure_cache_available(images, 4)
    assert made.build_connector_meta(step()) == EmbeddingMetadata()


def test_a_worker_copies_no_embedding_that_the_agent_does_not_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode_connector, "get_tensor_model_parallel_rank", lambda: 0)

    class Rows(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise AssertionError("copied")

    made = connector(
        ECConnectorRole.WORKER, is_producer=True, agent_socket="/nonexistent", weights="w"
    )
    made.bind_connector_metadata(EmbeddingMetadata(offers=["cat", "evicted"]))
    rows = torch.zeros(4, 3, dtype=torch.bfloat16).as_subclass(Rows)
    made.start_save_caches(encoder_cache={"cat": rows})
    made.shutdown()


def test_a_worker_loads_the_rows_of_the_step() -> None:
    made = connector(ECConnectorRole.WORKER, agent_socket="/nonexistent", weights="w")
    rows = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    data = rows.view(torch.uint8).numpy().tobytes()
    made.bind_connector_metadata(EmbeddingMetadata(loads={"cat": (data, 4)}))
    cache: dict[str, torch.Tensor] = {}
    made.start_load_caches(cache)
    assert torch.equal(cache["cat"], rows)
    made.save_caches(cache, "cat")  # it encodes for nobody


def identity(**model: Any) -> str:
    return encoder_identity(engine(extra={"weights": "w"}, **model))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"hf_config": SimpleNamespace(to_dict=lambda: {"vision_config": {"depth": 3}})},
        {"multimodal_config": MultiModalConfig(mm_processor_kwargs={"max_pixels": 9000})},
        {"multimodal_config": MultiModalConfig(media_io_kwargs={"video": {"num_frames": 8}})},
    ],
)
def test_encoders_that_make_other_embeddings_share_none(changes: dict[str, Any]) -> None:
    assert identity(**changes) != identity() == identity()


def test_the_path_of_the_model_is_no_part_of_the_encoder() -> None:
    assert identity(model="/elsewhere") == identity()


def test_encoders_with_adapters_are_refused() -> None:
    config = engine(extra={"weights": "w"})
    config.lora_config = SimpleNamespace(enable_tower_connector_lora=True)
    with pytest.raises(ValueError, match="remove --enable-tower-connector-lora"):
        encoder_identity(config)
