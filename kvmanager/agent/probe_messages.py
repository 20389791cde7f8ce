"""What is said over gRPC to probe a link: structs of service `prfaas.NodeAgent`.

A probe sends bytes that mean nothing from one agent to another, to measure the link between them.
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
    """Let one probe of `nbytes` land here, in a little memory of its own that it goes through again
    and again: what arrives is verified and lost.
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
    """How one end of a probe is doing; lets it live `lease_s` from now."""

    transfer_id: str
    role: ProbeRole
    lease_s: float


class KernelTcp(msgspec.Struct, frozen=True):
    """What the kernel lets TCP do in one agent's network namespace; 0 and "" where not known."""

    wmem_max_bytes: int = 0
    tcp_wmem_bytes: int = 0
    tcp_rmem_bytes: int = 0
    available_congestion: list[str] = []
    allowed_congestion: list[str] = []
    default_congestion: str = ""
    slow_start_after_idle: bool = False
    tcp_memory_bytes: int = 0
    """What all TCP sockets hold now."""
    tcp_memory_pressure_bytes: int = 0
    """From here on the kernel shrinks windows (net.ipv4.tcp_mem)."""
    may_exceed: bool = False
    """CAP_NET_ADMIN: send buffers and congestion control are the agent's own choice."""


class AgentLoad(msgspec.Struct, frozen=True):
    """Counters of an agent and its host: two of them tell what was used in between."""

    now_s: float
    """The agent's monotonic clock."""
    cpu_s: float
    """CPU time of the agent's process."""
    host_busy_s: float
    """CPU time that everybody on the host used, of all its CPUs."""
    host_cpus: int
    usable_cpus: float
    """How many of these CPUs the agent may use: affinity and the cgroup's quota."""


class ProbeStatusReply(msgspec.Struct, frozen=True):
    """One end of a probe. What only the sending end knows has the defaults at the other."""

    state: Literal["open", "complete", "failed", "cancelled"]
    error: str
    nbytes: int
    done_bytes: int
    """Acknowledged; at the landing: verified."""
    load: AgentLoad
    kernel: KernelTcp
    num_connections: int = 0
    link: LinkState | None = None
    congestion: str = ""
    """What the agent's configuration asks for on links to other hosts."""
    max_connections: int = 0


class ProbeEnd(msgspec.Struct, frozen=True):
    """End the probe's ends here and free their memory."""

    transfer_id: str
    reason: str = ""


class ProbeEndReply(msgspec.Struct, frozen=True):
    """`ended`: whether something was still alive."""

    ended: bool
