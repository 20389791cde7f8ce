"""How a replay starts: the plans of its policy, the instances, empty caches, the drawn jitter.

Pure but for the random numbers, which a seed decides. It knows no events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.planning.plan import Plan
from scheduler.planning.region_model import Cluster, PdClusterModel
from scheduler.planning.solve import best_plan, is_pair
from scheduler.planning.threshold_search import threshold_plan
from scheduler.replay.caching import ReplayCache
from scheduler.replay.decode import DecodeInstance, DecodePool, step_table
from scheduler.replay.jobs import Job
from scheduler.replay.model import Policy, ReplayModel
from scheduler.replay.prefill import BY_ARRIVAL, PrefillStation
from scheduler.replay.workload import Workload
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.profiles import PrefillProfile


def starting_plans(model: ReplayModel, policy: Policy) -> list[Plan]:
    """The plan that a policy starts with in each PD cluster."""
    if model.joint is None:
        return [starting_plan(model, policy)]
    if policy.thresholds is not None or policy.num_prefill is not None:
        raise ValueError("thresholds and num_prefill are for regions with one PD cluster")
    return list(model.joint.plans.values())


def starting_plan(model: ReplayModel, policy: Policy) -> Plan:
    """The plan that a policy starts with: the best one unless the policy names another."""
    region = model.region
    if policy.thresholds is None and policy.num_prefill is None:
        return best_plan(region)
    if not is_pair(region):
        raise ValueError("thresholds and num_prefill need one prefill cluster and one PD cluster")
    best = best_plan(region)
    tokens = best.threshold_tokens
    if policy.thresholds is not None and region.prefill_clusters:
        tokens = policy.thresholds[region.prefill_clusters[0].name]
    num_prefill = policy.num_prefill
    if num_prefill is None:
        num_prefill = round(best.num_prefill[model.pd.name])
    return threshold_plan(
        region, region.traffic.lengths.max_tokens if tokens is None else tokens, float(num_prefill)
    )


def starting_station(
    model: ReplayModel, cluster: Cluster, num_instances: int, order: OrderConfig | None = None
) -> PrefillStation:
    """The instances of a cluster that prefill, all of them idle. Prompts wait in this order; None:
    first come, first served.
    """
    return PrefillStation(
        cluster.name,
        PrefillProfile.of(model.prefill(cluster)),
        num_instances,
        order or BY_ARRIVAL,
        model.prefill_factors.get(cluster.name, 1.0),
        max_concurrent=model.max_concurrent,
        pass_tokens=model.pass_tokens,
    )


def starting_pool(
    model: ReplayModel,
    pd: PdClusterModel,
    num_prefill: int,
    schedule: Callable[[float, DecodeInstance, int], None],
    begun: Callable[[Job, float], None],
) -> DecodePool:
    """The instances of a PD cluster that decode, all but `num_prefill`, and all of them idle.

    ValueError if none is left to decode, or none of the region's prefills.
    """
    num_decode = pd.num_instances - num_prefill
    if num_decode < 1:
        raise ValueError(f"all {pd.num_instances} instances of {pd.name} prefill; one decodes")
    if not num_prefill and not model.region.prefill_clusters:
        raise ValueError("nobody prefills: no prefill cluster, and no local prefill instance")
    instances = [DecodeInstance(f"{pd.name}-{num_prefill + i}") for i in range(num_decode)]
    points = model.decode_steps or ((pd.batch_size, pd.step_s),)
    if points[-1][0] < pd.batch_size:
        # Measured steps may end below the batch of the plan, whose step time is the last point
        # then. A larger batch never takes less time, whatever the plan says.
        points = (*points, (pd.batch_size, max(pd.step_s, points[-1][1])))
    return DecodePool(
        instances,
        pd.batch_size,
        step_table(points),
        schedule,
        begun=begun,
        load_steps=model.load_steps,
        pass_tokens=model.pass_tokens,
    )


def starting_caches(
    model: ReplayModel, workload: Workload, stations: Sequence[PrefillStation]
) -> dict[str, ReplayCache] | None:
    """An empty cache for each station, by its name. None if the replay has no caches."""
    sizes = model.cache_blocks
    if sizes is None or workload.block_ids is None:
        return None
    return {
        station.name: ReplayCache(sizes.get(station.name, 0), workload.block_tokens)
        for station in stations
    }


def prefill_jitter(model: ReplayModel, num_jobs: int, seed: int) -> list[float] | None:
    """For each job the factor of its prefill time, with a mean of 1. None without jitter."""
    jitter = model.prefill_jitter
    if not jitter:
        return None
    # A random stream of its own: jitter changes nothing else.
    rng = np.random.default_rng((seed, 99))
    drawn: list[float] = rng.lognormal(-(jitter**2) / 2, jitter, num_jobs).tolist()
    return drawn
