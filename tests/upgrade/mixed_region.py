"""A region of processes, each of which runs either the release before this one or this one.

Everything is what users start (`prfaas agent`, `prefill`, `pd`, `directory`, `gateway`), with a
region's key and grants; only engines are stand-ins, which compare what lands with what was sent.
Files are those that the release before this one reads. Two gateways stand behind a load balancer:
one has the front of the PD cluster inside, the other asks a front that is a process of its own.

Where the two releases describe KVCache in other formats, an agent refuses an engine of the other
release. Such an instance answers prompts, and no KVCache leaves or reaches it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from eventually import eventually
from free_ports import free_port

from deploy.region.launch.ports import can_listen
from kvmanager.private_files import write_private
from kvmanager.vllm_connector.key_guard import KEY_FILE_VARIABLE
from tests.soak.stand_in_engine import answer_to
from transport.grants import new_key_pair
from transport.region_key import new_key

NEW: Final = Path(__file__).resolve().parents[2]
PREVIOUS: Final = Path(__file__).with_name("PREVIOUS").read_text().strip()
"""The git revision of the release before this one."""
PATIENCE_S: Final = 300.0
MODEL: Final = "stand-in"
NODES: Final = {"b1": "home", "b2": "home", "a1": "far"}
"""Of which cluster."""
NUM_CLIENTS: Final = 4
SHORT_TOKENS, LONG_TOKENS = (40, 200), (700, 1500)


def unpack_previous(folder: Path) -> Path:
    """The tree of the release before this one, unpacked in `folder`."""
    archive = subprocess.run(
        ["git", "archive", PREVIOUS], cwd=NEW, stdout=subprocess.PIPE, check=True
    ).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def layout_format(tree: Path) -> str:
    """The format in which the release in `tree` describes KVCache."""
    text = (tree / "kvmanager" / "layout.py").read_text()
    found = re.search(r"^FORMAT_VERSION = (\d+)$", text, re.MULTILINE)
    assert found
    return found[1]


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    await eventually(condition, what=what, timeout_s=PATIENCE_S)


@dataclass
class Process:
    """A process of the region; `words` follow `python -m`."""

    name: str
    words: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    """Where it listens when it serves; 0: it says when it does."""
    running: asyncio.subprocess.Process | None = None

    async def start(self, tree: Path) -> None:
        """Run the release in `tree`; returns when the process says that it is ready."""
        with self.log.open("a") as log:
            self.running = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", *self.words),
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)} | self.env,
                stdout=log if self.port else subprocess.PIPE,
                stderr=log,
            )
        if self.port:
            await until(self._listens, f"{self.name} of {tree} listens")
        elif self.running.stdout is not None:
            async with asyncio.timeout(PATIENCE_S):
                line = await self.running.stdout.readline()
            assert line, f"{self.name} of {tree} did not start: {self.log.read_text()[-2000:]}"

    async def _listens(self) -> bool:
        self.check_runs()
        return not can_listen("127.0.0.1", self.port)

    async def stop(self) -> None:
        """As systemd and Kubernetes stop it."""
        running, self.running = self.running, None
        if running is None or running.returncode is not None:
            return
        running.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await running.wait()
        except TimeoutError:
            running.kill()
            raise

    def check_runs(self) -> None:
        """AssertionError with the end of its log if it has ended by itself."""
        if self.running is not None and self.running.returncode is not None:
            end = self.log.read_text()[-2000:]
            raise AssertionError(f"{self.name} ended with {self.running.returncode}: {end}")


class MixedRegion:
    """The processes by name, and what clients were answered."""

    def __init__(self, folder: Path) -> None:
        self.processes: dict[str, Process] = {}
        self.balanced: dict[str, str] = {}
        """URLs of the gateways that the load balancer sends requests to."""
        self.routes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.may_stream = True
        self._formats: dict[str, str] = {}
        """The format of layouts that each process knows."""
        self._urls: dict[str, str] = {}
        self._folder = folder
        self._num_asking: Counter[str] = Counter()
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def runs(self, tree: Path) -> AsyncIterator[None]:
        """All processes, of the release in `tree` at first, and clients that ask all the time."""
        self._plan()
        async with aiohttp.ClientSession() as self._session:
            try:
                for process in self.processes.values():
                    await self._start(process, tree)
                for name in self._urls:
                    await until(lambda url=self._urls[name]: self._is_usable(url), name)
                self.balanced = dict(self._urls)
                async with asyncio.TaskGroup() as clients:
                    asking = [
                        clients.create_task(self._ask(random.Random(number)))
                        for number in range(NUM_CLIENTS)
                    ]
                    yield
                    for task in asking:
                        task.cancel()
            finally:
                for process in reversed(self.processes.values()):
                    await process.stop()

    async def replace(self, name: str, tree: Path) -> None:
        """Stop the process and start the release in `tree` in its place, and go on when the region
        is whole and has served prompts through every gateway since.
        """
        # Requests that an engine has begun to answer end with it.
        self.may_stream = not name.endswith("-engine")
        # The other gateway has the front of the PD cluster inside.
        away = {"front-pd": "gateway-2"}.get(name, name)
        self.balanced.pop(away, None)
        await until(lambda: self._is_idle(away), f"requests of {away} end")
        process = self.processes[name]
        await process.stop()
        await self._start(process, tree)
        for gateway, url in self._urls.items():
            await until(lambda url=url: self._is_usable(url), f"{gateway} is whole with new {name}")
            self.balanced[gateway] = url
        self.may_stream = True
        before = self.routes.copy()

        async def has_served() -> bool:
            grown = self.routes - before
            routes = ["local", *(["prefill_cluster"] if self._can_transfer() else [])]
            wanted = [f"{g} {route}" for g in self._urls for route in routes]
            return bool(self.failures) or all(grown[key] >= 2 for key in wanted)

        await until(has_served, f"prompts are served with new {name}: {self.routes - before}")
        assert not self.failures, f"{name} of {tree}: {self.failures[:5]}"

    def tracebacks(self) -> list[str]:
        """The processes that have logged one."""
        logs = {item.name: item.log.read_text() for item in self.processes.values()}
        return [name for name, text in logs.items() if "Traceback" in text]

    async def _start(self, process: Process, tree: Path) -> None:
        self._formats[process.name] = layout_format(tree)
        await process.start(tree)

    def _format(self, node: str) -> str:
        """The format that the node's agent and engine agree on; "" if they do not."""
        formats = {self._formats[f"agent-{node}"], self._formats[f"{node}-engine"]}
        return formats.pop() if len(formats) == 1 else ""

    def _can_transfer(self) -> bool:
        """Whether every node that decodes can have what the prefill cluster makes."""
        formats = {self._format(node) for node in NODES}
        return len(formats) == 1 and "" not in formats

    async def _is_idle(self, gateway: str) -> bool:
        return not self._num_asking[gateway] or gateway in self.balanced

    async def _is_usable(self, gateway: str) -> bool:
        """Whether it could serve by every instance, and by the prefill cluster; an instance whose
        agent refuses it must be known to lack its agent.
        """
        for process in self.processes.values():
            process.check_runs()
        try:
            async with self._session.get(f"{gateway}/health") as answer:
                if answer.status != 200:
                    return False
            async with self._session.get(f"{gateway}/prfaas/region") as answer:
                seen = await answer.json()
        except aiohttp.ClientError:
            return False
        clusters = [seen["pd"], *seen["prefill"].values()]
        return all(clusters) and all(
            item["healthy"] == bool(self._format(item["name"].removesuffix("-engine")))
            for cluster in clusters
            for item in cluster["instances"]
        )

    # Clients.

    async def _ask(self, dice: random.Random) -> None:
        while True:
            lengths = dice.choice((SHORT_TOKENS, LONG_TOKENS))
            prompt = dice.randbytes(lengths[1]).hex()[: dice.randint(*lengths)]
            stream = self.may_stream and dice.random() < 0.5
            gateway, url = dice.choice(list(self.balanced.items()))
            self._num_asking[gateway] += 1
            try:
                route, text = await self._answer(url, prompt, stream=stream)
            except (aiohttp.ClientError, ValueError, LookupError) as error:
                self.failures.append(f"{gateway}, {len(prompt)} tokens, stream={stream}: {error!r}")
            else:
                self.routes[f"{gateway} {route}"] += 1
                if text != answer_to(prompt.encode()):
                    self.failures.append(f"{gateway}, {len(prompt)} tokens by {route}: {text!r}")
            finally:
                self._num_asking[gateway] -= 1
            await asyncio.sleep(dice.uniform(0, 0.1))

    async def _answer(self, url: str, prompt: str, *, stream: bool) -> tuple[str, str]:
        """The route and the text."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": stream}
        async with self._session.post(f"{url}/v1/completions", json=body) as answer:
            raw = (await answer.read()).decode()
            if answer.status != 200:
                raise ValueError(f"{answer.status} {raw[:300]}")
            route = answer.headers["x-prfaas-route"]
        if not stream:
            return route, json.loads(raw)["choices"][0]["text"]
        events = [line.removeprefix("data: ") for line in raw.splitlines() if line]
        if events[-1:] != ["[DONE]"]:
            raise ValueError(f"the stream broke off after {len(events)} events")
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        return route, "".join(texts)

    # Processes and their files.

    def _plan(self) -> None:
        """In the order in which they are upgraded."""
        folder = self._folder
        (folder / "arenas").mkdir()
        private, public = new_key_pair()
        keys = {"region.key": new_key().encode(), "engine.key": b"engine-key\n"}
        for name, data in {**keys, "granting.key": private, "granting.pub": public}.items():
            write_private(folder / name, data)
        instances = {node: self._node(node) for node in NODES}
        pd = {"instances": [instances["b1"], instances["b2"]]}
        prefill_front = self._front("prefill", "far", [instances["a1"]])
        pd_front = self._front("pd", "home", pd["instances"])
        directory = f"127.0.0.1:{free_port()}"
        agents = {f"{cluster}/{node}": instances[node]["agent"] for node, cluster in NODES.items()}
        self._process("directory", "directory", {"listen": directory, "agents": agents})
        for node, instance in instances.items():
            self._engine(node, instance)
        for name, source in (("gateway-1", pd), ("gateway-2", {"front": pd_front})):
            port = free_port()
            self._urls[name] = f"http://127.0.0.1:{port}"
            settings = {
                "gateway": {
                    "port": port,
                    "threshold_tokens": 600,
                    "models": [{"name": MODEL, "max_model_len": 65536, "root": str(folder)}],
                    "directory": {"kind": "grpc", "target": directory},
                    # Every prompt's route follows from its length, and none is refused.
                    "scheduling": {
                        "routing": {"policy": "threshold"},
                        "admission": {"policy": "off"},
                        "long_term": {"mode": "off"},
                    },
                },
                "pd": {"name": "home", **source},
                "prefill": [{"name": "far", "front": prefill_front}],
                "granting_key": {"file": str(folder / "granting.key"), "region": "r"},
                **self._engine_settings(),
            }
            self._process(name, "gateway", settings)

    def _node(self, node: str) -> dict[str, Any]:
        """Its agent; returns the instance as fronts know it."""
        control = f"127.0.0.1:{free_port()}"
        settings = {
            "listen": f"127.0.0.1:{free_port()}",
            "control": control,
            "socket": str(self._folder / f"{node}.sock"),
            "arena_dir": str(self._folder / "arenas"),
            "arena_gib": 0.0625,
            "link_probes": False,
            # A link that was cut by a restart counts again soon after.
            "link_detector": {"dwell_s": 0.5, "calm_s": 0.5},
            "granting_keys": {"file": str(self._folder / "granting.pub"), "region": "r"},
        }
        self._process(f"agent-{node}", "agent", settings)
        return {
            "name": f"{node}-engine",
            "agent": control,
            "node": node,
            "url": f"http://127.0.0.1:{free_port()}",
            "model": MODEL,
            "role": "prefill" if node == "a1" else "both",
        }

    def _front(self, command: str, name: str, instances: list[dict[str, Any]]) -> str:
        listen = f"127.0.0.1:{free_port()}"
        settings = {"name": name, "listen": listen, "instances": instances}
        self._process(f"front-{command}", command, settings | self._engine_settings())
        return listen

    def _engine(self, node: str, instance: Mapping[str, Any]) -> None:
        host, _, port = instance["url"].removeprefix("http://").rpartition(":")
        extra = {"agent_socket": str(self._folder / f"{node}.sock"), "instance": instance["name"]}
        words = ["tests.soak.stand_in_engine", "--host", host, "--port", port]
        words += ["--served-model-name", MODEL]
        words += ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})]
        name = instance["name"]
        self.processes[name] = Process(
            name,
            words,
            self._folder / f"{name}.log",
            {KEY_FILE_VARIABLE: str(self._folder / "engine.key")},
            port=int(port),
        )

    def _engine_settings(self) -> dict[str, Any]:
        return {
            "engine_key_file": str(self._folder / "engine.key"),
            "log_dir": str(self._folder / "logs"),
        }

    def _process(self, name: str, command: str, settings: dict[str, Any]) -> None:
        key = {"file": str(self._folder / "region.key"), "region": "r", "name": name}
        path = self._folder / f"{name}.json"
        write_private(path, json.dumps(settings | {"region_key": key}).encode())
        words = ["deploy.cli", command, "--config", str(path)]
        self.processes[name] = Process(name, words, self._folder / f"{name}.log")
