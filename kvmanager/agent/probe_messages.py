"""Messages for probes of links: structs of service `prfaas.NodeAgent`.

A probe sends random bytes from one agent to another, to measure the link between them.
Ids, tokens and fingerprints are hex strings; sizes are bytes, times are seconds.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| ProbeLanding | ProbeLanding -> ProbeLandingReply | NO_ROOM (probes run already), INVALID |
| ProbeSend | ProbeSend -> ProbeSendReply | NO_ROOM (probes run already), INVALID |
| ProbeStatus | ProbeStatus -> ProbeStatusReply | NOT_FOUND (unknown, or over for long), INVALID |
| ProbeEnd | ProbeEnd -> ProbeEndReply | INVALID; ending what is over or unknown is no error |
"""

from __future__ import annotations

from typing import Literal

import msgspec

from transport import LinkState

ProbeRole = Literal["landing", "send"]


class ProbeLanding(msgspec.Struct, frozen=True):
    """Admit one probe of `nbytes`. Its bytes are verified in a little memory of their own and then
    forgotten.
    """

    nbytes: int
    lease_s: float


class ProbeLandingReply(msgspec.Struct, frozen=True):
    transfer_id: str
    token: str
    fingerprint: str
    host: str
    port: int
    lease_s: float


class ProbeSend(msgspec.Struct, frozen=True):
    """Send `nbytes` that no codec makes smaller to a probe's landing, as fast as the link goes and
    behind the KVCache that requests wait for.
    """

    transfer_id: str
    token: str
    fingerprint: str
    nbytes: int
    host: str
    port: int
    lease_s: float


class ProbeSendReply(msgspec.Struct, frozen=True):
    lease_s: float


class ProbeStatus(msgspec.Struct, frozen=True):
    """Ask for the state of one end of a probe. Renews its lease to `lease_s` from now."""

    transfer_id: str
    role: ProbeRole
    lease_s: float


class KernelTcp(msgspec.Struct, frozen=True):
    """The kernel's limits for TCP in one agent's network namespace; 0 and "" where unknown."""

    wmem_max_bytes: int = 0
    tcp_wmem_bytes: int = 0
    tcp_rmem_bytes: int = 0
    available_congestion: list[str] = []
    allowed_congestion: list[str] = []
    default_congestion: str = ""
    slow_start_after_idle: bool = False
    tcp_memory_bytes: int = 0
    """Memory that all TCP sockets hold now."""
    tcp_memory_pressure_bytes: int = 0
    """The kernel shrinks windows above this (net.ipv4.tcp_mem, the second value)."""
    may_exceed: bool = False
    """Whether the agent has CAP_NET_ADMIN, and may choose any send buffer and algorithm."""


class AgentLoad(msgspec.Struct, frozen=True):
    """Counters of an agent and its host. The difference of two is the use in between."""

    now_s: float
    """The agent's monotonic clock."""
    cpu_s: float
    """CPU time of the agent's process."""
    host_busy_s: float
    """CPU time that all processes of the host have used, on all its CPUs."""
    host_cpus: int
    usable_cpus: float
    """CPUs that the agent may use, by its affinity and its cgroup's quota."""


class ProbeStatusReply(msgspec.Struct, frozen=True):
    """One end of a probe. Fields that only the sending end knows have their defaults at the
    landing.
    """

    state: Literal["open", "complete", "failed", "cancelled"]
    error: str
    nbytes: int
    done_bytes: int
    """Bytes acknowledged, or at the landing verified."""
    load: AgentLoad
    kernel: KernelTcp
    num_connections: int = 0
    link: LinkState | None = None
    congestion: str = ""
    """The congestion control that the agent's configuration names for links to other hosts."""
    max_connections: int = 0


class ProbeEnd(msgspec.Struct, frozen=True):
    """End the probe's ends here and free their memory."""

    transfer_id: str
    reason: str = ""


class ProbeEndReply(msgspec.Struct, frozen=True):
    """`ended`: whether something was still alive."""

    ended: bool
