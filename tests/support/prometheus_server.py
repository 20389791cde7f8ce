"""A real Prometheus server with the configuration that `prfaas region render` writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventually import wait_until
from free_ports import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed; `make system` does that",
)


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API. AssertionError for an error."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as response:
            answer = json.loads(response.read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expr: str) -> dict[str, float]:
        """The present values of a query by their labels, without those that are no number."""
        found = self.ask("query", query=expr)["result"]
        values = {json.dumps(item["metric"]): float(item["value"][1]) for item in found}
        return {labels: value for labels, value in values.items() if value == value}

    def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name; of several with one name any."""
        alerts = self.ask("alerts")["alerts"]
        return {item["labels"]["alertname"]: item for item in alerts if item["state"] == "firing"}

    def metric_names(self) -> set[str]:
        """The families that targets declared, also those without a sample."""
        return set(self.ask("metadata"))


@contextmanager
def running_prometheus(rendered: Path, data: Path, every_s: float) -> Iterator[Prometheus]:
    """A server with the files in `rendered` that scrapes and evaluates every `every_s` seconds."""
    config = yaml.safe_load((rendered / "prometheus.yml").read_text())
    config["global"] = {key: f"{round(every_s * 1e3)}ms" for key in config["global"]}
    file = rendered / "faster.yml"
    file.write_text(yaml.safe_dump(config))
    at = f"127.0.0.1:{free_port()}"
    argv = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={data}"]
    with (data.parent / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [*argv, f"--web.listen-address={at}", "--storage.tsdb.retention.time=1d"],
            stdout=log,
            stderr=log,
        )
    try:
        server = Prometheus(f"http://{at}")
        wait_until(lambda: _is_ready(server, process), what="Prometheus serves")
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(server: Prometheus, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Prometheus ended"
    try:
        with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
