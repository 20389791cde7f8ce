"""The layers of an engine's pipeline stages, and what its processes tell each other about them.

vLLM forms the groups of layers over the whole model and gives each worker all of them with the
layers of its own stage alone; the scheduler's process gets those of the first worker. But the
places of bytes in a transfer follow from all layers. So the workers exchange their stages when they
are made, before they connect to the agent: from then on each knows the whole layout, as without
stages. The scheduler's process learns it from them by vLLM's handshake. Nothing later depends on
the order in which processes connect, and the agent sees one layout on all connections.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from msgspec.structs import replace
from vllm.distributed import get_pp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvmanager.layout import KVGroup, KVLayout, LayoutError

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Has another text on every host, and the same in all containers of a host."""


class Stage(msgspec.Struct, frozen=True):
    """What one process knows of the engine's KVCache.

    groups: all groups of the engine, with the layers of this stage; a group may have none of them.
    readings: for each of these layers, how vLLM's specs say that its pages are to be read.
    """

    groups: tuple[KVGroup, ...]
    readings: dict[str, tuple[str, ...]]

    @property
    def layer_names(self) -> frozenset[str]:
        return frozenset(self.readings)


@dataclass
class LayoutHandshake(KVConnectorHandshakeMetadata):
    """A worker's word to the scheduler's process: the layout of the whole engine, encoded."""

    layout: bytes


def joined(stages: Sequence[Stage]) -> Stage:
    """All layers of these stages, those of earlier stages first in each group.

    Raises `LayoutError` where the stages are not of one engine.
    """
    first = stages[0]
    for number, stage in enumerate(stages):
        if _without_layers(stage) != _without_layers(first):
            raise LayoutError(
                f"pipeline stage {number} has groups {_described(stage)}, stage 0 has "
                f"{_described(first)}"
            )
        if not stage.readings:
            raise LayoutError(
                f"pipeline stage {number} of {len(stages)} has no layer with KVCache: use fewer "
                "stages, or divide the layers with VLLM_PP_LAYER_PARTITION"
            )
    groups = tuple(
        replace(parts[0], layers=tuple(layer for group in parts for layer in group.layers))
        for parts in zip(*(stage.groups for stage in stages), strict=True)
    )
    return Stage(groups, {name: found for s in stages for name, found in s.readings.items()})


def _without_layers(stage: Stage) -> list[KVGroup]:
    return [replace(group, layers=()) for group in stage.groups]


def _described(stage: Stage) -> str:
    return ", ".join(
        f"{group.kind}({group.window_tokens}) in blocks of {group.tokens_per_block}"
        for group in stage.groups
    )


def exchanged(own: Stage) -> list[Stage]:
    """The stages of all workers of this worker's pipeline, in order. All of them must call it.

    vLLM makes the connectors of all workers in one call to all of them, before any step, so that
    nothing else is under way in the group. Raises `LayoutError` where they run on several hosts.
    """
    pipeline = get_pp_group()
    if pipeline.world_size == 1:
        return [own]
    told: list[Any] = [None] * pipeline.world_size
    mine = _BOOT_ID.read_text(), msgspec.msgpack.encode(own)
    torch.distributed.all_gather_object(told, mine, group=pipeline.cpu_group)
    num_hosts = len({boot_id for boot_id, _ in told})
    if num_hosts > 1:
        # Each worker would write into the arena of its own host, and no transfer be whole.
        raise LayoutError(
            f"the pipeline stages run on {num_hosts} hosts: put all of an engine on the host of "
            "its node agent"
        )
    return [msgspec.msgpack.decode(stage, type=Stage) for _, stage in told]


def layout_from(handshakes: Mapping[tuple[int, int], object], num_workers: int) -> KVLayout:
    """The layout that all workers have told. Raises `LayoutError`, also for another connector's
    handshakes.
    """
    told = {
        worker: said.layout
        for worker, said in handshakes.items()
        if isinstance(said, LayoutHandshake)
    }
    if len(told) < len(handshakes):
        # vLLM's MultiConnector passes on the handshake of one of its connectors, to all of them.
        raise LayoutError(
            "with pipeline parallelism PrfaasConnector needs vLLM's handshake for itself: use it "
            "without another connector in front of it"
        )
    if len(told) != num_workers or len(set(told.values())) != 1:
        raise LayoutError(
            f"{len(told)} of {num_workers} workers told {len(set(told.values()))} KV layouts: "
            f"(pipeline stage, tensor-parallel rank) {sorted(told)}"
        )
    return KVLayout.decode(next(iter(told.values())))
