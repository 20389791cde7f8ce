"""`prfaas region render --kubernetes`: pods reach each other, and start anew when they have to.
`tests/golden` has the objects.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import pytest
from kubernetes_objects import named, processes

from deploy.region.kubernetes.chart import rendered
from deploy.region.kubernetes.pods import object_name, pods_of
from deploy.region.kubernetes.values import ChartValues, default_values
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec

# As a host would have it whose files lie where pods have them.
REGION = """
name: two
gateway:
  host: 0.0.0.0
  api_keys_file: /etc/prfaas/clients/clients
  state: /var/lib/prfaas/gateway.learned
models:
  - name: m
    path: /models/m
    tensor_parallel_size: 2
    env: {HF_HUB_OFFLINE: '1', NOTE: '{{ x }} $(y) "it"'}
    args: [--seed, '$(z)']
  - {name: small, path: org/small, kv_space_gib: 4}
clusters:
  - name: far
    kind: prefill
    nodes:
      - name: a1
        host: a1.far.svc
        listen: 0.0.0.0
        agent: &agent {arena_dir: /var/lib/prfaas-arena, arena_gib: 2}
        instances: [{name: p, model: m}, {name: q, model: m}, {name: r, model: small}]
      - name: a2
        host: a2.far.example
        listen: 0.0.0.0
        agent: *agent
        instances: [{name: s, model: m}]
  - name: home
    kind: pd
    nodes:
      - name: b1
        host: 10.1.0.1
        agent: *agent
        instances: [{name: d, model: m}, {name: e, model: small}]
links: [{from: far, to: home}]
security:
  tls: {cert: /etc/prfaas/tls/tls.crt, key: /etc/prfaas/tls/tls.key, ca: /etc/prfaas/tls/ca.crt}
  engine_key: /etc/prfaas/keys/engine.key
  metrics_key: /etc/prfaas/keys/metrics.key
  granting_key: /etc/prfaas/granting/granting.key
  granting_keys: /etc/prfaas/keys/granting.pub
"""


@pytest.fixture
def region() -> RegionSpec:
    return parse_region(REGION, {})


def all_on(region: RegionSpec) -> ChartValues:
    """Values with all that the chart may have."""
    document = default_values(region, pods_of(region)).model_dump(mode="json", by_alias=True)
    for name in ("serviceMonitors", "keda"):
        document[name]["enabled"] = True
    peers = [{"ipBlock": {"cidr": "10.9.0.0/16"}}]
    document["networkPolicies"] |= {"monitoring": peers, "agentsElsewhere": peers}
    document["networkPolicies"] |= {"gatewaysElsewhere": peers}
    return ChartValues.model_validate(document)


def test_what_processes_call_is_behind_a_service_of_its_host(region: RegionSpec) -> None:
    objects = rendered(region)
    services = named(objects, "Service")
    assert set(services) == {
        "a1",
        "two-a2",
        "two-gateway",
        *(f"two-{n}-metrics" for n in ("a1", "a2", "b1")),
    }
    called: dict[str, set[int]] = {"a1.far.svc": set(), "a2.far.example": set(), "10.1.0.1": set()}
    for found in processes(objects).values():
        for document in found.files.values():
            for text in _texts(document):
                host, _, port = text.rpartition("//")[2].rpartition(":")
                if host in called and port.isdigit():
                    called[host].add(int(port))
    assert called["10.1.0.1"] == {7100, 7101, 7400, 7401}  # on its machine's network
    for name, host in (("a1", "a1.far.svc"), ("two-a2", "a2.far.example")):
        spec = services[name]["spec"]
        assert called[host] <= {port["port"] for port in spec["ports"]}
        assert spec["publishNotReadyAddresses"]
        for port in spec["ports"]:
            # The port's name leads to the one pod that has it.
            assert port["targetPort"] == port["name"] == f"p{port['port']}"
            owners = [
                pod
                for pod, body in _pods(objects).items()
                if spec["selector"].items() <= body["metadata"]["labels"].items()
                and port["name"] in _port_names(body["spec"])
            ]
            assert len(owners) == 1
    assert [port["port"] for port in services["two-gateway"]["spec"]["ports"]] == [8000]


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return list(chain.from_iterable(map(_texts, [*value, *value.values()])))
    if isinstance(value, list):
        return list(chain.from_iterable(map(_texts, value)))
    return [value] if isinstance(value, str) else []


def _pods(objects: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = ("DaemonSet", "StatefulSet", "Deployment")
    return {
        n: item["spec"]["template"] for kind in kinds for n, item in named(objects, kind).items()
    }


def _port_names(spec: dict[str, Any]) -> set[str]:
    return {port["name"] for port in spec["containers"][0]["ports"]}


def test_pods_start_anew_for_settings_that_they_do_not_follow(region: RegionSpec) -> None:
    def digests(text: str) -> dict[str, str]:
        objects = rendered(parse_region(text, {}))
        return {
            item["metadata"]["name"]: item["spec"]["template"]["metadata"]["annotations"]
            for item in objects
            if "annotations" in item.get("spec", {}).get("template", {}).get("metadata", {})
        }

    def changed(old: str, new: str) -> set[str]:
        before, after = digests(REGION), digests(REGION.replace(old, new))
        return {name for name in before if before[name] != after[name]}

    assert changed("host: 0.0.0.0", "host: 0.0.0.0\n  threshold_tokens: 9") == {"two-gateway"}
    agents = {"two-agent-a1", "two-agent-a2", "two-agent-b1"}
    assert changed("arena_gib: 2", "arena_gib: 2, eviction: lfu") == agents
    assert changed("host: 0.0.0.0", "host: 0.0.0.0\n  max_in_flight: 9") == set()
    more = "{name: s, model: m}, {name: t, model: m}"
    assert changed("{name: s, model: m}", more) == set()


def test_policies_let_in_whom_the_plan_makes_call(region: RegionSpec) -> None:
    policies = named(rendered(region, all_on(region)), "NetworkPolicy")

    def callers(name: str) -> dict[int, list[str]]:
        return {
            port["port"]: [
                peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
                if "podSelector" in peer
                else peer["ipBlock"]["cidr"]
                for peer in rule["from"]
            ]
            for rule in policies[name]["spec"]["ingress"]
            for port in rule["ports"]
        }

    assert callers("two-agent-a1") == {7100: ["agent", "10.1.0.1/32"], 7101: ["gateway", "front"]}
    assert callers("two-engine-p") == {7400: ["gateway", "front"]}
    assert callers("two-front-far") == {7200: ["gateway"]}
    assert callers("two-gateway") == {8000: []}  # everybody
    assert callers("two-agent-a1-monitoring") == {7102: ["10.9.0.0/16"]}
    assert callers("two-agent-a1-agents") == {7100: ["10.9.0.0/16"]}
    assert callers("two-agent-a1-gateways") == {7101: ["10.9.0.0/16"]}
    assert not any("b1" in name for name in policies)  # on its machine's network
    # A rule for no peers would let everybody in.
    default = named(rendered(region), "NetworkPolicy")
    assert {n for n in policies if n not in default} == {
        name for name in policies if name.endswith(("-monitoring", "-agents", "-gateways"))
    }
    for name, item in default.items():
        empty = [rule for rule in item["spec"]["ingress"] if not rule["from"]]
        assert bool(empty) == (name == "two-gateway")


def test_names_that_kubernetes_takes() -> None:
    assert object_name("two", "agent.a1") == "two-agent-a1"
    assert object_name("Two") != object_name("two")
    assert object_name("Two").startswith("two-")
    # Helm and the API server take no capitals, underscores or digits in front.
    assert re.fullmatch(r"r-2026-my-region-\w+", object_name("2026_My.Region"))
    long = object_name("x" * 63, "agent.y")
    assert len(long) == 50
    assert long != object_name("x" * 63, "agent.z")
