"""The decode side of a PD cluster as routing and admission see it: slots, KV memory, landings.

An engine without free KV memory decodes only the requests it holds, however many slots it has, and
lets the others wait inside. Its metrics say so, and reports carry them. Pure; time is an argument.
This file knows no links and no prefill clusters, and not what is decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.ledger import Ledger
from scheduler.reports import InstanceReport, decodes, serves
from scheduler.routing.views import DecodeView

UNTOLD_SLOTS: Final = 1 << 20
"""Slots of an instance whose front does not say how many requests it decodes at a time. It is large
enough never to be a limit.
"""
FULL_SHARE: Final = 0.9
"""A share of an engine's KV memory. While less is in use, its waiting requests wait for their turn
to prefill, because a step computes only so many tokens. While more is in use, they wait for memory.
"""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The instances of a PD cluster that decode for one model, as the report of `at_s` has them.

    `num_requests` are all that they have. The engines were read at `looked_at_s`.
    """

    at_s: float
    names: frozenset[str]
    slots_total: int
    num_requests: int
    kv_bytes: float
    kv_total_bytes: float | None
    looked_at_s: float
    landing: LandingRoom | None
    """None if a node does not say what room it has."""

    @property
    def num_free(self) -> int | None:
        """How many more requests they would decode at once; None if there are none."""
        return max(0, self.slots_total - self.num_requests) if self.names else None


@dataclass(frozen=True, slots=True)
class LandingRoom:
    """The room for landings by node, and the most that landings may take there, bytes.

    `nodes` gives the node of each instance of the cluster, since models share nodes. All were read
    at `looked_at_s`.
    """

    room_bytes: Mapping[str, float]
    cap_bytes: Mapping[str, float]
    nodes: Mapping[str, str]
    looked_at_s: float


def decoding(instances: Sequence[InstanceReport], at_s: float, model: str) -> Decoding:
    """Sum up the instances of a PD cluster that decode for a model."""
    found = [item for item in instances if decodes(item.role) and serves(item, model)]
    kv_bytes, kv_total_bytes = _kv_memory(found)
    return Decoding(
        at_s=at_s,
        names=frozenset(item.name for item in found),
        slots_total=sum(_num_slots(item) for item in found),
        num_requests=sum(item.running for item in found),
        kv_bytes=kv_bytes,
        kv_total_bytes=kv_total_bytes,
        looked_at_s=_looked_at_s(found, at_s),
        landing=_landing_room(found, instances, _looked_at_s(instances, at_s)),
    )


def decode_view(
    reported: Decoding, now_s: float, *, pd: str, model: str, known: ModelKnowledge, ledger: Ledger
) -> DecodeView:
    """The instances of `pd` that decode for a model as one pool."""
    landing = ledger.landing(model, pd)
    # No instance has these yet, so no number of requests includes them.
    coming = [leg for leg in ledger.taken().values() if (leg.model, leg.pd) == (model, pd)]
    slots = reported.slots_total
    num_requests = reported.num_requests + ledger.change_since(reported.names, reported.at_s)
    # Their number includes requests that still wait for their landings.
    num_decoding = max(0, num_requests - len(landing))
    under_way = [*landing, *coming]
    kv_change_bytes = ledger.kv_change_since(model, reported.looked_at_s, pd)
    return DecodeView(
        slots_total=slots,
        slots_used=min(num_decoding, slots),
        num_waiting=max(0, num_decoding - slots),
        decode_s=known.decode_s,
        step_s=known.step_s or 0.0,
        landing_s=tuple(sorted([max(0.0, leg.lands_at_s - now_s) for leg in under_way])),
        landing_kv_bytes=sum([leg.kv_bytes for leg in under_way]),
        # Engines have taken in and released KVCache since the front read their metrics.
        kv_bytes=max(0.0, reported.kv_bytes + kv_change_bytes),
        kv_total_bytes=reported.kv_total_bytes,
        num_instances=len(reported.names),
    )


def is_full(item: InstanceReport, num_requests: int) -> bool:
    """Whether one more request would wait inside an instance, for a slot or for KV memory.

    Where the front does not say how many slots it has, the engine says whether requests wait.
    """
    if not item.decode_slots and item.num_waiting > 0:
        return True
    return num_requests >= _num_slots(item)


def landing_room_bytes(reported: Decoding, *, pd: str, ledger: Ledger) -> float | None:
    """The largest landing for a model that fits now, bytes; None if a node does not say.

    A landing lies on the node of the instance that will decode it, so the node with most room
    counts.
    """
    landing = reported.landing
    if landing is None or not landing.room_bytes:
        return None
    room = dict(landing.room_bytes)
    change = ledger.landing_change(reported.at_s, landing.looked_at_s, pd)
    for instance, nbytes in change.items():
        node = landing.nodes.get(instance)
        if node in room:
            room[node] -= nbytes
    cap = landing.cap_bytes
    # The report may already contain what was given back, so that it would count twice.
    return max(0.0, *[min(nbytes, cap[node]) for node, nbytes in room.items()])


def _landing_room(
    decoding: Sequence[InstanceReport], instances: Sequence[InstanceReport], looked_at_s: float
) -> LandingRoom | None:
    room: dict[str, float] = {}
    cap: dict[str, float] = {}
    for item in decoding:
        # Until the node has said what is free, all that landings may take counts as free.
        nbytes = item.landing_room_bytes
        if nbytes is None:
            nbytes = item.landing_cap_bytes
        if nbytes is None:
            return None
        room[_node(item)] = nbytes
        cap[_node(item)] = item.landing_cap_bytes or math.inf
    return LandingRoom(room, cap, {item.name: _node(item) for item in instances}, looked_at_s)


def _looked_at_s(instances: Sequence[InstanceReport], at_s: float) -> float:
    """When the front last read the engines and agents that it reported at `at_s`."""
    return at_s - max((item.looked_s for item in instances), default=0.0)


def _node(item: InstanceReport) -> str:
    # Without an agent's address each instance counts as a node of its own.
    return item.node or item.name


def _num_slots(item: InstanceReport) -> int:
    """How many requests an instance decodes at a time.

    If others wait for memory, it is the number that it decodes now.
    """
    slots = item.decode_slots or UNTOLD_SLOTS
    is_full = item.kv_usage is not None and item.kv_usage >= FULL_SHARE
    if is_full and item.num_waiting > 0:
        return min(slots, max(1, item.num_running))
    return slots


def _kv_memory(instances: Sequence[InstanceReport]) -> tuple[float, float | None]:
    """(bytes in use, all bytes) of KV memory; (0, None) if an instance does not say."""
    used_bytes = total_bytes = 0.0
    for item in instances:
        if item.kv_usage is None or item.kv_total_bytes is None:
            return 0.0, None
        used_bytes += item.kv_usage * item.kv_total_bytes
        total_bytes += item.kv_total_bytes
    return used_bytes, total_bytes or None
