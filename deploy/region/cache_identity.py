"""Engines of one served name whose KVCache differs: nothing of it is shared between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager.agent.messages import StatusReply
from scheduler.reports import InstanceReport, engine_report, unlike_groups

SAME_KVCACHE = "load the same weights with the same settings on both, or give them two names"
"""How to mend it."""


def unlike_engines(agents: Iterable[StatusReply]) -> list[str]:
    """A sentence for each two groups of different KVCache under one name of a model or adapter."""
    return unlike_groups(engines_of(agents))


def engines_of(agents: Iterable[StatusReply]) -> list[InstanceReport]:
    """The engines of these agents that say which model they serve."""
    engines = [engine for agent in agents for engine in agent.engines]
    return [engine_report(engine) for engine in engines if engine.model]
