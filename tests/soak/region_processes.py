"""The region of `make soak-region` as real processes, and what each of them holds.

Everything is what `prfaas up` starts, with the security that it has by default, but: engines are
stand-ins (`stand_in_engine`), and fronts and directory, which `prfaas up` has inside the gateway,
are processes of their own, as in a region on many hosts. Idle links are not probed, and their
connections close soon, so that there are times of rest. Does not know requests or faults.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from free_ports import free_port

from deploy.processes import module_argv, module_environment
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.plan import PlannedProcess
from deploy.region.launch.running import RunningProcess
from deploy.region.spec.region import RegionSpec
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import StatusReply
from kvmanager.private_files import write_private
from prfaas.engines.health import ProbeTiming
from prfaas.engines.supervision.process import ProcessSpec
from prfaas.engines.supervision.supervisor import Supervisor, SupervisorConfig
from tests.soak.growth import Sample
from transport import Endpoint
from transport.rpc import RpcError

MODEL = "stand-in"
THRESHOLD_TOKENS = 600
STEADY, KILLED = ("a1", "b1"), ("a2", "b2")
"""Nodes whose agents live all along, and nodes whose agents are killed."""
OPERATOR = "ops"
NUM_RECORDS = 200
"""The number of ended requests kept. The default, 1000, would fill up only after minutes."""
LINK_IDLE_S = 1.0
WARM_S = 5.0
LINK_DETECTOR = {"dwell_s": 0.5, "calm_s": 0.5}
"""Between storms all connections of links are closed, so that descriptors can be compared. Those of
a link that was down stand for `WARM_S`, and until it counts as clear again.
"""
START_S = 60.0
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Freed memory goes back to the kernel, so that growth means a leak."""
VLLM_SERVER = "vllm.entrypoints.openai.api_server"

_SERIES = re.compile(r"^(\w+)(\{[^\n]*\})? (\S+)$", re.MULTILINE)
_SIZES = {
    "prfaas_agent_cache_blocks": "cache blocks",
    "prfaas_agent_received_connections": "data connections",
    "prfaas_directory_memory_bytes": "table, bytes",
    "prfaas_directory_node_blocks": "blocks",
    "prfaas_gateway_in_flight_requests": "in flight",
    "prfaas_gateway_settling_requests": "settling",
    "prfaas_prefill_waiting_jobs": "queued",
    "prfaas_prefill_running_jobs": "running",
}
"""Metrics that are sizes of tables, and their names here. Labels are summed."""


def region_spec(folder: Path, keys_file: Path) -> RegionSpec:
    agent = {
        "arena_gib": 0.0625,
        "arena_dir": str(folder / "arenas"),
        # A region of which links are probed is never at rest.
        "link_probes": False,
        "transport": {
            "link_idle_timeout_s": LINK_IDLE_S,
            "handshake_timeout_s": 0.8 * WARM_S,
            "ack_timeout_s": 0.8 * WARM_S,
            "idle_timeout_s": WARM_S,
        },
    }
    (folder / "arenas").mkdir()

    def nodes(letter: str) -> list[dict[str, Any]]:
        return [
            {"name": f"{letter}{n}", "agent": agent, "instances": [{"name": f"{letter}{n}-engine"}]}
            for n in (1, 2)
        ]

    document = {
        "name": "soak",
        "gateway": {
            "port": 0,
            "admin": "127.0.0.1:0",
            "threshold_tokens": THRESHOLD_TOKENS,
            "api_keys_file": str(keys_file),
            "operators": [OPERATOR],
            # Every prompt's route follows from its length, and none is refused for its load.
            "scheduling": {
                "routing": {"policy": "threshold"},
                "admission": {"policy": "off"},
                "long_term": {"mode": "advise"},
            },
        },
        "models": [{"name": MODEL, "path": str(folder), "max_model_len": 65536}],
        "clusters": [
            {"name": "prefill-a", "kind": "prefill", "nodes": nodes("a")},
            {"name": "pd-b", "kind": "pd", "nodes": nodes("b")},
        ],
        "links": [{"from": "prefill-a", "to": "pd-b", "emulate": {"rate": "1Gbit", "rtt": "2ms"}}],
    }
    return RegionSpec.model_validate(document)


class SoakRegion:
    """Enter it to start everything. Methods belong to one event loop."""

    def __init__(self, folder: Path, keys_file: Path) -> None:
        self._folder = folder
        self.fronts: dict[str, Supervisor] = {}
        self.running = RunningRegion(
            region_spec(folder, keys_file),
            folder / "run",
            environment=os.environ | ENVIRONMENT,
            adapt=self._adapt,
        )
        self._metrics: dict[str, str] = {}
        self._agents: dict[str, AgentClient] = {}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> SoakRegion:
        # No connection stays open: it would be one of the descriptors that are counted.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=10)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            await self.running.start()
        except BaseException:
            await self._close()
            raise
        spec = self.running.region
        for node in (node for cluster in spec.clusters for node in cluster.nodes):
            self._metrics[f"agent.{node.name}"] = f"http://127.0.0.1:{node.agent.metrics_port}"
            control = self.running.agent_control(node.name)
            credentials = self.running.credentials("operator")
            self._agents[node.name] = AgentClient(control, credentials)
        self._metrics["gateway"] = f"http://{spec.gateway.admin}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self._agents.values():
            await agent.close()
        await self.running.stop()
        await self._close()

    async def _close(self) -> None:
        # After the gateway, which gives back what requests still hold.
        await asyncio.gather(*(front.stop() for front in self.fronts.values()))
        await self._session.close()

    # How the processes are started.

    def _adapt(self, planned: PlannedProcess) -> PlannedProcess:
        """Called for each process before any starts, for the gateway last."""
        if planned.kind == "engine":
            argv = list(planned.process.argv)
            argv[argv.index(VLLM_SERVER)] = "tests.soak.stand_in_engine"
            return replace(planned, process=replace(planned.process, argv=argv))
        if planned.kind == "agent":
            path = Path(planned.process.argv[-1])
            settings = json.loads(path.read_text()) | {"link_detector": LINK_DETECTOR}
            write_private(path, json.dumps(settings, indent=1).encode())
        if planned.kind == "gateway":
            self._take_fronts_out()
        return planned

    def _take_fronts_out(self) -> None:
        """Let the gateway find fronts and directory elsewhere, and start them."""
        path = self.running.directory.gateway_file
        file = json.loads(path.read_text())
        (pd,), prefill = file["pd"], file["prefill"][0]
        shared = {name: file[name] for name in ("engine_key_file", "log_dir")}
        file["pd"] = {
            "name": pd["name"],
            "front": self._front("pd-front", file, "pd", {**_front_of(pd), **shared}),
        }
        file["prefill"] = [
            {
                **{name: prefill[name] for name in ("name", "link", "endpoints")},
                "front": self._front(
                    "prefill-front", file, "prefill", {**_front_of(prefill), **shared}
                ),
            }
        ]
        agents = {
            f"{source['name']}/{item['node']}": item["agent"]
            for source in (pd, prefill)
            for item in source["instances"]
        }
        target = self._front("directory", file, "directory", {"agents": agents})
        file["gateway"] |= {
            "directory": {"kind": "grpc", "target": target},
            "num_records": NUM_RECORDS,
        }
        write_private(path, json.dumps(file, indent=1).encode())

    def _front(
        self, name: str, gateway: Mapping[str, Any], command: str, settings: dict[str, Any]
    ) -> str:
        """Start `prfaas COMMAND` in the background; its address."""
        listen, metrics_port = f"127.0.0.1:{free_port()}", free_port()
        settings |= {
            "listen": listen,
            "metrics_port": metrics_port,
            "region_key": gateway["region_key"] | {"name": name},
        }
        file = self._folder / f"{name}.json"
        write_private(file, json.dumps(settings, indent=1).encode())
        process = ProcessSpec(
            name=name,
            argv=[*module_argv("deploy.cli", command), "--config", str(file)],
            log_path=self.running.directory.logs / f"{name}.log",
            env=module_environment(os.environ | ENVIRONMENT),
        )
        config = SupervisorConfig(start_timeout_s=START_S, probes=ProbeTiming())
        self.fronts[name] = Supervisor(process, lambda: listens(listen), config)
        self.fronts[name].start()
        self._metrics[name] = f"http://127.0.0.1:{metrics_port}"
        return listen

    # What the processes hold.

    @property
    def names(self) -> list[str]:
        return [*(process.name for process in self.running.processes), *self.fronts]

    def is_killed_at_times(self, name: str) -> bool:
        return name.removeprefix("agent.") in KILLED

    def pid(self, name: str) -> int | None:
        """The id of its main process; None while there is none."""
        if name in self.fronts:
            front = self.fronts[name]
            pids = [pid for pid in front.members() if pid != front.pid]
        else:
            pids = self.running.process(name).pids
        return min(pids, default=None)

    def agent(self, node: str) -> RunningProcess:
        return self.running.agent(node)

    async def samples(self, *, is_at_rest: bool) -> dict[str, Sample]:
        """The figures of every process that runs now."""
        # Before their tables: each question opens a connection.
        found = self._uses(is_at_rest=is_at_rest)
        shown = await asyncio.gather(*(self._tables(name) for name in found))
        return {
            name: replace(sample, tables=tables)
            for (name, sample), tables in zip(found.items(), shown, strict=True)
        }

    def num_descriptors(self) -> dict[str, int]:
        """The figures of every process that runs now."""
        return {name: sample.num_descriptors for name, sample in self._uses().items()}

    def _uses(self, *, is_at_rest: bool = False) -> dict[str, Sample]:
        now_s = time.monotonic()
        pids = {name: self.pid(name) for name in self.names}
        found = {
            name: _sample(pid, now_s, is_at_rest=is_at_rest)
            for name, pid in pids.items()
            if pid is not None
        }
        return {name: sample for name, sample in found.items() if sample is not None}

    async def unrest(self) -> str:
        """Say what is not at rest; "" when nothing is held for any request."""
        view = await self.page("/prfaas/region")
        if view["in_flight"] or view["settling"] or view["buffered_bytes"]:
            return f"the gateway has {view['in_flight']} in flight, {view['settling']} settling"
        for node in self._agents:
            status = await self.status(node)
            if status is None:
                return f"the agent of {node} does not answer"
            if status.landing_bytes or status.outbox_bytes:
                return (
                    f"{node} holds {status.num_landings} landings, {status.num_outboxes} outboxes"
                )
            if status.num_received_connections:
                return f"{node} has {status.num_received_connections} data connections"
            if sum(engine.num_connections for engine in status.engines) < 2:
                return f"the engine of {node} is not connected to its agent"
        return ""

    async def page(self, path: str) -> Any:
        """A page of the gateway for operators."""
        headers = {"Authorization": f"Bearer {self.running.operator_key}"}
        async with self._session.get(self._metrics["gateway"] + path, headers=headers) as response:
            assert response.status == 200, f"{path}: {response.status}"
            return await response.json()

    async def status(self, node: str) -> StatusReply | None:
        try:
            return await self._agents[node].status(5.0)
        except RpcError:
            return None

    async def _tables(self, name: str) -> dict[str, float]:
        """The sizes of tables that a process shows, and of its table of metrics' series."""
        if name not in self._metrics:
            return {}
        headers = {"Authorization": f"Bearer {self.running.operator_key}"}
        try:
            url = f"{self._metrics[name]}/metrics"
            async with self._session.get(url, headers=headers) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return {}  # it is being restarted
        series = _SERIES.findall(text)
        sizes: dict[str, float] = {"series": len(series)}
        for metric, _, value in series:
            if metric in _SIZES:
                sizes[_SIZES[metric]] = sizes.get(_SIZES[metric], 0.0) + float(value)
        if name == "gateway":
            view = await self.page("/prfaas/region")
            sizes["tenants in flight"] = len(view["admission"]["tenants"])
        elif name.startswith("agent."):
            status = await self.status(name.removeprefix("agent."))
            if status is not None:
                sizes["landings known"] = sum(status.num_landings.values())
                sizes["outboxes known"] = sum(status.num_outboxes.values())
                sizes["links"] = len(status.links)
        return sizes


def _front_of(source: Mapping[str, Any]) -> dict[str, Any]:
    left_out = ("front", "link", "endpoints", "has_prefill_instances", "spill")
    return {name: value for name, value in source.items() if name not in left_out}


def _sample(pid: int, now_s: float, *, is_at_rest: bool) -> Sample | None:
    """Without its tables; None for a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.partition(":")[::2] for line in lines)
        rss, anonymous = (1024 * int(status[key].split()[0]) for key in ("VmRSS", "RssAnon"))
        num_descriptors = sum(map(_counts, Path(f"/proc/{pid}/fd").iterdir()))
    except (OSError, KeyError):
        return None
    return Sample(
        at_s=now_s,
        pid=pid,
        is_at_rest=is_at_rest,
        rss_bytes=rss,
        memory_bytes=anonymous,
        num_descriptors=num_descriptors,
        num_threads=int(status["Threads"]),
    )


def _counts(descriptor: Path) -> bool:
    """False for the clock that the watch of an event loop has of each thread, and if it is closed
    just now.
    """
    try:
        return not os.readlink(descriptor).startswith("/proc/")
    except OSError:
        return False


async def listens(address: str) -> bool:
    at = Endpoint.parse(address)
    _, writer = await asyncio.open_connection(at.host, at.port)
    writer.close()
    return True
