"""Moving a prompt's KVCache against computing it again: times over link rate and prompt length.

KVCache sizes and prefill times are the planner's curves, what remains of an overlapped transfer is
the planner's simulation of a lone request. Rates are Gbit/s of the link; the transport's goodput is
the share of it that was measured, and never more than both ends can move. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.config_files.units import GBIT_PER_S
from scheduler.planning.curves import Curve
from scheduler.planning.lengths import Floats
from scheduler.planning.load.queueing import (
    QueueingLink,
    Requests,
    SlotPool,
    Station,
    System,
    simulate,
)
from scheduler.planning.region_model import KvSize

PAYLOAD_SHARE = 1448 / 1500
"""Payload of full TCP segments over IPv4 with time stamps, as a share of the link's bytes."""

_SEARCHED_GBPS = np.geomspace(1e-3, 1e3, 12_001)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model's KVCache and the prefill of an engine that would make it."""

    model: str
    engine: str
    kv: KvSize
    prefill: Curve

    @property
    def name(self) -> str:
        return f"{self.model}, {self.engine}"


@dataclass(frozen=True, slots=True)
class Goodput:
    """What the transport carries on a link. `shares`: (Gbit/s of a link, goodput as a share of it)
    as measured; straight lines over the logarithm between them, level outside; PAYLOAD_SHARE where
    there is none. `ceiling_gbps`: what both ends can move at all.
    """

    shares: tuple[tuple[float, float], ...]
    ceiling_gbps: float

    def gbps(self, link_gbps: Floats) -> Floats:
        points = sorted(self.shares) or [(1.0, PAYLOAD_SHARE)]
        rates, shares = np.array(points).T
        share = np.interp(np.log(link_gbps), np.log(rates), shares)
        carried: Floats = np.minimum(share * link_gbps, self.ceiling_gbps)
        return carried

    def link_gbps_for(self, wanted_gbps: float) -> float | None:
        """The slowest link that carries so much; None when the ends cannot."""
        enough = np.flatnonzero(self.gbps(_SEARCHED_GBPS) >= wanted_gbps)
        return float(_SEARCHED_GBPS[enough[0]]) if len(enough) else None

    def basis(self, link_gbps: float) -> str:
        """Where the goodput at this rate comes from."""
        if self.gbps(np.array([link_gbps]))[0] >= self.ceiling_gbps:
            return "what the ends can move"
        rates = sorted(rate for rate, _ in self.shares)
        if not rates:
            return "assumed"
        if any(math.isclose(rate, link_gbps, rel_tol=1e-6) for rate in rates):
            return "measured"
        return "interpolated" if rates[0] < link_gbps < rates[-1] else "extended"


@dataclass(frozen=True, slots=True)
class Row:
    """One case at one prompt length; times over the link rates of the study.

    `needed_gbps` is the goodput at which moving takes as long as the prefill, None where the RTT
    alone does; `crossover_gbps` the slowest link with it, None where the ends cannot move so much.
    `hiding_gbps` is the goodput at which the link keeps up with what the prefill emits.
    `remaining_s`: from the prefill's end until the layer-wise transfer has landed.
    """

    num_tokens: int
    kv_bytes: float
    prefill_s: float
    needed_gbps: float | None
    crossover_gbps: float | None
    hiding_gbps: float
    transfer_s: tuple[float, ...]
    remaining_s: tuple[float, ...]


def rows(
    case: Case, lengths: Sequence[int], link_gbps: Floats, goodput: Goodput, rtt_s: float
) -> list[Row]:
    """One for each prompt length."""
    carried_gbps = goodput.gbps(link_gbps)
    found = []
    for num_tokens in lengths:
        kv_bytes, prefill_s = float(case.kv.size(num_tokens)), float(case.prefill(num_tokens))
        left_s = prefill_s - rtt_s
        needed_gbps = kv_bytes / left_s / GBIT_PER_S if left_s > 0 else None
        token_bytes = kv_bytes - case.kv.fixed_bytes
        found.append(
            Row(
                num_tokens=num_tokens,
                kv_bytes=kv_bytes,
                prefill_s=prefill_s,
                needed_gbps=needed_gbps,
                crossover_gbps=None if needed_gbps is None else goodput.link_gbps_for(needed_gbps),
                hiding_gbps=token_bytes / prefill_s / GBIT_PER_S,
                transfer_s=tuple((kv_bytes / (carried_gbps * GBIT_PER_S) + rtt_s).tolist()),
                remaining_s=tuple(
                    remaining_s(
                        prefill_s, token_bytes, case.kv.fixed_bytes, carried_gbps, rtt_s
                    ).tolist()
                ),
            )
        )
    return found


def remaining_s(
    prefill_s: float, token_bytes: float, fixed_bytes: float, carried_gbps: Floats, rtt_s: float
) -> Floats:
    """From the end of a lone prefill until its KVCache has landed, for each goodput: layers leave
    while it runs, recurrent states at its end.
    """
    num = len(carried_gbps)
    links = tuple(QueueingLink(gbps * GBIT_PER_S, rtt_s / 2) for gbps in carried_gbps.tolist())
    played = simulate(
        System(
            stations=tuple(Station(1, {0: index}) for index in range(num)),
            pools=(SlotPool(num, 0.0),),
            links=links,
        ),
        Requests(
            arrivals_s=np.zeros(num),
            station=np.arange(num),
            pool=np.zeros(num, np.intp),
            service_s=np.full(num, prefill_s),
            decode_s=np.zeros(num),
            kv_token_bytes=np.full(num, token_bytes),
            kv_fixed_bytes=np.full(num, fixed_bytes),
        ),
        warmup=0.0,
    )
    return played.tail_s


def interpolated(values: Sequence[float], link_gbps: Floats, at_gbps: float) -> float:
    """A time of a `Row` at a rate between those of the study; both axes logarithmic."""
    logs = np.log(np.maximum(values, 1e-9))
    return float(np.exp(np.interp(math.log(at_gbps), np.log(link_gbps), logs)))
