"""The tables of `prfaas plan live`. Knows answers of the gateway, not how they were had."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deploy.gateway.scheduling.plan_overview import (
    ClusterModel,
    PlanDecision,
    PlanGoal,
    PlanOverview,
    TrafficNow,
)
from deploy.table_style import TABLE_STYLE
from kvmanager.config_files.units import format_age, format_bytes, format_duration, format_rate


def print_plan(console: Console, found: PlanOverview, *, num_decisions: int = 10) -> None:
    """Settings, traffic, the region as planned with, and the last decisions."""
    _say(console, _mode(found))
    console.print(_settings_table(found))
    if found.conversion:
        _say(console, f"converting {found.conversion}")
    if found.traffic is not None:
        _say(console, _traffic(found.traffic))
    if found.region is not None:
        console.print(_clusters_table(found.region.clusters))
        for link in found.region.links:
            rate, rtt = format_rate(link.bytes_per_s), format_duration(link.rtt_s)
            _say(console, f"{link.source} to {link.target}: {rate}, round trip {rtt}")
        fixed, thousand = found.region.kv_fixed_bytes, 1000 * found.region.kv_token_bytes
        _say(
            console,
            f"KVCache: {format_bytes(round(fixed))} and {format_bytes(round(thousand))} "
            "per 1000 tokens",
        )
        for note in found.region.notes:
            _say(console, note)
    if found.unknown:
        _say(console, f"no plan: {found.unknown}")
    if found.decisions and num_decisions:
        console.print(_decisions_table(found.decisions[:num_decisions]))


def _mode(found: PlanOverview) -> str:
    if found.next_step_s is None:
        return f"mode {found.mode}: nothing is re-planned"
    every, next_step = format_age(found.period_s), format_age(found.next_step_s)
    return f"mode {found.mode}, every {every}, next in {next_step}"


def _settings_table(found: PlanOverview) -> Table:
    """What the region is set to, beside the best that was found last."""
    goal = next((item.goal for item in found.decisions if item.goal is not None), None)
    table = _table("setting")
    for heading in ("now", "best"):
        table.add_column(heading, justify="right")
    for cluster, tokens in found.thresholds.items():
        best = None if goal is None else goal.thresholds.get(cluster)
        table.add_row(f"t of {cluster}, tokens", f"{tokens:,.0f}", _number(best))
    for role, now in (("prefill", found.num_prefill), ("decode", found.num_decode)):
        for cluster, num in now.items():
            table.add_row(
                f"{cluster} {role} instances", f"{num}", _number(_wanted(goal, role, cluster))
            )
    return table


def _wanted(goal: PlanGoal | None, role: str, cluster: str) -> float | None:
    if goal is None:
        return None
    return (goal.num_prefill if role == "prefill" else goal.num_decode).get(cluster)


def _clusters_table(clusters: list[ClusterModel]) -> Table:
    table = _table("cluster")
    lengths = [tokens for tokens, _ in clusters[0].prefill_s] if clusters else []
    headings = ["instances", *(f"prefill of\n{tokens:,}" for tokens in lengths)]
    for heading in (*headings, "error", "prefills\nseen", "decode\nslots", "step"):
        table.add_column(heading, justify="right")
    for item in clusters:
        table.add_row(
            item.name,
            f"{item.num_instances}",
            *(format_duration(seconds) for _, seconds in item.prefill_s),
            "" if item.error is None else f"{item.error:.0%}",
            f"{item.num_seen:,}",
            f"{item.decode_slots}" if item.decode_slots else "",
            format_duration(item.step_s) if item.decode_slots else "",
        )
    return table


def _decisions_table(decisions: list[PlanDecision]) -> Table:
    table = _table("age", "reason")
    table.add_column("best gains", justify="right")
    table.add_column("done", overflow="fold")
    for item in decisions:
        gain = item.numbers.get("gain")
        table.add_row(
            format_age(item.age_s),
            item.reason,
            "" if gain is None else f"{gain:.1%}",
            "\n".join(item.done),
        )
    return table


def _traffic(traffic: TrafficNow) -> str:
    prompts = (
        f"prompts of {traffic.input_tokens:,.0f} tokens, {traffic.uncached_tokens:,.0f} of them "
        f"uncached (P90 {traffic.uncached_p90_tokens:,.0f})"
    )
    measured = f"{traffic.num_requests:,.0f} requests in {format_age(traffic.window_s)}"
    return (
        f"traffic: {traffic.rate_rps:.2f} requests/s, {prompts}, "
        f"{traffic.output_tokens:,.0f} tokens out; {measured}"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _table(*titles: str) -> Table:
    table = Table(**TABLE_STYLE)
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
