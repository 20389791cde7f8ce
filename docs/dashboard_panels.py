"""What Grafana's dashboards of a region show: titles, units and queries.

`$region` and `$__rate_interval` are Grafana's. Tests run every query against a Prometheus server
that scrapes a region. Knows no Grafana.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

R: Final = 'region="$region"'


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the legend of its lines. `quiet` says why it may find nothing in a region that is
    well, although its metric exists.
    """

    expr: str
    legend: str
    quiet: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of lines. `unit` is Grafana's name of it."""

    title: str
    unit: str
    text: str
    queries: tuple[Query, ...]
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `name` names its file and its address."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def rate(metric: str, by: str, more: str = "") -> str:
    """The sum of rates of a counter, by labels."""
    return f"sum by ({by}) (rate({metric}{{{R}{more}}}[$__rate_interval]))"


def mean(histogram: str, by: str) -> str:
    """The mean of what a histogram observed lately, by labels."""
    return f"{rate(histogram + '_sum', by)} / {rate(histogram + '_count', by)}"


def quantiles(histogram: str, by: str, *shares: float) -> tuple[Query, ...]:
    """Quantiles of what a histogram observed lately, by a label."""
    buckets = rate(f"{histogram}_bucket", f"{by}, le")
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", f"{{{{{by}}}}} p{share * 100:g}")
        for share in shares
    )


def level(metric: str, by: str, how: str = "sum") -> str:
    """A gauge over all processes of the region, by labels."""
    return f"{how} by ({by}) ({metric}{{{R}}})"


_GATEWAY: Final = "prfaas_gateway_"
_NO_FAULT: Final = "nothing has failed"

REGION: Final = Board(
    "region",
    "PrfaaS region",
    "Requests, first tokens and routes of a region.",
    (
        Panel(
            "Requests",
            "reqps",
            "Requests that ended, by status.",
            (Query(rate(f"{_GATEWAY}requests_total", "status"), "{{status}}"),),
        ),
        Panel(
            "Failed requests",
            "percentunit",
            "Share of requests with a 5xx status.",
            (
                Query(
                    rate(f"{_GATEWAY}requests_total", "region", ',status=~"5.."')
                    + " / "
                    + rate(f"{_GATEWAY}requests_total", "region"),
                    "failed",
                    _NO_FAULT,
                ),
            ),
        ),
        Panel(
            "In flight",
            "short",
            "Requests being served, by gateway.",
            (Query(level(f"{_GATEWAY}in_flight_requests", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Processes that answer",
            "short",
            "1: Prometheus gets the metrics of the process.",
            (Query(level("up", "job, instance", "min"), "{{instance}}"),),
        ),
        Panel(
            "Time to first token",
            "s",
            "From the request's arrival at the gateway.",
            quantiles(f"{_GATEWAY}time_to_first_token_seconds", "model_name", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Parts of the time to first token",
            "s",
            "Means of offloaded requests; docs/operations.md says what each part is.",
            (Query(mean(f"{_GATEWAY}ttft_part_seconds", "part"), "{{part}}"),),
            is_stacked=True,
        ),
        Panel(
            "Between tokens",
            "s",
            "Time from one piece of a stream to the next.",
            quantiles(f"{_GATEWAY}inter_token_latency_seconds", "model_name", 0.5, 0.95),
        ),
        Panel(
            "Whole requests",
            "s",
            "Arrival to last byte, by route.",
            quantiles(f"{_GATEWAY}e2e_request_latency_seconds", "route", 0.5, 0.95),
        ),
        Panel(
            "Tokens",
            "short",
            "Tokens a second, of prompts and of answers.",
            (
                Query(
                    rate(f"{_GATEWAY}prompt_tokens_total", "model_name"), "{{model_name}} prompts"
                ),
                Query(
                    rate(f"{_GATEWAY}generation_tokens_total", "model_name"),
                    "{{model_name}} answers",
                ),
            ),
        ),
        Panel(
            "Routes",
            "reqps",
            "Where prompts are computed.",
            (Query(rate(f"{_GATEWAY}decisions_total", "route"), "{{route}}"),),
        ),
        Panel(
            "Reasons",
            "reqps",
            "Why; docs/runbook has a page for each.",
            (Query(rate(f"{_GATEWAY}decisions_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Predicted / measured",
            "percentunit",
            "Predicted over measured times to first token.",
            (
                Query(
                    rate(f"{_GATEWAY}ttft_predicted_seconds_sum", "route")
                    + " / "
                    + rate(f"{_GATEWAY}ttft_measured_seconds_sum", "route"),
                    "{{route}}",
                ),
            ),
        ),
        Panel(
            "Failures on the way",
            "reqps",
            "Second tries, and prefills that failed.",
            (
                Query(rate(f"{_GATEWAY}retries_total", "reason"), "again: {{reason}}", _NO_FAULT),
                Query(
                    rate(f"{_GATEWAY}prefill_failures_total", "target, code"),
                    "{{target}}: {{code}}",
                    _NO_FAULT,
                ),
            ),
        ),
    ),
)

LINK: Final = Board(
    "link",
    "PrfaaS links",
    "What links carry, and how routing sees them.",
    (
        Panel(
            "Condition",
            "short",
            "The condition of each link; docs/runbook has a page for each.",
            (
                Query(
                    level(f"{_GATEWAY}link_condition", "source, target, condition", "max")
                    + " == 1",
                    "{{source}} to {{target}}: {{condition}}",
                ),
            ),
        ),
        Panel(
            "Threshold",
            "short",
            "Prompts with more uncached tokens than the current threshold go over the link.",
            (
                Query(
                    level(f"{_GATEWAY}threshold_tokens", "source, target", "max"),
                    "{{source}} to {{target}}, current",
                ),
                Query(
                    level(f"{_GATEWAY}threshold_base_tokens", "source, target", "max"),
                    "{{source}} to {{target}}, planned",
                ),
            ),
        ),
        Panel(
            "Rate",
            "Bps",
            "What transfers get, what they would get, and the most of the last minutes.",
            tuple(
                Query(
                    level(f"prfaas_link_{word}_bytes_per_second", "node, link"),
                    f"{{{{node}}}} to {{{{link}}}}, {word}",
                )
                for word in ("achieved", "available", "reference")
            ),
        ),
        Panel(
            "Acknowledged",
            "Bps",
            "KVCache that arrived, before coding.",
            (Query(rate("prfaas_link_acked_bytes_total", "node, link"), "{{node}} to {{link}}"),),
        ),
        Panel(
            "Round trip",
            "s",
            "And the part of it that queues in the network add.",
            (
                Query(level("prfaas_link_rtt_seconds", "node, link"), "{{node}} to {{link}}"),
                Query(
                    level("prfaas_link_queueing_delay_seconds", "node, link"),
                    "{{node}} to {{link}}, queues",
                ),
            ),
        ),
        Panel(
            "Loss",
            "percentunit",
            "Retransmitted share of the bytes.",
            (Query(level("prfaas_link_loss_ratio", "node, link"), "{{node}} to {{link}}"),),
        ),
        Panel(
            "Backlog",
            "s",
            "Time to send what waits at the sender.",
            (Query(level("prfaas_link_backlog_seconds", "node, link"), "{{node}} to {{link}}"),),
        ),
        Panel(
            "Limited by",
            "short",
            "What keeps a link from carrying more.",
            (
                Query(
                    f"{level('prfaas_link_limited_by', 'node, link, limit')} == 1",
                    "{{node}} to {{link}}: {{limit}}",
                ),
            ),
        ),
        Panel(
            "Transfer tail",
            "s",
            "End of the prefill until the last byte was verified.",
            quantiles("prfaas_agent_transfer_tail_seconds", "node", 0.5, 0.95),
        ),
        Panel(
            "Transfers",
            "ops",
            "Ends of transfers, by outcome.",
            (
                Query(
                    rate("prfaas_agent_transfers_total", "node, kind, outcome"),
                    "{{node}} {{kind}}: {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Sent again",
            "Bps",
            "After a lost connection (agents), or by the kernel.",
            (
                Query(rate("prfaas_agent_resent_bytes_total", "node"), "{{node}}, agent"),
                Query(rate("prfaas_link_retransmitted_bytes_total", "node"), "{{node}}, kernel"),
            ),
        ),
        Panel(
            "Age of the last report",
            "s",
            "Routing uses no link that was not heard of for 5 s.",
            (
                Query(
                    level(f"{_GATEWAY}link_age_seconds", "source, target", "min"),
                    "{{source}} to {{target}}",
                ),
            ),
        ),
    ),
)

CLUSTER: Final = Board(
    "cluster",
    "PrfaaS clusters",
    "Instances, queues, memory and caches of each cluster.",
    (
        Panel(
            "Instances",
            "short",
            "By role and state, as gateways see them.",
            (
                Query(
                    level(f"{_GATEWAY}instances", "cluster, role, state", "max"),
                    "{{cluster}} {{role}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Wanted instances",
            "short",
            "What the measured traffic asks for, and the best division of those that are there.",
            (
                Query(
                    level("prfaas_plan_wanted_instances", "cluster, role", "max"),
                    "{{cluster}} {{role}}, wanted",
                ),
                Query(
                    level("prfaas_plan_instances", "cluster, role", "max"),
                    "{{cluster}} {{role}}, plan",
                    "no plan was made yet",
                ),
            ),
        ),
        Panel(
            "Waiting",
            "short",
            "Requests in the queues of fronts and engines.",
            (
                Query(
                    level(f"{_GATEWAY}waiting_requests", "cluster, queue", "max"),
                    "{{cluster}} {{queue}}",
                ),
            ),
        ),
        Panel(
            "Running",
            "short",
            "Requests at work.",
            (
                Query(
                    level(f"{_GATEWAY}running_requests", "cluster, queue", "max"),
                    "{{cluster}} {{queue}}",
                ),
            ),
        ),
        Panel(
            "Prefill jobs",
            "s",
            "Means of the parts of a job.",
            (Query(mean("prfaas_prefill_seconds", "cluster, part"), "{{cluster}} {{part}}"),),
            is_stacked=True,
        ),
        Panel(
            "Ends of prefill jobs",
            "ops",
            "By outcome.",
            (
                Query(
                    rate("prfaas_prefill_jobs_total", "cluster, outcome"), "{{cluster}} {{outcome}}"
                ),
            ),
        ),
        Panel(
            "Arena in use",
            "percentunit",
            "Share of each node's arena that is neither free nor evictable.",
            (
                Query(
                    f"1 - {level('prfaas_agent_arena_free_bytes', 'node')}"
                    f" / {level('prfaas_agent_arena_bytes', 'node')}",
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            "Room for landings",
            "percentunit",
            "Share of what landings may take.",
            (
                Query(
                    f"{level('prfaas_agent_landing_room_bytes', 'node')}"
                    f" / {level('prfaas_agent_landing_limit_bytes', 'node')}",
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            "Prefix cache",
            "bytes",
            "Cached KVCache by tier and kind.",
            (
                Query(
                    level("prfaas_agent_cache_bytes", "node, tier, kind"),
                    "{{node}} {{tier}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Cache hits",
            "percentunit",
            "Share of the tokens that engines looked up.",
            (
                Query(
                    f"{rate('prfaas_agent_cache_hit_tokens_total', 'node')}"
                    f" / {rate('prfaas_agent_cache_query_tokens_total', 'node')}",
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            "Event loops",
            "s",
            "The longest gap that a process caused itself in the last minute.",
            (
                Query(
                    "max by (instance) ({__name__=~"
                    '"prfaas_(gateway|prefill|pd|agent)_loop_longest_own_gap_seconds", '
                    f'within="minute", {R}}})',
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Certificates",
            "s",
            "Time until a certificate expires.",
            (
                Query(
                    f"{level('prfaas_certificate_expiry_timestamp_seconds', 'instance', 'min')}"
                    " - time()",
                    "{{instance}}",
                ),
            ),
        ),
    ),
)

ENGINE: Final = Board(
    "engine",
    "PrfaaS engine hand-off",
    "KVCache between engines and their agents, as vLLM's own metrics tell it.",
    (
        Panel(
            "KVCache out of and into engines",
            "Bps",
            "What connectors gave to agents for other engines, and took from landings.",
            (
                Query(rate("vllm:prfaas_sent_bytes_total", "instance"), "{{instance}}, out"),
                Query(rate("vllm:prfaas_loaded_bytes_total", "instance"), "{{instance}}, in"),
            ),
        ),
        Panel(
            "Loads",
            "ops",
            "Landings that engines took, and those that failed and were computed again.",
            (
                Query(rate("vllm:prfaas_loads_total", "instance"), "{{instance}}"),
                Query(rate("vllm:prfaas_failed_loads_total", "instance"), "{{instance}}, failed"),
                Query(
                    rate("vllm:prfaas_failed_sends_total", "instance"), "{{instance}}, failed sends"
                ),
            ),
        ),
        Panel(
            "Prefix cache",
            "Bps",
            "KVCache that engines stored in and loaded from their node's cache.",
            (
                Query(
                    rate("vllm:prfaas_cache_stored_bytes_total", "instance"), "{{instance}}, stored"
                ),
                Query(
                    rate("vllm:prfaas_cache_loaded_bytes_total", "instance"), "{{instance}}, loaded"
                ),
            ),
        ),
        Panel(
            "Waiting for copies",
            "percentunit",
            "Share of the time for which steps waited for room in staging memory.",
            (Query(rate("vllm:prfaas_staging_wait_seconds_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Requests in engines",
            "short",
            "In the batch, and waiting for it.",
            (
                Query(level("vllm:num_requests_running", "instance"), "{{instance}}, running"),
                Query(level("vllm:num_requests_waiting", "instance"), "{{instance}}, waiting"),
            ),
        ),
        Panel(
            "KVCache of engines",
            "percentunit",
            "Share of an engine's own KVCache memory in use.",
            (Query(level("vllm:kv_cache_usage_perc", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Engine connections",
            "short",
            "Processes of engines that are connected to their agent.",
            (
                Query(
                    level("prfaas_agent_engine_connections", "node, exported_instance"),
                    "{{exported_instance}}",
                ),
            ),
        ),
        Panel(
            "Reservations",
            "ops",
            "Memory that PD clusters reserved for KVCache, by outcome.",
            (
                Query(
                    rate("prfaas_pd_reservations_total", "cluster, outcome"),
                    "{{cluster}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Hand-overs inside PD clusters",
            "ops",
            "By way.",
            (
                Query(
                    rate("prfaas_pd_hand_offs_total", "cluster, hand_off"),
                    "{{cluster}} {{hand_off}}",
                    "only between instances of one PD cluster",
                ),
            ),
        ),
    ),
)

_TENANT: Final = f"{_GATEWAY}tenant_"
TENANTS: Final = Board(
    "tenants",
    "PrfaaS tenants",
    "What each tenant asks for and gets.",
    (
        Panel(
            "Requests",
            "reqps",
            "By tenant.",
            (Query(rate(f"{_TENANT}requests_total", "tenant"), "{{tenant}}"),),
        ),
        Panel(
            "In flight",
            "short",
            "Requests of tenants being served.",
            (Query(level(f"{_TENANT}in_flight_requests", "tenant"), "{{tenant}}"),),
        ),
        Panel(
            "Refused",
            "reqps",
            "Requests that were answered with 429, by tenant.",
            (
                Query(
                    rate(f"{_TENANT}refused_requests_total", "tenant"),
                    "{{tenant}}",
                    "nobody was refused",
                ),
            ),
        ),
        Panel(
            "Admission",
            "reqps",
            "Requests let in and refused, by reason.",
            (
                Query(
                    rate(f"{_GATEWAY}admission_total", "verdict, reason"), "{{verdict}}: {{reason}}"
                ),
            ),
        ),
        Panel(
            "Prompt tokens",
            "short",
            "Tokens a second.",
            (Query(rate(f"{_TENANT}prompt_tokens_total", "tenant"), "{{tenant}}"),),
        ),
        Panel(
            "Answer tokens",
            "short",
            "Tokens a second.",
            (Query(rate(f"{_TENANT}generation_tokens_total", "tenant"), "{{tenant}}"),),
        ),
        Panel(
            "Cached tokens",
            "percentunit",
            "Share of the tenant's prompt tokens that were cached.",
            (
                Query(
                    rate(f"{_TENANT}cached_tokens_total", "tenant")
                    + " / "
                    + rate(f"{_TENANT}prompt_tokens_total", "tenant"),
                    "{{tenant}}",
                ),
            ),
        ),
    ),
)

BOARDS: Final = (REGION, LINK, CLUSTER, ENGINE, TENANTS)
