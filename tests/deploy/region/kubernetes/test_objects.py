"""`prfaas region render --kubernetes`: pods run what `prfaas up` runs, and reach each other."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from kubernetes_objects import named, pod_specs, processes
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region import certs
from deploy.region.certs import hosts_of
from deploy.region.kubernetes.chart import chosen_values, rendered
from deploy.region.kubernetes.pods import kubernetes_problems, object_name, pods_of
from deploy.region.kubernetes.values import ChartValues, default_values, site_values
from deploy.region.launch.parts import part_with
from deploy.region.launch.plan import PlannedProcess, Planner
from deploy.region.launch.ports import resolve_part
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.loading import load_region, parse_region
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError

EXAMPLE = Path(__file__).parents[4] / "deploy" / "region" / "examples" / "kubernetes.yaml"

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


def planned(region: RegionSpec) -> dict[str, tuple[PlannedProcess, dict[str, str]]]:
    """The processes that `prfaas up` starts on each host, and the files of that host."""
    found = {}
    for host in hosts_of(region):
        part = part_with(region, host.folder, host.nodes)
        directory = RunDirectory(Path("/etc/prfaas/config"), Path("/run/prfaas"))
        planner = Planner(resolve_part(region, part), directory, {})
        files = {str(path): text for path, text in planner.files().items()}
        for item in planner.processes():
            found[item.name] = (item, files)
    return found


@pytest.mark.parametrize("text", [REGION, EXAMPLE.read_text()], ids=["two", "example"])
def test_pods_run_what_prfaas_up_plans(text: str) -> None:
    region = parse_region(text, {})
    pods = {pod.name: pod.process for pod in pods_of(region)}
    running = processes(rendered(region))
    if region.name == "demo":  # its paths are those of the file's folder
        text = REGION[REGION.index("  tls:") :]
        told = EXAMPLE.read_text()
        told = told[: told.index("  tls:")] + text + told[told.index("\nmodels:") :]
        told = told.replace("api_keys_file: clients", "api_keys_file: /etc/prfaas/clients/clients")
        told = told.replace("gateway:", "gateway:\n  state: /var/lib/prfaas/gateway.learned", 1)
        told = told.replace("arena_gib", "arena_dir: /var/lib/prfaas-arena, arena_gib")
        told = told.replace(
            "path: /models/chat", "env: {HF_HUB_OFFLINE: '1'}\n    path: /models/chat"
        )
        region = parse_region(told, {})
    expected = planned(region)
    assert sorted(pods.values()) == sorted(expected)
    for name, found in running.items():
        item, files = expected[pods[name]]
        assert found.argv == ["python3", *item.process.argv[1:]]
        env = dict(item.process.env)
        env.pop("PYTHONPATH", None)  # of a checkout: images have the packages installed
        if item.kind == "engine":
            env |= {"HOME": "/home/prfaas", "USER": "prfaas"}
        assert found.env == env
        config = [word for word in found.argv if word.startswith("/etc/prfaas/config/")]
        assert sorted(found.files) == config
        for path in config:
            document = json.loads(files[path])
            document.pop("operator_key_file", None)
            assert found.files[path] == document
        assert int(item.address.rpartition(":")[2]) in found.ports
    ports = {pods[name]: found.ports for name, found in running.items()}
    first = region.nodes[0].name
    assert ports[f"agent.{first}"] == {7100, 7101, 7102}
    assert ports[f"front.{region.clusters[0].name}"] == {7200, 7210}


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


def test_agents_and_engines_of_a_host_share_memory_and_sockets(region: RegionSpec) -> None:
    specs = pod_specs(rendered(region))
    for name in ("two-agent-a1", "two-engine-p", "two-engine-r"):
        folders = {
            v["name"]: v["hostPath"]["path"] for v in specs[name]["volumes"] if "hostPath" in v
        }
        assert folders == {"arena": "/dev/shm/prfaas-two", "sockets": "/run/prfaas/two"}
        mounts = {m["mountPath"] for m in specs[name]["containers"][0]["volumeMounts"]}
        assert {"/var/lib/prfaas-arena", "/run/prfaas"} <= mounts
        assert specs[name]["nodeSelector"] == {"prfaas/host": "two-a1"}
    (first,) = specs["two-agent-a1"]["initContainers"]
    assert first["command"][-2:] == ["/var/lib/prfaas-arena", "/run/prfaas"]
    assert first["securityContext"]["runAsUser"] == 0
    agent, engine = (specs[n]["containers"][0] for n in ("two-agent-a1", "two-engine-p"))
    assert agent["resources"] == {"requests": {"cpu": 2, "memory": "4096Mi"}}
    assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_engines_get_devices_and_only_the_gateway_gets_its_key(region: RegionSpec) -> None:
    specs = pod_specs(rendered(region))
    gpus = {
        name: spec["containers"][0]["resources"].get("limits", {}).get("nvidia.com/gpu")
        for name, spec in specs.items()
        if "engine" in name
    }
    assert gpus == {f"two-engine-{n}": 2 for n in "pqsd"} | {
        "two-engine-r": None,
        "two-engine-e": None,
    }
    with_granting = [
        name
        for name, spec in specs.items()
        if any(v["name"] == "granting" for v in spec["volumes"])
    ]
    assert with_granting == ["two-gateway"]
    for spec in specs.values():
        # Only files of this mode are taken for keys.
        assert {v["secret"]["defaultMode"] for v in spec["volumes"] if "secret" in v} == {0o440}


def test_pods_are_on_the_network_that_the_file_says(region: RegionSpec) -> None:
    specs = pod_specs(rendered(region))
    on_host = {name for name, spec in specs.items() if spec.get("hostNetwork")}
    assert on_host == {"two-agent-b1", "two-engine-d", "two-engine-e"}
    assert specs["two-agent-b1"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    # The front of a host with a Service may run anywhere.
    assert specs["two-front-far"]["nodeSelector"] == {}


def test_probes_ask_what_needs_no_key(region: RegionSpec) -> None:
    specs = pod_specs(rendered(region))
    for name, port in (("two-agent-a1", 7102), ("two-front-far", 7210), ("two-gateway", 8000)):
        container = specs[name]["containers"][0]
        assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": f"p{port}"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": f"p{port}"}
        assert container["startupProbe"]["httpGet"]["path"] == "/livez"
    engine = specs["two-engine-q"]["containers"][0]
    assert engine["livenessProbe"]["tcpSocket"] == {"port": "p7401"}
    slow = parse_region(REGION.replace("name: m\n", "name: m\n    start_minutes: 90\n"), {})
    for wanted, minutes in ((region, 60), (slow, 90)):
        engine = pod_specs(rendered(wanted))["two-engine-q"]["containers"][0]
        probe = engine["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] == 60 * minutes


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


def test_the_operators_pages_are_not_in_the_service_of_clients(region: RegionSpec) -> None:
    text = REGION.replace("host: 0.0.0.0", "host: 0.0.0.0\n  admin: 0.0.0.0:8001", 1)
    region = parse_region(text, {})
    services = named(rendered(region, all_on(region)), "Service")
    assert [port["port"] for port in services["two-gateway"]["spec"]["ports"]] == [8000]
    admin = services["two-gateway-admin"]
    assert admin["spec"]["clusterIP"] == "None"
    assert [port["port"] for port in admin["spec"]["ports"]] == [8001]
    monitor = named(rendered(region, all_on(region)), "ServiceMonitor")["two-gateway"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= admin["metadata"]["labels"].items()
    assert not wanted.items() <= services["two-gateway"]["metadata"]["labels"].items()


def test_rendering_says_whom_policies_keep_out(tmp_path: Path) -> None:
    text = REGION.replace("name: two", "name: 2026_My.Region", 1)
    (tmp_path / "r.yaml").write_text(text.replace("host: 10.1.0.1", "host: b1.example"))
    command = ["region", "render", str(tmp_path / "r.yaml"), "--kubernetes", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "networkPolicies.agentsElsewhere is empty" in result.stderr
    assert "its host is b1.example" in result.stderr
    # Helm and the API server take no capitals, underscores or digits in front.
    assert re.search(r"helm upgrade --install r-2026-my-region-\w+ ", result.stdout)
    names = [path.name for path in (tmp_path / "out" / "objects").glob("service-*")]
    assert names
    assert all(name.startswith("service-r-2026-my-region") or "a1" in name for name in names), names


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


def test_certificates_have_the_names_that_prfaas_certs_gives(
    region: RegionSpec, tmp_path: Path
) -> None:
    certs.make(region, tmp_path / "made", days=1)
    wanted = named(rendered(region), "Certificate")
    assert set(wanted) == {"two-a1", "two-a2", "two-b1"}
    for host in ("a1", "a2", "b1"):
        made = x509.load_pem_x509_certificate((tmp_path / "made" / host / "cert.pem").read_bytes())
        names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        spec = wanted[f"two-{host}"]["spec"]
        assert spec.get("dnsNames", []) == names.get_values_for_type(x509.DNSName)
        addresses = names.get_values_for_type(x509.IPAddress)
        assert spec.get("ipAddresses", []) == list(map(str, addresses))
        assert spec["uris"] == names.get_values_for_type(x509.UniformResourceIdentifier)
        assert spec["secretName"] == f"two-{host}-tls"


def test_monitors_show_the_keys_that_processes_ask_for(region: RegionSpec) -> None:
    monitors = named(rendered(region, all_on(region)), "ServiceMonitor")
    assert set(monitors) == {"two-a1", "two-a2", "two-b1", "two-gateway"}
    endpoints = {item["port"]: item for item in monitors["two-a1"]["spec"]["endpoints"]}
    assert set(endpoints) == {"p7102", "p7210", "p7400", "p7401", "p7402"}
    assert endpoints["p7102"]["authorization"]["credentials"] == {
        "name": "two-keys",
        "key": "metrics.key",
    }
    assert endpoints["p7400"]["scheme"] == "https"
    assert endpoints["p7400"]["tlsConfig"]["serverName"] == "a1.far.svc"
    labels = {i["targetLabel"]: i.get("replacement") for i in endpoints["p7402"]["relabelings"]}
    assert labels == {
        "job": "prfaas-engine",
        "region": "two",
        "instance": "r",
        "node": "a1",
        "cluster": "far",
    }
    (gateway,) = monitors["two-gateway"]["spec"]["endpoints"]
    assert gateway["authorization"]["credentials"] == {"name": "two-clients", "key": "operator"}


def test_engines_of_prefill_clusters_run_while_the_planner_wants_them(region: RegionSpec) -> None:
    objects = rendered(region, all_on(region))
    scalers = named(objects, "ScaledObject")
    # Not the first of a model, and none whose stop would end answers.
    assert set(scalers) == {"two-engine-q", "two-engine-s"}
    spec = scalers["two-engine-s"]["spec"]
    assert spec["scaleTargetRef"]["name"] in named(objects, "StatefulSet")
    query = (
        'max(prfaas_plan_wanted_instances{cluster="far",role="prefill",model_name="m"}) > bool 2'
    )
    assert spec["triggers"][0]["metadata"]["query"] == query
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 1)
    sets = named(objects, "StatefulSet")
    # Else `helm upgrade` would undo what KEDA did.
    assert "replicas" not in sets["two-engine-q"]["spec"]
    assert sets["two-engine-p"]["spec"]["replicas"] == 1


def test_several_gateways_are_deployments_with_one_budget() -> None:
    objects = rendered(load_region(EXAMPLE, {}))
    assert set(named(objects, "Deployment")) == {"demo-gateway-b1", "demo-gateway-b2"}
    (budget,) = named(objects, "PodDisruptionBudget").values()
    assert budget["spec"]["maxUnavailable"] == 1
    # An address of Redis may have a password.
    assert set(named(objects, "Secret")) == {"demo-gateway-b1", "demo-gateway-b2"}


def test_a_site_has_its_hosts(region: RegionSpec) -> None:
    told = site_values(region, "far")
    assert told["hosts"] == {
        "a1": {"enabled": True},
        "a2": {"enabled": True},
        "b1": {"enabled": False},
    }
    far, home = (rendered(region, chosen_values(region, site, None)) for site in ("far", "home"))
    assert set(pod_specs(far)) | set(pod_specs(home)) == set(pod_specs(rendered(region)))
    assert not set(pod_specs(far)) & set(pod_specs(home))
    assert named(far, "PodDisruptionBudget") == {}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "links: [{from: far, to: home}]",
            "links: [{from: far, to: home, emulate: {rtt: 5ms}}]",
            "links[0].emulate",
        ),
        (
            "  metrics_key: /etc/prfaas/keys/metrics.key\n",
            "",
            "security.metrics_key: name the file",
        ),
        ("  engine_key: /etc/prfaas/keys/engine.key\n", "", "security.engine_key"),
        ("  host: 0.0.0.0\n  api", "  api", "gateway.host: nobody reaches loopback"),
        ("gateway:\n", "gateway:\n  admin: 127.0.0.1:1\n", "gateway.admin: nobody reaches"),
        (
            "a2.far.example\n        listen: 0.0.0.0",
            "a2.far.example\n        listen: 10.0.0.9",
            "nodes[1].listen: a pod's address",
        ),
        (
            "{HF_HUB_OFFLINE: '1',",
            "{CUDA_VISIBLE_DEVICES: '1',",
            "models[0].env.CUDA_VISIBLE_DEVICES: the device",
        ),
        ("host: 10.1.0.1", "host: 127.0.0.1", "nodes[0].host: other pods do not reach loopback"),
    ],
)
def test_what_kubernetes_cannot_run_is_refused(old: str, new: str, said: str) -> None:
    assert old in REGION
    with pytest.raises(FileError) as refused:
        rendered(parse_region(REGION.replace(old, new), {}))
    assert said in str(refused.value)


def test_engines_need_tls_between_pods() -> None:
    text = REGION.replace(
        REGION[REGION.index("  tls:") : REGION.index("  engine_key")], "  region_key: /k\n"
    )
    problems = kubernetes_problems(parse_region(text, {}))
    assert any("engines need TLS" in str(problem) for problem in problems)


def test_names_that_kubernetes_takes() -> None:
    assert object_name("two", "agent.a1") == "two-agent-a1"
    assert object_name("Two") != object_name("two")
    assert object_name("Two").startswith("two-")
    long = object_name("x" * 63, "agent.y")
    assert len(long) == 50
    assert long != object_name("x" * 63, "agent.z")


def test_names_that_would_be_one_are_refused() -> None:
    text = REGION.replace("name: a2", "name: a.1").replace("name: a1", "name: a-1")
    with pytest.raises(FileError, match="several processes would be called two-agent-a-1"):
        rendered(parse_region(text, {}))
