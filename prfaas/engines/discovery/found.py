"""The instances of a service discovery, and the changes of a cluster that follow from it. Pure.

It does not know DNS or Kubernetes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, FilePath, model_validator

from kvmanager.config_files.fields import Address, Port, Seconds, Section
from prfaas.engines.instance import DEFAULT_DECODE_SLOTS, DEFAULT_MAX_CONCURRENT, InstanceSpec
from prfaas.engines.members import MemberChanges, member_changes
from scheduler.reports import Role
from transport import Endpoint


class DiscoverySection(Section):
    """Instances that come and go with DNS records or with a Kubernetes service.

    An instance is called HOST-PORT, as its SRV record says, or after its pod. Its engine's
    connector must have the same name. It does not depend on which other engines there are.
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
    """An engine's server. `node` is what people call its host, and `pod` identifies the pod that
    it runs in; "" where they are not known. What has one name is one engine.
    """

    name: str
    host: str
    port: int
    node: str = ""
    pod: str = ""


class Discovered:
    """The instances that a discovery has told of. Those that are missing in `num_misses` answers
    in a row have left: one answer of DNS may lack some.
    """

    def __init__(self, section: DiscoverySection, num_misses: int) -> None:
        self._section = section
        self._num_misses = num_misses
        self._known: dict[str, Found] = {}
        self._missed: Counter[str] = Counter()
        self._refused: set[str] = set()

    def heard(self, found: Sequence[Found]) -> MemberChanges:
        """The changes that follow from an answer, in whatever order it lists engines."""
        told: dict[str, Found] = {}
        for item in sorted(set(found), key=_by_preference):
            told.setdefault(item.name, item)
        for name, known in self._known.items():
            # An engine at several addresses keeps the one that it is used by.
            if name in told and (known in found or _is_one_pod(known, told[name])):
                told[name] = known
        self._missed = Counter({n: self._missed[n] + 1 for n in self._known if n not in told})
        kept = {n: self._known[n] for n, num in self._missed.items() if num < self._num_misses}
        before, self._known = self._known, kept | told
        self._missed = Counter({n: num for n, num in self._missed.items() if n in kept})
        return member_changes(self._specs(before), self._specs(self._known))

    def refused(self, why: Mapping[str, str]) -> list[str]:
        """These could not join: their names are those of others, which must not leave when these
        do. The next answer tries them again. Returns the reasons that were not told before.
        """
        for name in why:
            del self._known[name]
        new, self._refused = set(why.values()) - self._refused, set(why.values())
        return sorted(new)

    def _specs(self, found: Mapping[str, Found]) -> tuple[InstanceSpec, ...]:
        return tuple(self._section.spec(item) for item in found.values())


def _by_preference(item: Found) -> tuple[str, bool, str, int]:
    # Of a dual-stack service's two slices, the one that every front can use comes first.
    return item.name, ":" in item.host, item.host, item.port


def _is_one_pod(one: Found, other: Found) -> bool:
    """Whether both are addresses of one server: a pod has all of its addresses for life."""
    return bool(one.pod) and (one.pod, one.port) == (other.pod, other.port)
