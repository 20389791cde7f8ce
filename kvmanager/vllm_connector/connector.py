"""`PrfaasConnector`, which vLLM loads with `--kv-transfer-config`. A thin facade.

    {"kv_connector": "PrfaasConnector",
     "kv_connector_module_path": "kvmanager.vllm_connector.connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"agent_socket": "/run/prfaas/agent.sock", "instance": "d0"}}

It may stand beside NixlConnector in a MultiConnector, behind it: each leaves the requests of the
other alone.

`instance` is the engine's name for the agent and the cluster's front. Without it the name is the
vLLM engine id, which changes with every start.

With vLLM's own prefix caching on, the engine uses the agent's prefix cache as well, unless
`"prefix_pool": false`; `cache_min_load_tokens` and `cache_find_timeout_s` are its options. Engines
of the same weights share KVCache. The files of the weights identify them; the option `weights` is a
word that identifies weights which are in no file (`kvmanager.vllm_connector.weights`). The option
`adapters` has the names and paths of the engine's `--lora-modules`: the agent is told which they
are. KVCache of other adapters is cached by their content, and the gateway moves none of it.

On a GPU `staging_mib` (64) is the memory through which pages are stored, and as much again through
which they are loaded: on the device, beyond `gpu_memory_utilization`, and pinned on the host.

With pipeline parallelism the connectors of the workers exchange the layers of their stages when
they are made, and vLLM's handshake brings them to the scheduler's process, whose connector begins
only then (`kvmanager.vllm_connector.stages`).

`kv_role` may also be `kv_producer` or `kv_consumer`. The engine then computes the other role's
requests as if they had no parameters. A `kv_producer` whose steps overlap (asynchronous scheduling,
pipelines) stores in the prefix cache and never loads from it. The interface is vLLM's
`KVConnectorBase_V1` with `SupportsHMA`.
"""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus
from vllm.version import __version__ as vllm_version

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import PROTOCOL_VERSIONS, EngineHello
from kvmanager.layout import KVLayout
from kvmanager.vllm_connector.cache.keys import namespace_of
from kvmanager.vllm_connector.cache.scheduler import (
    DEFAULT_FIND_TIMEOUT_S,
    DEFAULT_MIN_LOAD_TOKENS,
    PrefixCacheOptions,
)
from kvmanager.vllm_connector.cuda_pages import DEFAULT_STAGING_MIB
from kvmanager.vllm_connector.engine_layout import layout_of, registered_views, stage_of
from kvmanager.vllm_connector.media_settings import is_text_only
from kvmanager.vllm_connector.metadata import PrfaasMetadata
from kvmanager.vllm_connector.scheduler import SchedulerSide
from kvmanager.vllm_connector.stages import LayoutHandshake, exchanged, layout_from
from kvmanager.vllm_connector.stats import PrfaasPromMetrics, TransferStats
from kvmanager.vllm_connector.versions.check import check_vllm
from kvmanager.vllm_connector.weights import Adapters, adapter_settings
from kvmanager.vllm_connector.worker import LOAD_WAIT_S, WorkerSide

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("prfaas.kvmanager.connector")

DEFAULT_LANDING_TIMEOUT_S = 120.0
# After any other status the prompt may not be computed to its end, so an outbox stays incomplete.
FINISHED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
NO_SLEEP = "an engine that exchanges KVCache cannot give up the memory of its KV cache"


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams prefilled KVCache to the node agent and loads landed KVCache from it."""

    def __new__(
        cls,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> Self:
        # Before object.__new__, which refuses a class that lacks an abstract method of a newer
        # vLLM and names neither version. One of an engine's processes warns.
        check_vllm(vllm_version, warns=role is KVConnectorRole.SCHEDULER)
        return super().__new__(cls)

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        if not extra.get("agent_socket"):
            raise ValueError(
                "PrfaasConnector needs kv_connector_extra_config.agent_socket: "
                "the path that `prfaas agent --socket` listens on"
            )
        # vLLM 0.33 refuses it by `supports_sleep_mode`; 0.32 does not ask.
        if vllm_config.model_config.enable_sleep_mode:
            raise ValueError(f"PrfaasConnector: {NO_SLEEP}; remove --enable-sleep-mode")
        # vLLM makes one connector in the scheduler's process and one in each worker, and calls only
        # the methods of its role.
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._layout: KVLayout | None = None
        stage = stage_of(vllm_config, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            self._layout = layout_of(vllm_config, exchanged(stage))
        elif vllm_config.parallel_config.pipeline_parallel_size == 1:
            self._start_scheduler(layout_of(vllm_config, [stage]))

    def _start_scheduler(self, layout: KVLayout) -> None:
        config, extra = self._vllm_config, self._kv_transfer_config.kv_connector_extra_config
        adapters = Adapters(extra.get("adapters"), adapter_settings(config))
        hello = _hello(config, layout, None, adapters.told)
        self._scheduler = SchedulerSide(
            layout,
            self._kv_cache_config,
            EngineClient(extra["agent_socket"], hello),
            mamba_cache_mode=config.cache_config.mamba_cache_mode,
            landing_timeout_s=float(extra.get("landing_timeout_s", DEFAULT_LANDING_TIMEOUT_S)),
            produces=self._kv_transfer_config.is_kv_producer,
            consumes=self._kv_transfer_config.is_kv_consumer,
            cache=_cache_options(extra, hello.namespace, loads=self._may_load(config)),
            adapters=adapters,
            speculates=config.speculative_config is not None,
        )
        if not extra.get("instance"):
            logger.warning(
                "kv_connector_extra_config names no instance: this engine is %s to its node "
                "agent, and something else after the next start",
                hello.instance,
            )
        self._scheduler.start()

    def _may_load(self, vllm_config: "VllmConfig") -> bool:
        """Whether no load can meet a running step that still writes the same block.

        Where steps overlap, vLLM's scheduler delays the reuse of blocks that running steps may
        still write, but only for consumers.
        """
        is_consumer: bool = self._kv_transfer_config.is_kv_consumer
        return is_consumer or vllm_config.max_concurrent_batches == 1

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._layout is not None
        tp_rank = get_tensor_model_parallel_rank()
        views = registered_views(self._layout, kv_caches, self._kv_cache_config, tp_rank)
        worker = get_pp_group().rank_in_group, tp_rank
        extra = self._kv_transfer_config.kv_connector_extra_config
        hello = _hello(self._vllm_config, self._layout, worker)
        client = EngineClient(extra["agent_socket"], hello)
        # Not earlier: a load needs the views, and the agent may give this worker work once it is
        # connected.
        staging_bytes = int(extra.get("staging_mib", DEFAULT_STAGING_MIB)) << 20
        self._worker = WorkerSide(self._layout, client, views, staging_bytes)
        self._worker.start()

    def unregister_kv_caches(self) -> None:
        """Refuse: copies from and to the pages may be under way, and are never all drained.

        vLLM 0.33 calls this before it takes the pages' memory away. The error leaves the memory in
        its place, and reaches whoever asked vLLM for it.
        """
        raise RuntimeError(f"PrfaasConnector: {NO_SLEEP}; stop the engine instead")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The layout of all pipeline stages. None without stages: the scheduler's process has it,
        and a connector beside this one may need vLLM's handshake.
        """
        if self._vllm_config.parallel_config.pipeline_parallel_size == 1:
            return None
        assert self._layout is not None
        return LayoutHandshake(self._layout.encode())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take a step's metadata and begin its loads. vLLM calls this before each forward pass, and
        `start_load_kv` behind it when no request of the step waits for a load.
        """
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        self._worker.begin_step(self._metadata(), time.monotonic())

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start_step(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only when its load is over. "When an engine loads
        KVCache" in docs/architecture.md says why.
        """

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert self._worker is not None
        self._worker.save_kv_layer(self._metadata(), layer_name)

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.wait_for_save(self._metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        return self._worker.transfer_results(LOAD_WAIT_S if self._metadata().is_idle else 0.0)

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        return self._worker.take_stats() if self._worker is not None else None

    def _metadata(self) -> PrfaasMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PrfaasMetadata)
        return metadata

    # Scheduler side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Begin, with the layout of all pipeline stages. vLLM calls it before any request comes."""
        if self._scheduler is None:
            num_workers = self._vllm_config.parallel_config.world_size
            self._start_scheduler(layout_from(metadata, num_workers))

    @property
    def requires_kv_delivery(self) -> bool:
        """False: pages are copied out while they are computed, so a preempted producer need not be
        computed again for its hand-off.
        """
        return False

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def on_new_request(self, request: "Request") -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> PrfaasMetadata:
        assert self._scheduler is not None
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        self._scheduler.update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        self._scheduler.reset_cache()
        return True

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.request_finished(request, aborted=request.status not in FINISHED_WELL)
        # False: vLLM may free the blocks at once, because copies of them are ordered before any
        # later write of the same stream.
        return False, None

    # Both.

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: where a full CUDA graph keeps vLLM from calling `save_kv_layer` in a step, the
        layers are sent after the step. Decode steps have nothing to send and keep their graphs.
        """
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """False: see `unregister_kv_caches`. vLLM 0.33 asks before an engine starts."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrfaasPromMetrics:
        return PrfaasPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# With statistics of the engine process MultiConnector looks up a class by its name, and it knows
# no module paths. A module that is imported again has registered it already.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector(PrfaasConnector.__name__, __name__, "PrfaasConnector")


def _cache_options(extra: dict[str, Any], namespace: bytes, *, loads: bool) -> PrefixCacheOptions:
    return PrefixCacheOptions(
        namespace,
        loads,
        int(extra.get("cache_min_load_tokens", DEFAULT_MIN_LOAD_TOKENS)),
        float(extra.get("cache_find_timeout_s", DEFAULT_FIND_TIMEOUT_S)),
    )


def instance_name(vllm_config: "VllmConfig") -> str:
    """The engine's name for its agent. The scheduler and all workers of a core have one name, each
    data parallel core another one (`EnginePeer.engine` knows the form).

    Without a configured name it is vLLM's engine id, which all processes of a core have. With
    several cores it ends with the core's rank.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    name = transfer.kv_connector_extra_config.get("instance")
    if not name:
        return str(transfer.engine_id)
    rank = vllm_config.parallel_config.data_parallel_index
    return f"{name}_dp{rank}" if rank else str(name)


def _namespace(config: "VllmConfig", layout: KVLayout) -> bytes:
    """The start of the engine's cache keys; empty: it does not use the agent's prefix cache."""
    assert config.kv_transfer_config is not None
    extra = config.kv_transfer_config.kv_connector_extra_config
    return namespace_of(config, layout) if extra.get("prefix_pool", True) else b""


def _hello(
    config: "VllmConfig",
    layout: KVLayout,
    worker: tuple[int, int] | None,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> EngineHello:
    """`worker`: (pipeline stage, tensor-parallel rank); None: the scheduler's process."""
    pp_rank, tp_rank = worker or (0, 0)
    return EngineHello(
        version=PROTOCOL_VERSIONS.newest,
        oldest_version=PROTOCOL_VERSIONS.oldest,
        instance=instance_name(config),
        role="scheduler" if worker is None else "worker",
        pid=os.getpid(),
        tp_rank=tp_rank,
        tp_size=layout.tp_size,
        pp_rank=pp_rank,
        pp_size=config.parallel_config.pipeline_parallel_size,
        layout=layout.encode(),
        namespace=_namespace(config, layout),
        adapters=dict(adapters),
        engine=f"vllm {vllm_version}",
        text_only=is_text_only(config),
    )
