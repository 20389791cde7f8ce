"""What all objects of a region have: their form before values are filled in, and their labels.

It does not know which objects there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from deploy.region.kubernetes.pods import Pod, object_name
from deploy.region.spec.region import RegionSpec

Object: TypeAlias = dict[str, Any]
Keys: TypeAlias = tuple[str, ...]
"""A value of the chart by its keys."""
Value: TypeAlias = Callable[..., Any]
"""Gives a value of the chart by its keys: the value itself, or what stands for it in a template."""

HOST_LABEL = "prfaas/host"
PROCESS_LABEL = "prfaas/process"
CLUSTER_LABEL = "prfaas/cluster"


@dataclass(frozen=True, slots=True)
class Manifest:
    """An object, the template that holds it, and when it is there: if of each tuple of `when` one
    value is neither false nor empty.
    """

    template: str
    body: Object
    when: tuple[tuple[Keys, ...], ...] = ()


def enabled(host: str) -> tuple[Keys, ...]:
    """The condition that this Kubernetes cluster runs the host."""
    return (("hosts", host, "enabled"),)


def made(
    template: str,
    kind: tuple[str, str],
    name: str,
    labels: dict[str, str],
    rest: Object,
    *when: tuple[Keys, ...],
    annotations: Any = None,
) -> Manifest:
    """An object of a (version, kind); `rest` is what comes behind its metadata."""
    version, word = kind
    metadata: Object = {"name": name, "labels": labels}
    if annotations is not None:
        metadata["annotations"] = annotations
    head = {"apiVersion": version, "kind": word, "metadata": metadata}
    return Manifest(template, head | rest, when)


def region_labels(region: RegionSpec, component: str = "") -> dict[str, str]:
    """The labels of all objects of a region, or of its pods of one kind."""
    labels = {
        "app.kubernetes.io/name": "prfaas",
        "app.kubernetes.io/instance": object_name(region.name),
    }
    return labels | ({"app.kubernetes.io/component": component} if component else {})


def host_labels(region: RegionSpec, host: str) -> dict[str, str]:
    """The labels of all pods and Services of a host."""
    return region_labels(region) | {HOST_LABEL: object_name(region.name, host)}


def pod_labels(region: RegionSpec, pod: Pod) -> dict[str, str]:
    """The labels of a process' pod."""
    labels = region_labels(region, pod.kind) | host_labels(region, pod.host.folder)
    labels |= {PROCESS_LABEL: pod.name}
    return labels | ({CLUSTER_LABEL: object_name(pod.cluster)} if pod.cluster else {})


def process_labels(region: RegionSpec, pod: Pod) -> dict[str, str]:
    """The labels that no other process's pod has."""
    return region_labels(region) | {PROCESS_LABEL: pod.name}


def port_name(port: int) -> str:
    """The name of a port of a host: several processes behind one address have other numbers."""
    return f"p{port}"
