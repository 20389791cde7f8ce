"""Requests and regions for tests of the queueing simulation, plain unless said otherwise."""

from typing import Any

import numpy as np

from scheduler.planning.load.queueing import (
    QueueingLink,
    Requests,
    SlotPool,
    Station,
    System,
)

ROOMY = SlotPool(num_slots=10**9, step_s=0.0)


def requests(arrivals_s: Any, service_s: Any, **fields: Any) -> Requests:
    """Requests of station and pool 0 without KVCache, decode or memory, unless given."""
    num = len(arrivals_s)
    full: dict[str, Any] = {
        "station": np.zeros(num, int),
        "pool": np.zeros(num, int),
        "service_s": np.broadcast_to(np.asarray(service_s, float), num),
        "decode_s": np.zeros(num),
        "kv_token_bytes": np.zeros(num),
        "kv_fixed_bytes": np.zeros(num),
    }
    for name, values in fields.items():
        full[name] = np.broadcast_to(np.asarray(values), num)
    return Requests(arrivals_s=np.asarray(arrivals_s, float), **full)


def one_queue(num_servers: int) -> System:
    return System(stations=(Station(num_servers),), pools=(ROOMY,))


def across(link: QueueingLink, num_servers: int = 10**9) -> System:
    return System(stations=(Station(num_servers, {0: 0}),), pools=(ROOMY,), links=(link,))
