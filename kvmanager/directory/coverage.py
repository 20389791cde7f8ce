"""Computes how much of one prompt each node can resume, from each node's flags of each block. Pure.

Does not know keys or the source of the flags. Neighbouring blocks with the same flags form a run,
so that a prompt of many blocks that few nodes hold costs only a few rows. Nothing changes within a
run: if a prefix that ends within it can be resumed, so can the prefix that ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.directory.messages import Hit, NodeCoverage, NodeName, ResumeRule
from kvmanager.pool.shape import PartKind

Flags = npt.NDArray[np.uint16]

NUM_KINDS: Final = 3
ALL_FLAGS: Final = (1 << 3 * NUM_KINDS) - 1
"""Bit 3 * tier + kind, for the tiers arena, ssd and engine."""
EMBEDDING_FLAG: Final = 1 << 3 * NUM_KINDS
"""The key is an embedding's, and the node has it. No feed has this bit (`CacheFeed.embeddings`)."""

_VIEWS: Final = ((0, 1, 2), (0, 1), (0,), (1,), (2,))
"""The tiers of `NodeCoverage.every`, `pool`, `arena`, `ssd` and `engine`."""


def _masks(kind: PartKind) -> npt.NDArray[np.uint16]:
    masks = [sum(1 << NUM_KINDS * tier + kind for tier in tiers) for tiers in _VIEWS]
    return np.array(masks, dtype=np.uint16)[:, None, None]


_KV, _WINDOW, _STATE = _masks(PartKind.KV), _masks(PartKind.WINDOW), _masks(PartKind.STATE)


def coverages(
    rule: ResumeRule,
    flags: Flags,
    ends: npt.NDArray[np.int64],
    nodes: Sequence[tuple[NodeName, float]],
) -> list[NodeCoverage]:
    """`flags[run, node]`, for runs that end before blocks `ends`, and the nodes' names and ages.

    Nodes that hold nothing useful are left out. The longest usable prefix comes first.
    """
    kv, usable = _hits(rule, flags, ends)
    found = []
    for column in np.flatnonzero(kv[0]).tolist() if kv.size else ():
        pairs = zip(kv[:, column].tolist(), usable[:, column].tolist(), strict=True)
        every, pool, arena, ssd, engine = (Hit(*pair) for pair in pairs)
        (cluster, node), age_s = nodes[column]
        found.append(NodeCoverage(cluster, node, every, pool, arena, ssd, engine, age_s))
    found.sort(key=lambda one: (-one.usable_blocks, -one.kv_blocks, one.cluster, one.node))
    return found


def _hits(rule: ResumeRule, flags: Flags, ends: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """KV and usable blocks, each by [view, node]."""
    flags = flags[None, :, :]
    ends = ends[None, :, None]
    resumes: npt.NDArray[np.bool_] = np.ones((len(_VIEWS), *flags.shape[1:]), dtype=np.bool_)
    if rule.has_kv:
        resumes = np.logical_and.accumulate((flags & _KV) != 0, axis=1)
        kv = np.where(resumes, ends, 0).max(axis=1, initial=0)
    if rule.window_reach:
        # The end of the last run so far without the windows: a prefix needs them in its last
        # `window_reach` blocks, or in all of its blocks if it has fewer.
        gap_ends = np.maximum.accumulate(np.where(flags & _WINDOW, 0, ends), axis=1)
        resumes = resumes & (ends - gap_ends >= np.minimum(rule.window_reach, ends))
    if rule.has_state:
        resumes = resumes & ((flags & _STATE) != 0)
    usable = np.where(resumes, ends, 0).max(axis=1, initial=0)
    return (kv if rule.has_kv else usable), usable
