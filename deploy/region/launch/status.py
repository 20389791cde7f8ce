"""What a running region holds now, according to its launcher's state file and its processes.

It works from any process on the machine, and changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.gateway.cache.api import hit_share
from deploy.gateway.scheduling.plan_overview import PlanOverview
from deploy.gateway.sharing.overview import SharingOverview
from deploy.lab.emulator.control import RelayControl, RelayError
from deploy.lab.emulator.faults import LinkReport
from deploy.region.cache_identity import engines_of
from deploy.region.client import CannotAsk, asked
from deploy.region.launch.probes import cluster_reports
from deploy.region.launch.rundir import RegionState, operator_key
from deploy.region.launch.trust import credentials_in
from deploy.table_style import new_table
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import StatusReply
from kvmanager.config_files.units import format_age, format_bytes, format_duration, format_rate
from prfaas.engines.supervision.guard import live_session_members
from scheduler.reports import ClusterReport, unlike_groups
from transport import Credentials
from transport.rpc import RpcError

_TIMEOUT_S = 2.0


class ProcessUse(msgspec.Struct, frozen=True):
    """What a process and its children use. `memory_bytes` counts shared memory for each of them."""

    num_processes: int
    memory_bytes: int
    uptime_s: float


class RegionStatus(msgspec.Struct, frozen=True):
    """Everything that `prfaas status` shows. A process that did not answer is missing."""

    state: RegionState
    launcher_lives: bool
    use: dict[str, ProcessUse]
    agents: dict[str, StatusReply]
    links: dict[str, LinkReport]
    plan: PlanOverview | None = None
    gateways: dict[str, SharingOverview] = {}
    """What each gateway says of its sharing with others, by its process."""
    unlike: tuple[str, ...] = ()
    """Which engines of one model can share no KVCache, and why."""


async def region_status(state: RegionState) -> RegionStatus:
    """Ask all processes at once, for at most a few seconds."""
    lives = state.launcher_lives()
    credentials = credentials_in(state) if lives else None
    # The agents of a dead launcher are gone, and asking them would only take time.
    started = {item.name for item in state.processes} if lives else set()
    own = {node: at for node, at in state.agents.items() if f"agent.{node}" in started}
    agents, plan, gateways, reports = await asyncio.gather(
        asyncio.gather(*(_agent(control, credentials) for control in own.values())),
        _plan(state, lives),
        _sharing(state, lives),
        _reports(state, lives),
    )
    answers = {n: s for n, s in zip(own, agents, strict=True) if s is not None}
    links = [_link(Path(path)) for path in state.relays.values()]
    return RegionStatus(
        state=state,
        launcher_lives=lives,
        use={item.name: _use(item.pid) for item in state.processes if lives and item.pid},
        agents=answers,
        links={n: r for n, r in zip(state.relays, links, strict=True) if r is not None},
        plan=plan,
        gateways=gateways,
        unlike=tuple(_unlike(answers.values(), reports)),
    )


def render_status(status: RegionStatus) -> RenderableType:
    """The status as tables for a terminal."""
    state = status.state
    phase = state.phase if status.launcher_lives else "dead: its launcher was killed"
    style = "green" if phase == "running" else "yellow" if status.launcher_lives else "bold red"
    title = Text.assemble(
        ("region ", "dim"), (state.title, "bold"), "  ", (phase, style), "  ", state.gateway_url
    )
    tables = [_process_table(status)]
    if status.agents:
        tables.append(_agent_table(status))
        if any(agent.cache is not None for agent in status.agents.values()):
            tables.append(_cache_table(status))
    if status.links:
        tables.append(_link_table(status))
    parts: list[RenderableType] = [title]
    for table in tables:
        # Edges are empty lines, and one between two tables is enough.
        table.show_edge = False
        parts += [Text(), table]
    if sharing := list(_sharing_lines(status.gateways)):
        parts += [Text(), *sharing]
    if omissions := list(_omissions(status.plan)):
        parts += [Text(), *map(Text, omissions)]
    if status.unlike:
        parts += [Text(), *(Text(sentence, style="red") for sentence in status.unlike)]
    logs = sorted({str(Path(item.log).parent) for item in state.processes})
    return Group(*parts, Text(), Text(f"logs are in {', '.join(logs)}", style="dim"))


def _sharing_lines(gateways: Mapping[str, SharingOverview]) -> Iterator[Text]:
    """How each gateway works together with others, and which of them leads."""
    for process, seen in gateways.items():
        since = format_age(seen.for_s)
        if seen.state == "joined":
            others = ", ".join(peer.name for peer in seen.peers) or "none"
            role = "it leads" if seen.leads else f"{seen.leader or 'nobody'} leads"
            yield Text(f"{process} has shared with others ({others}) for {since}; {role}")
        else:
            yield Text(f"{process} has been alone for {since}: {seen.error}", style="yellow")
        for item in seen.processes:
            again = f", started again {item.restarts} times" if item.restarts else ""
            line = f"  process {item.number} (pid {item.pid}): {item.state}"
            style = "" if item.state == "serving" else "yellow"
            yield Text(f"{line} for {format_age(item.for_s)}{again}", style=style)


def _omissions(plan: PlanOverview | None) -> Iterator[str]:
    """What the long-term loop cannot plan with, and why."""
    if plan is None or plan.mode == "off":
        return
    for model in plan.models:
        if model.unknown:
            yield f"no plan of {model.model}: {model.unknown}"
        for note in model.region.notes if model.region is not None else ():
            yield f"plan of {model.model}: {note}"


def _process_table(status: RegionStatus) -> Table:
    table = new_table("process", "kind", "state", numbers=("up", "memory", "restarts"))
    table.add_column("address", overflow="fold")
    for item in status.state.processes:
        use = status.use.get(item.name)
        state = item.state if status.launcher_lives else "gone"
        table.add_row(
            item.name,
            item.kind,
            Text(state, style="green" if state == "healthy" else "red"),
            "" if use is None else format_age(use.uptime_s),
            "" if use is None else format_bytes(use.memory_bytes),
            str(item.num_restarts or ""),
            item.address,
        )
    return table


def _agent_table(status: RegionStatus) -> Table:
    table = new_table("agent", "tls", numbers=("arena", "free"))
    for heading in ("landings", "outboxes", "engines"):
        table.add_column(heading, overflow="fold")
    for name, agent in status.agents.items():
        table.add_row(
            name,
            "yes" if agent.is_encrypted else "no",
            format_bytes(agent.arena_bytes),
            format_bytes(agent.free_bytes),
            _held(agent.num_landings, agent.landing_bytes),
            _held(agent.num_outboxes, agent.outbox_bytes),
            ", ".join(sorted(engine.instance for engine in agent.engines)),
        )
    return table


def _cache_table(status: RegionStatus) -> Table:
    """What each node has cached. `hits` is the share of the tokens that its engines looked up."""
    table = new_table(
        "cache", numbers=("kv", "windows", "states", "on ssd", "in use", "prompts", "hits")
    )
    for name, agent in status.agents.items():
        cache = agent.cache
        if cache is None:
            continue
        in_arena = [cache.nbytes.get(f"arena/{kind}", 0) for kind in ("kv", "window", "state")]
        on_ssd = sum(size for part, size in cache.nbytes.items() if part.startswith("ssd/"))
        share = hit_share(cache)
        table.add_row(
            name,
            *map(format_bytes, in_arena),
            format_bytes(on_ssd),
            format_bytes(cache.pinned_bytes),
            str(cache.queries),
            "" if share is None else f"{share:.0%}",
        )
    return table


def _link_table(status: RegionStatus) -> Table:
    table = new_table(
        "link", numbers=("rate", "rtt", "sent", "on its\nway", "returned", "connec-\ntions")
    )
    table.add_column("faults", overflow="fold")
    for name, link in status.links.items():
        faults = ["cut"] if link.is_cut else []
        faults += [f"{direction} stalled" for direction in link.stalled]
        faults += [f"{direction} swallowed" for direction in link.swallowing]
        table.add_row(
            name,
            format_rate(link.rate_bytes_per_s),
            format_duration(link.rtt_s),
            format_bytes(link.forward.out_bytes),
            format_bytes(link.forward.held_bytes),
            format_bytes(link.backward.out_bytes),
            str(link.open_connections),
            Text(", ".join(faults), style="red"),
        )
    return table


def _unlike(agents: Iterable[StatusReply], reports: Iterable[ClusterReport]) -> list[str]:
    """Why engines of one model share no KVCache. The gateway knows those of other hosts, too."""
    known = {item.name: item for item in engines_of(agents)}
    heard = (item for report in reports for item in report.instances)
    known |= {item.name: item for item in heard if item.layout_fingerprint}
    return unlike_groups(known.values())


async def _plan(state: RegionState, lives: bool) -> PlanOverview | None:
    if not (lives and state.gateway_url):
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            url, key = await _gateway(state)
            return await asked(url, "/prfaas/plan", PlanOverview, key=key)
    except (CannotAsk, TimeoutError):
        return None


async def _reports(state: RegionState, lives: bool) -> list[ClusterReport]:
    """The clusters as the gateway here sees them; none if there is no gateway, or no answer."""
    if not (lives and state.gateway_url):
        return []
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await cluster_reports(*await _gateway(state))
    except (CannotAsk, TimeoutError):
        return []


async def _gateway(state: RegionState) -> tuple[str, str]:
    """Where the gateway's pages for operators are, and the key that they need."""
    key = await asyncio.to_thread(operator_key, Path(state.region_file).parent)
    return state.admin_url or state.gateway_url, key


async def _sharing(state: RegionState, lives: bool) -> dict[str, SharingOverview]:
    """What the gateways here say; one that does not answer, or shares nothing, is missing."""
    if not lives:
        return {}
    key = await asyncio.to_thread(operator_key, Path(state.region_file).parent)

    async def ask(process: str, url: str) -> tuple[str, SharingOverview] | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return process, await asked(url, "/prfaas/gateways", SharingOverview, key=key)
        except (CannotAsk, TimeoutError):
            return None

    found = await asyncio.gather(*(ask(*each) for each in state.gateways.items()))
    return dict(each for each in found if each is not None)


async def _agent(control: str, credentials: Credentials | None) -> StatusReply | None:
    client = AgentClient(control, credentials)
    try:
        return await client.status(_TIMEOUT_S)
    except RpcError:
        return None
    finally:
        await client.close()


def _link(path: Path) -> LinkReport | None:
    try:
        return RelayControl(path, timeout_s=_TIMEOUT_S).report()
    except RelayError:
        return None


def _use(session: int) -> ProcessUse:
    memory_bytes = num_processes = 0
    started_s = time.time()
    for pid in live_session_members(session):
        try:
            process = psutil.Process(pid)
            memory_bytes += process.memory_info().rss
            started_s = min(started_s, process.create_time())
        # A process may end while it is asked.
        except psutil.Error:
            continue
        num_processes += 1
    return ProcessUse(num_processes, memory_bytes, time.time() - started_s)


def _held(by_state: dict[str, int], nbytes: int) -> str:
    """How many there are in each state, and the memory that they hold together."""
    counts = ", ".join(f"{count} {state}" for state, count in by_state.items() if count)
    return f"{format_bytes(nbytes)}: {counts}" if counts else "0"
