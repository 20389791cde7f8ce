"""The best threshold and division for one PD cluster with one threshold, by exhaustive search.

This is the search of the paper (section 4.2): every threshold of a grid with every division of the
PD cluster's instances, all at once with numpy; then a finer grid of thresholds around the best. It
serves both modes, the tables and the pictures, and needs no solver. The corners are part of it:
N_p = 0 with t = 0 is the naive deployment that offloads everything, and t = longest prompt is a PD
cluster on its own.

The paper has one prefill cluster. Several with the same threshold add up: each takes as many of the
offloaded prompts as it and its link can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from scheduler.planning.lengths import Floats
from scheduler.planning.plan import Classes, NoRouteError, Plan
from scheduler.planning.region_model import Link, PrefillClusterModel, Region
from scheduler.planning.throughput import (
    Mode,
    Split,
    local_mean,
    offloaded_mean,
    pd_decode_rps,
    pd_prefill_rps,
    prefill_cluster_rps,
    system_rps,
)

Bounds: TypeAlias = Mapping[str, tuple[int, int]]
"""The least and the most N_p of each PD cluster by name. Its other instances decode."""

NUM_THRESHOLDS: Final = 1000
SHARED_STEP: Final = 0.01
"""How finely instances are divided where they may share roles, instances."""
_REFINEMENTS: Final = 2


@dataclass(frozen=True)
class ThresholdSearch:
    """Throughput at every threshold (rows) and number of local prefill instances (columns)."""

    split: Split
    num_prefill: Floats
    prefill_cluster_rps: Floats
    """Theta_prfaas, shape (num_thresholds,)."""
    pd_prefill_rps: Floats
    """Theta_pd-p, shape (num_thresholds, num_splits)."""
    pd_decode_rps: Floats
    """Theta_pd-d, shape (num_splits,)."""
    system_rps: Floats
    """Lambda_max, shape (num_thresholds, num_splits)."""

    @property
    def best(self) -> tuple[int, int]:
        """Row and column of the highest throughput; of equals, the one with the highest threshold.

        A higher threshold sends less over the link for the same throughput.
        """
        # Rounding must not decide between equal plans.
        rows, columns = np.nonzero(self.system_rps >= self.system_rps.max() * (1 - 1e-9))
        return int(rows[-1]), int(columns[-1])


def sources_of(region: Region) -> list[tuple[PrefillClusterModel, Link]]:
    """The prefill clusters that have a link to the region's only PD cluster, each with its link."""
    (pd,) = region.pd_clusters
    return [(c, link) for c in region.prefill_clusters if (link := region.link(c.name, pd.name))]


def search_thresholds(
    region: Region, mode: Mode, thresholds: ArrayLike, num_prefill: ArrayLike
) -> ThresholdSearch:
    """Throughput over a grid of `thresholds` (tokens, ascending) and `num_prefill` instances."""
    (pd,), lengths = region.pd_clusters, region.traffic.lengths
    split = Split.at(lengths, thresholds)
    columns = np.atleast_1d(np.asarray(num_prefill, float))
    nothing = np.where(split.offload_fraction > 0, 0.0, np.inf)
    remote: Floats = np.sum(_offloaded_rps(region, mode, split) or [nothing], axis=0)
    local = pd_prefill_rps(columns[None, :], local_mean(mode, pd.prefill, lengths, split)[:, None])
    decode = pd_decode_rps(
        pd.num_instances - columns, pd.batch_size, pd.step_s, region.traffic.output_tokens
    )
    total = system_rps(remote[:, None], local, decode[None, :], split.offload_fraction[:, None])
    return ThresholdSearch(split, columns, remote, local, decode, total)


def threshold_grid(region: Region, num: int = NUM_THRESHOLDS) -> Floats:
    """0, the longest prompt, and lengths between them at equal shares of requests."""
    lengths = region.traffic.lengths
    inner = lengths.quantile(np.arange(1, num - 1) / (num - 1))
    return np.unique(np.concatenate([[0.0], inner, [lengths.max_tokens]]))


def best_threshold_plan(
    region: Region, mode: Mode, *, whole: bool = True, bounds: Bounds | None = None
) -> Plan:
    """The best plan with one threshold for all prefill clusters. Raises `NoRouteError`.

    N_p runs over the numbers within `bounds`, or over all that leave something to decode.
    """
    (pd,) = region.pd_clusters
    if pd.num_instances < 1:
        raise NoRouteError(f"{pd.name} has no instance: decode needs at least one")
    least, most = (0, pd.num_instances - 1) if bounds is None else bounds[pd.name]
    columns = np.arange(least, most + 1, 1 if whole else SHARED_STEP, dtype=np.float64)
    grid = threshold_grid(region)
    search = search_thresholds(region, mode, grid, columns)
    row, column = search.best
    # One prefill term of equation 6 rises with t and the other falls (3.4.2), so the best
    # threshold lies between the neighbours of the best row.
    for _ in range(_REFINEMENTS):
        grid = np.unique(np.linspace(grid[max(row - 1, 0)], grid[min(row + 1, len(grid) - 1)], 101))
        search = search_thresholds(region, mode, grid, search.num_prefill[column : column + 1])
        row, column = search.best
    # With all prompts offloaded, any threshold below the shortest is the same; 0 says it plainly.
    tokens = 0.0 if search.split.offload_fraction[row] >= 1 else float(grid[row])
    return threshold_plan(region, tokens, float(search.num_prefill[column]))


def threshold_plan(region: Region, threshold_tokens: float, num_prefill: float) -> Plan:
    """The plan that offloads prompts longer than the threshold, for one PD cluster.

    Several prefill clusters take them in proportion to what they sustain.
    """
    (pd,), lengths = region.pd_clusters, region.traffic.lengths
    classes = Classes.at(lengths, [threshold_tokens])
    split = Split.at(lengths, [threshold_tokens])
    rates = np.array([float(rps[0]) for rps in _offloaded_rps(region, Mode.EXACT, split)])
    # Without an offloaded prompt the rates are infinite, and with dead links they are 0.
    if not (np.isfinite(rates).all() and rates.any()):
        rates = np.ones(len(rates))
    # Without a source nothing can be offloaded.
    remote = (classes.edges[1:] > threshold_tokens) & (len(rates) > 0)
    parts = rates[:, None] / rates.sum()
    flow = np.concatenate([~remote[None, :], parts * remote]) * classes.shares
    tokens = threshold_tokens if remote.any() else lengths.max_tokens
    return Plan(region, classes, flow, {pd.name: num_prefill}, tokens)


def _offloaded_rps(region: Region, mode: Mode, split: Split) -> list[Floats]:
    """The rate of prompts above each threshold that each of `sources_of` sustains, requests/s."""
    lengths, sources = region.traffic.lengths, sources_of(region)
    kv_bytes = offloaded_mean(mode, region.kv.size, lengths, split)
    # Clusters of one kind have the same curve, and its means take most of the time.
    curves = {id(source.prefill): source.prefill for source, _ in sources}
    means = {key: offloaded_mean(mode, curve, lengths, split) for key, curve in curves.items()}
    return [
        prefill_cluster_rps(
            source.num_instances, means[id(source.prefill)], link.bytes_per_s, kv_bytes
        )
        for source, link in sources
    ]
