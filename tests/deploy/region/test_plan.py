"""From a specification to ports, command lines and the files that processes read."""

from __future__ import annotations

import json
import logging.config
from pathlib import Path

import pytest
import yaml

from deploy.gateway.config import TimeoutConfig
from deploy.gateway.file import GatewayFile
from deploy.gateway.media.config import MediaSection
from deploy.region.launch.addresses import gateway_url
from deploy.region.launch.plan import Planner, stop_limit_s
from deploy.region.launch.plan import grace_s as grace_s_of
from deploy.region.launch.ports import resolve_ports
from deploy.region.launch.process_files import gateway_file
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.checks import fixed_ports
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import LogsSpec, RegionSpec
from kvmanager.agent.config import AgentConfig
from kvmanager.config_files.security import GrantsSection, RegionKeySection

EXAMPLE = Path(__file__).parents[3] / "deploy" / "region" / "examples" / "demo.yaml"


@pytest.fixture
def region() -> RegionSpec:
    return parse_region(EXAMPLE.read_text(), {"MODEL": "/models/tiny"})


def planner(region: RegionSpec) -> Planner:
    resolved = resolve_ports(region, is_free=lambda _host, _port: True)
    root = Path("/run/demo")
    return Planner(resolved, RunDirectory(root, root / "sockets"), {"PATH": "/bin"})


def test_every_port_is_chosen_once(region: RegionSpec) -> None:
    resolved = resolve_ports(region, is_free=lambda _host, port: port % 2 == 0)
    ports = [resolved.region.gateway.port]
    for cluster in resolved.region.clusters:
        for node in cluster.nodes:
            ports += [node.agent.data_port, node.agent.control_port, node.agent.metrics_port]
            ports += [instance.port for instance in node.instances]
    ports += [int(relay.listen.rpartition(":")[2]) for relay in resolved.relays]
    assert len(set(ports)) == len(ports) == 11
    assert ports[0] == 8000
    assert all(port % 2 == 0 and 0 < port < 32768 for port in ports)


def test_an_engine_may_load_for_as_long_as_its_model_may(region: RegionSpec) -> None:
    (model,) = region.models
    slow = region.model_copy(update={"models": (model.model_copy(update={"start_minutes": 90}),)})
    for wanted, minutes in ((region, 60), (slow, 90)):
        starts = {item.start_s for item in planner(wanted).processes() if item.kind == "engine"}
        assert starts == {60.0 * minutes}


def test_engines_of_a_cluster_with_nixl_have_its_connector_and_ours(region: RegionSpec) -> None:
    prefill, pd = region.clusters
    pd = pd.model_copy(update={"hand_off": "nixl"})
    made = planner(region.model_copy(update={"clusters": (prefill, pd)}))
    resolved = made.resolved.region
    engines = {item.name: item.process for item in made.processes() if item.kind == "engine"}
    ports = set()
    for cluster in resolved.clusters:
        for instance in cluster.instances:
            process = engines[instance.name]
            argv = list(process.argv)
            config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
            if cluster.kind == "prefill":
                assert config["kv_connector"] == "PrfaasConnector"
                assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in process.env
                continue
            assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_both")
            assert config["kv_load_failure_policy"] == "recompute"
            nixl, ours = config["kv_connector_extra_config"]["connectors"]
            assert nixl["kv_connector"] == "NixlConnector"
            assert ours["kv_connector_extra_config"]["instance"] == instance.name
            assert process.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
            assert process.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(instance.nixl_port)
            ports.add(instance.nixl_port)
    assert len(ports) == 2
    assert 0 not in ports
    assert gateway_file(made.resolved, made.directory).pd[0].hand_off == "nixl"


def test_adapters_reach_engines_and_gateway(region: RegionSpec) -> None:
    model = region.models[0].model_copy(update={"adapters": {"poet": "/adapters/poet"}})
    made = planner(region.model_copy(update={"models": (model,)}))
    for process in made.processes():
        if process.kind == "engine":
            argv = list(process.process.argv)
            module = json.loads(argv[argv.index("--lora-modules") + 1])
            assert module == {"name": "poet", "path": "/adapters/poet"}
    file = gateway_file(made.resolved, made.directory)
    assert file.gateway.models[0].adapters == {"poet": "/adapters/poet"}


def test_no_free_port_is_an_error(region: RegionSpec) -> None:
    with pytest.raises(OSError, match="no free port on 127"):
        resolve_ports(region, is_free=lambda _host, _port: False)


def test_an_emulated_link_becomes_a_relay_and_its_endpoint(region: RegionSpec) -> None:
    resolved = resolve_ports(region, is_free=lambda _host, _port: True)
    (relay,) = resolved.relays
    (node,) = resolved.region.pd_clusters[0].nodes
    assert relay.name == "link.prefill-a-to-pd-b.b1"
    assert relay.target == f"127.0.0.1:{node.agent.data_port}"
    (link,) = resolved.region.links
    assert link.endpoints == {"b1": relay.listen}
    assert link.emulate is None


def test_processes_start_in_order(region: RegionSpec) -> None:
    processes = planner(region).processes()
    assert [item.kind for item in processes] == [
        "relay", "agent", "agent", "engine", "engine", "engine", "gateway",
    ]  # fmt: skip
    relay = list(processes[0].process.argv)
    assert relay[relay.index("--rate") + 1] == "1Gbit"
    assert relay[relay.index("--control") + 1] == "/run/demo/sockets/link.prefill-a-to-pd-b.b1.sock"
    engine = list(processes[3].process.argv)
    config = json.loads(engine[engine.index("--kv-transfer-config") + 1])
    assert config["kv_connector_extra_config"] == {
        "agent_socket": "/run/demo/sockets/a1.sock",
        "instance": "a1-prefill",
    }
    assert "--enable-prefix-caching" in engine
    assert engine[engine.index("--max-num-seqs") + 1] == "256"
    assert processes[3].process.env["PATH"] == "/bin"


def test_the_gateway_is_told_clusters_and_links(region: RegionSpec) -> None:
    plan = planner(region)
    text = plan.files()[plan.directory.gateway_file]
    file = GatewayFile.model_validate(yaml.safe_load(text))
    assert file == gateway_file(plan.resolved, plan.directory)
    assert file.gateway.threshold_tokens == 512
    assert [item.role for item in file.pd[0].instances] == ["prefill", "decode"]
    assert {item.decode_slots for item in file.pd[0].instances} == {256}
    (source,) = file.prefill
    (relay,) = plan.resolved.relays
    assert source.endpoints == {relay.target: relay.listen}
    assert source.link == {"pd-b": "prefill-a-to-pd-b"}
    assert file.gateway.home == "pd-b"
    assert "SecretStr" not in text
    assert gateway_url(plan.resolved.region) == "http://127.0.0.1:8000"


SEVERAL = """
models: [{name: m, path: org/m}]
gateway: {node: c1}
clusters:
  - {name: a, kind: prefill, nodes: [{name: a1, host: 10.0.0.1, instances: [{name: a1-p}]}]}
  - {name: b, kind: prefill, nodes: [{name: b1, host: 10.0.0.2, instances: [{name: b1-p}]}]}
  - name: c
    kind: pd
    spill: nearest
    nodes: [{name: c1, host: 10.0.0.3, instances: [{name: c1-d}]}]
  - {name: d, kind: pd, nodes: [{name: d1, host: 10.0.0.4, instances: [{name: d1-d}]}]}
uplinks: [{cluster: a, way: egress, rate: 1Gbit}]
links:
  - {from: a, to: c, emulate: {rate: 1Gbit}}
  - {from: a, to: d, endpoints: {d1: "tunnel:9"}}
  - {from: b, to: d}
"""


def test_a_region_may_have_several_pd_clusters_and_any_links_to_them() -> None:
    region = parse_region(SEVERAL, {})
    plan = planner(region)
    file = gateway_file(plan.resolved, plan.directory)
    assert [(source.name, source.spill) for source in file.pd] == [
        ("c", "nearest"),
        ("d", "overflow"),
    ]
    assert list(file.links()) == [("a", "c", "a-to-c"), ("a", "d", "a-to-d"), ("b", "d", "b-to-d")]
    (relay,) = plan.resolved.relays
    assert relay.name == "link.a-to-c.c1"
    d1 = next(node for node in plan.resolved.region.nodes if node.name == "d1")
    assert file.prefill[0].endpoints == {
        relay.target: relay.listen,
        f"10.0.0.4:{d1.agent.data_port}": "tunnel:9",
    }
    assert file.prefill[1].endpoints == {}
    (uplink,) = file.uplinks
    assert (uplink.cluster, uplink.way, uplink.rate) == ("a", "egress", 125e6)
    again = GatewayFile.model_validate_json(file.model_dump_json())
    assert again.uplinks == file.uplinks


@pytest.mark.parametrize(
    ("gateway", "home"),
    [
        ("{}", "c"),
        ("{node: c1}", "c"),
        ("{node: d1}", "d"),
        ("{node: a1}", "c"),
        ("{home: d}", "d"),
    ],
)
def test_the_home_of_a_region_is_said_or_where_its_gateway_runs(gateway: str, home: str) -> None:
    region = parse_region(SEVERAL.replace("{node: c1}", gateway), {})
    plan = planner(region)
    assert gateway_file(plan.resolved, plan.directory).gateway.home == home


def test_agents_are_told_what_they_understand(region: RegionSpec) -> None:
    plan = planner(region)
    text = plan.files()[Path("/run/demo/agent.b1.json")]
    config = AgentConfig.model_validate(yaml.safe_load(text))
    assert config.landing_gib == 0.75
    assert config.socket == Path("/run/demo/sockets/b1.sock")
    assert config.region_key == RegionKeySection(
        file=Path("/run/demo/region.key"), region="demo", name="b1"
    )
    assert not config.trusted_network
    (relay,) = plan.resolved.relays
    nodes = [node for cluster in plan.resolved.region.clusters for node in cluster.nodes]
    received = [f"127.0.0.1:{node.agent.data_port}" for node in nodes]
    assert config.send_to == tuple(sorted([relay.listen, *received]))
    assert config.arena_name is not None
    assert config.arena_name.startswith("demo-b1-")
    assert config.cache_gib is None


def test_the_receiver_of_spans_is_told_to_all(region: RegionSpec) -> None:
    traces = {"endpoint": "http://collector:4317", "sample": 0.1}
    text = EXAMPLE.read_text() + f"\ntraces: {json.dumps(traces)}\n"
    made = planner(parse_region(text, {"MODEL": "/models/tiny"}))
    files = {path.name: yaml.safe_load(text) for path, text in made.files().items()}
    assert files["gateway.json"]["traces"] == traces
    agents = [name for name in files if name.startswith("agent.")]
    assert agents
    for name in agents:
        # Only gateways decide what is traced.
        assert AgentConfig.model_validate(files[name]).traces is not None
        assert files[name]["traces"] == {"endpoint": traces["endpoint"]}
    for process in made.processes():
        if process.kind == "engine":
            argv = list(process.process.argv)
            assert argv[argv.index("--otlp-traces-endpoint") + 1] == traces["endpoint"]
    quiet = planner(region)
    assert not any("otlp" in word for item in quiet.processes() for word in item.process.argv)


def test_how_processes_know_each_other_is_told_to_all() -> None:
    key = Path("/etc/prfaas/key")
    for security, section in (
        ("", RegionKeySection(file=Path("/run/demo/region.key"), region="demo", name="gateway")),
        (
            "security: {region_key: /etc/prfaas/key}",
            RegionKeySection(file=key, region="demo", name="gateway"),
        ),
        ("security: {tls: {cert: c, key: k, ca: a}}", None),
        ("security: {trusted_network: true}", None),
    ):
        region = parse_region(f"{EXAMPLE.read_text()}{security}\n", {"MODEL": "/models/tiny"})
        plan = planner(region)
        file = gateway_file(plan.resolved, plan.directory)
        agent = AgentConfig.model_validate(
            yaml.safe_load(plan.files()[Path("/run/demo/agent.b1.json")])
        )
        assert file.region_key == section
        assert (agent.region_key is None) == (section is None)
        assert (file.tls is None) == (agent.tls is None) == ("tls" not in security)
        assert file.trusted_network == agent.trusted_network == ("trusted" in security)
        if "trusted" in security:
            assert file.granting_key is agent.granting_keys is None
        else:
            folder = Path("/run/demo")
            signs = GrantsSection(file=folder / "granting.key", region="demo")
            assert file.granting_key == signs
            assert agent.granting_keys == GrantsSection(file=folder / "granting.pub", region="demo")


def test_metrics_leave_loopback_only_with_a_key_or_on_a_trusted_network() -> None:
    text = EXAMPLE.read_text().replace("- name: b1\n", "- name: b1\n        host: 10.0.0.2\n")
    for security, host, key in (
        ("", "127.0.0.1", None),
        ("security: {tls: {cert: c, key: k, ca: a}}", "127.0.0.1", None),
        ("security: {metrics_key: /etc/prfaas/key}", "10.0.0.2", Path("/etc/prfaas/key")),
        ("security: {trusted_network: true}", "10.0.0.2", None),
    ):
        region = parse_region(f"{text}{security}\n", {"MODEL": "/models/tiny"})
        files = planner(region).files()
        b1, a1 = (
            AgentConfig.model_validate(yaml.safe_load(files[Path(f"/run/demo/agent.{name}.json")]))
            for name in ("b1", "a1")
        )
        assert (b1.metrics_host, b1.metrics_key_file) == (host, key)
        assert (a1.metrics_host, a1.metrics_key_file) == ("127.0.0.1", key)
        metrics = {item.host for item in fixed_ports(region) if item.path[-1] == "metrics_port"}
        assert metrics == {"127.0.0.1", host}


def test_cache_settings_reach_agent_engines_and_gateway() -> None:
    text = EXAMPLE.read_text().replace(
        "landing_gib: 0.75",
        "landing_gib: 0.75, cache_gib: 0.5, eviction: cost, keep_arena: false,"
        " ssd_dir: /ssd, ssd_gib: 2, placement: {every_tokens: 1024, dense_tokens: 8192}",
    )
    text = text.replace(
        "  port: 8000\n", "  port: 8000\n  directory: {kind: grpc, target: '10.0.0.5:7400'}\n"
    )
    plan = planner(parse_region(text, {"MODEL": "/models/tiny"}))
    raw = yaml.safe_load(plan.files()[Path("/run/demo/agent.b1.json")])
    config = AgentConfig.model_validate(raw)
    assert (config.cache_gib, config.eviction, config.arena_name) == (0.5, "cost", None)
    assert (config.ssd_dir, config.ssd_gib) == (Path("/ssd"), 2)
    assert config.placement.every_tokens == 1024
    engines = {item.name: item.process.argv for item in plan.processes() if item.kind == "engine"}
    for name in ("b1-prefill", "b1-decode"):
        argv = list(engines[name])
        events = json.loads(argv[argv.index("--kv-events-config") + 1])
        told = f"{events['endpoint']},{events['replay_endpoint']}"
        assert config.kv_events[name] == told
        assert told.startswith("ipc:///run/demo/sockets/kv.")
    assert len(set(config.kv_events.values())) == 2
    file = gateway_file(plan.resolved, plan.directory)
    assert file.gateway.directory.target == "10.0.0.5:7400"
    assert [item.node for item in file.pd[0].instances] == ["b1", "b1"]


def test_without_prefix_caching_agents_have_no_cache() -> None:
    text = EXAMPLE.read_text().replace(
        "    max_model_len: 8192\n", "    max_model_len: 8192\n    prefix_caching: false\n"
    )
    plan = planner(parse_region(text, {"MODEL": "/models/tiny"}))
    raw = yaml.safe_load(plan.files()[Path("/run/demo/agent.b1.json")])
    assert AgentConfig.model_validate(raw).cache_gib == 0
    engine = next(item for item in plan.processes() if item.kind == "engine")
    assert "--no-enable-prefix-caching" in engine.process.argv
    assert "--kv-events-config" not in engine.process.argv


def test_a_gateway_may_drain_as_long_as_the_file_says(region: RegionSpec) -> None:
    timeouts = TimeoutConfig(drain_s=300.0, cluster_s=7.0)
    gateway = region.gateway.model_copy(update={"timeouts": timeouts})
    planned = planner(region.model_copy(update={"gateway": gateway}))
    grace_s = {item.kind: item.process.term_grace_s for item in planned.processes()}
    assert grace_s["gateway"] > 300.0 + 7.0
    assert gateway_file(planned.resolved, planned.directory).gateway.timeouts == timeouts
    assert grace_s_of("front", timeouts) > 300.0, "its prefills end as well"
    assert stop_limit_s(timeouts) > sum(grace_s.values())


@pytest.mark.parametrize(
    ("media", "domains"),
    [
        ({}, ["media.invalid"]),
        ({"fetch": "refuse"}, ["media.invalid"]),
        ({"domains": ["*.example.org"]}, ["media.invalid"]),
        ({"fetch": "engine", "domains": ["a.example", "b.example"]}, ["a.example", "b.example"]),
    ],
)
def test_engines_fetch_media_only_where_the_file_says_so(
    region: RegionSpec, media: dict[str, object], domains: list[str]
) -> None:
    section = MediaSection.model_validate(media)
    gateway = region.gateway.model_copy(update={"media": section})
    planned = planner(region.model_copy(update={"gateway": gateway}))
    for item in planned.processes():
        if item.kind == "engine":
            argv = item.process.argv
            at = argv.index("--allowed-media-domains") + 1
            assert argv[at : at + len(domains)] == domains
            assert len(argv) == at + len(domains) or argv[at + len(domains)].startswith("--")
            assert item.process.env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    assert gateway_file(planned.resolved, planned.directory).gateway.media == section


def test_arguments_of_a_model_win_over_ours(region: RegionSpec) -> None:
    own = ("--allowed-media-domains", "own.example")
    model = region.models[0].model_copy(update={"args": own})
    planned = planner(region.model_copy(update={"models": (model, *region.models[1:])}))
    (argv, *_) = (item.process.argv for item in planned.processes() if item.kind == "engine")
    assert argv.index("own.example") > argv.index("media.invalid")


def test_wildcard_gateways_are_reached_on_loopback(region: RegionSpec) -> None:
    gateway = region.gateway.model_copy(update={"host": "::"})
    assert gateway_url(region.model_copy(update={"gateway": gateway})) == "http://127.0.0.1:8000"


def test_every_process_logs_as_the_region_says(region: RegionSpec) -> None:
    logs = LogsSpec(format="json", level="warning")
    planned = planner(region.model_copy(update={"logs": logs}))
    path = Path("/run/demo/engine-logs.json")
    for process in planned.processes():
        env = process.process.env
        if process.kind == "engine":
            assert env["VLLM_LOGGING_LEVEL"] == "WARNING"
            assert env["VLLM_LOGGING_CONFIG_PATH"] == str(path)
        else:
            assert (env["PRFAAS_LOG_LEVEL"], env["PRFAAS_LOG_FORMAT"]) == ("warning", "json")
    config = json.loads(planned.files()[path])
    assert config["loggers"]["prfaas"]["level"] == "WARNING"
    logging.config.DictConfigurator(config).configure_formatter(config["formatters"]["json"])
    assert path not in planner(region).files()
