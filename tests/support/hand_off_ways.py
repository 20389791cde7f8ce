"""The ways in which a region's engines hand KVCache over, each behind a gateway of its own.

The region has a PD cluster of two nodes: `b1` prefills, `b2` prefills and decodes. A gateway here
knows only the engines whose hand-off takes the wanted way.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.gateway.app import Gateway
from deploy.gateway.file import build_clusters, build_granter, load_gateway_file
from deploy.gateway.server import start_server
from deploy.region.spec.region import RegionInstance, RegionSpec
from local_pd.handoff import HandOffWay

PREFILL_FAR = RegionInstance(name="b1-prefill", role="prefill")
PREFILL_NEAR = RegionInstance(name="b2-prefill", role="prefill")
DECODE = RegionInstance(name="b2-decode", role="decode")

_HERE = Path(__file__).resolve().parent
NIXL_ENVIRONMENT = {
    # Engines find the plugin, and this project.
    "PYTHONPATH": os.pathsep.join([str(_HERE / "nixl_plugin"), str(_HERE.parents[1])]),
    "UCX_TLS": "tcp",
    "UCX_USE_MT_MUTEX": "y",  # its other locks spin
    "UCX_KEEPALIVE_INTERVAL": "inf",  # starved cores are not lost peers
}


@dataclass(frozen=True, slots=True)
class Way:
    """What the front is told, and the engines that it knows beside the one that decodes."""

    hand_off: HandOffWay
    prefills: str
    taken: str


WAYS = {
    "arena": Way("auto", PREFILL_NEAR.name, "arena"),
    "transport between nodes": Way("auto", PREFILL_FAR.name, "transport"),
    "transport within a node": Way("transport", PREFILL_NEAR.name, "transport"),
    "nixl": Way("nixl", PREFILL_FAR.name, "nixl"),
}


def two_nodes(spec: RegionSpec, hand_off: HandOffWay) -> RegionSpec:
    """The region's PD cluster alone, on two nodes like its first."""
    cluster = spec.pd_clusters[0]
    node = cluster.nodes[0]
    far = node.model_copy(update={"name": "b1", "instances": (PREFILL_FAR,)})
    near = node.model_copy(update={"name": "b2", "instances": (PREFILL_NEAR, DECODE)})
    cluster = cluster.model_copy(update={"nodes": (far, near), "hand_off": hand_off})
    model = spec.models[0]
    if hand_off == "nixl":
        model = model.model_copy(update={"env": {**model.env, **NIXL_ENVIRONMENT}})
    return spec.model_copy(update={"models": (model,), "clusters": (cluster,), "links": ()})


@asynccontextmanager
async def gateway(
    file: Path, hand_off: HandOffWay, prefills: Collection[str] = ()
) -> AsyncIterator[tuple[str, Gateway]]:
    """The gateway of a region's file once more, for its decode engine and these; its URL."""
    loaded = load_gateway_file(file)
    (pd,) = loaded.pd
    known = tuple(i for i in pd.instances if i.name in (DECODE.name, *prefills))
    made = loaded.model_copy(
        update={
            "pd": (pd.model_copy(update={"instances": known, "hand_off": hand_off}),),
            "gateway": loaded.gateway.model_copy(update={"port": 0, "admin": None}),
        }
    )
    granter = build_granter(made)
    clusters = build_clusters(made, granter)
    await clusters.start()
    gateway = Gateway(
        made.gateway, clusters.pds, {}, granter=granter, engine_access=made.engine_access()
    )
    runner = await start_server(gateway)
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", gateway
    finally:
        await runner.cleanup()
        await clusters.close()
