"""The region of the drill: two hosts, an emulated link between them, and clients that ask."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine_module import install
from eventually import wait_until
from region_hosts import PATIENCE_S, RegionHost, prfaas, told
from two_hosts import two_hosts

LIMIT = 3
"""Requests that the only tenant may have in flight."""
LONG, SHORT = list(range(200)), list(range(50))


@dataclass
class DrillRegion:
    """The hosts, the gateway's URL, what Prometheus reads, and the folder of engines' modules."""

    hosts: dict[str, RegionHost]
    gateway: str
    rendered: Path
    engines: Path

    def run(self, host: str, *words: str) -> str:
        """A `prfaas` command on a host."""
        said = self.hosts[host].tell(*words)
        assert said.returncode == 0, said.stdout + said.stderr
        return said.stdout

    def pid(self, host: str, process: str) -> int:
        """The process id that `prfaas status --json` shows."""
        pid = self.hosts[host].pid(process)
        assert pid is not None, f"{process} does not run"
        return pid

    def module(self, host: str) -> Path:
        """What the engine of a host is started from."""
        return self.engines / host / "vllm" / "entrypoints" / "openai" / "api_server.py"

    def kill(self, host: str, process: str) -> None:
        """`kill -9 PID`."""
        os.killpg(self.pid(host, process), signal.SIGKILL)

    def disturb_link(self, action: str) -> None:
        """`prfaas emulate fault SOCKET ACTION` at the emulated link."""
        state = json.loads((Path(self.hosts["b1"].run_dir) / "state.json").read_text())
        (socket,) = state["relays"].values()
        said = told(prfaas("emulate", "fault", str(socket), action))
        assert said.returncode == 0, said.stderr

    def change(self, change: dict[str, Any]) -> None:
        """Write other limits of tenants into the region's file of the gateway's host."""
        file = self.hosts["b1"].folder / "region.yaml"
        region = json.loads(file.read_text())
        region["gateway"]["scheduling"]["admission"] = {"default_tenant": change}
        file.write_text(json.dumps(region))

    def route(self) -> str:
        """Where a long prompt is prefilled now; "" if the request is not answered."""
        return ask(self.gateway, LONG)


def ask(gateway: str, prompt: list[int]) -> str:
    """The route of a request, its status if it is refused or fails, "" without an answer."""
    body = {"model": "small", "prompt": prompt, "max_tokens": 4}
    request = urllib.request.Request(
        f"{gateway}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            response.read()
            return str(response.headers["x-prfaas-route"])
    except urllib.error.HTTPError as error:
        with error:
            return str(error.code)
    except OSError:
        return ""


class Clients:
    """Threads that ask, one request after the other."""

    def __init__(self, gateway: str) -> None:
        self._gateway, self._over = gateway, threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, number: int, pause_s: float) -> None:
        """Begin with `number` threads that wait `pause_s` between two requests."""
        for _ in range(number):
            thread = threading.Thread(target=self._keep_asking, args=(pause_s,))
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End all threads."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _keep_asking(self, pause_s: float) -> None:
        while not self._over.wait(pause_s):
            ask(self._gateway, LONG)
            ask(self._gateway, SHORT)


def _adapt(region: dict[str, Any], engines: Path) -> None:
    # Each host has an engine module of its own, which can be taken away there.
    for cluster in region["clusters"]:
        (node,) = cluster["nodes"]
        python_path = install(engines / node["name"])
        node["instances"][0]["env"] = {"PYTHONPATH": python_path}
    region["links"][0]["emulate"] = {"rate": "1Gbit", "rtt": "20ms"}
    admission = {"default_tenant": {"max_requests": LIMIT}}
    region["gateway"]["scheduling"]["admission"] = admission


@contextmanager
def drill_region(folder: Path) -> Iterator[DrillRegion]:
    """The region, running, with one client that asks now and then."""
    engines = folder / "engines"
    hosts = two_hosts(folder, partial(_adapt, engines=engines))
    with ExitStack() as stack:
        for host in hosts.values():
            stack.callback(_end, host)
        for host in hosts.values():
            host.begin()
        gateway = [host.ready()["gateway"] for host in hosts.values()][1]
        out = folder / "watch"
        file = hosts["b1"].folder / "region.yaml"
        said = told(prfaas("region", "render", str(file), "--prometheus", str(out)))
        assert said.returncode == 0, said.stderr
        wait_until(lambda: ask(gateway, LONG) == "prefill_cluster", timeout_s=PATIENCE_S)
        clients = Clients(gateway)
        stack.callback(clients.stop)
        clients.add(1, 0.5)
        yield DrillRegion(hosts, gateway, out, engines)


def _end(host: RegionHost) -> None:
    host.tell("down")
    host.close()
