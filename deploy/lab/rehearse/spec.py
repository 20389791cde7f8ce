"""A rehearsal file: a plan or simulation file that may say what cannot be derived from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deploy.lab.rehearse.traffic import DEFAULT_LOAD
from deploy.plan.simulate.spec import SimulationFile
from kvmanager.config_files.fields import Positive, Section


class RehearsalSpec(Section):
    """How the profiles' world is made small enough for one machine."""

    tokens_per_token: Annotated[int, Field(ge=1, le=1024)] = 16
    """How many tokens of the plan one token of the tiny model stands for in a prompt."""
    output_tokens_per_token: Annotated[int, Field(ge=1, le=1024)] = 4
    """The same in an answer, so how many decode steps one step stands for. A first token waits for
    two or three of them.
    """
    slowdown: Positive = 1.0
    """All times of the rehearsal over those of the plan. Raise it where a rehearsal is void."""
    model: Literal["mimo-v2-tiny", "qwen3-next-tiny"] = "mimo-v2-tiny"
    """The tiny model whose KVCache really moves (`prfaas demo` has them)."""


class RehearsalFile(SimulationFile):
    """A whole rehearsal file."""

    rehearsal: RehearsalSpec = RehearsalSpec()

    @model_validator(mode="before")
    @classmethod
    def _with_load(cls, values: Any) -> Any:
        """A plan file need not say how much arrives, and the command line often does."""
        simulation: Any = values.get("simulation", {}) if isinstance(values, dict) else None
        traffic: Any = values.get("traffic") if isinstance(simulation, dict) else None
        if not isinstance(traffic, dict) or "rate_rps" in traffic or "load" in simulation:
            return values
        lengths = traffic.get("lengths")
        # A trace has its own arrivals.
        if isinstance(lengths, dict) and "trace" in lengths:
            return values
        return values | {"simulation": simulation | {"load": DEFAULT_LOAD}}
