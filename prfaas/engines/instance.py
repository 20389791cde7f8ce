"""One instance of a cluster: what it is, whether it is usable, and how loaded it is.

It asks and decides nothing: `instances.py` probes it, and fronts place work on it.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import CacheModel
from prfaas.engines.client import EngineHttp, EngineLoad
from prfaas.engines.command import EncoderRole, EngineSpec
from prfaas.engines.health import HealthTracker
from prfaas.engines.load import LoadEstimate
from prfaas.engines.prefill_run import PrefillPlace
from prfaas.engines.supervision.supervisor import Supervisor
from scheduler.reports import CONVERTIBLE, InstanceReport, Role, decodes
from scheduler.routing.front_placement import DEFAULT_PASS_TOKENS, Room

DEFAULT_MAX_CONCURRENT: Final = 4
DEFAULT_DECODE_SLOTS: Final = 256


class InstanceSpec(BaseModel):
    """One instance of a cluster: its engine's URL, its node agent's control address, its role.

    `name` is the one that the engine's connector is configured with (`EngineSpec.instance`).
    With `engine` the front starts and supervises the engine itself; without it the engine is
    started elsewhere. `max_concurrent` and `pass_tokens` (vLLM's `max_num_batched_tokens`) bound
    the prefill jobs given to the instance at a time (`Room`). `decode_slots` is how many requests
    its engine decodes at a time (vLLM's `max_num_seqs`). `node` names the agent's host in what
    people read. With `paced` its engine takes the time of another device.

    `encoder_role` is the one that the engine was started with, ec_producer where it is left out and
    the role is encode. With `encodes` an instance that decodes encodes media for others, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    agent: str
    node: str = ""
    url: str = ""
    model: str = ""
    role: Role = "both"
    max_concurrent: int = Field(default=DEFAULT_MAX_CONCURRENT, ge=1)
    pass_tokens: int = Field(default=DEFAULT_PASS_TOKENS, ge=1)
    decode_slots: int = Field(default=DEFAULT_DECODE_SLOTS, ge=1)
    encoder_role: EncoderRole | None = None
    encodes: bool = False
    paced: bool = False
    engine: EngineSpec | None = None

    @model_validator(mode="after")
    def _has_url(self) -> "InstanceSpec":
        if not self.url and self.engine is None:
            raise ValueError(f"instance {self.name} needs `url` or `engine`")
        if self.engine is not None and self.engine.instance != self.name:
            raise ValueError(f"instance {self.name} has an engine called {self.engine.instance}")
        return self

    @property
    def encodes_only(self) -> bool:
        """Whether the engine has the model's encoder alone, so that its role is fixed."""
        role = self._encoder_role
        return self.role == "encode" if role is None else role == "ec_producer"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the instance can be given, with its own."""
        if self.encodes_only or self.role == "both":
            return (self.role,)
        return CONVERTIBLE if self._encoder_role is None else ("encode", *CONVERTIBLE)

    @property
    def _encoder_role(self) -> EncoderRole | None:
        return self.encoder_role or (self.engine.encoder_role if self.engine is not None else None)

    @property
    def engine_url(self) -> str:
        """The base URL of the engine's OpenAI server."""
        return self.url or (self.engine.url if self.engine is not None else "")

    @property
    def served_name(self) -> str:
        """The model's served name; "" when the front need not tell models apart."""
        return self.model or (self.engine.served_name if self.engine is not None else "")

    @property
    def room(self) -> Room:
        """How many prefills it is given at a time."""
        return Room(self.max_concurrent, self.pass_tokens)


def check_names(specs: Sequence[InstanceSpec]) -> tuple[InstanceSpec, ...]:
    """The instances of one cluster. ValueError names those that share a name."""
    names = [spec.name for spec in specs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"instance names must be unique in a cluster; several are called {', '.join(doubled)}"
        )
    return tuple(specs)


InstanceSpecs = Annotated[tuple[InstanceSpec, ...], AfterValidator(check_names)]
"""The instances that a file lists for a cluster."""


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
        """The engine's latest metrics; None where they are not read."""
        self.looked_at_s = 0.0
        """When the request for these metrics began (monotonic seconds)."""
        self.kv_block_bytes = 0
        self.layout_fingerprint = ""
        """The fingerprint of its KVCache layout, from the agent's latest status; "": none yet."""
        self.landing_cap_bytes: int | None = None
        self.landing_room_bytes: int | None = None
        """The room left for landings at its node, from the agent's latest word."""
        self.cache: CacheModel | None = None
        """How its node caches the engine's prompts, from the agent's latest status."""
        self.layout = ""
        self.weights = ""
        """What its layout is in words, and what identifies its weights; "": not known yet."""
        self.adapters: dict[str, str] = {}
        """The identities of its LoRA adapters by name, from the agent's latest status."""
        self.encoder = ""
        """What the keys of its embeddings are made of; "": it has none, or has not told yet."""
        self.text_only = False
        """Whether the engine refuses prompts with media, from the agent's latest status."""
        self.draining = False
        self.leaving = False
        """Whether it drains to be forgotten. Nothing ends such a drain."""
        self.joining = False
        """Whether it came to a cluster that runs and was not yet found to fit."""
        self.gone = asyncio.Event()
        """Set while probes or the supervisor find engine or agent gone: work there is given up.
        A single failed request takes the instance out of placement, but gives up no other work."""
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
        """Whether the engine and its node agent both answer."""
        return self.engine_health.healthy and self.agent_health.healthy

    @property
    def encodes(self) -> bool:
        """Whether it encodes media for others."""
        return self.role == "encode" or (self.spec.encodes and decodes(self.role))

    @property
    def reason(self) -> str:
        """Why it does not transfer; "" when it does."""
        if not self.engine_health.healthy:
            return f"engine: {self.engine_health.reason}"
        if not self.agent_health.healthy:
            return f"node agent: {self.agent_health.reason}"
        return ""

    def place(self) -> PrefillPlace:
        """The instance as the place of a prefill's try."""
        return PrefillPlace(self.name, self.http, self.agent, self.gone, self.spec.served_name)

    def report(self, running: int) -> InstanceReport:
        """The instance's part of a cluster report; `running` is the front's own count."""
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
            layout_fingerprint=self.layout_fingerprint,
            decode_slots=self.spec.decode_slots,
            looked_s=0.0 if load is None else max(0.0, time.monotonic() - self.looked_at_s),
            num_running=0 if load is None else load.num_running,
            num_waiting=0 if load is None else load.num_waiting - load.num_deferred,
            kv_usage=None if load is None else load.kv_usage,
            kv_total_bytes=self._kv_total_bytes(),
            landing_cap_bytes=self.landing_cap_bytes,
            landing_room_bytes=self.landing_room_bytes,
            leaving=self.leaving,
            layout=self.layout,
            weights=self.weights,
            adapters=self.adapters,
            text_only=self.text_only,
            encodes=self.encodes,
            paced=self.spec.paced,
            roles=self.spec.roles,
            encoder=self.encoder,
        )

    def _kv_total_bytes(self) -> int | None:
        """The engine's KV memory; None until the engine and its agent have both told of it."""
        # The engine's metrics tell how many blocks it has, the agent's status how big they are.
        num_blocks = 0 if self.engine_load is None else self.engine_load.num_kv_blocks
        # One of them is vLLM's null block, which holds nothing.
        return (num_blocks - 1) * self.kv_block_bytes or None if num_blocks else None
