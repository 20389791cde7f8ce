"""Instances and requests of stage simulations, small enough that times can be added up by hand."""

from __future__ import annotations

import math
from typing import Any, Final

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.values import EncodeConfig, Medium
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.stages.batching import Batching
from scheduler.stages.profile import StageProfile, StageSizes, StageSlo
from scheduler.stages.simulation import StageModel
from scheduler.stages.traffic import StageRequest

ENCODE: Final = EncodeLine(0.002, 1e-5)
PREFILL: Final = PrefillProfile((0.0,), ((0.010, 1e-4, 0.0),))
STEPS: Final = tuple(0.010 + 0.001 * batch for batch in range(9))


def profile(**changes: Any) -> StageProfile:
    """2 ms and 10 us a token to encode, 10 ms and 100 us a token to prefill, up to 8 decodes."""
    given: dict[str, Any] = {"encode": ENCODE, "prefill": PREFILL, "decode_steps": STEPS} | changes
    return StageProfile(**given)


def sizes(**changes: Any) -> StageSizes:
    """1 kB of KVCache a token, 100 bytes of embedding, pulled at 1 GB/s after 1 ms."""
    given: dict[str, Any] = {
        "embedding_token_bytes": 100.0,
        "kv": KvProfile(0.0, 1000.0),
        "bytes_per_s": 1e9,
        "latency_s": 0.001,
    } | changes
    return StageSizes(**given)


def model(batching: Batching = Batching.ENGINE, **changes: Any) -> StageModel:
    """Wide objectives, and an encode stage that never leaves media to others."""
    given: dict[str, Any] = {
        "profile": profile(),
        "sizes": sizes(),
        "slo": StageSlo(1.0, 0.1),
        "batching": batching,
        "encoding": EncodeConfig(own_cost=math.inf, timeout_s=math.inf),
    } | changes
    return StageModel(**given)


def request(
    at_s: float = 0.0, text: int = 100, *media: str, tokens: int = 500, output: int = 3
) -> StageRequest:
    """A request with media of these names."""
    found = tuple(Medium(name, tokens) for name in media)
    return StageRequest(at_s, text + tokens * len(media), found, output)
