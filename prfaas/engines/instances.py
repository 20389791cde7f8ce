"""The instances of a cluster: probes them, estimates their load, drains them, supervises engines.

It does not know jobs or requests, and it decides nothing about placement or roles: fronts read
`Instance`, set roles and are told of changes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvmanager.agent.messages import StatusReply
from kvmanager.agent.shared_clients import AgentClients
from prfaas.engines.access import EngineAccess
from prfaas.engines.client import EngineHttp, open_session
from prfaas.engines.command import EngineSpec
from prfaas.engines.errors import EngineError, UnknownInstance
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import Instance, InstanceSpec, check_names
from prfaas.engines.members import MemberRefused, cannot_join
from prfaas.engines.prefill_run import AttemptFailed
from prfaas.engines.supervision.supervisor import (
    ProcessState,
    Supervisor,
    SupervisorConfig,
    SupervisorEvent,
    engine_process,
)
from scheduler.reports import Role
from transport import Credentials, TlsFiles
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.engines")


@dataclass(frozen=True, slots=True)
class InstancesConfig:
    """Probing and supervision. `poll_load` reads the engines' metrics with every probe."""

    probes: ProbeTiming = field(default_factory=ProbeTiming)
    """How often engines and their node agents are asked whether they serve."""
    poll_load: bool = False
    drained_hold_s: float = 60.0
    """After an instance has drained, whoever asked for it should give it a new role or work again.
    If nothing comes for this many seconds, the front gives it work again: the caller may have died.
    """
    log_dir: Path = Path("logs")
    """Directory for the logs of the engines that the front starts."""
    engine_key_file: Path | None = None
    """File with the key that engines demand, readable by its owner or group. Left out: they demand
    none.
    """
    credentials: Credentials | None = None

    def engine_access(self) -> EngineAccess:
        """How to ask the engines. Raises LocalError when a file cannot be used."""
        tls = self.credentials if isinstance(self.credentials, TlsFiles) else None
        return EngineAccess(self.engine_key_file, tls)


class Instances:
    """All instances of `cluster`. `on_change` is called after an instance's usability changed."""

    def __init__(
        self,
        cluster: str,
        specs: Sequence[InstanceSpec],
        config: InstancesConfig,
        on_change: Callable[[Instance], None],
    ) -> None:
        self._cluster = cluster
        self._specs = check_names(specs)
        self._config = config
        self._on_change = on_change
        self._session: aiohttp.ClientSession | None = None
        self._agents = AgentClients(config.credentials)
        self._access: EngineAccess | None = None
        self._instances: dict[str, Instance] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task that probes each instance, by its name."""
        self._holds: dict[str, asyncio.TimerHandle] = {}
        """Timers that give drained instances work again, by instance."""

    @property
    def by_name(self) -> Mapping[str, Instance]:
        """Instances in the order of their specs; empty before `start`."""
        return self._instances

    async def start(self) -> None:
        """Start supervised engines, probe everything once, go on probing in the background.

        Raises LocalError when the engines' key or a certificate cannot be used.
        """
        self._access = await asyncio.to_thread(self._config.engine_access)
        self._session = open_session()
        for spec in self._specs:
            self._add(spec)
        await asyncio.gather(*(self._probe(item) for item in self._instances.values()))
        for item in self._instances.values():
            self._tasks[item.name] = start_task(self._keep_probing(item), f"probe {item.name}")

    def join(self, spec: InstanceSpec) -> Instance:
        """Add an instance to the cluster that runs, and start its engine if its spec has one. It is
        usable once probes found it well and like the others.

        Raises MemberRefused for a name that is taken.
        """
        if spec.name in self._instances:
            raise MemberRefused(f"{self._cluster} has an instance {spec.name} already")
        instance = self._add(spec)
        instance.joining = True
        self._tasks[spec.name] = start_task(self._join(instance), f"probe {spec.name}")
        return instance

    def set_leaving(self, name: str) -> Instance:
        """Take an instance out of placement for good. Raises UnknownInstance."""
        instance = self.known(name)
        instance.leaving = True
        self.set_draining(name, draining=True)
        return instance

    async def stop_serving(self, name: str) -> None:
        """Give up the prefills that still run on a known instance: it is as if its engine were
        gone.
        """
        task = self._tasks.pop(name, None)
        if task is not None:
            # A probe that succeeds would make it well again.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        instance = self._instances[name]
        instance.engine_health.mark_lost("it left the cluster")
        instance.gone.set()
        self._on_change(instance)

    async def remove(self, name: str) -> None:
        """Forget an instance that serves no more, and stop its engine if it was started here."""
        instance = self._instances.pop(name)
        if hold := self._holds.pop(name, None):
            hold.cancel()
        if instance.supervisor is not None:
            await instance.supervisor.stop()
        await instance.agent.close()

    async def wait_ready(
        self, timeout_s: float, progress: Callable[[str], None] | None = None
    ) -> None:
        """Wait until every instance transfers. Raises EngineStartFailed when a supervised engine
        fails to start, EngineError when the time is over; both name the instance.
        """
        deadline_s = time.monotonic() + timeout_s
        for instance in self._instances.values():
            if instance.supervisor is not None:
                left_s = max(0.0, deadline_s - time.monotonic())
                await instance.supervisor.wait_healthy(left_s, progress)
            while not instance.transfers:
                if time.monotonic() >= deadline_s:
                    raise EngineError(f"{instance.name} is not ready: {instance.reason}")
                if progress is not None:
                    progress(f"{instance.name}: {instance.reason}")
                await asyncio.sleep(0.2)

    def known(self, name: str) -> Instance:
        """The instance of this name. Raises UnknownInstance; all of them before `start`."""
        instance = self._instances.get(name)
        if instance is None:
            raise UnknownInstance(self._cluster, name)
        return instance

    def attempt_failed(self, name: str, error: AttemptFailed) -> None:
        """A try on a known instance failed: what it proved to be gone stays out."""
        if error.engine_lost:
            self.engine_lost(name, error.message)
        if error.agent_lost:
            self.agent_lost(name, error.message)

    def engine_lost(self, name: str, reason: str) -> None:
        """A request proved that the engine is gone; it stays out until a probe succeeds."""
        # Who says so may have begun while the instance was still here.
        instance = self._instances.get(name)
        if instance is not None and instance.engine_health.mark_lost(reason):
            logger.warning("%s: engine lost: %s", name, reason)
            self._on_change(instance)

    def agent_lost(self, name: str, reason: str) -> None:
        """A call proved that the node agent is gone; it stays out until a probe succeeds."""
        for instance in self._beside(name):
            if instance.agent_health.mark_lost(reason):
                agent = instance.spec.agent
                logger.warning("%s: node agent %s lost: %s", instance.name, agent, reason)
                self._on_change(instance)

    def landing_room_said(self, name: str, room_bytes: int | None) -> None:
        """The instance's node agent told how many bytes one more landing can take there.

        None: it did not tell; its next status does.
        """
        if room_bytes is None:
            return
        # Instances that share an agent share its memory for landings.
        for instance in self._beside(name):
            instance.landing_room_bytes = room_bytes

    def set_draining(self, name: str, *, draining: bool) -> None:
        """Take an instance out of placement, or back in. Raises UnknownInstance."""
        instance = self.known(name)
        draining = draining or instance.leaving
        if hold := self._holds.pop(name, None):
            hold.cancel()
        if instance.draining != draining:
            instance.draining = draining
            self._on_change(instance)

    def drained(self, name: str) -> None:
        """The wait for an instance's drain is over.

        The instance returns to placement after `drained_hold_s` unless `set_draining` comes first.
        """
        instance = self._instances.get(name)
        if instance is None or not instance.draining or instance.leaving:
            return
        self.set_draining(name, draining=True)
        loop = asyncio.get_running_loop()
        self._holds[name] = loop.call_later(self._config.drained_hold_s, self._hold_over, name)

    def set_role(self, name: str, role: Role, epoch: int) -> None:
        """Give the instance this role, ordered in this epoch. Raises UnknownInstance."""
        instance = self.known(name)
        instance.role, instance.role_epoch = role, epoch
        self._on_change(instance)

    async def look(self, name: str) -> None:
        """Probe an engine now instead of at the next interval. Raises UnknownInstance."""
        await self._judge(self.known(name), self._probe_engine)

    async def close(self) -> None:
        """Stop probing, stop supervised engines, close connections."""
        for hold in self._holds.values():
            hold.cancel()
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        supervisors = [item.supervisor for item in self._instances.values() if item.supervisor]
        await asyncio.gather(*(item.stop() for item in supervisors))
        await asyncio.gather(*(item.agent.close() for item in self._instances.values()))
        if self._session is not None:
            await self._session.close()

    def _beside(self, name: str) -> list[Instance]:
        """The instance and those that share its node agent; none if it has left."""
        own = self._instances.get(name)
        everyone = () if own is None else self._instances.values()
        return [item for item in everyone if own and item.spec.agent == own.spec.agent]

    def _hold_over(self, name: str) -> None:
        held_s = self._config.drained_hold_s
        logger.warning("%s: drained %g s ago and no order came: it gets work again", name, held_s)
        self.set_draining(name, draining=False)

    def _add(self, spec: InstanceSpec) -> Instance:
        assert self._session is not None
        assert self._access is not None
        http = EngineHttp(spec.engine_url, self._session, self._access)
        instance = self._instances[spec.name] = Instance(spec, http, self._agents.open(spec.agent))
        if spec.engine is not None:
            instance.supervisor = self._supervise(instance, spec.engine)
        return instance

    async def _join(self, instance: Instance) -> None:
        self._on_change(instance)
        await self._probe(instance)
        await self._keep_probing(instance)

    def _supervise(self, instance: Instance, engine: EngineSpec) -> Supervisor:
        def on_event(event: SupervisorEvent) -> None:
            if event.state is ProcessState.BACKOFF:
                self.engine_lost(instance.name, event.reason)
                instance.gone.set()

        supervisor = Supervisor(
            engine_process(engine, self._config.log_dir),
            instance.http.health,
            SupervisorConfig(60.0 * engine.start_minutes, self._config.probes),
            on_event,
        )
        supervisor.start()
        return supervisor

    async def _keep_probing(self, instance: Instance) -> None:
        probes = self._config.probes
        while True:
            steady = instance.transfers
            await asyncio.sleep(probes.interval_s if steady else probes.start_interval_s)
            await self._probe(instance)

    async def _probe(self, instance: Instance) -> None:
        probes = self._probe_engine, self._probe_agent
        await asyncio.gather(*(self._judge(instance, probe) for probe in probes))

    async def _judge(
        self, instance: Instance, probe: Callable[[Instance], Awaitable[bool]]
    ) -> None:
        """Run one probe and tell at once what it changed, without waiting for the other probe."""
        # The probe is called here, not by the caller: a coroutine made for a task that is cancelled
        # before its first step would never be awaited.
        changed = await probe(instance)
        if instance.transfers:
            instance.gone.clear()
        elif instance.engine_health.gone or instance.agent_health.gone:
            instance.gone.set()
        if changed:
            logger.info("%s: %s", instance.name, instance.reason or "ready")
            self._on_change(instance)

    async def _probe_engine(self, instance: Instance) -> bool:
        timeout_s = self._config.probes.timeout_s
        if not await instance.http.health(timeout_s):
            return instance.engine_health.probe_failed(
                f"{instance.spec.engine_url} does not answer"
            )
        if self._config.poll_load:
            started, asked_s = instance.load.poll_starts(), time.monotonic()
            try:
                load = await instance.http.load(timeout_s)
            except EngineError as error:
                return instance.engine_health.probe_failed(str(error))
            instance.engine_load, instance.looked_at_s = load, asked_s
            instance.load.polled(load.num_running + load.num_waiting, started)
        return instance.engine_health.probe_succeeded()

    async def _probe_agent(self, instance: Instance) -> bool:
        try:
            status = await instance.agent.status(self._config.probes.timeout_s)
        except RpcError as error:
            return instance.agent_health.probe_failed(error.message)
        if instance.spec.encodes_only:
            return _judge_encoder(instance, status)
        engine = next((item for item in status.engines if item.instance == instance.name), None)
        if engine is None:
            # Engine and agent may both be well, but without their connection no KVCache of the
            # engine can leave or arrive.
            return instance.agent_health.probe_failed(
                f"{instance.spec.agent} has no connection from an engine called {instance.name}"
            )
        instance.cache, instance.kv_block_bytes = engine.cache, engine.kv_block_bytes
        # An engine may restart with other arguments between two probes, and fronts place work by
        # layouts.
        is_changed = (instance.layout_fingerprint, instance.text_only) != (
            engine.layout_fingerprint,
            engine.text_only,
        )
        instance.layout_fingerprint = engine.layout_fingerprint
        instance.layout, instance.weights = engine.layout, engine.weights
        instance.adapters, instance.text_only = engine.adapters, engine.text_only
        instance.encoder = status.encoder_of(instance.name)
        instance.landing_cap_bytes = status.landing_cap_bytes
        instance.landing_room_bytes = status.landing_room_bytes
        # Only one that joins is held to the others: those of the region's first configuration may
        # differ, since new weights come to one instance after the other.
        if instance.joining and (why := cannot_join(instance, self._instances.values())):
            return instance.agent_health.probe_failed(f"may not join: {why}")
        instance.joining = False
        return instance.agent_health.probe_succeeded() or is_changed


def _judge_encoder(instance: Instance, status: StatusReply) -> bool:
    """Take in what the node agent says of an instance that keeps no KVCache. True if that changed
    its health.
    """
    if status.embeddings is None:
        return instance.agent_health.probe_failed(
            f"{instance.spec.agent} keeps no embeddings: its embedding_gib is 0"
        )
    if all(one.instance != instance.name for one in status.encoders):
        return instance.agent_health.probe_failed(
            f"{instance.spec.agent} has no connection from an encoder called {instance.name}"
        )
    instance.encoder = status.encoder_of(instance.name)
    instance.landing_cap_bytes = status.landing_cap_bytes
    instance.landing_room_bytes = status.landing_room_bytes
    instance.joining = False
    return instance.agent_health.probe_succeeded()
