"""`prfaas region render --prometheus`: a configuration that finds every process of a region."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region.launch.parts import part_of, part_with, whole
from deploy.region.launch.ports import resolve_part, resolve_ports
from deploy.region.launch.prometheus import ScrapeKeys, hidden_targets, rendered
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec

REGION = """
name: two
models: [{name: m, path: org/m}]
clusters:
  - name: far
    kind: prefill
    nodes: [{name: a1, host: 10.0.0.1, instances: [{name: p}]}]
  - name: home
    kind: pd
    nodes: [{name: b1, host: 10.1.0.1, instances: [{name: d}]}]
links: [{from: far, to: home}]
"""
SECURITY = """
gateway: {host: 0.0.0.0, api_keys_file: /k/clients}
security:
  tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}
  engine_key: /k/engine.key
  granting_key: /k/granting.key
  granting_keys: /k/granting.pub
"""
METRICS_KEY = "  metrics_key: /k/metrics.key\n"
KEYS = ScrapeKeys(engine=Path("/k/engine.key"), gateway=Path("/k/operator.key"))


def jobs_of(files: dict[str, str]) -> dict[str, dict[str, Any]]:
    config = yaml.safe_load(files["prometheus.yml"])
    return {job["job_name"]: job for job in config["scrape_configs"]}


def targets(jobs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Addresses by process."""
    return {
        static["labels"]["instance"]: static["targets"][0]
        for job in jobs.values()
        for static in job["static_configs"]
    }


def of_hosts(text: str) -> tuple[RegionSpec, tuple[str, ...]]:
    region = parse_region(text, {})
    return region, tuple(node.name for node in region.nodes)


def test_all_processes_of_all_hosts_are_found_with_keys_and_certificates() -> None:
    region, nodes = of_hosts(REGION + SECURITY + METRICS_KEY)
    part = part_with(region, "two", nodes)
    files = rendered(resolve_part(region, part).region, part, KEYS)
    jobs = jobs_of(files)
    assert targets(jobs) == {
        "gateway": "10.1.0.1:8000",
        "front.far": "10.0.0.1:7210",
        "agent.a1": "10.0.0.1:7102",
        "p": "10.0.0.1:7400",
        "agent.b1": "10.1.0.1:7102",
        "d": "10.1.0.1:7400",
    }
    shown = {name: job["authorization"]["credentials_file"] for name, job in jobs.items()}
    assert shown == {
        "prfaas-gateway": "/k/operator.key",
        "prfaas-front": "/k/metrics.key",
        "prfaas-agent": "/k/metrics.key",
        "prfaas-engine": "/k/engine.key",
    }
    engine = jobs["prfaas-engine"]
    assert engine["tls_config"]["ca_file"] == "/k/ca.pem"
    assert engine["static_configs"][0]["labels"] == {
        "region": "two",
        "instance": "p",
        "node": "a1",
        "cluster": "far",
        "__scheme__": "https",
    }
    assert {"prometheus.yml", "prfaas-alerts.yaml"} <= set(files)


def test_metrics_on_loopback_of_other_hosts_are_named() -> None:
    region, nodes = of_hosts(REGION + SECURITY)
    part = part_with(region, "two", nodes)
    (problem,) = hidden_targets(resolve_part(region, part).region, part)
    assert problem.message.startswith("front.far, agent.a1, agent.b1 show")
    alone = part_of(region, node="a1")
    resolved = resolve_part(region, alone).region
    assert hidden_targets(resolved, alone) == []
    found = targets(jobs_of(rendered(resolved, alone, KEYS)))
    assert found == {
        "front.far": "127.0.0.1:7210",
        "agent.a1": "127.0.0.1:7102",
        "p": "10.0.0.1:7400",
    }


def test_fronts_inside_the_gateway_are_no_targets() -> None:
    text = REGION.replace("host: 10.0.0.1, ", "").replace("host: 10.1.0.1, ", "")
    region = parse_region(text, {})
    resolved = resolve_ports(region).region
    jobs = jobs_of(rendered(resolved, whole(region), ScrapeKeys(Path("/run/engine.key"))))
    assert set(targets(jobs)) == {"gateway", "agent.a1", "agent.b1", "p", "d"}
    assert "authorization" not in jobs["prfaas-gateway"]
    assert "tls_config" not in jobs["prfaas-engine"]


class TestCommandLine:
    def told(self, *words: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["region", "render", *words])
        return result.exit_code, result.stdout, result.stderr

    def test_it_writes_configuration_alerts_and_dashboards(self, tmp_path: Path) -> None:
        file, out = tmp_path / "region.yaml", tmp_path / "watch"
        file.write_text(REGION + SECURITY + METRICS_KEY)
        words = (str(file), "--prometheus", str(out))
        status, _, refused = self.told(*words)
        assert status == 2
        assert "gateway: it shows its metrics to operators only; give --gateway-key" in refused
        status, said, _ = self.told(
            *words, "--gateway-key", "/k/op", "--docs", "https://docs.example.org"
        )
        assert status == 0
        assert f"prometheus --config.file={out}/prometheus.yml" in said
        assert (
            "https://docs.example.org/runbook/conditions/down.html"
            in (out / "prfaas-alerts.yaml").read_text()
        )
        assert all(
            "panels" in json.loads(path.read_text()) for path in (out / "dashboards").iterdir()
        )

    @pytest.mark.skipif(
        shutil.which("promtool") is None,
        reason="promtool is not installed; `make system` does that",
    )
    def test_promtool_takes_what_it_writes(self, tmp_path: Path) -> None:
        for name in ("engine.key", "op", "metrics.key", "cert.pem", "key.pem", "ca.pem"):
            (tmp_path / name).touch()
        file, out = tmp_path / "region.yaml", tmp_path / "watch"
        file.write_text((REGION + SECURITY + METRICS_KEY).replace("/k/", f"{tmp_path}/"))
        key = ("--gateway-key", str(tmp_path / "op"))
        assert self.told(str(file), "--prometheus", str(out), *key)[0] == 0
        config = str(out / "prometheus.yml")
        said = subprocess.run(
            ["promtool", "check", "config", config],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert said.returncode == 0, said.stdout + said.stderr

    def test_what_it_cannot_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        file, out = tmp_path / "region.yaml", str(tmp_path / "watch")
        file.write_text(REGION + SECURITY)
        assert "give --systemd DIR, --kubernetes DIR or --prometheus DIR" in self.told(str(file))[2]
        assert "show their metrics on loopback" in self.told(str(file), "--prometheus", out)[2]
        # Without keys in the file it is a region of one machine, which must run.
        file.write_text(REGION)
        assert "no region runs in" in self.told(str(file), "--prometheus", out)[2]
