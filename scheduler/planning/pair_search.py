"""The best threshold and split for one PD cluster with one threshold, by exhaustive search.

This is the search of the paper (section 4.2): every threshold of a grid with every division of the
PD cluster's instances, all at once with numpy; then a finer grid of thresholds around the best. The
corners are part of it: N_p = 0 with t = 0 is the naive deployment that offloads everything, and t =
longest prompt is a PD cluster on its own.

The paper has one prefill cluster. Several with the same threshold add up: each takes as many of the
offloaded prompts as it and its link can.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scheduler.planning.lengths import Floats
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

NUM_THRESHOLDS = 1000
_REFINEMENTS = 2


@dataclass(frozen=True)
class PairSearch:
    """Throughput at every threshold (rows) and number of local prefill instances (columns)."""

    mode: Mode
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
        top = self.system_rps.max()
        # Rounding must not decide between equal plans.
        rows, columns = np.nonzero(self.system_rps >= top * (1 - 1e-9))
        return int(rows[-1]), int(columns[-1])


def sources_of(region: Region) -> list[tuple[PrefillClusterModel, Link]]:
    """The prefill clusters that have a link to the region's only PD cluster, each with its link.

    ValueError if there are several PD clusters.
    """
    if len(region.pd_clusters) != 1:
        raise ValueError("not one PD cluster")
    pd = region.pd_clusters[0].name
    return [(c, link) for c in region.prefill_clusters if (link := region.link(c.name, pd))]


def offloaded_rps(region: Region, mode: Mode, split: Split) -> list[Floats]:
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


def search_pair(
    region: Region, mode: Mode, thresholds: ArrayLike, num_prefill: ArrayLike
) -> PairSearch:
    """Throughput over a grid of `thresholds` (tokens, ascending) and `num_prefill` instances."""
    pd, lengths = region.pd_clusters[0], region.traffic.lengths
    split = Split.at(lengths, thresholds)
    columns = np.atleast_1d(np.asarray(num_prefill, float))
    nothing = np.where(split.offload_fraction > 0, 0.0, np.inf)
    remote: Floats = np.sum(offloaded_rps(region, mode, split) or [nothing], axis=0)
    local = pd_prefill_rps(columns[None, :], local_mean(mode, pd.prefill, lengths, split)[:, None])
    decode = pd_decode_rps(
        pd.num_instances - columns, pd.batch_size, pd.step_s, region.traffic.output_tokens
    )
    total = system_rps(remote[:, None], local, decode[None, :], split.offload_fraction[:, None])
    return PairSearch(mode, split, columns, remote, local, decode, total)


def threshold_grid(region: Region, num: int = NUM_THRESHOLDS) -> Floats:
    """0, the longest prompt, and lengths between them at equal shares of requests."""
    lengths = region.traffic.lengths
    inner = lengths.quantile(np.arange(1, num - 1) / (num - 1))
    return np.unique(np.concatenate([[0.0], inner, [lengths.max_tokens]]))


def best_of_pair(
    region: Region,
    mode: Mode,
    *,
    thresholds: ArrayLike | None = None,
    num_prefill: ArrayLike | None = None,
) -> tuple[float, float, float]:
    """(threshold in tokens, N_p, requests/s) of the best plan. Given values are not searched.

    N_p runs over whole numbers from 0, and at least one instance decodes.
    """
    splits = (
        np.arange(region.pd_clusters[0].num_instances)
        if num_prefill is None
        else np.atleast_1d(num_prefill)
    )
    grid = threshold_grid(region) if thresholds is None else np.atleast_1d(thresholds)
    found = search_pair(region, mode, grid, splits)
    row, column = found.best
    # One prefill term of equation 6 rises with t and the other falls (3.4.2), so the best
    # threshold lies between the neighbours of the best row.
    for _ in range(_REFINEMENTS if thresholds is None else 0):
        finer = np.linspace(grid[max(row - 1, 0)], grid[min(row + 1, len(grid) - 1)], 101)
        grid = np.unique(finer)
        found = search_pair(region, mode, grid, found.num_prefill[column : column + 1])
        row, column = found.best
    # With all prompts offloaded, any threshold below the shortest is the same; 0 says it plainly.
    threshold = 0.0 if found.split.offload_fraction[row] >= 1 else float(grid[row])
    return threshold, float(found.num_prefill[column]), float(found.system_rps[row, column])
