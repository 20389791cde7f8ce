"""What an engine is called towards its agent: the same by all its processes, by no other engine."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from agent_process import SMALL_LAYOUT
from vllm.config import KVTransferConfig, MultiModalConfig

from kvmanager.vllm_connector.connector import _hello, instance_name


def config_of(instance: str = "", dp_rank: int = 0) -> Any:
    """As vLLM hands it to the processes of one core (`EngineCoreProc.run_engine_core`)."""
    transfer = KVTransferConfig(
        kv_connector="PrfaasConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"prefix_pool": False}
        | ({"instance": instance} if instance else {}),
    )
    parallel = SimpleNamespace(data_parallel_index=dp_rank, pipeline_parallel_size=1)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        model_config=SimpleNamespace(multimodal_config=None),
    )


def test_a_configured_name_is_taken_as_it_is() -> None:
    assert instance_name(config_of("prefill-0")) == "prefill-0"


def test_data_parallel_cores_do_not_share_a_name() -> None:
    assert instance_name(config_of("p0", dp_rank=1)) == "p0_dp1"
    assert instance_name(config_of("p0", dp_rank=2)) == "p0_dp2"


@pytest.mark.parametrize("instance", ["", "p0"])
def test_the_processes_of_an_engine_agree_wherever_they_run(
    instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(instance)
    scheduler = instance_name(config)
    monkeypatch.setattr("os.getppid", lambda: 4711)
    assert instance_name(copy.deepcopy(config)) == scheduler


def test_two_engines_without_a_configured_name_have_different_ones() -> None:
    assert instance_name(config_of()) != instance_name(config_of())


def test_an_engine_says_which_vllm_it_is_however_that_was_installed() -> None:
    """The build for CPUs is a package of another name."""
    said = _hello(config_of("p0"), SMALL_LAYOUT, None).engine
    assert said.startswith("vllm 0.")


def test_a_worker_says_which_stage_and_rank_it_is() -> None:
    config = config_of("p0")
    config.parallel_config.pipeline_parallel_size = 3
    worker, scheduler = _hello(config, SMALL_LAYOUT, (2, 0)), _hello(config, SMALL_LAYOUT, None)
    assert (worker.role, worker.pp_rank, worker.pp_size, worker.tp_rank) == ("worker", 2, 3, 0)
    assert (scheduler.role, scheduler.pp_rank, scheduler.pp_size) == ("scheduler", 0, 3)
    assert worker.layout == scheduler.layout


def test_an_engine_says_which_adapters_it_has() -> None:
    assert _hello(config_of("p0"), SMALL_LAYOUT, None).adapters == {}
    assert _hello(config_of("p0"), SMALL_LAYOUT, None, {"a": "i"}).adapters == {"a": "i"}


@pytest.mark.parametrize(
    ("media", "text_only"),
    [
        (None, True),
        (MultiModalConfig(), False),
        (MultiModalConfig(language_model_only=True), True),
    ],
)
def test_an_engine_says_whether_it_has_an_encoder(
    media: MultiModalConfig | None, text_only: bool
) -> None:
    config = config_of("p0")
    config.model_config.multimodal_config = media
    for worker in (None, (0, 0)):
        assert _hello(config, SMALL_LAYOUT, worker).text_only is text_only
