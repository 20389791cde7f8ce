"""The part of a region on one host: its processes, the ports that all hosts work out, its keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from granting import grant_files

from deploy.gateway.config import SharedSection
from deploy.gateway.file import GatewayFile
from deploy.region.certs import hosts_of
from deploy.region.launch.parts import Part, UnknownPart, part_of, part_problems, whole
from deploy.region.launch.plan import Planner
from deploy.region.launch.ports import resolve_part, resolve_ports, taken_ports
from deploy.region.launch.rundir import LOCK, RunDirectory
from deploy.region.launch.trust import make_keys
from deploy.region.spec.checks import check_region
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec
from kvmanager.agent.config import AgentConfig
from kvmanager.config_files.problems import FileError
from prfaas.front_config import PrefillFrontConfig
from transport import Endpoint, LinkPath

TWO_SITES = """
name: two
models: [{name: m, path: org/m}]
clusters:
  - name: far
    kind: prefill
    nodes:
      - {name: a1, host: 10.0.0.1, instances: [{name: a1-p}]}
      - {name: a2, host: 10.0.0.2, instances: [{name: a2-p}, {name: a2-q}]}
  - name: home
    kind: pd
    nodes:
      - {name: b1, host: 10.1.0.1, instances: [{name: b1-d}]}
      - {name: b2, host: 10.1.0.2, instances: [{name: b2-p, role: prefill}]}
links: [{from: far, to: home}]
"""
KEYS = """
security:
  tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}
  engine_key: /k/engine.key
  granting_key: /k/granting.key
  granting_keys: /k/granting.pub
"""


def region_of(more: str = KEYS, text: str = TWO_SITES) -> RegionSpec:
    return parse_region(text + more, {})


def planner(region: RegionSpec, part: Part) -> Planner:
    root = Path("/run/two")
    return Planner(resolve_part(region, part), RunDirectory(root, root / "sockets"), {})


def names(region: RegionSpec, **part: str) -> list[str]:
    return [item.name for item in planner(region, part_of(region, **part)).processes()]


def test_each_host_starts_its_own_part() -> None:
    region = region_of()
    assert names(region, node="a1") == ["agent.a1", "a1-p", "front.far"]
    assert names(region, node="a2") == ["agent.a2", "a2-p", "a2-q"]
    assert names(region, node="b1") == ["agent.b1", "b1-d", "gateway"]
    assert names(region, node="b2") == ["agent.b2", "b2-p"]
    assert names(region, site="far") == [
        "agent.a1", "agent.a2", "a1-p", "a2-p", "a2-q", "front.far",
    ]  # fmt: skip
    everything = names(region, site="far") + names(region, site="home")
    assert len(everything) == len(set(everything)) == 11


def test_the_gateway_runs_where_the_file_puts_it() -> None:
    region = region_of(f"{KEYS}gateway: {{node: a2}}\n")
    assert names(region, node="a1") == ["agent.a1", "a1-p"]
    assert names(region, node="a2") == ["agent.a2", "a2-p", "a2-q", "gateway"]
    assert names(region, node="b1") == ["agent.b1", "b1-d", "front.home"]
    plan = planner(region, part_of(region, node="a2"))
    file = GatewayFile.model_validate(yaml.safe_load(plan.files()[plan.directory.gateway_file]))
    assert (file.pd[0].front, file.pd[0].has_prefill_instances) == ("10.1.0.1:7200", True)
    assert [item.name for item in file.prefill[0].instances] == ["a1-p", "a2-p", "a2-q"]


SEVERAL = """
gateway: {nodes: [a1, b1, b2], shared: {redis: "rediss://redis.example"}}
"""


def test_several_gateways_have_all_fronts_apart() -> None:
    region = region_of(KEYS + SEVERAL)
    assert names(region, node="a1") == ["agent.a1", "a1-p", "front.far", "gateway.a1"]
    assert names(region, node="b1") == ["agent.b1", "b1-d", "front.home", "gateway.b1"]
    assert names(region, node="b2") == ["agent.b2", "b2-p", "gateway.b2"]
    files = planner(region, part_of(region, node="b2")).files()
    file = GatewayFile.model_validate_json(files[Path("/run/two/gateway.b2.json")])
    assert file.gateway.shared == SharedSection(
        redis="rediss://redis.example", region="two", name="b2"
    )
    assert file.pd[0].front == "10.1.0.1:7200"
    assert (file.gateway.port, file.gateway.home) == (8000, "home")
    assert file.gateway.state == Path("/run/two/gateway.b2.learned")
    part = part_of(region, node="a1")
    resolved = resolve_part(region, part).region
    assert resolved.gateway.ports == {"a1": 8000, "b1": 8000, "b2": 8000}
    assert not [item for item in taken_ports(resolved, part) if "twice" in item.message]
    assert [part.gateways for part in (whole(region), part_of(region, site="home"))] == [
        ("a1", "b1", "b2"),
        ("b1", "b2"),
    ]


def test_a_gateway_of_several_processes_has_all_fronts_apart() -> None:
    region = region_of(KEYS + SEVERAL.replace("nodes: [a1, b1, b2]", "processes: 3"))
    # Its parent starts the processes, wherever it runs.
    assert names(region, node="b1") == ["agent.b1", "b1-d", "front.home", "gateway"]
    assert whole(region).fronts == ("far", "home")
    files = planner(region, part_of(region, node="b1")).files()
    file = GatewayFile.model_validate_json(files[Path("/run/two/gateway.json")])
    assert file.gateway.processes == 3
    assert all(source.front for source in (*file.pd, *file.prefill))


def test_gateways_of_one_host_have_ports_of_their_own() -> None:
    text = TWO_SITES.replace("10.1.0.2", "10.1.0.1")
    region = region_of(KEYS + SEVERAL, text)
    assert resolve_part(region, part_of(region, node="b2")).region.gateway.ports == {
        "a1": 8000,
        "b1": 8000,
        "b2": 8001,
    }
    together = resolve_ports(region, is_free=lambda _host, _port: True).region.gateway
    assert together.ports["a1"] == 8000
    assert len(set(together.ports.values())) == 3
    chosen = SEVERAL.replace("gateway: {", "gateway: {ports: {b2: 9000}, admin: '0.0.0.0:0', ")
    region = region_of(KEYS + chosen.replace("gateway: {", "gateway: {api_keys_env: K, "), text)
    assert resolve_part(region, part_of(region, node="b2")).region.gateway.ports["b2"] == 9000
    for part in (whole(region), part_of(region, node="b2")):
        (problem,) = part_problems(region, part)
        assert "gateways of one machine cannot share it" in problem.message


def test_no_instance_has_the_name_of_a_gateway_process() -> None:
    text = TWO_SITES.replace("name: b1-d", "name: gateway.b1")
    assert names(region_of(text=text), node="b1")[1] == "gateway.b1"
    with pytest.raises(FileError, match="names another process of the region"):
        region_of(KEYS + SEVERAL, text)


@pytest.mark.parametrize(
    ("gateway", "where", "message"),
    [
        ("{nodes: [a1, b1]}", "gateway.nodes", "several gateways need shared"),
        ("{nodes: [a1, b9], shared: {redis: 'rediss://r'}}", "gateway.nodes[1]", "no node is"),
        ("{nodes: [a1, a1], shared: {redis: 'rediss://r'}}", "gateway.nodes", "once"),
        ("{processes: 2}", "gateway", "2 processes need shared, the Redis server"),
        ("{processes: 0}", "gateway.processes", "greater than or equal to 1"),
        ("{nodes: [a1], node: b1}", "gateway.nodes", "node for one gateway or nodes"),
        ("{nodes: [a1], ports: {b1: 1}}", "gateway.ports.b1", "nodes has no 'b1'"),
    ],
)
def test_gateways_that_cannot_be_meant(gateway: str, where: str, message: str) -> None:
    with pytest.raises(FileError) as caught:
        region_of(f"{KEYS}gateway: {gateway}\n")
    assert where in {problem.where for problem in caught.value.problems}
    assert message in str(caught.value)


def test_every_host_works_out_the_same_ports() -> None:
    region = region_of()
    parts = [part_of(region, node=node.name) for node in region.nodes]
    first, *others = (resolve_part(region, part).region for part in parts)
    assert others == [first] * 3
    a2 = first.nodes[1]
    agent = a2.agent
    assert (agent.data_port, agent.control_port, agent.metrics_port) == (7100, 7101, 7102)
    assert [item.port for item in a2.instances] == [7400, 7401]
    assert [cluster.front_port for cluster in first.clusters] == [7200, 0]
    assert check_region(first) == []


def test_ports_of_nodes_on_one_host_differ() -> None:
    text = TWO_SITES.replace("10.0.0.2", "10.0.0.1").replace("a1-p}", "a1-p, port: 7100}")
    first = resolve_part(region_of(text=text), part_of(region_of(text=text), node="a1")).region
    a1, a2 = first.clusters[0].nodes
    assert (a1.agent.data_port, a2.agent.data_port) == (7101, 7104)
    assert (a1.agent.metrics_port, a2.agent.metrics_port) == (7103, 7106)
    assert [item.port for item in a1.instances + a2.instances] == [7100, 7400, 7401]
    assert check_region(first) == []


def test_loopback_of_two_hosts_is_two_networks() -> None:
    key = KEYS.replace("tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}", "region_key: k")
    assert check_region(region_of(key)) == []
    for node in resolve_part(region_of(key), part_of(region_of(key), node="a1")).region.nodes:
        assert node.instances[0].port == 7400


def test_an_emulated_link_runs_where_its_receiver_is() -> None:
    text = TWO_SITES.replace("to: home", "to: home, emulate: {rtt: 9ms}")
    region = region_of(text=text)
    assert names(region, node="a1") == ["agent.a1", "a1-p", "front.far"]
    assert names(region, node="b2") == ["link.far-to-home.b2", "agent.b2", "b2-p"]
    plan = planner(region, part_of(region, node="b1"))
    file = GatewayFile.model_validate(yaml.safe_load(plan.files()[plan.directory.gateway_file]))
    assert file.prefill[0].endpoints == {
        "10.1.0.1:7100": "10.1.0.1:7900",
        "10.1.0.2:7100": "10.1.0.2:7900",
    }


def test_a_part_writes_only_what_its_processes_read() -> None:
    region = region_of()
    for node, expected in {
        "a1": {"region.json", "agent.a1.json", "front.far.json"},
        "a2": {"region.json", "agent.a2.json"},
        "b1": {"region.json", "agent.b1.json", "gateway.json"},
    }.items():
        files = planner(region, part_of(region, node=node)).files()
        assert {path.name for path in files} == expected
    files = planner(region, part_of(region, node="a1")).files()
    front = PrefillFrontConfig.model_validate(
        yaml.safe_load(files[Path("/run/two/front.far.json")])
    )
    assert front.listen == "10.0.0.1:7200"
    assert [item.engine_url for item in front.instances] == [
        "https://10.0.0.1:7400", "https://10.0.0.2:7400", "https://10.0.0.2:7401",
    ]  # fmt: skip
    assert front.engine_key_file == Path("/k/engine.key")
    agent = AgentConfig.model_validate(yaml.safe_load(files[Path("/run/two/agent.a1.json")]))
    assert agent.granting_keys is not None
    assert agent.granting_keys.file == Path("/k/granting.pub")
    assert set(agent.send_to) == {f"10.{site}.0.{host}:7100" for site in (0, 1) for host in (1, 2)}


def test_behind_nat_processes_listen_elsewhere_than_others_connect() -> None:
    text = TWO_SITES.replace("host: 10.0.0.1,", "host: 198.51.100.7, listen: 0.0.0.0,")
    text = text.replace("to: home", "to: home, emulate: {rtt: 1ms}")
    text = text.replace("host: 10.1.0.1,", "host: 198.51.100.9, listen: 10.1.0.1,")
    region = region_of(text=text)
    plan = planner(region, part_of(region, node="a1"))
    agent = yaml.safe_load(plan.files()[Path("/run/two/agent.a1.json")])
    assert (agent["listen"], agent["control"]) == ("0.0.0.0:7100", "0.0.0.0:7101")
    assert agent["advertise"] == "198.51.100.7:7100"
    assert (agent["metrics_host"], agent["metrics_port"]) == ("127.0.0.1", 7102)
    guarded = region_of(f"{KEYS}  metrics_key: /k/metrics.key\n", text)
    files = planner(guarded, part_of(guarded, node="a1")).files()
    agent = yaml.safe_load(files[Path("/run/two/agent.a1.json")])
    assert (agent["metrics_host"], agent["metrics_key_file"]) == ("0.0.0.0", "/k/metrics.key")
    front = yaml.safe_load(plan.files()[Path("/run/two/front.far.json")])
    assert (front["listen"], front["instances"][0]["agent"], front["instances"][0]["url"]) == (
        "0.0.0.0:7200",
        "198.51.100.7:7101",
        "https://198.51.100.7:7400",
    )
    engine = next(item for item in plan.processes() if item.kind == "engine")
    argv = list(engine.process.argv)
    assert (argv[argv.index("--host") + 1], engine.address) == (
        "0.0.0.0",
        "https://198.51.100.7:7400",
    )
    home = planner(region, part_of(region, node="b1"))
    (relay,) = [item for item in home.processes() if item.kind == "relay"]
    assert relay.address == "10.1.0.1:7900"
    file = GatewayFile.model_validate(yaml.safe_load(home.files()[home.directory.gateway_file]))
    assert file.prefill[0].front == "198.51.100.7:7200"
    assert file.prefill[0].endpoints["198.51.100.9:7100"] == "198.51.100.9:7900"


def test_hosts_with_several_addresses_pair_them() -> None:
    text = TWO_SITES.replace(
        "host: 10.1.0.1,", 'host: 10.1.0.1, agent: {advertise: ["10.1.0.1:7100", "10.9.0.1:7100"]},'
    )
    region = region_of(text=text)
    told = planner(region, part_of(region, node="a1")).files()[Path("/run/two/agent.a1.json")]
    sender = AgentConfig.model_validate(yaml.safe_load(told))
    first, second = Endpoint("10.1.0.1", 7100), Endpoint("10.9.0.1", 7100)
    assert sender.paths == {first: [LinkPath(first), LinkPath(second)]}
    assert str(first) in sender.send_to
    told = planner(region, part_of(region, node="b1")).files()[Path("/run/two/agent.b1.json")]
    receiver = AgentConfig.model_validate(yaml.safe_load(told))
    assert (receiver.listen, receiver.advertise) == ("[::]:7100", "10.1.0.1:7100")
    # What it sends itself leaves from both of its addresses.
    a1 = Endpoint("10.0.0.1", 7100)
    assert receiver.paths[a1] == [LinkPath(a1, "10.1.0.1"), LinkPath(a1, "10.9.0.1")]
    both = region_of(
        text=text.replace(
            "host: 10.0.0.1,", 'host: 10.0.0.1, agent: {advertise: ["10.0.0.1:1", "10.9.0.2:1"]},'
        )
    )
    told = planner(both, part_of(both, node="a1")).files()[Path("/run/two/agent.a1.json")]
    sender = AgentConfig.model_validate(yaml.safe_load(told))
    assert sender.paths[first] == [LinkPath(first, "10.0.0.1"), LinkPath(second, "10.9.0.2")]
    assert hosts_of(both)[0].addresses == ("10.0.0.1", "10.9.0.2")


def test_unknown_parts_are_refused() -> None:
    region = region_of()
    with pytest.raises(UnknownPart, match="no node is called 'a3'; known here: a1, a2, b1, b2"):
        part_of(region, node="a3")
    with pytest.raises(UnknownPart, match="no cluster is called 'hme'; did you mean 'home'"):
        part_of(region, site="hme")
    with pytest.raises(UnknownPart, match="not both"):
        part_of(region, site="home", node="a1")
    assert part_of(region).is_whole


def told(region: RegionSpec, **part: str) -> dict[str, str]:
    return {item.where: item.message for item in part_problems(region, part_of(region, **part))}


def test_keys_that_no_host_can_make_alone_must_be_named() -> None:
    problems = told(region_of(""), node="a1")
    assert set(problems) == {
        "security",
        "security.engine_key",
        "security.granting_key",
        "security.granting_keys",
    }
    assert all("`prfaas certs init DIR FILE` makes" in text for text in problems.values())
    assert part_problems(region_of(""), part_of(region_of(""))) == []
    open_region = region_of("security: {trusted_network: true}")
    assert set(told(open_region, node="a1")) == {"security.engine_key"}


def test_files_that_a_part_reads_must_be_on_its_host(tmp_path: Path) -> None:
    region = region_of(KEYS.replace("/k/", f"{tmp_path}/"))
    for name in ("cert.pem", "key.pem", "ca.pem", "engine.key", "granting.pub"):
        (tmp_path / name).touch()
    assert told(region, node="a1") == {}
    assert set(told(region, node="b1")) == {"security.granting_key"}
    (tmp_path / "cert.pem").unlink()
    (message,) = told(region, node="a2").values()
    assert message.startswith(f"there is no {tmp_path}/cert.pem on this host")


def test_engines_on_loopback_must_be_where_they_are_asked(tmp_path: Path) -> None:
    key = KEYS.replace("tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}", "region_key: k")
    for name in ("k", "engine.key", "granting.pub", "granting.key"):
        (tmp_path / name).touch()
    key = key.replace("/k/", f"{tmp_path}/").replace("region_key: k", f"region_key: {tmp_path}/k")
    problems = told(region_of(key), node="a1")
    assert set(problems) == {"clusters[0].nodes[1].host", "clusters[1].nodes[1].host"}
    assert "loopback only, and a1 (10.0.0.1) has to ask them" in next(iter(problems.values()))


def test_named_keys_are_not_made(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, tmp_path)
    keys = tmp_path / "keys"
    keys.mkdir()
    private, public = grant_files(keys)
    region = region_of(KEYS.replace("/k/", f"{keys}/"))
    text = private.path.read_bytes()
    private.path.unlink()
    make_keys(region, directory, part_of(region, node="a1"))
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    private.path.touch(mode=0o600)
    private.path.write_bytes(text)
    make_keys(region, directory, part_of(region, node="b1"))
    assert {path.name for path in tmp_path.iterdir()} == {"keys", "operator.key", LOCK}
    assert sorted(keys.iterdir()) == [private.path, public.path]


def test_only_the_ports_of_a_part_must_be_free_here() -> None:
    text = TWO_SITES.replace("10.0.0.1", "127.0.0.1").replace("a1-p}", "a1-p, port: 1}")
    region = region_of(text=text.replace("port: 1", "port: 0"))
    part = part_of(region, node="a1")
    assert taken_ports(region, part) == []
    assert "cannot listen on 10.0.0.2" in taken_ports(region)[0].message
    twice = resolve_part(region, part).region
    node = twice.nodes[0]
    agent = node.agent.model_copy(update={"data_port": node.agent.control_port})
    cluster = twice.clusters[0]
    nodes = (node.model_copy(update={"agent": agent}), *cluster.nodes[1:])
    clusters = (cluster.model_copy(update={"nodes": nodes}), *twice.clusters[1:])
    (problem,) = taken_ports(twice.model_copy(update={"clusters": clusters}), part)
    assert "is given twice" in problem.message


def test_the_example_of_several_pd_clusters() -> None:
    examples = Path(__file__).parents[3] / "deploy" / "region" / "examples"
    text = (examples / "two_pd_clusters.yaml").read_text()
    region = parse_region(text, {"MODEL": "org/chat"}, directory=Path("/etc/prfaas"))
    assert names(region, node="berlin-1") == ["agent.berlin-1", "berlin-d1", "gateway"]
    assert names(region, node="berlin-2") == ["agent.berlin-2", "berlin-d2"]
    assert names(region, node="paris-1") == ["agent.paris-1", "paris-d1", "front.paris"]
    plan = planner(region, part_of(region, node="berlin-1"))
    file = GatewayFile.model_validate(yaml.safe_load(plan.files()[plan.directory.gateway_file]))
    assert (file.gateway.home, file.gateway.homes) == ("berlin", {"acme": "paris"})
    assert [(source.name, source.front, source.spill) for source in file.pd] == [
        ("berlin", None, "overflow"),
        ("paris", "10.2.0.1:7200", "never"),
    ]
    assert len(list(file.links())) == 4


def test_the_example_of_several_hosts() -> None:
    file = Path(__file__).parents[3] / "deploy" / "region" / "examples" / "two_sites.yaml"
    region = parse_region(file.read_text(), {"MODEL": "org/chat"}, directory=Path("/etc/prfaas"))
    assert names(region, node="b1") == ["agent.b1", "b1-decode", "gateway"]
    assert names(region, site="prefill-a")[-1] == "front.prefill-a"
    missing = told(region, node="b1").values()
    assert {message.split()[3] for message in missing} == {
        f"/etc/prfaas/keys/{name}"
        for name in ("cert.pem", "key.pem", "ca.pem", "engine.key", "granting.key", "granting.pub")
    }
