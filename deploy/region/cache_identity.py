"""Engines of one served name whose KVCache differs: nothing of it is shared between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from kvmanager.agent.messages import EngineStatus, StatusReply
from scheduler.reports import InstanceReport, engine_report, unlike_groups

SAME_KVCACHE = "load the same weights with the same settings on both, or give them two names"
"""How to mend it."""


def unlike_engines(agents: Iterable[StatusReply]) -> list[str]:
    """A sentence for each two groups of different KVCache under one name of a model or adapter."""
    reports = list(agents)
    adapters: dict[tuple[str, str], dict[str, EngineStatus]] = {}
    for engine in (engine for agent in reports for engine in agent.engines if engine.model):
        for name, identity in engine.adapters.items():
            adapters.setdefault((engine.model, name), {}).setdefault(identity, engine)
    return unlike_groups(engines_of(reports)) + [
        _other_adapters(model, name, (one, first), (other, second))
        for (model, name), engines in sorted(adapters.items())
        for (one, first), (other, second) in combinations(engines.items(), 2)
    ]


def engines_of(agents: Iterable[StatusReply]) -> list[InstanceReport]:
    """The engines of these agents that say which model they serve."""
    engines = [engine for agent in agents for engine in agent.engines]
    return [engine_report(engine) for engine in engines if engine.model]


def _other_adapters(
    model: str, name: str, one: tuple[str, EngineStatus], other: tuple[str, EngineStatus]
) -> str:
    (identity, first), (other_identity, second) = one, other
    return (
        f"{model}: {first.instance} and {second.instance} have different adapters called {name}, "
        f"{identity} and {other_identity}; no KVCache of it is shared between them"
    )
