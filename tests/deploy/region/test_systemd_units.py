"""`prfaas region render --systemd`: units that systemd takes, with the files that they name."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.file import GatewayFile
from deploy.region.launch.systemd_units import HostPaths, rendered
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec
from kvmanager.agent.config import AgentConfig
from kvmanager.arena import Arena
from prfaas.front_config import PrefillFrontConfig

REGION = """
name: two
models: [{name: m, path: org/m, env: {NOTE: '50% of "it"'}, args: [--seed, $x]}]
clusters:
  - name: far
    kind: prefill
    nodes:
      - {name: a1, host: 10.0.0.1, instances: [{name: p}]}
      - {name: a2, host: 10.0.0.1, instances: [{name: q}]}
  - name: home
    kind: pd
    nodes: [{name: b1, host: 10.1.0.1, instances: [{name: d}]}]
links: [{from: far, to: home, emulate: {rtt: 5ms}}]
security:
  tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}
  engine_key: /k/engine.key
  granting_key: /k/granting.key
  granting_keys: /k/granting.pub
"""
PATHS = HostPaths(Path("/etc/prfaas/two"), "root", sys.executable)


@pytest.fixture
def region() -> RegionSpec:
    return parse_region(REGION, {})


def unit(files: dict[str, str], process: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)  # two EnvironmentFile
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(files[f"systemd/prfaas-two-{process}.service"])
    return parser


def test_each_host_gets_its_services_and_what_they_read(region: RegionSpec) -> None:
    files = rendered(region, ("a1", "a2"), PATHS)
    assert set(files) == {
        *(f"systemd/prfaas-two-{name}.service" for name in ("agent.a1", "agent.a2", "p", "q")),
        *(f"systemd/prfaas-two-arena.{name}.service" for name in ("a1", "a2")),
        "systemd/prfaas-two-front.far.service",
        "systemd/prfaas-two.target",
        *(f"config/{name}.env" for name in ("agent.a1", "agent.a2", "p", "q", "front.far")),
        "config/agent.a1.json",
        "config/agent.a2.json",
        "config/front.far.json",
    }
    agent = AgentConfig.model_validate(yaml.safe_load(files["config/agent.a2.json"]))
    assert agent.socket == Path("/run/prfaas/two/a2.sock")
    PrefillFrontConfig.model_validate(yaml.safe_load(files["config/front.far.json"]))
    assert "prfaas-two-front.far.service" in files["systemd/prfaas-two.target"]
    home = rendered(region, ("b1",), PATHS)
    assert {
        "systemd/prfaas-two-gateway.service",
        "systemd/prfaas-two-link.far-to-home.b1.service",
    } <= set(home)
    gateway = GatewayFile.model_validate(json.loads(home["config/gateway.json"]))
    assert gateway.operator_key_file is None
    assert gateway.engine_key_file == Path("/k/engine.key")


def test_units_say_when_they_serve_and_are_limited(region: RegionSpec) -> None:
    files = rendered(region, ("b1",), PATHS) | rendered(region, ("a1", "a2"), PATHS)
    for process in ("agent.a1", "front.far", "gateway"):
        service = unit(files, process)["Service"]
        assert (service["Type"], service["WatchdogSec"]) == ("notify", "30")
    for process in ("p", "link.far-to-home.b1"):
        service = unit(files, process)["Service"]
        assert (service["Type"], "WatchdogSec" in service) == ("exec", False)
    service = unit(files, "p")["Service"]
    assert (service["LimitMEMLOCK"], service["LimitNOFILE"]) == ("infinity", "1048576")
    assert "prfaas-two-agent.a1.service" in unit(files, "p")["Unit"]["After"]
    assert int(unit(files, "gateway")["Service"]["TimeoutStopSec"]) > 30
    argv = shlex.split(service["ExecStart"])
    assert argv[argv.index("--seed") + 1] == "$$x"
    environment = shlex.split(files["config/p.env"])
    assert 'NOTE=50% of "it"' in environment
    assert "CUDA_VISIBLE_DEVICES=0" in environment
    assert "CUDA_VISIBLE_DEVICES=1" in shlex.split(files["config/q.env"])


def test_an_engine_may_load_for_as_long_as_its_model_may(region: RegionSpec) -> None:
    slow = parse_region(REGION.replace("name: m,", "name: m, start_minutes: 90,"), {})
    for wanted, minutes in ((region, 60), (slow, 90)):
        service = unit(rendered(wanted, ("a1", "a2"), PATHS), "p")["Service"]
        assert service["TimeoutStartSec"] == str(minutes * 60)


def test_a_unit_waits_until_its_engine_listens_or_has_ended(region: RegionSpec) -> None:
    service = unit(rendered(region, ("a1", "a2"), PATHS), "p")["Service"]
    with socket.socket() as server, subprocess.Popen(["sleep", "100"]) as engine:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
        *argv, host, _ = shlex.split(service["ExecStartPost"].replace("$$", "$"))
        assert host == "10.0.0.1"
        environment = {"MAINPID": str(engine.pid)}
        with subprocess.Popen([*argv, "127.0.0.1", port], env=environment) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(1.0)
            server.listen()
            assert waiting.wait(30) == 0
        engine.kill()
        engine.wait()
        refused = subprocess.run([*argv, "127.0.0.1", "1"], env=environment, timeout=30)
        assert refused.returncode == 1


def test_the_end_of_all_services_removes_what_an_agent_would_keep(
    region: RegionSpec, tmp_path: Path
) -> None:
    nodes = tuple(
        node.model_copy(update={"agent": node.agent.model_copy(update={"arena_dir": tmp_path})})
        for node in region.clusters[0].nodes
    )
    first = region.clusters[0].model_copy(update={"nodes": nodes})
    region = region.model_copy(update={"clusters": (first, *region.clusters[1:])})
    files = rendered(region, ("a1", "a2"), HostPaths(Path("/etc/prfaas"), "u", sys.executable))
    told = AgentConfig.model_validate(yaml.safe_load(files["config/agent.a1.json"]))
    assert told.arena_name is not None
    arena = Arena.create(tmp_path, 1, 4096, name=told.arena_name)
    arena.close(keep=True)
    assert len(list(tmp_path.iterdir())) == 1
    service = unit(files, "arena.a1")
    assert service["Unit"]["Before"] == "prfaas-two-agent.a1.service"
    assert service["Unit"]["PartOf"] == "prfaas-two.target"
    argv = shlex.split(service["Service"]["ExecStop"])
    told_env = dict(word.split("=", 1) for word in shlex.split(service["Service"]["Environment"]))
    subprocess.run(argv, check=True, timeout=100, env=os.environ | told_env)
    assert list(tmp_path.iterdir()) == []


def units_of_both_hosts(region: RegionSpec) -> dict[str, str]:
    """The texts of all units by their names."""
    files = rendered(region, ("a1", "a2"), PATHS) | rendered(region, ("b1",), PATHS)
    return {
        name.removeprefix("systemd/"): text
        for name, text in files.items()
        if name.startswith("systemd/")
    }


def test_each_host_has_its_units(region: RegionSpec) -> None:
    assert len(units_of_both_hosts(region)) == 13


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed; `make system` does that",
)
def test_systemd_takes_the_units(region: RegionSpec, tmp_path: Path) -> None:
    for name, text in units_of_both_hosts(region).items():
        (tmp_path / name).write_text(text)
    argv = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    said = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert [line for line in said.stderr.splitlines() if "prfaas-two" in line] == []


class TestCommandLine:
    def told(self, *words: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["region", "render", *words])
        return result.exit_code, result.stdout, result.stderr

    def test_all_hosts_or_one(self, tmp_path: Path) -> None:
        file = tmp_path / "region.yaml"
        file.write_text(REGION)
        out = tmp_path / "units"
        status, said, _ = self.told(str(file), "--systemd", str(out))
        assert status == 0
        assert {path.name for path in out.iterdir()} == {"a1", "b1"}
        assert f"{out}/a1/config/. to /etc/prfaas/two" in said
        assert "systemctl enable --now prfaas-two.target" in said
        assert not (out / "a1/config/agent.a1.json").stat().st_mode & 0o077
        assert self.told(str(file), "--systemd", str(tmp_path / "one"), "--node", "b1")[0] == 0
        assert {path.name for path in (tmp_path / "one").iterdir()} == {"b1"}
        status, _, refused = self.told(str(file), "--systemd", str(out))
        assert (status, "is not empty" in refused) == (1, True)

    def test_nodes_of_one_host_share_its_gpus_whichever_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "region.yaml"
        file.write_text(REGION)
        texts = []
        for node in ("a1", "a2"):
            out = tmp_path / node
            assert self.told(str(file), "--systemd", str(out), "--node", node)[0] == 0
            texts.append({path.name: path.read_text() for path in out.glob("a1/*/*")})
        assert texts[0] == texts[1]
        wants = texts[0]["prfaas-two.target"]
        for gpu, process in enumerate("pq"):
            assert f"prfaas-two-{process}.service" in wants
            assert f'CUDA_VISIBLE_DEVICES="{gpu}"' in texts[0][f"{process}.env"]

    def test_keys_must_be_named(self, tmp_path: Path) -> None:
        file = tmp_path / "region.yaml"
        file.write_text(REGION[: REGION.index("security:")])
        status, _, refused = self.told(str(file), "--systemd", str(tmp_path / "units"))
        assert (status, "security.engine_key: name the file" in refused) == (2, True)
