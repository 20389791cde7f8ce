"""Which processes a region, or the part of it on one host, consists of, and their command lines.

Pure: it takes a resolved region, paths and an environment, and returns process descriptions. It
does not know when they are started or whether they are healthy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blake3 import blake3

from deploy.gateway.config import TimeoutConfig
from deploy.gateway.media.config import MediaSection
from deploy.lab.emulator.control import relay_argv
from deploy.processes import module_argv, module_environment
from deploy.region.launch.addresses import engine_tls, engine_url, front_address, gateway_url
from deploy.region.launch.arenas import arena_name
from deploy.region.launch.ports import (
    RelayPlan,
    ResolvedRegion,
    advertised_address,
    advertised_addresses,
)
from deploy.region.launch.process_files import (
    front_file,
    gateway_file,
    gateway_text,
    region_text,
)
from deploy.region.launch.rundir import RunDirectory
from deploy.region.launch.trust import (
    checks_grants,
    engine_key_file,
    region_key_of,
)
from deploy.region.spec.encoding import encoder_role_of
from deploy.region.spec.pace import paced_options
from deploy.region.spec.region import (
    ClusterSpec,
    NodeSpec,
    RegionInstance,
    RegionSpec,
    gateway_process,
)
from kvmanager.agent.config import AgentSection
from kvmanager.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogLevel
from prfaas.engines.command import EncoderRole, EngineOptions, EngineSpec
from prfaas.engines.supervision.process import KILL_S, ProcessSpec
from transport import Endpoint

Kind = Literal["relay", "agent", "engine", "front", "gateway"]

# The gateway first, so that no request meets an engine that is gone; relays last, since agents
# use them.
STOP_ORDER: tuple[Kind, ...] = ("gateway", "front", "engine", "agent", "relay")

_NO_HOST = "media.invalid"
"""A name that no host has (RFC 2606)."""
AGENT_START_S = 600.0
"""An agent may have to touch every page of a large arena before it serves."""
START_S = 60.0
_CLOSE_S = 5.0
_ENGINE_GRACE_S = 15.0


def grace_s(kind: Kind, timeouts: TimeoutConfig) -> float:
    """How long a process may take to end by itself, before it is killed."""
    if kind == "gateway":  # it drains, then gives back what requests still held
        return timeouts.drain_s + timeouts.cluster_s + _CLOSE_S
    if kind == "front":  # it lets jobs end
        return timeouts.drain_s + _CLOSE_S
    return _ENGINE_GRACE_S if kind == "engine" else _CLOSE_S


def stop_limit_s(timeouts: TimeoutConfig) -> float:
    """How long a region takes to stop at most: its kinds of processes one after the other, each
    killed at the end of its grace.
    """
    return sum(grace_s(kind, timeouts) + KILL_S for kind in STOP_ORDER)


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """A process to run. `address` is how others reach it: a URL, host:port or a socket path."""

    name: str
    kind: Kind
    address: str
    process: ProcessSpec
    start_s: float = START_S
    """How long it may take until it serves."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the processes of one part of a region."""

    resolved: ResolvedRegion
    directory: RunDirectory
    environment: Mapping[str, str]
    devices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By instance, the variables that give its engine GPUs or cores of this machine."""

    def processes(self) -> list[PlannedProcess]:
        """All processes, in the order in which they should be started."""
        region, part, nodes = self.resolved.region, self.resolved.part, self._nodes()
        return [
            *(self._relay(relay) for relay in self.resolved.relays if relay.node in part.nodes),
            *(self._agent(node) for node in nodes),
            *(self._engine(node, item) for node in nodes for item in node.instances),
            *(self._front(region.cluster(name)) for name in part.fronts),
            *(self._gateway(region, node) for node in part.gateways),
        ]

    def _nodes(self) -> list[NodeSpec]:
        part = self.resolved.part
        return [node for node in self.resolved.region.nodes if node.name in part.nodes]

    def files(self) -> dict[Path, str]:
        """The files that the processes read. They must be written before the processes start."""
        resolved, directory = self.resolved, self.directory
        region = resolved.region
        files = {
            directory.region_file: region_text(region),
        }
        for at in resolved.part.gateways:
            path = directory.gateway_file_of(gateway_process(region, at))
            files[path] = gateway_text(gateway_file(resolved, directory, at))
        for name in resolved.part.fronts:
            front = front_file(resolved, directory, region.cluster(name))
            files[self._front_file(name)] = front.model_dump_json(indent=1)
        for node in self._nodes():
            files[self._agent_file(node)] = json.dumps(self._agent_settings(node), indent=1)
        if region.logs.format == "json":
            files[self._engine_logs] = json.dumps(engine_logging(region.logs.level), indent=1)
        return files

    @property
    def _engine_logs(self) -> Path:
        return self.directory.root / "engine-logs.json"

    def _log_variables(self, kind: Kind) -> dict[str, str]:
        logs = self.resolved.region.logs
        if kind != "engine":
            return {LEVEL_VARIABLE: logs.level, FORMAT_VARIABLE: logs.format}
        variables = {"VLLM_LOGGING_LEVEL": logs.level.upper()}
        if logs.format == "json":
            variables["VLLM_LOGGING_CONFIG_PATH"] = str(self._engine_logs)
        return variables

    def _front_file(self, cluster: str) -> Path:
        return self.directory.root / f"front.{cluster}.json"

    def _front(self, cluster: ClusterSpec) -> PlannedProcess:
        command = "prefill" if cluster.kind == "prefill" else "pd"
        file = str(self._front_file(cluster.name))
        argv = [*module_argv("deploy.cli", command), "--config", file]
        return self._planned(f"front.{cluster.name}", "front", front_address(cluster), argv)

    def _relay(self, relay: RelayPlan) -> PlannedProcess:
        control = self.directory.socket(relay.name)
        emulate = relay.emulate
        argv = relay_argv(
            to=relay.target,
            listen=relay.listen,
            rate=emulate.rate,
            rtt=emulate.rtt,
            jitter=emulate.jitter,
        )
        return self._planned(relay.name, "relay", relay.listen, [*argv, "--control", str(control)])

    def _agent(self, node: NodeSpec) -> PlannedProcess:
        control = str(Endpoint(node.host, node.agent.control_port))
        argv = [*module_argv("deploy.cli", "agent"), "--config", str(self._agent_file(node))]
        return self._planned(f"agent.{node.name}", "agent", control, argv)

    def _agent_file(self, node: NodeSpec) -> Path:
        return self.directory.root / f"agent.{node.name}.json"

    def _agent_settings(self, node: NodeSpec) -> dict[str, object]:
        agent, security = node.agent, self.resolved.region.security
        settings: dict[str, object] = {
            "listen": str(Endpoint(node.data_host, agent.data_port)),
            "control": str(Endpoint(node.bound_host, agent.control_port)),
            "socket": str(self.directory.socket(node.name)),
            "advertise": advertised_address(node),
            "send_to": self._destinations(),
            **self._detours(),
            **self._routes(node),
            "metrics_port": agent.metrics_port,
            "metrics_host": self.resolved.region.metrics_host(node),
            "metrics_key_file": None if security.metrics_key is None else str(security.metrics_key),
            "trusted_network": security.trusted_network,
        }
        settings |= self._cache_settings(node)
        key = region_key_of(self.resolved.region, self.directory.region_key, node.name)
        if key is not None:
            settings["region_key"] = key.model_dump(mode="json")
        grants = checks_grants(self.resolved.region, self.directory.granting_keys)
        if grants is not None:
            settings["granting_keys"] = grants.model_dump(mode="json")
        receiver = self.resolved.region.receiver
        if receiver is not None:
            settings["traces"] = receiver.model_dump(mode="json")
        if security.tls is not None:
            settings |= {f"tls_{key}": str(path) for key, path in security.tls}
        return settings

    def _destinations(self) -> list[str]:
        """The addresses at which agents receive, and the detours of links to them."""
        region = self.resolved.region
        detours = {address for link in region.links for address in link.endpoints.values()}
        return sorted(detours | {advertised_address(node) for node in region.nodes})

    def _detours(self) -> dict[str, object]:
        """The hosts behind the detours of links: the certificates there do not name the detour."""
        region = self.resolved.region
        at = {node.name: Endpoint.parse(advertised_address(node)).host for node in region.nodes}
        known = {to: at[name] for link in region.links for name, to in link.endpoints.items()}
        return {"detours": known} if known else {}

    def _routes(self, node: NodeSpec) -> dict[str, object]:
        """The addresses of hosts that have several, where the node or another one does."""
        own = [Endpoint.parse(address).host for address in node.agent.advertised]
        sources = own if len(own) > 1 else []
        others = [item for item in self.resolved.region.nodes if item.name != node.name]
        known = {item.name: advertised_addresses(item) for item in others}
        routes = {there[0]: list(there) for there in known.values() if sources or len(there) > 1}
        return {"routes": routes, "sources": sources} if routes else {}

    def _cache_settings(self, node: NodeSpec) -> dict[str, object]:
        agent, region = node.agent, self.resolved.region
        settings: dict[str, object] = agent.model_dump(
            mode="json", include=set(AgentSection.model_fields)
        )
        if not region.caches(node):
            return settings | {"cache_gib": 0, "ssd_dir": None, "ssd_gib": None}
        return settings | {
            "arena_name": arena_name(region, node, self.directory.root),
            "kv_events": {
                instance.name: endpoints
                for instance in node.instances
                if (endpoints := self._kv_events(node, instance)) is not None
            },
        }

    def _kv_events(self, node: NodeSpec, instance: RegionInstance) -> str | None:
        """Where the engine publishes, and repeats, what its own prefix cache holds.

        None if it has no prefix cache, or its agent does not follow caches. These are Unix sockets:
        the events contain prompts as token ids, so they must not leave the host. A digest names
        them, because names of instances may be longer than paths of sockets.
        """
        region = self.resolved.region
        caches = region.caches(node) and region.model_of(instance).prefix_caching
        if not caches or instance.encodes_only:
            return None
        digest = blake3(instance.name.encode()).hexdigest(8)
        sockets = (self.directory.socket(f"{word}.{digest}") for word in ("kv", "replay"))
        return ",".join(f"ipc://{socket}" for socket in sockets)

    def _engine(self, node: NodeSpec, instance: RegionInstance) -> PlannedProcess:
        region = self.resolved.region
        spec = engine_spec(
            region,
            node,
            instance,
            self.directory.socket(node.name),
            encoder_role=encoder_role_of(region, region.cluster_with(node), instance),
            kv_events=self._kv_events(node, instance),
            key_file=engine_key_file(region, self.directory),
            devices=self.devices.get(instance.name, {}),
            pace_log=self.directory.pace,
        )
        process = ProcessSpec(
            name=instance.name,
            argv=spec.argv(),
            log_path=self.directory.logs / f"{instance.name}.log",
            env=spec.environment(dict(self.environment) | self._log_variables("engine")),
            term_grace_s=grace_s("engine", region.gateway.timeouts),
        )
        url = engine_url(region, node, instance)
        return PlannedProcess(instance.name, "engine", url, process, 60.0 * spec.start_minutes)

    def _gateway(self, region: RegionSpec, node: str) -> PlannedProcess:
        name = gateway_process(region, node)
        file = str(self.directory.gateway_file_of(name))
        argv = [*module_argv("deploy.cli", "gateway"), "--config", file]
        return self._planned(name, "gateway", gateway_url(region, node), argv)

    def _planned(self, name: str, kind: Kind, address: str, argv: list[str]) -> PlannedProcess:
        env = module_environment(self.environment) | self._log_variables(kind)
        log_path = self.directory.logs / f"{name}.log"
        patience_s = grace_s(kind, self.resolved.region.gateway.timeouts)
        process = ProcessSpec(name, argv, log_path, env, term_grace_s=patience_s)
        start_s = AGENT_START_S if kind == "agent" else START_S
        return PlannedProcess(name, kind, address, process, start_s)


def engine_logging(level: LogLevel) -> dict[str, object]:
    """A configuration for `logging.config` with which an engine, its HTTP server and our connector
    log as the other processes do (vLLM reads its file by VLLM_LOGGING_CONFIG_PATH).
    """
    logger = {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "kvmanager.logs.json_formatter"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": dict.fromkeys(("vllm", "uvicorn", "prfaas"), logger),
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }


def media_args(media: MediaSection) -> tuple[str, ...]:
    """Arguments with which an engine fetches no media but those that it is to fetch: what the
    gateway overlooks gets 400. `args` of a model or an instance win over them.
    """
    domains = media.domains if media.fetch == "engine" else (_NO_HOST,)
    return ("--allowed-media-domains", *domains)


def engine_spec(
    region: RegionSpec,
    node: NodeSpec,
    instance: RegionInstance,
    agent_socket: Path | None,
    *,
    encoder_role: EncoderRole | None = None,
    kv_events: str | None = None,
    key_file: Path | None = None,
    devices: Mapping[str, str] | None = None,
    pace_log: Path = Path(),
) -> EngineSpec:
    """How the instance's engine is started. Without a socket it is a plain engine. The file's own
    variables win over those of `devices`. A paced one logs its passes in the folder `pace_log`.
    """
    model = region.model_of(instance)
    options = {name: getattr(model, name) for name in EngineOptions.model_fields}
    paced = paced_options(region, instance, pace_log)
    options |= {
        "enforce_eager": model.enforce_eager or bool(paced),
        "tensor_parallel_size": region.tensor_parallel_size_of(instance),
        "pipeline_parallel_size": region.pipeline_parallel_size_of(instance),
        "block_size": instance.block_size or model.block_size,
        "args": (
            *media_args(region.gateway.media),
            *model.args,
            *instance.args,
            *paced.get("args", ()),
        ),
        # vLLM checks the hosts of first addresses only, and not where these redirect.
        "env": {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
        | dict(devices or {})
        | model.env
        | instance.env
        | paced.get("env", {}),
    }
    by_nixl = agent_socket is not None and instance.nixl_port and not instance.encodes_only
    return EngineSpec(
        **options,
        nixl_at=str(Endpoint(node.host, instance.nixl_port)) if by_nixl else None,
        instance=instance.name,
        model=model.path,
        served_name=model.name,
        host=region.engine_host(node),
        port=instance.port,
        key_file=key_file,
        tls=engine_tls(region, node),
        max_num_seqs=region.decode_slots_of(instance),
        enable_prefix_caching=model.prefix_caching,
        agent_socket=None if agent_socket is None else str(agent_socket),
        encoder_role=encoder_role,
        kv_events=kv_events,
        traces=region.receiver,
    )
