"""One instance of a cluster as a front sees it: what it is, whether it is usable, how loaded it is.

It asks and decides nothing; `instances.py` probes, and fronts place work.
"""

import asyncio
import time
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import CacheModel
from prfaas.engines.client import EngineHttp, EngineLoad
from prfaas.engines.command import EngineSpec
from prfaas.engines.health import HealthTracker
from prfaas.engines.load import LoadEstimate
from prfaas.engines.prefill_run import PrefillPlace
from prfaas.engines.supervision.supervisor import Supervisor
from scheduler.reports import InstanceReport, Role

DEFAULT_MAX_CONCURRENT: Final = 4
DEFAULT_DECODE_SLOTS: Final = 256


class InstanceSpec(BaseModel):
    """One instance of a cluster: its engine's URL, its node agent's control address, its role.

    `name` is the one that the engine's connector is configured with (`EngineSpec.instance`).
    With `engine` the front starts and supervises the engine itself; without it somebody else
    does. `max_concurrent` bounds the prefill jobs given to it at a time; vLLM batches these.
    `decode_slots` is how many requests its engine decodes at a time (vLLM's `max_num_seqs`).
    `node` is what people call the agent's host.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    agent: str
    node: str = ""
    url: str = ""
    model: str = ""
    role: Role = "both"
    max_concurrent: int = Field(default=DEFAULT_MAX_CONCURRENT, ge=1)
    decode_slots: int = Field(default=DEFAULT_DECODE_SLOTS, ge=1)
    engine: EngineSpec | None = None

    @model_validator(mode="after")
    def _has_url(self) -> "InstanceSpec":
        if not self.url and self.engine is None:
            raise ValueError(f"instance {self.name} needs `url` or `engine`")
        if self.engine is not None and self.engine.instance != self.name:
            raise ValueError(f"instance {self.name} has an engine called {self.engine.instance}")
        return self

    @property
    def engine_url(self) -> str:
        """Where its OpenAI server answers."""
        return self.url or (self.engine.url if self.engine is not None else "")

    @property
    def served_name(self) -> str:
        """The model's served name; "" when the front need not tell models apart."""
        return self.model or (self.engine.served_name if self.engine is not None else "")


class Instance:
    """One instance: clients, health and load. Mutated by `Instances` only."""

    def __init__(self, spec: InstanceSpec, http: EngineHttp, agent: AgentClient) -> None:
        self.spec = spec
        self.role: Role = spec.role
        self.role_epoch = 0
        """The epoch of the order that gave it its role; 0: it has the role of its spec."""
        self.http = http
        self.agent = agent
        self.engine_health = HealthTracker()
        self.agent_health = HealthTracker()
        self.load = LoadEstimate()
        self.engine_load: EngineLoad | None = None
        """What the engine's metrics said last; None where they are not read."""
        self.looked_at_s = 0.0
        """When they were asked for (monotonic)."""
        self.kv_block_bytes = 0
        self.layout_fingerprint = ""
        """Of its KVCache, as the agent said last; "": it has not yet."""
        self.landing_cap_bytes: int | None = None
        self.landing_room_bytes: int | None = None
        """As the agent said last."""
        self.cache: CacheModel | None = None
        """How the engine's prompts are cached at its node, as the agent said last."""
        self.draining = False
        self.gone = asyncio.Event()
        """Set while the engine or its agent is gone for good: to give up work on it. One failed
        request takes the instance out of placement, but is no reason to give up others."""
        self.supervisor: Supervisor | None = None

    @property
    def name(self) -> str:
        """Unique in its cluster."""
        return self.spec.name

    @property
    def serves(self) -> bool:
        """Whether the engine answers requests that need no transfer."""
        return self.engine_health.healthy

    @property
    def transfers(self) -> bool:
        """Whether engine and node agent are both there."""
        return self.engine_health.healthy and self.agent_health.healthy

    @property
    def reason(self) -> str:
        """Why it does not transfer; "" when it does."""
        if not self.engine_health.healthy:
            return f"engine: {self.engine_health.reason}"
        if not self.agent_health.healthy:
            return f"node agent: {self.agent_health.reason}"
        return ""

    def place(self) -> PrefillPlace:
        """Where a prefill given to it runs."""
        return PrefillPlace(self.name, self.http, self.agent, self.gone, self.spec.served_name)

    def report(self, running: int) -> InstanceReport:
        """The instance in a cluster report; `running` is the front's own count."""
        load = self.engine_load
        return InstanceReport(
            name=self.name,
            role=self.role,
            role_epoch=self.role_epoch,
            role_ready=not self.draining,
            model=self.spec.served_name,
            healthy=self.transfers,
            draining=self.draining,
            running=running,
            max_concurrent=self.spec.max_concurrent,
            reason=self.reason,
            num_restarts=self.supervisor.num_restarts if self.supervisor is not None else 0,
            node=self.spec.agent,
            node_name=self.spec.node or self.spec.agent,
            cache=self.cache,
            decode_slots=self.spec.decode_slots,
            looked_s=0.0 if load is None else max(0.0, time.monotonic() - self.looked_at_s),
            num_running=0 if load is None else load.num_running,
            num_waiting=0 if load is None else load.num_waiting - load.num_deferred,
            kv_usage=None if load is None else load.kv_usage,
            kv_total_bytes=self._kv_total_bytes(),
            landing_cap_bytes=self.landing_cap_bytes,
            landing_room_bytes=self.landing_room_bytes,
        )

    def _kv_total_bytes(self) -> int | None:
        """The engine says how many blocks it has, its agent how big they are."""
        num_blocks = 0 if self.engine_load is None else self.engine_load.num_kv_blocks
        # One of them is vLLM's null block, which holds nothing.
        return (num_blocks - 1) * self.kv_block_bytes or None if num_blocks else None
