"""Engines of one served name whose KVCache differs: nothing of it is shared between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from kvmanager.agent.messages import EngineStatus, StatusReply

SAME_KVCACHE = "load the same weights with the same settings on both, or give them two names"
"""How to mend it."""


def unlike_engines(agents: Iterable[StatusReply]) -> list[str]:
    """A sentence for each pair of different KVCache under one name, of a model or an adapter."""
    kinds: dict[str, dict[str, EngineStatus]] = {}
    adapters: dict[tuple[str, str], dict[str, EngineStatus]] = {}
    for engine in (engine for agent in agents for engine in agent.engines if engine.model):
        kinds.setdefault(engine.model, {}).setdefault(engine.layout_fingerprint, engine)
        for name, identity in engine.adapters.items():
            adapters.setdefault((engine.model, name), {}).setdefault(identity, engine)
    found = [
        _difference(model, first, second)
        for model, engines in sorted(kinds.items())
        for first, second in combinations(engines.values(), 2)
    ]
    return found + [
        _other_adapters(model, name, (one, first), (other, second))
        for (model, name), engines in sorted(adapters.items())
        for (one, first), (other, second) in combinations(engines.items(), 2)
    ]


def _difference(model: str, first: EngineStatus, second: EngineStatus) -> str:
    names = f"{first.instance} and {second.instance}"
    if first.weights != second.weights:
        what = f"have different weights, {first.weights} and {second.weights}"
    else:
        what = f"lay KVCache out differently, {first.layout} and {second.layout}"
    return f"{model}: {names} {what}; no KVCache is shared between them"


def _other_adapters(
    model: str, name: str, one: tuple[str, EngineStatus], other: tuple[str, EngineStatus]
) -> str:
    (identity, first), (other_identity, second) = one, other
    return (
        f"{model}: {first.instance} and {second.instance} have different adapters called {name}, "
        f"{identity} and {other_identity}; no KVCache of it is shared between them"
    )
