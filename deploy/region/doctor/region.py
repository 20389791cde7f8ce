"""Asks everything of a region that this host can reach, and puts the answers to the checks."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from cryptography import x509

from deploy.gateway.sharing.overview import SharingOverview
from deploy.region.certs import hosts_of
from deploy.region.client import CannotAsk, asked
from deploy.region.doctor import host_checks
from deploy.region.doctor.certificates import RENEW, Certificate, date_check, name_checks
from deploy.region.doctor.findings import Check, ok, problem, warning
from deploy.region.doctor.host_checks import HostView
from deploy.region.doctor.port_checks import port_checks, shown_certificates
from deploy.region.doctor.reach import Reached, reach
from deploy.region.doctor.viewpoint import (
    RegionPort,
    Viewpoint,
    admin_title,
    gateway_title,
    region_ports,
)
from deploy.region.launch.addresses import engine_tls, engine_url
from deploy.region.launch.parts import part_problems
from deploy.region.launch.probes import cluster_reports
from deploy.region.launch.rundir import operator_key
from deploy.region.launch.trust import checks_grants, engine_key_file, signs_grants
from deploy.region.spec.loading import missing_models
from deploy.region.spec.region import NodeSpec, RegionSpec
from kvmanager.agent.client import AgentClient
from kvmanager.config_files.fields import tls_files
from kvmanager.config_files.problems import Problem
from local_pd import server as pd_front
from prfaas import server as prefill_front
from prfaas.engines.access import EngineAccess
from prfaas.engines.client import EngineHttp, open_session
from prfaas.engines.prefill_rpc import Empty
from scheduler.reports import ClusterReport
from transport import TlsFiles
from transport.errors import LocalError
from transport.grants import key_digest, load_private_key, load_public_keys
from transport.rpc import RpcClient, RpcError
from transport.tls import client_context

ASK_S: Final = 5.0
_SAME_FILE: Final = "start it anew from this region file"


@dataclass(slots=True)
class _Answers:
    """The findings so far. `releases` are those of fronts and gateways."""

    checks: list[Check] = field(default_factory=list)
    hosts: list[HostView] = field(default_factory=list)
    releases: dict[str, str] = field(default_factory=dict)


async def examine(view: Viewpoint, api_key: str = "") -> list[Check]:
    """Everything that can be said from here. `api_key`: an operator's, for the gateway's pages."""
    region, now = view.region, datetime.datetime.now(datetime.UTC)
    tls = tls_files(region.security.tls)
    checks = await asyncio.to_thread(_files_here, view, tls, now)
    reached = await reach(region_ports(view), tls)
    checks += port_checks(reached)
    checks += shown_certificates(reached, region.name, now)
    answers = _Answers()
    open_ports = {one.port.name: one for one in reached if not one.trouble}
    await _ask_agents(view, open_ports, answers)
    await _ask_fronts(view, reached, answers)
    await _ask_engines(view, open_ports, answers)
    await _ask_gateways(view, open_ports, api_key, answers)
    checks += answers.checks
    signing, known = await asyncio.to_thread(_grant_digests, view)
    hosts = answers.hosts
    checks += host_checks.engine_checks(hosts)
    checks += host_checks.version_checks(answers.releases, hosts)
    checks += host_checks.clock_checks(hosts, region.gateway_node.name)
    if not region.security.trusted_network:
        checks += host_checks.grant_checks(hosts, signing, known)
    checks += host_checks.exposure_checks(hosts)
    checks += host_checks.kernel_lines(hosts)
    checks += host_checks.memory_checks(hosts)
    checks += host_checks.ssd_checks(hosts)
    checks += host_checks.placement_checks(region, hosts)
    return checks


# ---- this host


def _files_here(view: Viewpoint, tls: TlsFiles | None, now: datetime.datetime) -> list[Check]:
    found: list[Check] = []
    if view.part is not None:
        missing: list[Problem] = [
            *part_problems(view.region, view.part),
            *missing_models(view.region, view.part.nodes),
        ]
        found += [problem(item.where, item.message, "copy it to this host") for item in missing]
        if not missing:
            found.append(ok("files of this host", "those that the region file names are there"))
    if tls is not None:
        found += _certificate_here(view, tls, now)
    return found + _grants_here(view)


def _certificate_here(view: Viewpoint, tls: TlsFiles, now: datetime.datetime) -> list[Check]:
    try:
        client_context(tls)
        texts = {"certificate of this host": tls.cert, "authority of this host": tls.ca}
        read = {
            about: Certificate.of(x509.load_pem_x509_certificates(path.read_bytes())[0])
            for about, path in texts.items()
        }
    except (LocalError, OSError, ValueError) as error:
        message = error.message if isinstance(error, LocalError) else str(error)
        return [problem("certificate of this host", message, RENEW)]
    found = [date_check(about, certificate, now) for about, certificate in read.items()]
    names = view.part.nodes if view.part is not None else ()
    here = [host for host in hosts_of(view.region) if set(host.nodes) & set(names)]
    return found + name_checks(
        "certificate of this host",
        read["certificate of this host"],
        view.region.name,
        roles={one.role for host in here for one in host.identities} or {"operator"},
        addresses={address for host in here for address in host.addresses},
    )


def _grants_here(view: Viewpoint) -> list[Check]:
    """Whether the gateway's key and the agents' keys belong together, where both are here."""
    private = signs_grants(view.region, view.directory.granting_key)
    public = checks_grants(view.region, view.directory.granting_keys)
    if private is None or public is None or not view.has_gateway:
        return []
    about = "keys of grants of this host"
    try:
        key = load_private_key(private.grant_file).public_key()
        known = load_public_keys(public.grant_file)
    except LocalError as error:
        return [problem(about, error.message, "`prfaas certs init` makes a pair")]
    if key not in known:
        what = f"{public.file} does not have the public key of {private.file}"
        return [problem(about, what, "openssl pkey -in KEY -pubout, on all hosts")]
    return [ok(about, f"they belong together, {key_digest(key)}")]


def _grant_digests(view: Viewpoint) -> tuple[str, list[str]]:
    """The digest of the gateway's key, "" where it is not here, and those of the public keys."""
    private = signs_grants(view.region, view.directory.granting_key)
    public = checks_grants(view.region, view.directory.granting_keys)
    signing, known = "", list[str]()
    try:
        if private is not None and view.has_gateway:
            signing = key_digest(load_private_key(private.grant_file).public_key())
        if public is not None:
            known = [key_digest(key) for key in load_public_keys(public.grant_file)]
    except LocalError:
        pass  # said already where they have to be here
    return signing, known


# ---- processes


async def _ask_agents(
    view: Viewpoint, open_ports: Mapping[str, Reached], answers: _Answers
) -> None:
    async def ask(node: NodeSpec) -> None:
        port = open_ports.get(f"agent {node.name}, control")
        if port is None:
            return  # the port's line says why
        client = AgentClient(str(port.port.at), view.credentials)
        try:
            status = await client.status(ASK_S)
            # The connection stands now, so that the answer takes one round trip.
            began_s, since_s = time.time(), time.monotonic()
            facts = await client.host_facts(ASK_S)
            took_s = time.monotonic() - since_s
            ahead_s = facts.now_s - (began_s + took_s / 2)
            answers.hosts.append(HostView(node, status, facts, ahead_s, took_s / 2))
        except RpcError as error:
            answers.checks.append(_not_told(f"agent {node.name}", error))
        finally:
            await client.close()

    await asyncio.gather(*map(ask, view.region.nodes))
    order = [node.name for node in view.region.nodes]
    answers.hosts.sort(key=lambda host: order.index(host.node.name))


async def _ask_fronts(view: Viewpoint, reached: Sequence[Reached], answers: _Answers) -> None:
    async def ask(port: RegionPort) -> None:
        cluster = view.region.cluster(port.name.removeprefix("front "))
        service = prefill_front.SERVICE if cluster.kind == "prefill" else pd_front.SERVICE
        client = RpcClient(str(port.at), service, view.credentials)
        try:
            report = await client.call("Report", Empty(), ClusterReport, ASK_S)
        except RpcError as error:
            answers.checks.append(_not_told(port.name, error))
            return
        finally:
            await client.close()
        answers.releases[port.name] = report.version
        answers.checks += _report_checks(port.name, report)

    fronts = [one.port for one in reached if one.port.kind == "front" and not one.trouble]
    await asyncio.gather(*map(ask, fronts))


def _report_checks(about: str, report: ClusterReport) -> list[Check]:
    if not report.heard:
        return [problem(about, report.reason, "look at that front, and at the way to it")]
    ill = [item for item in report.instances if not item.healthy]
    if not ill:
        return [ok(about, f"it can use all {len(report.instances)} engines")]
    return [
        problem(about, f"it cannot use {item.name}: {item.reason}", "look at that engine's log")
        for item in ill
    ]


async def _ask_engines(
    view: Viewpoint, open_ports: Mapping[str, Reached], answers: _Answers
) -> None:
    """Ask engines for their health with the key of this host. Others may have no connection to
    them.
    """
    region = view.region
    engines = {
        f"engine {item.name}": (node, item) for node in region.nodes for item in node.instances
    }
    found = {name: it for name, it in engines.items() if name in open_ports}
    key_file = engine_key_file(region, view.directory)
    try:
        access = await asyncio.to_thread(EngineAccess, key_file, tls_files(region.security.tls))
    except LocalError as error:
        if view.part is not None:
            answers.checks.append(problem("key of engines", error.message, "copy it to this host"))
        return

    async def ask(name: str, session: aiohttp.ClientSession) -> None:
        node, item = found[name]
        if not await EngineHttp(engine_url(region, node, item), session, access).health(ASK_S):
            scheme = "HTTP" if engine_tls(region, node) is None else "HTTPS"
            what = f"it does not answer {scheme} requests with the key {key_file}"
            fix = "does it still load (its log), and is engine.key the same on all hosts?"
            answers.checks.append(problem(name, what, fix))

    async with open_session() as session:
        await asyncio.gather(*(ask(name, session) for name in found))


async def _ask_gateways(
    view: Viewpoint, open_ports: Mapping[str, Reached], api_key: str, answers: _Answers
) -> None:
    key = api_key or await asyncio.to_thread(operator_key, view.directory.root)
    names = [gateway_title(view.region, node) for node in view.region.gateway_nodes]
    found = (_ask_gateway(view.region, name, open_ports, key, answers) for name in names)
    await asyncio.gather(*found)


async def _ask_gateway(
    region: RegionSpec,
    name: str,
    open_ports: Mapping[str, Reached],
    key: str,
    answers: _Answers,
) -> None:
    port, admin = open_ports.get(name), open_ports.get(admin_title(name))
    if port is None:
        return  # the port's line says why
    try:
        said = await asked(f"http://{port.port.at}", "/version", dict[str, str])
        answers.releases[name] = said.get("version", "")
        if region.gateway.admin is not None and admin is None:
            return  # its pages are only at a port that cannot be reached from here
        pages = f"http://{(admin or port).port.at}"
        reports = await cluster_reports(pages, key)
        if region.gateway.shared is not None:
            sharing = await asked(pages, "/prfaas/gateways", SharingOverview, key=key)
            answers.checks.append(_sharing_check(name, sharing))
    except CannotAsk as error:
        if error.status in (401, 403):
            what = "it tells operators only what it sees"
            answers.checks.append(warning(name, what, "give --api-key"))
        else:
            answers.checks.append(problem(name, str(error), _SAME_FILE))
        return
    known = {report.name for report in reports}
    for cluster in region.clusters:
        if cluster.name not in known:
            what = f"it has no report of cluster {cluster.name}"
            answers.checks.append(problem(name, what, "look at that cluster's front"))
    for report in reports:
        answers.checks += _report_checks(f"{name}, cluster {report.name}", report)


def _sharing_check(about: str, sharing: SharingOverview) -> Check:
    if sharing.state != "joined":
        what = f"it does not share with other gateways: {sharing.error}"
        return problem(about, what, "does Redis run, and does a firewall let that host reach it?")
    others = ", ".join(peer.name for peer in sharing.peers) or "no other gateway yet"
    return ok(about, f"it shares through Redis with {others}")


def _not_told(about: str, error: RpcError) -> Check:
    if error.code == "INVALID" and "ethod not found" in error.message:
        return warning(about, "it is of an older release and tells little", "upgrade it")
    return problem(about, f"it does not answer: {error.message}", _SAME_FILE)
