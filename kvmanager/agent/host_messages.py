"""Messages about the host of a node agent, for `prfaas doctor region`: `HostFacts` -> the reply.

Sizes are bytes. Numbers are 0 and texts are empty where the host does not tell.
"""

from __future__ import annotations

import msgspec

from kvmanager.agent.probe_messages import KernelTcp


class HostFacts(msgspec.Struct, frozen=True):
    """Ask for what the agent sees of its host now."""


class NumaNode(msgspec.Struct, frozen=True):
    """CPUs, GPUs (by number, in the order of their PCI addresses) and network interfaces that are
    near each other.
    """

    number: int
    cpus: list[int]
    gpus: list[int] = []
    interfaces: list[str] = []


class EngineProcess(msgspec.Struct, frozen=True):
    """A connected process of an engine: the CPUs that it may use, and the devices that its
    environment gives it (None: the environment names none, or may not be read).
    """

    instance: str
    pid: int
    cpus: list[int] = []
    gpus: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    bound_cores: str | None = None
    """VLLM_CPU_OMP_THREADS_BIND."""


class HostFactsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The host as one agent sees it."""

    version: str
    """The release of the agent."""
    transport_versions: tuple[int, int]
    """The lowest and the highest version of the transport that it speaks."""
    now_s: float
    """Unix time."""
    kernel: KernelTcp
    congestion: str = ""
    """The congestion control that the agent's configuration names for links to other hosts."""
    max_open_files: int = 0
    cpus: list[int] = []
    """The CPUs that the agent may use."""
    num_gpus: int = 0
    numa: list[NumaNode] = []
    memory_bytes: int = 0
    arena_dir: str = ""
    arena_dir_bytes: int = 0
    """The size of the file system that the arena is in."""
    is_arena_in_memory: bool = False
    ssd_free_bytes: int | None = None
    """What the file system of `ssd_dir` has free; None without copies on SSD."""
    engines: list[EngineProcess] = []
    granting_keys: list[str] = []
    """Digests of the public keys with which it checks grants; none: it checks none."""
