"""A region for bench_hostile: a gateway, two node agents and stand-ins for their engines."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from agent_process import AgentProcess
from attacked_agents import AttackedRegion, Way
from free_ports import free_port
from gateway_process import answers, child, completion_request, gateway_process

from transport import RegionKey, TlsFiles

ENGINES: Final = Path(__file__).with_name("hostile_engines.py")
TRUE_KEY: Final = "a-true-client"
HOSTILE_KEY: Final = "a-hostile-client"
THRESHOLD_TOKENS: Final = 512
PROMPTS: Final[dict[str, list[int]]] = {"short": [1] * 16, "offloaded": [2] * 2048}
"""The longer one has 1 MiB of KVCache."""


class Region:
    """A gateway, two agents and their engines, all on loopback; a context manager.

    `way`: how its processes know each other. The agent `sender` may be started again.
    """

    def __init__(self, folder: Path, way: Way) -> None:
        attacked = AttackedRegion(folder, way)
        self.sender, self.receiver = (_agent(attacked, name) for name in ("a", "b"))
        self.port = free_port()
        self.gateway: psutil.Process
        self.requests = {
            path: completion_request(self.port, prompt, key=TRUE_KEY)
            for path, prompt in PROMPTS.items()
        }
        self._engine_ports = free_port(), free_port()
        self._folder = folder
        self._config = self._gateway_config(attacked)
        self._stack = ExitStack()

    def __enter__(self) -> Region:
        with self._stack as stack:
            for agent in (self.sender, self.receiver):
                stack.enter_context(agent)
            prefill, decode = self._engine_ports
            argv = [sys.executable, str(ENGINES)]
            argv += [str(prefill), str(self.sender.socket), str(decode), str(self.receiver.socket)]
            is_up = answers(decode, completion_request(decode, "up?"))
            stack.enter_context(child(argv, is_up))
            running = gateway_process(self._config, self._folder, self.requests["short"])
            self.gateway = psutil.Process(stack.enter_context(running))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def restart_sender(self) -> None:
        """Its next connections to the receiver are new ones."""
        self.sender.end()
        self.sender.start()

    def processes(self) -> dict[str, psutil.Process]:
        """The processes that are attacked, by name."""
        agents = {"receiving agent": self.receiver, "sending agent": self.sender}
        pids = {name: agent.ready["pid"] for name, agent in agents.items()}
        return {"gateway": self.gateway} | {name: psutil.Process(pid) for name, pid in pids.items()}

    def targets(self) -> tuple[int, int, tuple[int, ...]]:
        """Ports: the gateway's, where KVCache lands, and the control ports of both agents."""
        data, *controls = (
            int(address.rpartition(":")[2])
            for address in (
                self.receiver.ready["data"],
                self.receiver.ready["control"],
                self.sender.ready["control"],
            )
        )
        return self.port, data, tuple(controls)

    def _gateway_config(self, attacked: AttackedRegion) -> dict[str, Any]:
        prefill, decode = (
            {
                "name": name,
                "url": f"http://127.0.0.1:{port}",
                "agent": agent.settings["control"],
                "model": "echo",
                "role": role,
                "max_concurrent": 16,
            }
            for name, port, agent, role in (
                ("p0", self._engine_ports[0], self.sender, "prefill"),
                ("d0", self._engine_ports[1], self.receiver, "both"),
            )
        )
        # Which side is sooner says nothing where engines compute nothing: the length decides.
        scheduling = {
            "routing": {"policy": "threshold"},
            "long_term": {"mode": "off"},
            "admission": {"policy": "off"},
        }
        return {
            "gateway": {
                "port": self.port,
                "models": [{"name": "echo"}],
                "threshold_tokens": THRESHOLD_TOKENS,
                "api_keys": [f"good {TRUE_KEY}", f"bad {HOSTILE_KEY}"],
                "scheduling": scheduling,
            },
            "pd": {"name": "home", "instances": [decode]},
            "prefill": [{"name": "far", "link": "far-to-home", "instances": [prefill]}],
            "granting_key": {"file": str(attacked.granting_key.path), "region": "r"},
            "log_dir": str(self._folder),
            **_shown(attacked.shown("gateway")),
        }


def _agent(attacked: AttackedRegion, name: str) -> AgentProcess:
    """With the transport's own settings, and ports that stay when it is started again."""
    ports = {what: f"127.0.0.1:{free_port()}" for what in ("listen", "control")}
    return attacked.agent(
        name, grants=True, transport={}, arena_gib=1 / 16, block_bytes=1 << 16, **ports
    )


def _shown(credentials: Any) -> dict[str, Any]:
    """The part of a process's file that says how it shows who it is."""
    if isinstance(credentials, TlsFiles):
        files = ("cert", "key", "ca")
        return {"tls": {name: str(getattr(credentials, name)) for name in files}}
    assert isinstance(credentials, RegionKey)
    named = credentials.identity
    key = {"file": str(credentials.path), "region": named.region, "name": named.name}
    return {"region_key": key}
