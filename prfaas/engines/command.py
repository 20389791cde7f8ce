"""How one stock vLLM engine is started with our connector: its command line and its environment.

Pure: starts nothing, reads no environment of its own, and does not know who supervises the engine.
"""

import json
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from ssl import CERT_REQUIRED
from typing import Annotated, Final, Literal

from pydantic import Field

from kvmanager.agent.engines.protocol import MAX_ADAPTERS
from kvmanager.config_files.fields import ListenHost, SecretTexts, Section, TlsSection, Tokens
from kvmanager.config_files.traces import TracesSection
from kvmanager.vllm_connector.key_guard import KEY_FILE_VARIABLE
from transport import Endpoint
from transport.endpoint import is_wildcard

CONNECTOR: Final = "PrfaasConnector"
NIXL_CONNECTOR: Final = "NixlConnector"
CONNECTOR_MODULE: Final = "kvmanager.vllm_connector.connector"
EC_CONNECTOR: Final = "PrfaasECConnector"
EC_CONNECTOR_MODULE: Final = "kvmanager.vllm_connector.encode"
KEY_GUARD: Final = "kvmanager.vllm_connector.key_guard.KeyGuard"

# The `vllm` console command looks up a distribution called vllm, which the CPU build does not have.
_SERVER_MODULE: Final = "vllm.entrypoints.openai.api_server"

# vLLM 0.32 warms no eager engine up whose KV memory on the CPU is given, and then every pipeline
# stage but the first fails at the first prompt, for want of its input buffers. Mode 1 is plain
# torch.compile, which TORCHDYNAMO_DISABLE makes eager.
_EAGER_WITH_WARM_UP: Final = "-cc.mode=1"

_PROJECT_ROOT: Final = Path(__file__).resolve().parents[2]


AdapterName = Annotated[str, Field(min_length=1, max_length=200)]
AdapterPath = Annotated[str, Field(min_length=1)]
MAX_STAGING_MIB: Final = 16 << 10
"""Every worker pins twice as much of its host's memory."""
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
EncoderRole = Literal["ec_producer", "ec_both"]
"""vLLM's `ec_role`. ec_producer: the engine loads the model's encoder alone and encodes for others.
ec_both: it has the whole model, and encodes for others or takes what others have encoded.
"""
DEFAULT_LORA_RANK: Final = 16
"""vLLM's `max_lora_rank` where nobody sets it."""

MAX_ACTIVE_ADAPTERS: Final = 8
"""Most adapters that may work in one engine step, unless `args` say another number. Each takes
device memory from the KVCache.
"""


class EngineOptions(Section):
    """How an engine serves its model. A region's file gives the same options for a model."""

    dtype: str = "auto"
    """Type of weights and activations: a value of vLLM's --dtype."""
    max_model_len: Annotated[Tokens, Field(ge=2)] | None = None
    """Most tokens of prompt and output, a number or such as 128Ki. Left out: what the model has."""
    block_size: Tokens | None = None
    """Tokens of one KV block. Left out: vLLM's choice."""
    max_num_batched_tokens: Tokens | None = None
    """Tokens of one engine step, so of one prefill chunk, a number or such as 8Ki. Left out: vLLM's
    choice.
    """
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs that share each layer of an instance."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Stages that divide the layers of an instance, each on `tensor_parallel_size` GPUs. Chunks of
    prompts follow each other through them.
    """
    weights: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")] | None = None
    """A word of yours that identifies the weights. Engines with the same word share KVCache. Left
    out, their files or their commit on the hub do; needed only where weights are in no file here.
    """
    adapters: dict[AdapterName, AdapterPath] = Field(default={}, max_length=MAX_ADAPTERS)
    """LoRA adapters: the names that clients ask for, and the directory of each or its name on the
    Hugging Face hub. Engines share KVCache of adapters with the same files.
    """
    max_lora_rank: LoraRank | None = None
    """Largest rank of an adapter. Left out: vLLM's choice, 16."""
    start_minutes: Annotated[int, Field(ge=1)] = 60
    """How long an engine may take until it serves, minutes: one that takes longer is started again.
    """
    enforce_eager: bool = False
    """Do without CUDA graphs and compilation."""
    kv_space_gib: Annotated[int, Field(ge=1)] | None = None
    """KV memory of an engine on the CPU, whole GiB. On a GPU leave it out and put
    `--gpu-memory-utilization` into `args`.
    """
    staging_mib: Annotated[int, Field(ge=1, le=MAX_STAGING_MIB)] | None = None
    """Memory of each worker on a GPU through which it sends and stores KVCache, whole MiB, on the
    GPU and once more on the host; as much again through which it loads. Left out: 64.
    """
    args: tuple[str, ...] = ()
    """Further vLLM options. They come last on the command line and so override those above."""
    env: SecretTexts = Field(default={})
    """Added to the engines' environment."""


class EngineSpec(EngineOptions):
    """One vLLM engine: what it serves, where, with how much memory, and its node agent's socket."""

    instance: str
    """Name of the instance; its connector tells it to the node agent."""
    model: str
    """Directory of the weights, or a name on the Hugging Face hub."""
    served_name: str
    """Name of the model in clients' requests."""
    host: ListenHost = "127.0.0.1"
    """Address that its OpenAI server listens on."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """Port that its OpenAI server listens on."""
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    """Requests in one engine step. Left out: vLLM's choice."""
    enable_prefix_caching: bool = False
    """Cache prefixes in the engine's own memory."""
    agent_socket: str | None = None
    """Unix socket of the node agent. Left out: the engine runs without our connector."""
    encoder_role: EncoderRole | None = None
    """How it shares embeddings of media through its node agent. Left out: it shares none."""
    nixl_at: str | None = None
    """host:port at which NixlConnectors of other engines ask for its memory. Left out: it has
    none.
    """
    kv_events: str | None = None
    """ZeroMQ endpoint at which it publishes what its own prefix cache keeps and drops. A second
    endpoint, after a comma, answers those who missed messages.
    """
    key_file: Path | None = None
    """File with the key that it demands on every path. Left out: it answers everybody."""
    tls: TlsSection | None = None
    """Serves HTTPS, and demands a certificate of the same authority. Left out: plain HTTP."""
    traces: TracesSection | None = None
    """Where its spans go. Left out: nowhere."""
    python: str | None = None
    """The interpreter that has vLLM. Left out: the one of the process that starts the engine."""

    @property
    def url(self) -> str:
        """Base URL for a client on a host that can reach the engine."""
        host = "127.0.0.1" if is_wildcard(self.host) else self.host
        return f"{'http' if self.tls is None else 'https'}://{Endpoint(host, self.port)}"

    @property
    def _is_pipeline_on_cpu(self) -> bool:
        return self.pipeline_parallel_size > 1 and self.kv_space_gib is not None

    def kv_transfer_config(self) -> dict[str, object]:
        """The value of vLLM's `--kv-transfer-config`."""
        if self.nixl_at is None:
            return self._our_connector()
        nixl = {"kv_connector": NIXL_CONNECTOR, "kv_role": "kv_both"}
        if self.kv_space_gib is not None:
            nixl["kv_buffer_device"] = "cpu"
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # The first that has KVCache of a request loads it: a prompt that another engine keeps
            # ready must not begin with what our cache has of it.
            "kv_connector_extra_config": {"connectors": [nixl, self._our_connector()]},
        }

    def _our_connector(self) -> dict[str, object]:
        extra: dict[str, object] = {"agent_socket": self.agent_socket, "instance": self.instance}
        if self.weights is not None:
            extra["weights"] = self.weights
        if self.adapters:
            extra["adapters"] = self.adapters
        if self.staging_mib is not None:
            extra["staging_mib"] = self.staging_mib
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            # vLLM's other policy, "fail", would turn a lost transfer into an error for the client.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def ec_transfer_config(self) -> dict[str, object]:
        """The value of vLLM's `--ec-transfer-config`."""
        extra: dict[str, object] = {"agent_socket": self.agent_socket, "instance": self.instance}
        if self.weights is not None:
            extra["weights"] = self.weights
        return {
            "ec_connector": EC_CONNECTOR,
            "ec_connector_module_path": EC_CONNECTOR_MODULE,
            "ec_role": self.encoder_role,
            "ec_connector_extra_config": extra,
        }

    def kv_events_config(self) -> dict[str, object]:
        """The value of vLLM's `--kv-events-config`."""
        endpoint, _, replay_endpoint = (self.kv_events or "").partition(",")
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint or None,
            "topic": "",
        }

    def argv(self) -> list[str]:
        """The whole command line."""
        argv = [self.python or sys.executable, "-m", _SERVER_MODULE]
        argv += ["--model", self.model, "--served-model-name", self.served_name]
        argv += ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        optional = {
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_size,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--max-num-seqs": self.max_num_seqs,
        }
        for flag, value in optional.items():
            if value is not None:
                argv += [flag, str(value)]
        if self.tensor_parallel_size > 1:
            argv += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.pipeline_parallel_size > 1:
            argv += ["--pipeline-parallel-size", str(self.pipeline_parallel_size)]
        keeps_kv = self.encoder_role != "ec_producer"
        prefix = "" if self.enable_prefix_caching and keeps_kv else "no-"
        argv.append(f"--{prefix}enable-prefix-caching")
        if self.enforce_eager:
            argv.append(_EAGER_WITH_WARM_UP if self._is_pipeline_on_cpu else "--enforce-eager")
        # Without the first option an answer's usage has no `cached_tokens`; without the second,
        # every health probe writes a line into the engine's log.
        argv += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        # Without it the render endpoints, which turn requests into token ids, answer 403.
        argv.append("--enable-scale-out")
        if self.key_file is not None:
            argv += ["--middleware", KEY_GUARD]
        if self.tls is not None:
            argv += ["--ssl-certfile", str(self.tls.cert), "--ssl-keyfile", str(self.tls.key)]
            argv += ["--ssl-ca-certs", str(self.tls.ca), "--ssl-cert-reqs", str(int(CERT_REQUIRED))]
            argv.append("--enable-ssl-refresh")
        if self.agent_socket is not None and keeps_kv:
            argv += ["--kv-transfer-config", json.dumps(self.kv_transfer_config())]
        if self.agent_socket is not None and self.encoder_role is not None:
            argv += ["--ec-transfer-config", json.dumps(self.ec_transfer_config())]
        if self.kv_events is not None and keeps_kv:
            argv += ["--kv-events-config", json.dumps(self.kv_events_config())]
        if self.traces is not None:
            argv += ["--otlp-traces-endpoint", self.traces.endpoint]
        return argv + self._lora_argv() + list(self.args)

    def _lora_argv(self) -> list[str]:
        # Adapters change the language model, which an engine that only encodes has not loaded.
        if not self.adapters or self.encoder_role == "ec_producer":
            return []
        num_adapters = len(self.adapters)
        argv = ["--enable-lora", "--max-loras", str(min(num_adapters, MAX_ACTIVE_ADAPTERS))]
        # All of them stay in host memory: one that was loaded again could have other files by then
        # than those that were identified.
        argv += ["--max-cpu-loras", str(num_adapters)]
        if self.max_lora_rank is not None:
            argv += ["--max-lora-rank", str(self.max_lora_rank)]
        # As JSON, because a name may have a "=".
        modules = ({"name": name, "path": path} for name, path in self.adapters.items())
        return [*argv, "--lora-modules", *map(json.dumps, modules)]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited` plus what the engine needs; `env` of this spec wins."""
        environment = dict(inherited)
        environment |= {
            "VLLM_DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": _python_path(inherited.get("PYTHONPATH", "")),
            "PYTHONUNBUFFERED": "1",
        }
        # All workers of an engine are on its host. Otherwise gloo listens at the address of the
        # host's name, and asks nobody who connects for a key.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        paths = map(Path, (self.model, *self.adapters.values()))
        # A whole path is no name on a hub, whether or not the machine that asks has it, which may
        # write units or a chart for others.
        if all(path.is_absolute() or path.is_dir() for path in paths):
            # Everything is there; a look-up at a hub would only add a timeout without a network.
            environment["HF_HUB_OFFLINE"] = "1"
        if self.key_file is not None:
            environment[KEY_FILE_VARIABLE] = str(self.key_file)
        if self.nixl_at is not None:
            at = Endpoint.parse(self.nixl_at)
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = at.host
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(at.port)
        if self.kv_space_gib is not None:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.kv_space_gib)
            # By default vLLM pins each engine's threads to cores, and engines on one host choose
            # the same ones.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            # Threads that spin while they wait starve the other engines of a shared CPU: measured
            # with three engines on two cores, prefills took four to ten times as long.
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self.traces is not None:
            protocol = "http/protobuf" if self.traces.is_http else "grpc"
            environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = protocol
            # vLLM gives its traces no names of a service and an instance.
            environment.setdefault("OTEL_SERVICE_NAME", "vllm")
            given = inherited.get("OTEL_RESOURCE_ATTRIBUTES", "")
            own = f"service.instance.id={self.instance}"
            environment["OTEL_RESOURCE_ATTRIBUTES"] = ",".join(filter(None, (given, own)))
        if self.enforce_eager and self._is_pipeline_on_cpu:
            environment["TORCHDYNAMO_DISABLE"] = "1"
        return environment | self.env


def _python_path(inherited: str) -> str:
    """A search path on which the engine's Python finds `kvmanager`, installed or not."""
    root = str(_PROJECT_ROOT)
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return inherited
    parts = [part for part in inherited.split(":") if part and part != root]
    return ":".join([root, *parts])
