"""Runs a region, or a part of it, on this machine: relays, node agents, engines, fronts, gateway.

It is a library (`async with RunningRegion(...) as region`) and the core of `prfaas up`. Whatever
ends it, an error, a signal or even SIGKILL, none of its processes outlives it. It does not know
what the processes do, only whether they are healthy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import aiohttp

from deploy.gateway.reload import Changes, changed_settings
from deploy.lab.emulator.control import RelayControl
from deploy.region.cache_identity import unlike_engines
from deploy.region.launch.addresses import admin_url, gateway_url
from deploy.region.launch.arenas import discard_arenas
from deploy.region.launch.devices import Division, divided_for, divided_here
from deploy.region.launch.members import member_problems, resolve_again, with_members
from deploy.region.launch.parts import Part, part_problems, whole
from deploy.region.launch.plan import PlannedProcess, Planner
from deploy.region.launch.ports import (
    ResolvedRegion,
    resolve_part,
    resolve_ports,
    taken_ports,
)
from deploy.region.launch.probes import Prober, members_view, region_trouble
from deploy.region.launch.process_files import region_text
from deploy.region.launch.rundir import (
    Phase,
    RegionState,
    RunDirectory,
    RunLock,
    open_run_directory,
    remove_leftovers,
)
from deploy.region.launch.running import (
    ProcessProgress,
    RegionStartFailed,
    RunningProcess,
    RunningProcesses,
)
from deploy.region.launch.trust import engine_key_file, make_keys, run_credentials
from deploy.region.spec.checks import check_region
from deploy.region.spec.loading import missing_models, missing_packages
from deploy.region.spec.region import RegionSpec, gateway_process
from kvmanager.config_files.fields import tls_files
from kvmanager.config_files.problems import FileError, Problem
from kvmanager.latest_writer import LatestWriter
from kvmanager.private_files import read_secret
from prfaas.engines.access import EngineAccess
from prfaas.engines.client import open_session
from prfaas.engines.members import LEAVE_LIMIT_S
from prfaas.engines.ownership import finished
from transport import Credentials, Endpoint, Role
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.region")

LOOK_S: Final = 0.5
LEFT_LIMIT_S: Final = LEAVE_LIMIT_S + 90.0
"""The longest wait for an instance to leave its front, before its engine is stopped, seconds."""
SETTLE_TIMEOUT_S: Final = 60.0
"""From the gateway's start until its fronts find every instance of this machine usable."""


class RunningRegion:
    """A region, or a part of one, on this machine. `start` or enter it. After `stop` only its logs
    are left.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        region: RegionSpec,
        run_dir: Path,
        *,
        part: Part | None = None,
        on_progress: Callable[[ProcessProgress], None] = lambda progress: None,
        environment: Mapping[str, str] | None = None,
        adapt: Callable[[PlannedProcess], PlannedProcess] = lambda planned: planned,
    ) -> None:
        """Without a `part` all of the region runs here. `adapt` may change the command or the
        environment of a process before it starts.
        """
        self._adapt = adapt
        self._wanted = region
        self._part = part or whole(region)
        self._root = run_dir
        self._environment = dict(os.environ if environment is None else environment)
        self._lock: RunLock | None = None
        self._directory: RunDirectory | None = None
        self._resolved: ResolvedRegion | None = None
        self._planner: Planner | None = None
        self._devices = Division()
        self._session: aiohttp.ClientSession | None = None
        self._prober: Prober | None = None
        self._states: LatestWriter[RegionState] | None = None
        """Writes the state file; None unless there is a run directory."""
        self._processes = RunningProcesses(on_progress, self._put_state)
        self._phase: Phase = "starting"
        self._started_s = time.time()
        self._reloading = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks that stop processes once their instances have left."""

    # -- for callers and fault tests -------------------------------------------------------------

    @property
    def region(self) -> RegionSpec:
        """The specification with every port filled in. RuntimeError before `start`."""
        return self._resolved_region().region

    @property
    def part(self) -> Part:
        """The part of the region that runs here."""
        return self._part

    @property
    def devices(self) -> Division:
        """The GPUs and cores of this machine that its engines have got."""
        return self._devices

    @property
    def directory(self) -> RunDirectory:
        """The directory of logs and sockets. RuntimeError before `start`."""
        if self._directory is None:
            raise RuntimeError("the region is not started")
        return self._directory

    @property
    def gateway_url(self) -> str:
        """The base URL of the OpenAI API, without /v1; "" if the gateway runs elsewhere."""
        return next(iter(self.gateway_urls.values()), "")

    @property
    def gateway_urls(self) -> dict[str, str]:
        """The base URLs of all gateways that run here, by their processes."""
        region = self.region
        return {
            gateway_process(region, node): gateway_url(region, node) for node in self._part.gateways
        }

    @property
    def processes(self) -> Sequence[RunningProcess]:
        """All processes in the order of their start."""
        return tuple(self._processes)

    def process(self, name: str) -> RunningProcess:
        """A process by its name: "gateway", "agent.NODE", "front.CLUSTER" or an instance.

        KeyError if unknown.
        """
        return self._processes[name]

    def engine(self, instance: str) -> RunningProcess:
        """The engine of an instance. KeyError if unknown."""
        return self._processes[instance]

    def agent(self, node: str) -> RunningProcess:
        """The agent of a node. KeyError if unknown."""
        return self._processes[f"agent.{node}"]

    @property
    def gateway(self) -> RunningProcess:
        """The process of the gateway, the first one if there are several."""
        return next(item for item in self.processes if item.kind == "gateway")

    def relay(self, link: str = "", node: str = "") -> RelayControl:
        """Faults and counters of an emulated link.

        `link` is "FROM-to-TO"; `node` is the receiving node, if there are several. Without names,
        the only relay is meant. KeyError if unknown or not unique.
        """
        found = [
            relay
            for relay in self._resolved_region().relays
            if link in ("", relay.link) and node in ("", relay.node)
        ]
        if len(found) != 1:
            known = ", ".join(f"{relay.link} at {relay.node}" for relay in found) or "none"
            raise KeyError(f"link {link!r}, node {node!r}: {known}")
        return RelayControl(self.directory.socket(found[0].name))

    def agent_control(self, node: str) -> str:
        """host:port of a node agent's control service. KeyError if unknown."""
        return self._agent_controls()[node]

    @property
    def operator_key(self) -> str:
        """A key that opens the gateway's pages for operators, beside the region's API keys."""
        return read_secret(self.directory.operator_key)

    def engine_access(self) -> EngineAccess:
        """How to ask the engines. Reads files."""
        tls = tls_files(self.region.security.tls)
        return EngineAccess(engine_key_file(self.region, self.directory), tls)

    def credentials(self, role: Role) -> Credentials | None:
        """Credentials with which a process may call the region's processes as its role allows
        (`transport.access`).
        """
        return run_credentials(self.region, self.directory.region_key, role)

    # -- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything. Returns when all processes serve and the gateway, if it runs here, can
        use every instance that runs here.

        Raises FileError (the specification, ports in use), RunDirectoryError, RegionStartFailed.
        After any exception, also a cancellation, everything is stopped again.
        """
        try:
            # In a thread: to find who has a port, all sockets of the host are read.
            problems = await asyncio.to_thread(_problems, self._wanted, self._part)
            if problems:
                raise FileError(f"region {self._wanted.name}", problems)
            # To its end: `stop` must see the lock and the directory that it has made.
            await finished(asyncio.to_thread(self._prepare))
            await self._start_all()
            self._phase = "running"
            await self._write_state()
        except BaseException:
            await self.stop()
            raise

    async def wait_settled(self, timeout_s: float) -> None:
        """Wait until the gateway's fronts, which probe by themselves, find the instances usable
        that run here. Those of other hosts may start at any time.

        RegionStartFailed after `timeout_s`, with what they miss.
        """
        deadline_s = time.monotonic() + timeout_s
        key = self.operator_key
        names = [process.name for process in self.processes if process.kind == "engine"]
        for name, url in self._admin_urls().items():
            gateway = self.process(name)
            while (trouble := await region_trouble(url, key, names)) is not None:
                if time.monotonic() > deadline_s:
                    raise RegionStartFailed(f"the gateway runs, but {trouble}")
                self._processes.report(gateway, trouble, state="waiting")
                await asyncio.sleep(0.1)
            self._processes.report(gateway, gateway.reason)

    async def reload(self, wanted: RegionSpec, part: Part) -> Changes:
        """Follow a changed file: start what is new, have it join; have what is gone leave, and stop
        it afterwards. Returns when what is new serves, with what changed and what waits for a
        restart. Others run on in any case.

        Raises FileError, RegionStartFailed (nothing has joined then), OSError.
        """
        async with self._reloading:
            return await self._reload(wanted, part)

    async def _reload(self, wanted: RegionSpec, part: Part) -> Changes:
        running, directory = self._resolved_region(), self.directory
        # As they are written, so that equal settings are equal.
        before, wanted = (
            RegionSpec.model_validate_json(region_text(region)) for region in (self._wanted, wanted)
        )
        try:
            after = with_members(before, wanted)
        except ValueError as error:
            raise FileError(f"region {wanted.name}", [Problem((), str(error))]) from error
        changes = Changes(changed_settings(before, after), changed_settings(after, wanted))
        if not changes.made:
            return changes
        problems = check_region(after) or [*member_problems(before, after, part)]
        # Folders of models and adapters may be on a network's disk.
        if problems := problems or await asyncio.to_thread(missing_models, after, part.nodes):
            raise FileError(f"region {wanted.name}", problems)
        resolved = await asyncio.to_thread(resolve_again, after, running, part)
        devices = divided_for(resolved.region, part, self._environment, self._devices)
        planner = Planner(resolved, directory, self._environment, devices.environment)
        planned = {item.name: item for item in planner.processes()}
        # The files of the front and the gateway come last: what they name must serve.
        files = planner.files() | {directory.wanted_file: region_text(after)}
        last = {path for path in files if not path.name.startswith("agent.")}
        first = {path: text for path, text in files.items() if path not in last}
        await finished(asyncio.to_thread(_write, directory, first))
        new = self._supervise([i for i in planned.values() if i.name not in self._processes])
        try:
            await self._processes.start(new)
        except BaseException:
            await self._processes.discard(new)
            raise

        async def take_over() -> None:
            await asyncio.to_thread(
                _write, directory, {path: text for path, text in files.items() if path in last}
            )
            self._wanted, self._resolved, self._planner = after, resolved, planner
            self._part, self._devices = part, devices

        # To its end: `stop` discards the arenas of the nodes that are known then.
        await finished(take_over())
        gone = [item for item in self._processes if item.name not in planned]
        if gone:
            start_task(self._stop_gone(gone, running), "what has left the region", self._leaving)
        await self._write_state()
        return changes

    async def _stop_gone(self, gone: Sequence[RunningProcess], before: ResolvedRegion) -> None:
        """Stop processes once the fronts have forgotten their instances."""
        await self._forgotten({item.name for item in gone if item.kind == "engine"}, before)
        assert self._planner is not None
        wanted = {item.name for item in self._planner.processes()}
        # The file may name some of them again by now.
        gone = [item for item in gone if item.name not in wanted]
        await self._processes.discard(gone)
        nodes = {item.name.removeprefix("agent.") for item in gone if item.kind == "agent"}
        await finished(asyncio.to_thread(discard_arenas, before.region, self._root, nodes))

    async def part_left(self) -> None:
        """Wait until no front gives work to this part, whose nodes the region's file names no more:
        until they have forgotten its instances, but at most `LEFT_LIMIT_S`.
        """
        names = {item.name for item in self._processes if item.kind == "engine"}
        await self._forgotten(names, self._resolved_region())

    async def _forgotten(self, names: set[str], before: ResolvedRegion) -> None:
        credentials = self.credentials("operator")
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(LEFT_LIMIT_S),
                members_view(
                    before.region, before.part, lambda: self.operator_key, credentials
                ) as known,
            ):
                while names & await known():  # noqa: ASYNC110 (fronts tell only who asks)
                    await asyncio.sleep(LOOK_S)

    async def differences(self) -> list[str]:
        """A sentence for each two groups of engines of one model that share no KVCache. Hosts may
        start their parts at any time, so agents elsewhere that do not answer are left out.

        Raises RpcError where an agent of this machine does not answer.
        """
        assert self._prober is not None
        controls = self._agent_controls()
        answers = await asyncio.gather(
            *map(self._prober.agent_status, controls.values()), return_exceptions=True
        )
        replies = []
        for node, answer in zip(controls, answers, strict=True):
            if not isinstance(answer, BaseException):
                replies.append(answer)
            elif node in self._part.nodes or not isinstance(answer, RpcError):
                raise answer
        return unlike_engines(replies)

    async def stop(self) -> None:
        """Stop everything, gateway first. Goes on to the end even if cancelled. Idempotent."""
        stopping = asyncio.ensure_future(self._stop())
        cancelled = False
        while not stopping.done():
            try:
                # Cancelling the caller must not cut the clean-up short.
                await asyncio.shield(stopping)
            # A second interrupt: there is no more time for an orderly stop, but clean-up still
            # runs.
            except asyncio.CancelledError:
                cancelled = True
                self.kill_all()
        stopping.result()
        if cancelled:
            raise asyncio.CancelledError

    def kill_all(self) -> None:
        """Send SIGKILL to every process now. `stop` still has to clean up."""
        self._processes.kill_all()

    def _prepare(self) -> None:
        region, part = self._wanted, self._part
        # The lock before ports are chosen: two launchers in one directory must not both go on.
        self._lock = RunLock(self._root)
        directory = self._directory = open_run_directory(self._root)
        self._states = LatestWriter("the state file", directory.write_state)
        resolved = resolve_ports(region) if part.is_whole else resolve_part(region, part)
        self._resolved = resolved
        self._devices = divided_here(region, part, self._environment)
        self._planner = Planner(resolved, directory, self._environment, self._devices.environment)
        make_keys(region, directory, part)
        files = self._planner.files() | {directory.wanted_file: region_text(region)}
        _write(directory, files)

    async def _start_all(self) -> None:
        self._session = open_session()
        access = await asyncio.to_thread(self.engine_access)
        self._prober = Prober(self._session, self.credentials("operator"), access)
        assert self._planner is not None
        processes = self._supervise(self._planner.processes())
        await self._write_state()
        await self._processes.start(processes)
        if self._part.has_gateway:
            await self.wait_settled(SETTLE_TIMEOUT_S)

    def _supervise(self, planned: Sequence[PlannedProcess]) -> list[RunningProcess]:
        prober = self._prober
        assert prober is not None
        return [self._processes.add(self._adapt(item), prober.probe) for item in planned]

    async def _stop(self) -> None:
        self._phase = "stopping"
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._write_state()
        await self._processes.stop(self.processes)
        if self._prober is not None:
            await self._prober.close()
            self._prober = None
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._states is not None:
            # A late write would leave a state file behind.
            await self._states.written()
            self._states = None
        if self._lock is not None:
            await asyncio.to_thread(self._clean_up, self._lock)
            self._directory = self._lock = None

    def _clean_up(self, lock: RunLock) -> None:
        # While the lock is held: a new launcher in this directory may use the same arenas.
        if self._resolved is not None:
            discard_arenas(self._resolved.region, self._root)
        remove_leftovers(self._root)
        lock.release()

    # -- reporting --------------------------------------------------------------------------------

    async def _write_state(self) -> None:
        """Whoever reads the state file from now on finds this state or a newer one."""
        if self._states is not None:
            self._put_state()
            await self._states.written()

    def _put_state(self) -> None:
        """Have the state file written soon: the event loop does not wait for a slow disk."""
        if self._states is None or self._resolved is None:
            return
        admin_urls, directory = self._admin_urls(), self.directory
        state = RegionState(
            region=self.region.name,
            part=self._part.name,
            phase=self._phase,
            launcher_pid=os.getpid(),
            started_s=self._started_s,
            gateway_url=self.gateway_url,
            admin_url=next(iter(admin_urls.values()), ""),
            gateways=admin_urls,
            region_file=str(directory.region_file),
            processes=tuple(process.record for process in self._processes),
            relays={
                process.name: str(directory.socket(process.name))
                for process in self._processes
                if process.kind == "relay"
            },
            agents=self._agent_controls(),
        )
        self._states.put(state)

    def _agent_controls(self) -> dict[str, str]:
        return {
            node.name: str(Endpoint(node.host, node.agent.control_port))
            for node in self.region.nodes
        }

    def _admin_urls(self) -> dict[str, str]:
        """Where the pages for operators of each gateway are that runs here, by its process."""
        region = self.region
        return {
            gateway_process(region, node): admin_url(region, node) for node in self._part.gateways
        }

    def _resolved_region(self) -> ResolvedRegion:
        if self._resolved is None:
            raise RuntimeError("the region is not started")
        return self._resolved


def _problems(region: RegionSpec, part: Part) -> list[Problem]:
    problems = (
        check_region(region)
        or part_problems(region, part)
        or missing_models(region, part.nodes) + missing_packages(region, part.nodes)
    )
    if problems or part.is_whole:
        return problems or taken_ports(region, part)
    # Every host works out the ports from the file, so those of a part are fixed.
    return taken_ports(resolve_part(region, part).region, part)


def _write(directory: RunDirectory, files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        directory.write(path, text.encode())
