"""The command line and environment of an engine."""

import json
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from prfaas.engines.command import EngineSpec

ROOT = str(Path(__file__).resolve().parents[3])


def spec(**changes: object) -> EngineSpec:
    fields: dict[str, object] = {
        "instance": "prefill-0",
        "model": "/models/tiny",
        "served_name": "tiny",
        "port": 8100,
    }
    return EngineSpec.model_validate(fields | changes)


def test_the_smallest_command_line() -> None:
    argv = spec().argv()
    assert argv[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    text = " ".join(argv)
    assert "--model /models/tiny --served-model-name tiny" in text
    assert "--host 127.0.0.1 --port 8100" in text
    assert "--no-enable-prefix-caching" in argv
    for absent in (
        "--kv-transfer-config",
        "--kv-events-config",
        "--block-size",
        "--tensor-parallel-size",
    ):
        assert absent not in argv


def test_kv_events_go_to_the_endpoint() -> None:
    for endpoints, expected in (
        ("ipc:///run/d0", ("ipc:///run/d0", None)),
        ("ipc:///run/d0,ipc:///run/d0.again", ("ipc:///run/d0", "ipc:///run/d0.again")),
    ):
        argv = spec(enable_prefix_caching=True, kv_events=endpoints).argv()
        config = json.loads(argv[argv.index("--kv-events-config") + 1])
        assert (config["endpoint"], config["replay_endpoint"]) == expected
        assert config["enable_kv_cache_events"]


def test_eager_stages_on_the_cpu_are_warmed_up() -> None:
    """vLLM does it only in a mode with compilation, which is turned off in another way."""
    for num_stages, kv_space_gib, flag in ((2, 1, "-cc.mode=1"), (2, None, "--enforce-eager")):
        made = spec(
            pipeline_parallel_size=num_stages, kv_space_gib=kv_space_gib, enforce_eager=True
        )
        assert [arg for arg in made.argv() if "eager" in arg or "-cc" in arg] == [flag]
        assert ("TORCHDYNAMO_DISABLE" in made.environment({})) == (kv_space_gib is not None)
    plain = spec(pipeline_parallel_size=2, kv_space_gib=1)
    assert "-cc.mode=1" not in plain.argv()
    assert "TORCHDYNAMO_DISABLE" not in plain.environment({})


def test_everything_set() -> None:
    argv = spec(
        host="0.0.0.0",
        dtype="bfloat16",
        max_model_len=8192,
        block_size=256,
        max_num_batched_tokens=1024,
        max_num_seqs=64,
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        enable_prefix_caching=True,
        enforce_eager=True,
        agent_socket="/run/agent.sock",
        args=("--seed", "7"),
    ).argv()
    text = " ".join(argv)
    for part in (
        "--dtype bfloat16",
        "--max-model-len 8192",
        "--block-size 256",
        "--max-num-batched-tokens 1024",
        "--max-num-seqs 64",
        "--tensor-parallel-size 2",
        "--pipeline-parallel-size 3",
        "--enable-prefix-caching",
        "--enforce-eager",
    ):
        assert part in text
    assert argv[-2:] == ["--seed", "7"]
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config == {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "kvmanager.vllm_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"agent_socket": "/run/agent.sock", "instance": "prefill-0"},
    }


def lora_options(**changes: object) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The options with one value, and the modules."""
    argv = spec(**changes).argv()
    argv = argv[argv.index("--enable-lora") + 1 :]
    at = argv.index("--lora-modules")
    single = dict(zip(argv[:at:2], argv[1:at:2], strict=True))
    return single, [json.loads(item) for item in argv[at + 1 :]]


def test_adapters_become_vllms_options() -> None:
    assert "--enable-lora" not in spec().argv()
    adapters = {"poet": "/adapters/poet", "a=b": "org/lawyer"}
    options, modules = lora_options(adapters=adapters)
    assert options == {"--max-loras": "2", "--max-cpu-loras": "2"}
    assert modules == [{"name": name, "path": path} for name, path in adapters.items()]
    options, _ = lora_options(adapters=adapters, max_lora_rank=64)
    assert options["--max-lora-rank"] == "64"
    # All stay in host memory, and so as they were identified; few take memory of the device.
    options, _ = lora_options(adapters={f"a{n}": "/a" for n in range(20)})
    assert options == {"--max-loras": "8", "--max-cpu-loras": "20"}
    assert spec(adapters=adapters, args=("--max-loras", "1")).argv()[-2:] == ["--max-loras", "1"]


def test_the_connector_is_told_what_the_adapters_are() -> None:
    argv = spec(adapters={"poet": "/a"}, agent_socket="/run/agent.sock").argv()
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["adapters"] == {"poet": "/a"}


def test_the_connector_is_told_the_size_of_staging_memory() -> None:
    argv = spec(staging_mib=256, agent_socket="/run/agent.sock").argv()
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"]["staging_mib"] == 256


@pytest.mark.parametrize("staging_mib", [0, 16385])
def test_staging_memory_has_bounds(staging_mib: int) -> None:
    with pytest.raises(ValidationError, match="staging_mib"):
        spec(staging_mib=staging_mib)


def test_ranks_are_those_that_vllm_takes() -> None:
    with pytest.raises(ValidationError, match="max_lora_rank"):
        spec(max_lora_rank=5)


def test_a_cpu_engine_gets_the_cpu_environment() -> None:
    env = spec(kv_space_gib=2).environment({"HOME": "/h", "PYTHONPATH": "/x:/y"})
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["HOME"] == "/h"
    assert env["PYTHONPATH"].split(":") == [ROOT, "/x", "/y"]
    assert (env["VLLM_DO_NOT_TRACK"], env["VLLM_NO_USAGE_STATS"]) == ("1", "1")


def test_workers_of_an_engine_meet_on_loopback() -> None:
    assert spec().environment({})["GLOO_SOCKET_IFNAME"] == "lo"
    assert spec().environment({"GLOO_SOCKET_IFNAME": "eth1"})["GLOO_SOCKET_IFNAME"] == "eth1"


def test_a_gpu_engine_does_not() -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" not in spec().environment({})


def test_the_hub_is_off_for_a_local_model_only(tmp_path: Path) -> None:
    assert spec(model=str(tmp_path)).environment({})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in spec(model="org/model").environment({})
    adapters = {"lawyer": "org/lawyer"}
    assert "HF_HUB_OFFLINE" not in spec(model=str(tmp_path), adapters=adapters).environment({})


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [("http://c:4317", "grpc"), ("http://c:4318/v1/traces", "http/protobuf")],
)
def test_an_engine_sends_its_spans_to_the_same_receiver(endpoint: str, protocol: str) -> None:
    made = spec(traces={"endpoint": endpoint})
    argv = made.argv()
    assert argv[argv.index("--otlp-traces-endpoint") + 1] == endpoint
    env = made.environment({"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=lab"})
    assert env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == protocol
    assert env["OTEL_SERVICE_NAME"] == "vllm"
    named = f"deployment.environment.name=lab,service.instance.id={made.instance}"
    assert env["OTEL_RESOURCE_ATTRIBUTES"] == named
    assert "--otlp-traces-endpoint" not in spec().argv()
    assert not any(name.startswith("OTEL") for name in spec().environment({}))


def test_the_specs_own_environment_wins() -> None:
    env = spec(kv_space_gib=1, env={"VLLM_CPU_OMP_THREADS_BIND": "0-1"}).environment({})
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_urls() -> None:
    assert spec().url == "http://127.0.0.1:8100"
    assert spec(host="0.0.0.0").url == "http://127.0.0.1:8100"
    assert spec(host="10.0.0.7").url == "http://10.0.0.7:8100"
    assert spec(host="fd00::7").url == "http://[fd00::7]:8100"


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ValidationError, match="max_len"):
        spec(max_len=5)


def test_an_engine_shares_embeddings_beside_its_kvcache_or_alone() -> None:
    """As vLLM reads it: an ec_producer loads the encoder alone, and has no KVCache."""
    fields: dict[str, object] = {
        "agent_socket": "/run/agent.sock",
        "enable_prefix_caching": True,
        "kv_events": "ipc:///run/e0",
        "weights": "v7",
        "adapters": {"poet": "/poet"},
    }
    both = spec(**fields, encoder_role="ec_both").argv()
    assert {"--kv-transfer-config", "--kv-events-config", "--enable-lora"} <= set(both)
    alone = spec(**fields, encoder_role="ec_producer").argv()
    assert "--no-enable-prefix-caching" in alone
    assert not {"--kv-transfer-config", "--kv-events-config", "--enable-lora"} & set(alone)
    for argv, role in ((both, "ec_both"), (alone, "ec_producer")):
        assert json.loads(argv[argv.index("--ec-transfer-config") + 1]) == {
            "ec_connector": "PrfaasECConnector",
            "ec_connector_module_path": "kvmanager.vllm_connector.encode",
            "ec_role": role,
            "ec_connector_extra_config": {
                "agent_socket": "/run/agent.sock",
                "instance": "prefill-0",
                "weights": "v7",
            },
        }
    assert "--ec-transfer-config" not in spec(**fields).argv()
    assert "--ec-transfer-config" not in spec(encoder_role="ec_both").argv()
