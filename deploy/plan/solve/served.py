"""What is served, as the planner takes it: a trace as traffic, a model's KVCache as a curve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmanager.hf_config import ModelKv
from scheduler.planning.curves import Curve
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.prefix_reuse import TracePrompt, cached_tokens
from scheduler.planning.region_model import KvSize, Traffic


def traced_traffic(
    prompts: Sequence[TracePrompt],
    block_tokens: int,
    output_tokens: float | None,
    cache_tokens: float | None,
) -> Traffic:
    """A trace as traffic. `output_tokens` None: the trace's mean; `cache_tokens` None: no limit."""
    blocks = None if cache_tokens is None else int(cache_tokens / block_tokens)
    cached = cached_tokens(prompts, block_tokens, blocks)
    uncached = [p.input_tokens - c for p, c in zip(prompts, cached, strict=True)]
    return Traffic(
        EmpiricalLengths.of(uncached),
        output_tokens or sum(p.output_tokens for p in prompts) / len(prompts),
        sum(p.input_tokens for p in prompts) / len(prompts),
    )


def kv_size_of(model: ModelKv) -> KvSize:
    """The KVCache of a model as a curve: windows stop growing at their length."""
    # Between the ends of two windows the size is a straight line, so two points give each piece.
    knots = sorted({0.0, *(float(layer.window_tokens) for layer in model.layers)})
    pieces = []
    for start in knots:
        base = model.bytes_for(int(start))
        slope = model.bytes_for(int(start) + 1) - base
        pieces.append((base - slope * start, slope, 0.0))
    return KvSize(Curve(np.array(pieces), np.array(knots)), model.fixed_bytes)
