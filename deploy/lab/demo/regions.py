"""The demo's region as a `RegionSpec`: two clusters and an emulated link on this machine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy.lab.demo.scenario import CHUNK_TOKENS, THRESHOLD_TOKENS
from deploy.lab.demo.tiny_specs import TinyModel
from deploy.region.spec.region import RegionInstance, RegionSpec


def rank_environment(num_workers: int = 1) -> dict[str, str]:
    """The environment with which an engine starts quickly on a small machine without a GPU.

    One worker computes in the engine core's process, as on a GPU. vLLM's CPU platform gives it a
    process of its own, which imports everything a third time, to set OpenMP variables that nothing
    here sets. Without `VLLM_ENABLE_V1_MULTIPROCESSING` it does not. API server and engine core are
    two processes in both cases.

    Several workers share this machine's cores with one computing thread each. vLLM's parallel
    embedding would be compiled at the first request, eager mode or not, which takes two ranks most
    of a minute here. `TORCHDYNAMO_DISABLE` prevents it.
    """
    if num_workers == 1:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def demo_region(
    model: TinyModel,
    path: Path,
    *,
    threshold_tokens: int = THRESHOLD_TOKENS,
    chunk_tokens: int = CHUNK_TOKENS,
    prefix_caching: bool = True,
    link: dict[str, str] | None = None,
    tensor_parallel_size: int = 1,
    gateway_port: int = 0,
    landing_gib: float = 0.25,
    local_prefill: bool = True,
    scheduling: dict[str, Any] | None = None,
) -> RegionSpec:
    """A prefill cluster of one engine, a PD cluster of two, and a link of 1 Gbit/s and 20 ms.

    Without `local_prefill` the PD cluster has only its decode engine. Unless `scheduling` is given
    ({}: every default), routes follow the threshold alone. So the route of a prompt is known
    beforehand, however busy the machine is.
    """
    if scheduling is None:
        scheduling = {"routing": {"policy": "threshold"}}
    prefill_instances = [{"name": "b1-prefill", "role": "prefill"}] if local_prefill else []
    spec: dict[str, Any] = {
        "name": model.name,
        "gateway": {
            "port": gateway_port,
            "threshold_tokens": threshold_tokens,
            "scheduling": scheduling,
        },
        "models": [
            {
                "name": model.name,
                "path": str(path),
                "dtype": model.dtype,
                "max_model_len": model.max_model_len,
                "max_num_batched_tokens": chunk_tokens,
                "kv_space_gib": 1,
                "prefix_caching": prefix_caching,
                "tensor_parallel_size": tensor_parallel_size,
                "enforce_eager": True,
                "args": model.engine_args,
                "env": rank_environment(tensor_parallel_size),
            }
        ],
        "clusters": [
            {
                "name": "prefill-a",
                "kind": "prefill",
                "nodes": [
                    {
                        "name": "a1",
                        "agent": {"arena_gib": 0.5},
                        "instances": [{"name": "a1-prefill"}],
                    }
                ],
            },
            {
                "name": "pd-b",
                "kind": "pd",
                "nodes": [
                    {
                        "name": "b1",
                        "agent": {"arena_gib": 0.5, "landing_gib": landing_gib},
                        "instances": [
                            *prefill_instances,
                            {"name": "b1-decode", "role": "decode"},
                        ],
                    }
                ],
            },
        ],
        "links": [
            {
                "from": "prefill-a",
                "to": "pd-b",
                "emulate": link or {"rate": "1Gbit", "rtt": "20ms"},
            }
        ],
    }
    return RegionSpec.model_validate(spec)


def pd_cluster_alone(spec: RegionSpec, instances: Iterable[RegionInstance]) -> RegionSpec:
    """The PD cluster of `spec` with these instances on its node, without links and other
    clusters.
    """
    cluster = spec.pd_clusters[0]
    node = cluster.nodes[0].model_copy(update={"instances": tuple(instances)})
    alone = cluster.model_copy(update={"nodes": (node,)})
    return spec.model_copy(update={"clusters": (alone,), "links": ()})
