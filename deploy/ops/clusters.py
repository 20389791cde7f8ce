"""`prfaas clusters`: clusters and instances with their load, thresholds, and what is in flight.

It asks the gateway and prints its answer, which is imported when the command runs, so that its help
appears at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.command_line import GatewayOption, JsonOption, KeyOption, RunDirOption
from deploy.ops.watching import IntervalOption, WatchOption, show
from deploy.region import client
from deploy.table_style import new_table, say
from kvmanager.config_files.units import format_age

if TYPE_CHECKING:
    from deploy.gateway.region_overview import RegionNow
    from deploy.gateway.sharing.overview import SharingOverview
    from scheduler.live.thresholds import ThresholdNow
    from scheduler.reports import ClusterReport, InstanceReport


def clusters_command(
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the clusters of the region, the load of each instance, and the thresholds.

    A cluster of kind prefill has a queue. `running` is what the front gave to an instance, `batch`
    and `waiting` are the engine's own numbers, and `kv used` is the share of its KV memory. A
    prompt with more uncached tokens than the current threshold of a link is meant for its prefill
    cluster. The planned threshold is that of the plan, before the state of the link raises it.

    \b
    prfaas clusters
    prfaas clusters --watch
    prfaas clusters --json | jq '.thresholds[] | [.cluster, .tokens, .reason]'
    """
    url, key = client.find_pages(gateway, run_dir, api_key)

    def look() -> RegionNow:
        from deploy.gateway.region_overview import RegionNow

        return client.ask(url, "/prfaas/region", RegionNow, key=key)

    show(look, print_clusters, as_json=as_json, watch=watch, interval_s=interval_s)


def gateways_command(
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the gateways of the region as one of them sees them, and which of them leads.

    The leader acts on the long term. A gateway alone answers with an error, and so does one that
    shares nothing.

    \b
    prfaas gateways
    prfaas gateways --gateway http://10.0.0.5:8000 --json | jq .leader
    """
    url, key = client.find_pages(gateway, run_dir, api_key)

    def look() -> SharingOverview:
        from deploy.gateway.sharing.overview import SharingOverview

        return client.ask(url, "/prfaas/gateways", SharingOverview, key=key)

    show(look, print_gateways, as_json=as_json, watch=watch, interval_s=interval_s)


def print_clusters(console: Console, found: RegionNow) -> None:
    """Print the clusters, their instances, the thresholds and what is in flight."""
    clusters = [
        *(("pd", name, report) for name, report in found.pds.items()),
        *(("prefill", name, report) for name, report in found.prefill.items()),
    ]
    table = new_table("cluster", "kind", "state", numbers=("queue", "running", "instances"))
    for kind, name, report in clusters:
        table.add_row(name, kind, *_cluster_cells(report))
    console.print(table)
    reports = [report for _, _, report in clusters if report is not None]
    rows = [(report.name, item) for report in reports for item in report.instances]
    if rows:
        numbers = ("running", "batch", "waiting", "kv used")
        instances = new_table("instance", "cluster", "role", "state", numbers=numbers)
        for name, item in rows:
            instances.add_row(item.name, name, item.role, *_instance_cells(item))
        console.print(instances)
    if found.thresholds:
        thresholds = new_table("link", numbers=("current threshold", "planned threshold"))
        thresholds.add_column("reason", overflow="fold")
        for each in found.thresholds:
            thresholds.add_row(*_threshold_cells(each))
        console.print(thresholds)
    for line in _lines(found, reports):
        say(console, line)


def print_gateways(console: Console, found: SharingOverview) -> None:
    """Print one line for each gateway, then one for each process of the one that answers."""
    table = new_table("gateway", "state", numbers=("requests",))
    leads = " (leads)"
    state = f"{found.state} for {format_age(found.for_s)}"
    table.add_row(found.name + (leads if found.leads else ""), state, "")
    for peer in found.peers:
        title = peer.name + (leads if peer.name == found.leader else "")
        table.add_row(title, "joined", f"{peer.requests:,}")
    console.print(table)
    for item in found.processes:
        age = format_age(item.for_s)
        say(console, f"process {item.number}: {item.state} for {age}, {item.restarts} restarts")
    if found.error:
        say(console, found.error)


def _cluster_cells(report: ClusterReport | None) -> list[str]:
    if report is None or not report.heard:
        return ["no news", "", "", ""]
    usable = sum(item.healthy and not item.draining for item in report.instances)
    queue = f"{report.queue_depth:,}" + (f" of {report.max_queued:,}" if report.max_queued else "")
    state = "healthy" if report.healthy else "not healthy"
    return [state, queue, f"{report.running:,}", f"{usable} of {len(report.instances)}"]


def _instance_cells(item: InstanceReport) -> list[str]:
    words = {
        "not healthy": not item.healthy,
        "leaving": item.leaving,
        "draining": item.draining,
        "changes role": not item.role_ready,
    }
    state = next((word for word, is_so in words.items() if is_so), "serving")
    used = "" if item.kv_usage is None else f"{item.kv_usage:.0%}"
    limit = item.decode_slots or item.max_concurrent
    running = f"{item.running:,}" + (f" of {limit:,}" if limit else "")
    return [state, running, f"{item.num_running:,}", f"{item.num_waiting:,}", used]


def _threshold_cells(each: ThresholdNow) -> list[str]:
    way = f"{each.cluster} to {each.pd}" if each.pd else each.cluster
    return [way, f"{each.tokens:,.0f}", f"{each.base_tokens:,.0f}", each.reason]


def _lines(found: RegionNow, reports: list[ClusterReport]) -> Iterator[str]:
    refused = sum(found.admission.refused.values())
    yield f"{found.in_flight:,} requests in flight; admitted {found.admission.admitted:,}" + (
        f", refused {refused:,}" if refused else ""
    )
    for name, tenant in found.admission.tenants.items():
        yield f"tenant {name}: {tenant.requests:,} requests, {tenant.tokens:,} tokens in flight"
    for report in reports:
        if report.reason:
            yield f"{report.name}: {report.reason}"
        for item in report.instances:
            if item.reason:
                yield f"{item.name}: {item.reason}"
