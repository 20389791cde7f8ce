"""The throughput model of a PrfaaS region: what each role sustains and which one binds.

Equations 1-6 of the paper (Prefill-as-a-Service, section 3.4) are pure functions over numpy arrays
that broadcast against each other. The paper's symbols appear here and nowhere else:

    symbol              here
    Lambda_max          system_rps                 requests/s that the region sustains
    Theta_prfaas        prefill_cluster_rps        of the prefill cluster, requests/s
    Theta_pd-p          pd_prefill_rps             of the PD cluster's prefill instances
    Theta_pd-d          pd_decode_rps              of its decode instances
    N_prfaas, N_p, N_d  num_prfaas, num_prefill, num_decode    instances
    L, L_out            uncached prompt length, output_tokens   tokens
    t, p                threshold_tokens, offload_fraction = P(L > t)
    l_long, l_short     mean_offloaded_tokens = E[L | L > t], mean_local_tokens = E[L | L <= t]
    T_prefill(l)        prefill curves             s
    S_kv(l)             the KVCache curve          bytes
    Phi_kv(l)           kv_bytes_per_s             bytes/s that one instance emits
    B_out               link_bytes_per_s           bytes/s
    BS_max, T_decode    batch_size, step_s         requests, s
    N, P (equation 2)   num_gpus, gpus_per_instance

There are two modes. `paper` puts the mean length into the curves, T(E[L]), as the paper does.
`exact` takes the mean over the lengths, E[T(L)], which is the work that hardware has to do. T is
convex, so `paper` promises a few percent more than can be sustained.

A prompt of exactly t tokens stays local. Nothing here searches, simulates or reads files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import Floats, Lengths


class Mode(StrEnum):
    """How prompts of many lengths become one number."""

    PAPER = "paper"
    EXACT = "exact"


def kv_bytes_per_s(kv_bytes: ArrayLike, prefill_s: ArrayLike) -> Floats:
    """Equation 1: the rate at which one prefill instance emits KVCache, bytes/s."""
    return np.asarray(kv_bytes, np.float64) / np.asarray(prefill_s, np.float64)


def cluster_egress_bytes_per_s(
    num_gpus: ArrayLike, gpus_per_instance: ArrayLike, kv_bytes: ArrayLike, prefill_s: ArrayLike
) -> Floats:
    """Equation 2: the egress that keeps a prefill cluster from waiting for its link, bytes/s."""
    instances = np.asarray(num_gpus, np.float64) / np.asarray(gpus_per_instance, np.float64)
    egress: Floats = instances * kv_bytes_per_s(kv_bytes, prefill_s)
    return egress


def prefill_cluster_rps(
    num_prfaas: ArrayLike, prefill_s: ArrayLike, link_bytes_per_s: ArrayLike, kv_bytes: ArrayLike
) -> Floats:
    """Equation 3: the slower of prefilling and sending, which overlap layer by layer,
    requests/s.
    """
    return np.minimum(_per(num_prfaas, prefill_s), _per(link_bytes_per_s, kv_bytes))


def pd_prefill_rps(num_prefill: ArrayLike, prefill_s: ArrayLike) -> Floats:
    """Equation 4: requests/s of the PD cluster's prefill instances."""
    return _per(num_prefill, prefill_s)


def pd_decode_rps(
    num_decode: ArrayLike, batch_size: ArrayLike, step_s: ArrayLike, output_tokens: ArrayLike
) -> Floats:
    """Equation 5: requests/s of the decode instances, each with `batch_size` slots."""
    slots = np.asarray(num_decode, np.float64) * np.asarray(batch_size, np.float64)
    return _per(slots, np.asarray(step_s, np.float64) * np.asarray(output_tokens, np.float64))


def system_rps(
    prefill_cluster: ArrayLike, pd_prefill: ArrayLike, pd_decode: ArrayLike, offload: ArrayLike
) -> Floats:
    """Equation 6: the slowest stage, given the fraction of requests that is offloaded."""
    share = np.asarray(offload, np.float64)
    # A prefill stage sees its share of the requests only, while every request is decoded.
    prefill = np.minimum(_per(prefill_cluster, share), _per(pd_prefill, 1 - share))
    slowest: Floats = np.minimum(prefill, np.asarray(pd_decode, np.float64))
    return slowest


@dataclass(frozen=True)
class Split:
    """A distribution of lengths divided at thresholds. Every array has one entry per threshold."""

    threshold_tokens: Floats
    offload_fraction: Floats
    mean_offloaded_tokens: Floats
    mean_local_tokens: Floats

    @classmethod
    def at(cls, lengths: Lengths, threshold_tokens: ArrayLike) -> Split:
        thresholds = np.atleast_1d(np.asarray(threshold_tokens, np.float64))
        local, local_sum, _ = lengths.moments_to(thresholds)
        whole = lengths.moments_to([lengths.max_tokens])[1, 0]
        return cls(
            thresholds,
            _share(1 - local),
            mean_of(whole - local_sum, 1 - local),
            mean_of(local_sum, local),
        )


def offloaded_mean(mode: Mode, curve: Curve, lengths: Lengths, split: Split) -> Floats:
    """What an offloaded request needs of `curve` on average; 0 where nothing is offloaded."""
    if mode is Mode.PAPER:
        return np.where(split.offload_fraction > 0, curve(split.mean_offloaded_tokens), 0.0)
    # E[curve(L); L > t], which the division by P(L > t) makes conditional.
    longer = curve.mean(lengths) - curve.sum_to(lengths, split.threshold_tokens)
    return mean_of(longer, split.offload_fraction)


def local_mean(mode: Mode, curve: Curve, lengths: Lengths, split: Split) -> Floats:
    """What a request that stays local needs of `curve` on average; 0 where none stays."""
    local = _share(1 - split.offload_fraction)
    if mode is Mode.PAPER:
        return np.where(local > 0, curve(split.mean_local_tokens), 0.0)
    return mean_of(curve.sum_to(lengths, split.threshold_tokens), local)


def _per(capacity: ArrayLike, need: ArrayLike) -> Floats:
    """capacity / need. Without any need there is no limit, whatever the capacity."""
    have = np.asarray(capacity, np.float64)
    wanted = np.asarray(need, np.float64)
    rates = np.full(np.broadcast_shapes(have.shape, wanted.shape), np.inf)
    np.divide(have, wanted, out=rates, where=wanted > 0)
    return rates


def mean_of(total: Floats, share: Floats) -> Floats:
    """total / share, or 0 where the share is 0 but for rounding."""
    # Where only rounding is left of the share, the quotient would be noise.
    real = _share(share) > 0
    return np.divide(total, share, out=np.zeros(len(share)), where=real)


def _share(share: Floats) -> Floats:
    """The share, with mere rounding set to 0."""
    return np.where(share > 1e-12, share, 0.0)
