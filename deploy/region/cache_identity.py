"""Engines of one served name whose KVCache differs: nothing of it is shared between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from kvmanager.agent.messages import EngineStatus, StatusReply

SAME_KVCACHE = "load the same weights with the same settings on both, or give them two names"
"""How to mend it."""


def unlike_engines(agents: Iterable[StatusReply]) -> list[str]:
    """A sentence for each pair of different KVCache under one name."""
    kinds: dict[str, dict[str, EngineStatus]] = {}
    for agent in agents:
        for engine in agent.engines:
            if engine.model:
                kinds.setdefault(engine.model, {}).setdefault(engine.layout_fingerprint, engine)
    return [
        _difference(model, first, second)
        for model, found in sorted(kinds.items())
        for first, second in combinations(found.values(), 2)
    ]


def _difference(model: str, first: EngineStatus, second: EngineStatus) -> str:
    names = f"{first.instance} and {second.instance}"
    if first.weights != second.weights:
        what = f"have different weights, {first.weights} and {second.weights}"
    else:
        what = f"lay KVCache out differently, {first.layout} and {second.layout}"
    return f"{model}: {names} {what}; no KVCache is shared between them"
