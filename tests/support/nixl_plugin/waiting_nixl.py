"""A vLLM plugin for engines of tests: NIXL's progress thread waits until there is something to do.

NIXL's Python API gives that thread a pause of 0, so that it polls without end. Each engine then
keeps a core busy, idle or not, and the engines of a test have two cores together.
"""

from importlib import import_module
from typing import Any

PAUSE_US = 10_000
"""The longest that the thread waits. It wakes up as soon as a message comes."""


def register() -> None:
    """vLLM calls this in each process of an engine, before the engine makes its NIXL agent."""
    bindings: Any = import_module("nixl._bindings")
    given = bindings.nixlAgentConfig

    def set_value(config: Any, name: str, value: object) -> None:
        given.__setattr__(config, name, PAUSE_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = type("WaitingConfig", (given,), {"__setattr__": set_value})
