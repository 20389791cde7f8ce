"""Every panel's query against a real Prometheus server that scrapes a region of two hosts.

Its engines compute nothing: tests/engine/two_clusters/test_encryption.py has the panels of their
metrics and caches.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dashboard_queries import missing, queries
from eventually import wait_until
from prometheus_server import needs_prometheus, running_prometheus
from region_hosts import PATIENCE_S, RegionHost, prfaas, told
from two_hosts import two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_prometheus]

EVERY_S = 1.0
NUM_PROCESSES = 6
"""Two agents, two engines, a front and the gateway, which has the other front inside."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, RegionHost]]:
    both = two_hosts(tmp_path)
    yield both
    for host in both.values():
        host.close()


def ask(gateway: str, prompt: list[int], *, stream: bool = True) -> str:
    """The route of a request."""
    body = {"model": "small", "prompt": prompt, "max_tokens": 4, "stream": stream}
    request = urllib.request.Request(
        f"{gateway}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        response.read()
        route: str = response.headers["x-prfaas-route"]
    return route


@contextmanager
def asking(gateway: str) -> Iterator[None]:
    """Ask long and short prompts until the end."""
    over = threading.Event()

    def keep_asking() -> None:
        while not over.wait(0.1):
            ask(gateway, list(range(200)))
            ask(gateway, list(range(50)))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def scraped(host: RegionHost, folder: Path, *more: str) -> Path:
    """What `prfaas region render` writes for all hosts of the region."""
    out = folder / "watch"
    words = ("region", "render", str(host.folder / "region.yaml"), "--prometheus", str(out))
    said = told(prfaas(*words, *more))
    assert said.returncode == 0, said.stderr
    return out


def test_every_panel_of_a_region_finds_data(hosts: dict[str, RegionHost], tmp_path: Path) -> None:
    home, prefill = hosts["b1"], hosts["a1"]
    home.begin()
    prefill.begin()
    gateway = home.ready()["gateway"]
    prefill.ready()
    prompt = list(range(200))
    wait_until(lambda: ask(gateway, prompt) == "prefill_cluster", timeout_s=PATIENCE_S)
    rendered = scraped(home, tmp_path)
    with running_prometheus(rendered, tmp_path / "data", EVERY_S) as server, asking(gateway):
        wait_until(lambda: [*server.values("up").values()] == [1.0] * NUM_PROCESSES)
        assert missing(queries(of_engines=False), server, "two") == []
        assert server.firing() == {}
    home.down()
    prefill.down()
