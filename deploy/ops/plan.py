"""`prfaas plan live`: the plan that a running gateway follows, and what it rests on.

It asks the gateway and prints its answer. The type is imported when the command runs, so that its
help appears at once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.command_line import GatewayOption, JsonOption, KeyOption, RunDirOption
from deploy.ops.watching import IntervalOption, WatchOption, show
from deploy.region import client
from deploy.table_style import new_table, say
from kvmanager.config_files.units import format_age, format_bytes, format_duration, format_rate

if TYPE_CHECKING:
    from deploy.gateway.scheduling.plan_overview import (
        ClusterModel,
        ModelPlanNow,
        PlanDecision,
        PlanOverview,
        TrafficNow,
    )


def live_command(
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    num_decisions: Annotated[
        int, typer.Option("--decisions", min=0, help="how many of the last decisions to show")
    ] = 10,
    watch: WatchOption = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the plan in force: planned thresholds and division, what was measured, decisions.

    Prefill times are learnt from prefills; error says how far off the last ones were. The best
    division is the best for the measured traffic. Each decision says what was done, or why nothing
    was done.

    \b
    prfaas plan live
    prfaas plan live --gateway http://10.0.0.5:8000 --json | jq '.decisions[0]'
    """
    from deploy.gateway.scheduling.plan_overview import PlanOverview

    url, key = client.find_pages(gateway, run_dir, api_key)
    show(
        lambda: client.ask(url, "/prfaas/plan", PlanOverview, key=key),
        partial(print_plan, num_decisions=num_decisions),
        as_json=as_json,
        watch=watch,
        interval_s=interval_s,
    )


def print_plan(console: Console, found: PlanOverview, *, num_decisions: int = 10) -> None:
    """Print the settings, the traffic, the region as planned with, and the last decisions."""
    say(console, _mode(found))
    console.print(_settings_table(found))
    if found.conversion:
        say(console, f"converting {found.conversion}")
    for plan in found.models:
        if len(found.models) > 1:
            say(console, f"model {plan.model}" + (f" in {plan.pd}" if plan.pd else ""))
        _print_model(console, plan)
    if found.decisions and num_decisions:
        console.print(_decisions_table(found.decisions[:num_decisions], len(found.models) > 1))


def _print_model(console: Console, plan: ModelPlanNow) -> None:
    """Print what the plan of one model rests on, or why there is none."""
    if plan.traffic is not None:
        say(console, _traffic(plan.traffic))
    if plan.region is not None:
        console.print(_clusters_table(plan.region.clusters))
        for link in plan.region.links:
            rate, rtt = format_rate(link.bytes_per_s), format_duration(link.rtt_s)
            say(console, f"{link.source} to {link.target}: {rate}, round trip {rtt}")
        fixed, thousand = plan.region.kv_fixed_bytes, 1000 * plan.region.kv_token_bytes
        say(
            console,
            f"KVCache: {format_bytes(round(fixed))} and {format_bytes(round(thousand))} "
            "per 1000 tokens",
        )
        for note in plan.region.notes:
            say(console, note)
    if plan.encode is not None:
        stage, own = (format_duration(s) for s in (plan.encode.stage_s, plan.encode.own_s))
        say(
            console,
            f"encoding: {stage} a request on an instance that encodes, {own} on one that prefills",
        )
    if plan.unknown:
        say(console, f"no plan: {plan.unknown}")


def _mode(found: PlanOverview) -> str:
    if found.next_step_s is None:
        return f"mode {found.mode}: nothing is re-planned"
    every, next_step = format_age(found.period_s), format_age(found.next_step_s)
    return f"mode {found.mode}, every {every}, next in {next_step}"


def _settings_table(found: PlanOverview) -> Table:
    """The present settings of the region beside those of the latest best plans."""
    # Newest decision first in the list, so the reversed order lets the newest goal win.
    goals = {
        (item.model, item.pd): item.goal
        for item in reversed(found.decisions)
        if item.goal is not None
    }
    # A threshold is named by its link where there are several PD clusters.
    best_tokens = {
        name: t
        for (_, pd), goal in goals.items()
        for cluster, t in goal.thresholds.items()
        for name in (cluster, f"{cluster} to {pd}")
    }
    table = new_table("setting", numbers=("now", "best"))
    for cluster, tokens in found.thresholds.items():
        table.add_row(
            f"planned threshold of {cluster}, tokens",
            f"{tokens:,.0f}",
            _number(best_tokens.get(cluster)),
        )
    for plan in found.models:
        goal = goals.get((plan.model, plan.pd))
        whose = f" of {plan.model}" if len(found.models) > 1 else ""
        for role, now, best in (
            ("encode", plan.num_encode, {} if goal is None else goal.num_encode),
            ("prefill", plan.num_prefill, {} if goal is None else goal.num_prefill),
            ("decode", plan.num_decode, {} if goal is None else goal.num_decode),
        ):
            for cluster, num in now.items():
                name = f"{cluster} {role} instances{whose}"
                table.add_row(name, f"{num}", _number(best.get(cluster)))
    return table


def _clusters_table(clusters: list[ClusterModel]) -> Table:
    # The gateway gives the same lengths for every cluster.
    lengths = [tokens for tokens, _ in clusters[0].prefill_s] if clusters else []
    prefills = [f"prefill of\n{tokens:,}" for tokens in lengths]
    last = ("error", "prefills\nseen", "decode\nslots", "step")
    table = new_table("cluster", numbers=("instances", *prefills, *last))
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


def _decisions_table(decisions: list[PlanDecision], has_several_models: bool) -> Table:
    names = ("age", "model") if has_several_models else ("age",)
    table = new_table(*names, "reason", numbers=("best gains",))
    table.add_column("done", overflow="fold")
    for item in decisions:
        gain = item.numbers.get("gain")
        table.add_row(
            format_age(item.age_s),
            *([_plan_name(item)] if has_several_models else []),
            item.reason,
            "" if gain is None else f"{gain:.1%}",
            "\n".join(item.done),
        )
    return table


def _plan_name(decision: PlanDecision) -> str:
    return f"{decision.model} in {decision.pd}" if decision.pd else decision.model


def _traffic(traffic: TrafficNow) -> str:
    prompts = (
        f"prompts of {traffic.input_tokens:,.0f} tokens, {traffic.uncached_tokens:,.0f} of them "
        f"uncached (P90 {traffic.uncached_p90_tokens:,.0f})"
    )
    media = traffic.media_tokens_per_s
    encoded = f"{media:,.0f} media tokens/s to encode, " if media else ""
    measured = f"{traffic.num_requests:,.0f} requests in {format_age(traffic.window_s)}"
    return (
        f"traffic: {traffic.rate_rps:.2f} requests/s, {prompts}, "
        f"{encoded}{traffic.output_tokens:,.0f} tokens out; {measured}"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
