"""What `prfaas region render` writes, in the hands of systemd, promtool and a shell. `tests/golden`
has its texts, and `test_chart` what helm and kubectl make of a chart.
"""

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
from typer.testing import CliRunner

from deploy.cli import app
from kvmanager.arena import Arena

REGION = """
name: two
gateway: {host: 0.0.0.0, api_keys_file: /k/clients}
models: [{name: m, path: org/m, env: {NOTE: '50% of "it"'}, args: [--seed, $x]}]
clusters:
  - name: far
    kind: prefill
    nodes:
      - {name: a1, host: 10.0.0.1, agent: {arena_dir: /k/arenas}, instances: [{name: p}]}
      - {name: a2, host: 10.0.0.1, instances: [{name: q}]}
  - name: home
    kind: pd
    nodes: [{name: b1, host: 10.1.0.1, instances: [{name: d}]}]
links: [{from: far, to: home, emulate: {rtt: 5ms}}]
security:
  tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}
  engine_key: /k/engine.key
  metrics_key: /k/metrics.key
  granting_key: /k/granting.key
  granting_keys: /k/granting.pub
"""


def rendered(folder: Path, *options: str) -> Path:
    """What is written for the region, whose keys and arenas are in `folder`."""
    file, out = folder / "region.yaml", folder / "out"
    file.write_text(REGION.replace("/k/", f"{folder}/"))
    (folder / "arenas").mkdir()
    words = ["region", "render", str(file), options[0], str(out), *options[1:]]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def units(tmp_path: Path) -> Path:
    return rendered(tmp_path, "--systemd", "--python", sys.executable)


def unit(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)  # two EnvironmentFile
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return parser


def test_a_unit_waits_until_its_engine_listens_or_has_ended(units: Path) -> None:
    service = unit(units / "a1" / "systemd" / "prfaas-two-p.service")["Service"]
    with socket.socket() as server, subprocess.Popen(["sleep", "100"]) as engine:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
        *argv, _, _ = shlex.split(service["ExecStartPost"].replace("$$", "$"))
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
    units: Path, tmp_path: Path
) -> None:
    name = json.loads((units / "a1" / "config" / "agent.a1.json").read_text())["arena_name"]
    arenas = tmp_path / "arenas"
    Arena.create(arenas, 1, 4096, name=name).close(keep=True)
    assert len(list(arenas.iterdir())) == 1
    service = unit(units / "a1" / "systemd" / "prfaas-two-arena.a1.service")["Service"]
    argv = shlex.split(service["ExecStop"])
    own = dict(word.split("=", 1) for word in shlex.split(service["Environment"]))
    subprocess.run(argv, check=True, timeout=100, env=os.environ | own)
    assert list(arenas.iterdir()) == []


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed; `make system` does that",
)
@pytest.mark.parametrize("host", ["a1", "b1"])
def test_systemd_takes_the_units(units: Path, host: str) -> None:
    paths = map(str, (units / host / "systemd").iterdir())
    argv = ["systemd-analyze", "verify", "--man=no", *paths]
    said = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
    assert [line for line in said.stderr.splitlines() if "prfaas-two" in line] == []


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed; `make system` does that"
)
def test_promtool_takes_what_it_writes(tmp_path: Path) -> None:
    for name in ("engine.key", "operator.key", "metrics.key", "cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).touch()
    out = rendered(tmp_path, "--prometheus", "--gateway-key", str(tmp_path / "operator.key"))
    argv = ["promtool", "check", "config", str(out / "prometheus.yml")]
    said = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr
