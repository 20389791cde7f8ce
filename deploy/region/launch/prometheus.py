"""The configuration of a Prometheus server that scrapes a region, or the part of it on one host.

Pure: it takes a resolved region and the paths of keys, and returns texts. It does not know what
metrics mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from deploy.observability import alert_rules, dashboards
from deploy.region.launch.addresses import engine_tls, engine_url
from deploy.region.launch.parts import Part
from deploy.region.spec.region import ClusterSpec, NodeSpec, RegionSpec, gateway_process
from kvmanager.config_files.problems import Problem
from kvmanager.config_files.security import is_loopback
from transport import Endpoint
from transport.endpoint import is_wildcard

INTERVAL_S: Final = 15
"""The rules' shortest `for` and rates over 5 minutes suit it."""
_ALERTS: Final = "prfaas-alerts.yaml"


@dataclass(frozen=True, slots=True)
class ScrapeKeys:
    """Files with the keys that Prometheus shows. `gateway` is None where gateways ask for none."""

    engine: Path
    gateway: Path | None = None


@dataclass(frozen=True, slots=True)
class _Target:
    job: str
    process: str
    at: Endpoint
    scheme: str = "http"
    cluster: str = ""
    node: str = ""


def rendered(
    region: RegionSpec, part: Part, keys: ScrapeKeys, *, docs_url: str = ""
) -> dict[str, str]:
    """The files of a folder: `prometheus.yml`, the rules of alerts and the dashboards. `region` has
    all ports. `docs_url` is where alerts find the runbook.
    """
    jobs: dict[str, list[_Target]] = {}
    for target in _targets(region, part):
        jobs.setdefault(target.job, []).append(target)
    interval = f"{INTERVAL_S}s"
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [_ALERTS],
        "scrape_configs": [
            {
                "job_name": job,
                **_access(region, job, keys),
                "static_configs": [_static(region, target) for target in targets],
            }
            for job, targets in jobs.items()
        ],
    }
    files = {
        "prometheus.yml": yaml.safe_dump(config, sort_keys=False),
        _ALERTS: alert_rules(docs_url),
    }
    return files | {f"dashboards/{name}": text for name, text in dashboards().items()}


def hidden_targets(region: RegionSpec, part: Part) -> list[Problem]:
    """Processes that a Prometheus server elsewhere cannot ask, because they show their metrics on
    loopback of one host, and the part has several.
    """
    if len({node.host for node in region.nodes if node.name in part.nodes}) == 1:
        return []
    hidden = [item.process for item in _targets(region, part) if is_loopback(item.at.host)]
    # Regions of tests and demos have several loopback addresses of one machine.
    if not hidden or all(is_loopback(node.host) for node in region.nodes):
        return []
    message = (
        f"{', '.join(hidden)} show their metrics on loopback of their hosts only; give "
        "metrics_key and tls, or run a Prometheus server on each host: --node NAME"
    )
    return [Problem(("security",), message)]


def needs_gateway_key(region: RegionSpec, part: Part) -> bool:
    """Whether a gateway of the part shows its metrics to operators only."""
    gateway = region.gateway
    return part.has_gateway and bool(gateway.api_keys_file or gateway.api_keys_env)


def _targets(region: RegionSpec, part: Part) -> Iterator[_Target]:
    for node in region.gateway_nodes:
        if node.name in part.gateways:
            yield _gateway(region, node)
    for name in part.fronts:
        yield _front(region, region.cluster(name))
    for cluster in region.clusters:
        for node in cluster.nodes:
            if node.name in part.nodes:
                yield from _of_node(region, cluster, node)


def _gateway(region: RegionSpec, node: NodeSpec) -> _Target:
    gateway = region.gateway
    at = Endpoint(gateway.host, gateway.ports.get(node.name, gateway.port))
    if gateway.admin is not None:
        at = Endpoint.parse(gateway.admin)
    # A wildcard address is for listening only.
    host = node.host if is_wildcard(at.host) else at.host
    name = gateway_process(region, node.name)
    return _Target("prfaas-gateway", name, Endpoint(host, at.port), node=node.name)


def _front(region: RegionSpec, cluster: ClusterSpec) -> _Target:
    first = cluster.nodes[0]
    at = Endpoint(_metrics_host(region, first), cluster.front_metrics_port)
    # Its metrics name the cluster themselves.
    return _Target("prfaas-front", f"front.{cluster.name}", at, node=first.name)


def _of_node(region: RegionSpec, cluster: ClusterSpec, node: NodeSpec) -> Iterator[_Target]:
    at = Endpoint(_metrics_host(region, node), node.agent.metrics_port)
    where = {"cluster": cluster.name, "node": node.name}
    yield _Target("prfaas-agent", f"agent.{node.name}", at, **where)
    for item in node.instances:
        scheme, _, address = engine_url(region, node, item).partition("://")
        yield _Target("prfaas-engine", item.name, Endpoint.parse(address), scheme, **where)


def _metrics_host(region: RegionSpec, node: NodeSpec) -> str:
    """Where others reach the metrics of the node's agent and front."""
    bound = region.metrics_host(node)
    return node.host if bound == node.bound_host else bound


def _static(region: RegionSpec, target: _Target) -> dict[str, object]:
    # `instance` names the process for people; its address changes with ports.
    labels = {"region": region.name, "instance": target.process, "node": target.node}
    if target.cluster:
        labels["cluster"] = target.cluster
    if target.scheme != "http":
        labels["__scheme__"] = target.scheme
    return {"targets": [str(target.at)], "labels": labels}


def _access(region: RegionSpec, job: str, keys: ScrapeKeys) -> dict[str, object]:
    """What Prometheus shows to targets of a job."""
    security = region.security
    key = {
        "prfaas-gateway": keys.gateway,
        "prfaas-front": security.metrics_key,
        "prfaas-agent": security.metrics_key,
        "prfaas-engine": keys.engine,
    }[job]
    found: dict[str, object] = {}
    if key is not None:
        found["authorization"] = {"credentials_file": str(key)}
    has_tls = job == "prfaas-engine" and any(engine_tls(region, node) for node in region.nodes)
    if has_tls and (tls := security.tls) is not None:
        found["tls_config"] = {
            "ca_file": str(tls.ca),
            "cert_file": str(tls.cert),
            "key_file": str(tls.key),
        }
    return found
