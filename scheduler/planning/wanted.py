"""How many instances a measured load asks for, whatever there are now.

A plan divides the instances that there are. Whoever adds and removes instances (KEDA, an operator)
needs to know how many there should be. This file does not know what instances do now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from scheduler.planning.plan import Plan
from scheduler.planning.throughput import Mode

TARGET_LOAD: Final = 0.8
"""The share of its time for which an instance should work. Queues grow without bound towards 1."""


def needed_instances(plan: Plan, rate_rps: float, kind: str) -> Mapping[str, float]:
    """Instances by cluster that work for `TARGET_LOAD` of their time at this rate, requests/s.

    `kind` is "prefill" or "decode". The routes stay those of the plan, so the numbers of all parts
    change in proportion to the rate (equations 3 to 5 of the paper, solved for N).
    """
    return {
        part.name: rate_rps * part.need / TARGET_LOAD
        for part in plan.resources(Mode.EXACT)
        if part.kind == kind
    }
