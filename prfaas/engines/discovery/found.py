"""The instances of a service discovery, and the changes of a cluster that follow from it. Pure.

It does not know DNS or Kubernetes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import Field, FilePath, model_validator

from kvmanager.config_files.fields import Address, Port, Seconds, Section
from prfaas.engines.instance import DEFAULT_DECODE_SLOTS, DEFAULT_MAX_CONCURRENT, InstanceSpec
from prfaas.engines.members import MemberChanges, member_changes
from scheduler.reports import Role
from transport import Endpoint


class DiscoverySection(Section):
    """Instances that come and go with DNS records or with a Kubernetes service.

    An instance has the first label of its host's name, or the name of its pod; its engine's
    connector must have the same. Several engines behind one name are called NAME-PORT.
    """

    dns: Annotated[str, Field(min_length=1)] | None = None
    """The name of SRV records, such as `_engine._tcp.prefill.example.org`; needs prfaas[dns]."""
    kubernetes: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$")] | None = None
    """NAMESPACE/SERVICE, whose EndpointSlices are watched; needs prfaas[kubernetes]."""
    agent_port: Port = 7101
    """The control port of the node agents, on the hosts of the engines."""
    port_name: str = ""
    """The name of the engines' port in the Kubernetes service; left out: its first port."""
    scheme: Literal["http", "https"] = "http"
    """How engines are asked."""
    interval_s: Seconds = 5.0
    """How often DNS is asked."""
    nameserver: Address | None = None
    """The DNS server, host:port. Left out: that of the host."""
    kubeconfig: FilePath | None = None
    """How to reach Kubernetes. Left out: as the service account of this pod."""
    role: Role = "both"
    """The role of the instances."""
    model: str = ""
    """The served name of their model; left out: the region has one."""
    max_concurrent: Annotated[int, Field(ge=1)] = DEFAULT_MAX_CONCURRENT
    """How many prefill jobs an instance gets at a time."""
    decode_slots: Annotated[int, Field(ge=1)] = DEFAULT_DECODE_SLOTS
    """How many requests an engine decodes at a time."""

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.dns is None) == (self.kubernetes is None):
            raise ValueError("write either dns or kubernetes")
        return self

    def spec(self, found: Found) -> InstanceSpec:
        """The instance that was found."""
        return InstanceSpec(
            name=found.name,
            url=f"{self.scheme}://{Endpoint(found.host, found.port)}",
            agent=str(Endpoint(found.host, self.agent_port)),
            node=found.node or found.host,
            model=self.model,
            role=self.role,
            max_concurrent=self.max_concurrent,
            decode_slots=self.decode_slots,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """An engine's server. `node` is what people call its host, if that is known."""

    name: str
    host: str
    port: int
    node: str = ""


class Discovered:
    """The instances that a discovery has told of. Those that are missing in `num_misses` answers
    in a row have left: one answer of DNS may lack some.
    """

    def __init__(self, section: DiscoverySection, num_misses: int) -> None:
        self._section = section
        self._num_misses = num_misses
        self._known: dict[str, InstanceSpec] = {}
        self._missed: Counter[str] = Counter()

    def heard(self, found: Sequence[Found]) -> MemberChanges:
        """The changes that follow from an answer."""
        told = {item.name: self._section.spec(item) for item in _named(found)}
        self._missed = Counter({n: self._missed[n] + 1 for n in self._known if n not in told})
        kept = {n: self._known[n] for n, num in self._missed.items() if num < self._num_misses}
        before, self._known = self._known, kept | told
        self._missed = Counter({n: num for n, num in self._missed.items() if n in kept})
        return member_changes(tuple(before.values()), tuple(self._known.values()))


def _named(found: Sequence[Found]) -> list[Found]:
    """The same engines in a fixed order, each with a name of its own."""
    names = Counter(item.name for item in set(found))
    return [
        replace(item, name=f"{item.name}-{item.port}") if names[item.name] > 1 else item
        for item in sorted(set(found), key=lambda item: (item.name, item.host, item.port))
    ]
