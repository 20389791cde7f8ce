"""A real agent process, and an engine's connection to it that a test drives by hand.

Everything here blocks; use it from plain (not async) tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Literal, Self, TypeVar

import msgspec
import yaml
from arena_bytes import get_bytes, put_bytes
from eventually import wait_until
from simple_layouts import paged, state

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import (
    CacheFound,
    CacheSlots,
    EngineHello,
    Landed,
    OutboxOpened,
    Welcome,
)
from kvmanager.agent.messages import (
    SERVICE,
    Await,
    CacheFeed,
    Cancel,
    CancelReply,
    OpenOutbox,
    OpenOutboxReply,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    TransferReport,
    WatchCache,
)
from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind, KVLayout
from transport import Credentials, TlsFiles
from transport.rpc import RpcClient, RpcError

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)

CHILD_ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
"""For a child process that imports what this one can."""

QUICK_TRANSPORT = {
    "num_connections": 2,
    "handshake_timeout_s": 2.0,
    "ack_timeout_s": 2.0,
    "idle_timeout_s": 2.5,
}
"""The transport's settings of agents in tests."""

SMALL_LAYOUT = KVLayout(
    model_id="small",
    weights="files:0",
    config_digest="0",
    tp_size=1,
    groups=(
        KVGroup(KVKind.FULL, 16, (paged("layer.0", 4096), paged("layer.1", 4096))),
        KVGroup(KVKind.RECURRENT, 16, (state("layer.2", 10_000),)),
    ),
)


class AgentProcess:
    """`python -m kvmanager.agent` with its files under `directory`; a context manager."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.socket = directory / "agent.sock"
        defaults: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "control": "127.0.0.1:0",
            "socket": str(self.socket),
            "arena_dir": str(directory),
            "arena_gib": 8 / 1024,
            "drain_s": 1.0,
            "transport": QUICK_TRANSPORT,
        }
        self.settings = defaults | settings
        self.process: subprocess.Popen[str] | None = None
        self.disk: tuple[Path, str] | None = None
        """A folder that only the agent sees, on a file system of this size, such as "3m"."""
        self.ready: dict[str, Any] = {}
        self.transfer_ids: set[str] = set()
        self.caller: Credentials | None = None
        """The credentials that `call` shows; None for the agent's certificate, if it has one."""

    def write_settings(self) -> Path:
        """The file that the agent is started with."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "agent.yaml"
        path.write_text(yaml.safe_dump(self.settings))
        return path

    def start(self) -> Self:
        """Returns when the agent says that it is ready."""
        self.ready = {}
        command = ["-m", "deploy.cli", "agent", "--config", str(self.write_settings())]
        with (self.directory / "agent.log").open("a") as log:
            self.process = subprocess.Popen(
                [*self._mounting(), sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the agent did not start: {self.log()}"
        self.ready = json.loads(line)
        return self

    def _mounting(self) -> list[str]:
        if self.disk is None:
            return []
        folder, size = self.disk
        mount = f'mkdir -p "$0" && mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        return ["unshare", "--mount", *user, "sh", "-c", mount, str(folder)]

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send the signal and wait; the exit status. AssertionError with its log if an agent that
        was ready had ended before: it crashed.
        """
        process, self.process = self.process, None
        if process is None:
            return 0
        crashed = process.poll() is not None and bool(self.ready)
        process.send_signal(number)
        with contextlib.closing(process.stdout) if process.stdout else contextlib.nullcontext():
            status = process.wait(timeout_s)
        assert not crashed, f"the agent ended by itself with status {status}: {self.log()}"
        return status

    def __enter__(self) -> Self:
        return self.start() if self.process is None else self

    def __exit__(self, *_: object) -> None:
        process = self.process
        try:
            self.end()
        except subprocess.TimeoutExpired:
            assert process is not None
            process.kill()
            process.wait()
            raise

    @property
    def tls(self) -> TlsFiles | None:
        """The agent's own certificate, which its peers' callers may use as well."""
        if "tls_cert" not in self.settings:
            return None
        cert, key, ca = (Path(self.settings[f"tls_{name}"]) for name in ("cert", "key", "ca"))
        return TlsFiles(cert, key, ca)

    def log(self) -> str:
        return (self.directory / "agent.log").read_text()

    def arenas(self) -> list[Path]:
        return list(self.directory.glob("*.arena"))

    def call(
        self, method: str, request: msgspec.Struct, reply_type: type[ReplyT], timeout_s: float = 10
    ) -> ReplyT:
        """One call of the control plane; raises RpcError."""

        async def run() -> ReplyT:
            client = RpcClient(self.ready["control"], SERVICE, self.caller or self.tls)
            try:
                return await client.call(method, request, reply_type, timeout_s)
            finally:
                await client.close()

        return asyncio.run(run())

    def status(self) -> StatusReply:
        return self.call("Status", Status(), StatusReply)

    def watch_cache(self, epoch: str = "", after_seq: int = 0, timeout_s: float = 0.0) -> CacheFeed:
        request = WatchCache(epoch, after_seq, timeout_s)
        return self.call("WatchCache", request, CacheFeed, timeout_s + 10)

    def reserve(
        self,
        num_tokens: int,
        lease_s: float = 30.0,
        fingerprint: str = "",
        *,
        block_keys: bytes = b"",
    ) -> ReserveReply:
        request = Reserve(num_tokens, lease_s, fingerprint, block_keys=block_keys)
        reply = self.call("Reserve", request, ReserveReply)
        self.transfer_ids.add(reply.transfer_id)
        return reply

    def open_outbox(
        self, landing: ReserveReply, num_tokens: int, lease_s: float = 30.0, **changes: Any
    ) -> OpenOutboxReply:
        request = OpenOutbox(
            transfer_id=landing.transfer_id,
            token=landing.token,
            nbytes=landing.nbytes,
            num_tokens=num_tokens,
            layout_fingerprint=landing.layout_fingerprint,
            host=landing.host,
            port=landing.port,
            lease_s=lease_s,
            cached_tokens=landing.cached_tokens,
            window_step=landing.window_step,
        )
        request = msgspec.structs.replace(request, **changes)
        self.transfer_ids.add(request.transfer_id)
        return self.call("OpenOutbox", request, OpenOutboxReply)

    def cancel(self, transfer_id: str) -> CancelReply:
        return self.call("Cancel", Cancel(transfer_id, "end of test"), CancelReply)

    def cancel_all(self) -> None:
        """End every transfer that this object has begun at the agent."""
        while self.transfer_ids:
            with contextlib.suppress(RpcError):
                self.cancel(self.transfer_ids.pop())

    def wait(self, transfer_id: str, timeout_s: float = 20.0, kind: Any = "") -> TransferReport:
        request = Await(transfer_id, timeout_s, kind)
        return self.call("Await", request, TransferReport, timeout_s + 5)


Place = OpenOutboxReply | ReserveReply | int | str
"""An outbox, by its attempt, or a landing, by its transfer."""


class EngineConnection:
    """One engine's connection to the agent at `socket`, driven by hand."""

    def __init__(
        self,
        socket: Path,
        instance: str,
        layout: KVLayout = SMALL_LAYOUT,
        *,
        tp_rank: int = 0,
        role: Literal["scheduler", "worker"] = "worker",
        namespace: bytes = b"",
    ) -> None:
        self.events: Queue[tuple[Any, ...]] = Queue()
        self.heard: dict[int | str, OutboxOpened | Landed] = {}
        """What the agent has said of outboxes, by attempt, and of landings, by transfer."""
        self.releases_failed = True
        """Answer `Failed` with `Release`, as a producer must."""
        hello = EngineHello(
            instance, role, os.getpid(), layout.encode(), tp_rank, layout.tp_size, namespace
        )
        self.client = EngineClient(socket, hello)

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        self.events.put(("connected", welcome.arena_epoch))

    def on_disconnected(self) -> None:
        self.events.put(("disconnected",))

    def on_outbox_opened(self, opened: OutboxOpened) -> None:
        self.heard[opened.attempt] = opened

    def on_landed(self, landed: Landed) -> None:
        self.heard[landed.transfer_id.hex()] = landed
        self.events.put(("landed", landed.transfer_id.hex()))

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        if self.releases_failed:
            self.client.release(transfer_id, attempt)
        self.events.put(("failed", transfer_id.hex(), reason))

    def on_cache_found(self, found: CacheFound) -> None:
        self.events.put(("found", found))

    def on_cache_slots(self, slots: CacheSlots) -> None:
        self.events.put(("slots", slots))

    def next(self, timeout_s: float = 20.0) -> tuple[Any, ...]:
        """The next event; AssertionError when none comes."""
        try:
            return self.events.get(timeout=timeout_s)
        except Empty:
            raise AssertionError(f"no event within {timeout_s} s") from None

    def said(self, of: Place) -> OutboxOpened | Landed:
        """What the agent says of this outbox, or of this landing, which must have landed."""
        key = of.attempt if isinstance(of, OpenOutboxReply) else of
        key = key.transfer_id if isinstance(key, ReserveReply) else key
        wait_until(lambda: key in self.heard)
        return self.heard[key]

    def place(self, of: Place | list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where the agent says that it is."""
        return of if isinstance(of, list) else self.said(of).runs

    def write(self, outbox: Place | list[tuple[int, int]], data: bytes, offset: int = 0) -> None:
        """Put `data` at a logical offset of the outbox, or of these runs."""
        arena = self.client.arena
        assert arena is not None
        put_bytes(arena, self.place(outbox), data, offset)

    def fill(self, params: dict[str, Any], data: bytes, share: float = 1.0) -> None:
        """Do what the connector does while a prefill runs; `share` of the bytes become ready."""
        opening = bytes.fromhex(params["transfer_id"]), params["attempt"]
        self.client.attach(*opening)
        self.write(params["attempt"], data)
        self.client.ready(*opening, [(0, int(len(data) * share))])
        if share == 1.0:
            self.client.prefill_end(*opening)

    def send(self, landing: ReserveReply, outbox: OpenOutboxReply, data: bytes) -> None:
        """Put `data` at the begin of the outbox and say that it is ready."""
        opening = bytes.fromhex(landing.transfer_id), outbox.attempt
        assert self.client.attach(*opening)
        self.write(outbox, data)
        assert self.client.ready(*opening, [(0, len(data))])

    def read(self, landing: Place | list[tuple[int, int]], nbytes: int) -> bytes:
        """The bytes of a landing, which the engine takes if it has not watched it, or of runs."""
        arena = self.client.arena
        assert arena is not None
        if isinstance(landing, ReserveReply) and landing.transfer_id not in self.heard:
            self.client.watch(bytes.fromhex(landing.transfer_id))
        return get_bytes(arena, self.place(landing), nbytes)


class DrivenEngine(EngineConnection):
    """One engine connection driven by a test; a context manager."""

    def __init__(
        self,
        agent: AgentProcess,
        instance: str = "engine",
        layout: KVLayout = SMALL_LAYOUT,
        **hello: Any,
    ) -> None:
        super().__init__(agent.socket, instance, layout, **hello)

    def __enter__(self) -> Self:
        self.client.start(self)
        assert self.next()[0] == "connected"
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


ENGINE_PROCESS = """
import sys, time
from agent_process import AgentProcess, DrivenEngine
from pathlib import Path
what, transfer_id = sys.argv[2], bytes.fromhex(sys.argv[3])
with DrivenEngine(AgentProcess(Path(sys.argv[1])), "victim") as engine:
    print("connected", flush=True)
    attempt = int(sys.stdin.readline())
    if what == "fill":
        engine.client.attach(transfer_id, attempt)
        engine.client.ready(transfer_id, attempt, [(0, 1000)])
    else:
        engine.client.watch(transfer_id)
        assert engine.next()[0] == "landed"
    print("done", flush=True)
    time.sleep(60)
"""


class Victim:
    """An engine in a process of its own, to be killed."""

    def __init__(self, agent: AgentProcess, what: str, landing: ReserveReply) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE_PROCESS, agent.directory, what, landing.transfer_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=CHILD_ENV,
        )
        assert self._line() == "connected"

    def act(self, attempt: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{attempt}\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()
