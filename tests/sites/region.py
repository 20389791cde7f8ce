"""The region of `make sites`: two prefill clusters, two PD clusters, two gateways and Redis."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan import Path as Link

from deploy.lab.demo.regions import rank_environment
from deploy.lab.demo.scenario import CHUNK_TOKENS
from deploy.lab.demo.tiny_specs import TinyModel

LINKS = {
    "a1": Link(400e6, 0.020),
    "a2": Link(150e6, 0.040),
    "b1": Link(500e6, 0.005),
    "c1": Link(300e6, 0.010),
    "a3": Link(400e6, 0.020),
    "r1": Link(1e9, 0.001),
}
"""The path from each host to the router; two of them add up to the path between two hosts."""
PREFILL = {"prefill-a": "a1", "prefill-b": "a2"}
PD = {"pd-b": "b1", "pd-c": "c1"}
JOINING = "a3"
OUTSIDE = "r1"
"""The host of Redis and of the clients."""
THRESHOLD_TOKENS = 256


def region_file(
    model: TinyModel,
    path: Path,
    addresses: Mapping[str, str],
    redis_url: str,
    *,
    joined: bool = False,
) -> dict[str, Any]:
    """The region file, without and with the host `JOINING`."""

    def node(name: str, role: str) -> dict[str, Any]:
        return {
            "name": name,
            "host": addresses[name],
            "agent": {"arena_gib": 0.25},
            "instances": [{"name": f"{name}-engine", "role": role}],
        }

    clusters = []
    for cluster, name in PREFILL.items():
        names = [name, JOINING] if joined and cluster == "prefill-a" else [name]
        clusters.append(
            {"name": cluster, "kind": "prefill", "nodes": [node(n, "prefill") for n in names]}
        )
    for cluster, name in PD.items():
        clusters.append(
            {"name": cluster, "kind": "pd", "spill": "overflow", "nodes": [node(name, "both")]}
        )
    prefills = [item["name"] for item in clusters if item["kind"] == "prefill"]
    return {
        "name": "sites",
        "gateway": {
            "nodes": list(PD.values()),
            "host": "0.0.0.0",
            "threshold_tokens": THRESHOLD_TOKENS,
            # All engines share this machine's cores, so that the nearest one is always sooner.
            "scheduling": {"routing": {"policy": "threshold"}},
            "api_keys_file": "clients",
            "shared": {"redis": redis_url},
        },
        "security": {
            "tls": {name: f"keys/{name}.pem" for name in ("cert", "key", "ca")},
            "engine_key": "keys/engine.key",
            "granting_key": "keys/granting.key",
            "granting_keys": "keys/granting.pub",
        },
        "models": [
            {
                "name": model.name,
                "path": str(path),
                "dtype": model.dtype,
                "max_model_len": model.max_model_len,
                "max_num_batched_tokens": CHUNK_TOKENS,
                "kv_space_gib": 1,
                "enforce_eager": True,
                "args": model.engine_args,
                "env": rank_environment(),
            }
        ],
        "clusters": clusters,
        "links": [{"from": source, "to": target} for source in prefills for target in PD],
    }
