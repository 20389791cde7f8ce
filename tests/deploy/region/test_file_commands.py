"""What `prfaas region` and `certs` say of a file, and write of it, as their users see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region import certs
from deploy.region.spec.loading import load_region

REGION = """
name: two
gateway:
  host: 0.0.0.0
  api_keys_env: KEYS
  {gateway}
models: [{{name: m, path: org/m, env: {{HF_TOKEN: secret-token}}, {model}}}]
clusters:
  - name: far
    kind: prefill
    nodes: [{{name: a1, host: 10.0.0.1, instances: [{{name: p, {instance}}}]}}]
  - name: home
    kind: pd
    nodes: [{{name: b1, host: 10.0.0.2, agent: {{{agent}}}, instances: [{{name: d}}]}}]
links: [{{from: far, to: home}}]
security:
  tls: {{cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}}
  engine_key: /k/engine.key
  granting_key: /k/granting.key
  granting_keys: /k/granting.pub
"""


def region_file(tmp_path: Path, **parts: str) -> Path:
    path = tmp_path / "region.yaml"
    names = ("gateway", "model", "instance", "agent")
    path.write_text(REGION.format(**{name: parts.get(name, "") for name in names}))
    return path


def said(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


def units(file: Path, node: str) -> dict[str, str]:
    """The files of a host, by their paths."""
    out = file.parent / "units"
    said("region", "render", file, "--systemd", out, "--node", node)
    return {str(p.relative_to(out / node)): p.read_text() for p in out.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("flag", "cure"),
    [
        ("--max_num_seqs=16", "decode_slots"),
        ("--tensor-parallel-size", "tensor_parallel_size"),
        ("-tp=8", "tensor_parallel_size"),
        ("--host", "listen"),
        ("--kv_transfer_config.kv_role", "leave it out"),
        ("--middleware", "leave it out"),
        ("--ssl-keyfile", "security.tls"),
    ],
)
@pytest.mark.parametrize("place", ["model", "instance"])
def test_options_of_engines_that_contradict_the_file(
    tmp_path: Path, place: str, flag: str, cure: str
) -> None:
    file = region_file(tmp_path, **{place: f"args: ['{flag}', '8']"})
    output = said("region", "check", file, status=2)
    assert ".args" in output
    assert cure in output


@pytest.mark.parametrize("where", ["gateway", "agent", "admin"])
def test_the_gateway_shares_the_ports_of_its_host(tmp_path: Path, where: str) -> None:
    parts = {
        "gateway": {"gateway": "port: 7100", "agent": "data_port: 7100"},
        "agent": {"agent": "control_port: 8000"},
        "admin": {"gateway": "admin: 10.0.0.2:7101", "agent": "control_port: 7101"},
    }[where]
    output = said("region", "check", region_file(tmp_path, **parts), status=2)
    assert "clusters[1].nodes[0].agent" in output
    assert "is taken by gateway" in output


def test_an_engine_gets_no_port_of_the_gateway(tmp_path: Path) -> None:
    files = units(region_file(tmp_path, gateway="port: 7400"), "b1")
    assert '"--port" "7401"' in files["systemd/prfaas-two-d.service"]


def test_limits_of_the_gateway_reach_it(tmp_path: Path) -> None:
    file = region_file(tmp_path, gateway="max_in_flight: 4096\n  max_buffered_bytes: 4GiB")
    gateway = json.loads(units(file, "b1")["config/gateway.json"])["gateway"]
    assert (gateway["max_in_flight"], gateway["max_buffered_bytes"]) == (4096, 4 << 30)
    file = region_file(tmp_path, gateway="max_buffered_bytes: 1MiB")
    assert "must hold at least one body" in said("region", "check", file, status=2)


@pytest.mark.parametrize(
    "gateway",
    [
        'shared: "rediss://:secret@redis.example:6379"',
        "shared: {redis: {url: secret}}",
        "shared: {redis: [secret]}",
        "directory: {kind: redis, url: 'redis://:secret@redis.example'}",
    ],
)
def test_problems_show_no_password(tmp_path: Path, gateway: str) -> None:
    file = region_file(tmp_path, gateway=gateway)
    assert "secret" not in said("region", "check", file, status=2)
    assert "secret" not in said("region", "check", file, "--json", status=2)


@pytest.mark.parametrize("model", ["env: secret", "env: {TOKEN: [secret]}", "env: {TOKEN: 5.17}"])
def test_problems_show_no_variable_of_engines(tmp_path: Path, model: str) -> None:
    file = region_file(tmp_path)
    file.write_text(file.read_text().replace("env: {HF_TOKEN: secret-token}", model))
    output = said("region", "check", file, status=2)
    assert "models[0].env" in output
    assert "secret" not in output
    assert "5.17" not in output


def test_what_processes_need_and_people_do_not(tmp_path: Path) -> None:
    url = "rediss://:secret@redis.example:6379"
    file = region_file(tmp_path, gateway=f'shared: {{redis: "{url}"}}')
    document: dict[str, Any] = json.loads(said("region", "check", file, "--json"))["region"]
    assert document["gateway"]["shared"]["redis"] == "***"
    assert document["models"][0]["env"] == {"HF_TOKEN": "***"}
    files = units(file, "b1")
    assert json.loads(files["config/gateway.json"])["gateway"]["shared"]["redis"] == url
    assert 'HF_TOKEN="secret-token"' in files["config/d.env"]
    # Every user may read units.
    assert not [name for name in files if "systemd/" in name and "secret" in files[name]]


def test_a_unit_of_a_host_is_the_same_on_every_machine(tmp_path: Path) -> None:
    file = region_file(tmp_path)
    file.write_text(file.read_text().replace("org/m", "/models/of/another/host"))
    files = units(file, "b1")
    assert 'HF_HUB_OFFLINE="1"' in files["config/d.env"]
    state = json.loads(files["config/gateway.json"])["gateway"]["state"]
    assert state == "/var/lib/prfaas/two/gateway.learned"
    assert "StateDirectory=prfaas/two" in files["systemd/prfaas-two-gateway.service"]


def test_a_certificate_that_has_expired_is_made_anew(tmp_path: Path) -> None:
    file, keys = region_file(tmp_path), tmp_path / "keys"
    said("certs", "init", keys, file)

    def serial(host: str) -> int:
        return x509.load_pem_x509_certificate((keys / host / "cert.pem").read_bytes()).serial_number

    assert "every host of the file has its files" in said("certs", "add", keys, file)
    before = serial("a1"), serial("b1")
    host = next(host for host in certs.hosts_of(load_region(file, {})) if host.folder == "a1")
    for name, data in certs.Authority.read(keys).certified(host, days=0).items():
        (keys / "a1" / name).write_bytes(data)
    output = said("certs", "add", keys, file)
    assert f"copy {keys}/a1/" in output
    assert f"copy {keys}/b1/" not in output
    assert serial("a1") != before[0]
    assert serial("b1") == before[1]
    assert "every host of the file has its files" in said("certs", "add", keys, file)
