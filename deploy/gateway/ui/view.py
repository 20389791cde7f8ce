"""What the page shows: rows made of the answers of the operators' pages, and how two views differ.

Pure functions over JSON values. A view is {kind: {key: row}}. Ages are left out, since they would
change every row at every look; the browser counts them itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

Row: TypeAlias = dict[str, Any]
View: TypeAlias = dict[str, dict[str, Row]]

MAX_TEXT: Final = 300
"""Characters of a text that are shown: reasons and names of clients may be of any length."""

_REQUEST: Final = (
    "request_id", "started_s", "endpoint", "model", "adapter", "tenant", "num_prompt_tokens",
    "home", "cluster", "spill", "route", "target", "reason", "numbers", "predicted_ttft_s",
    "status", "outcome", "error", "error_code", "prefill_instance", "decode_instance",
    "prefill_error", "transfer_bytes", "cached_tokens", "ttft_s", "total_s", "parts",
)  # fmt: skip
_INSTANCE: Final = (
    "role", "model", "healthy", "draining", "running", "max_concurrent", "reason", "decode_slots",
    "num_running", "num_waiting", "kv_usage", "node_name", "leaving", "role_ready", "paced",
)  # fmt: skip
_LINK: Final = (
    "source", "target", "name", "condition", "reason", "available_bytes_per_s", "is_floor",
    "achieved_bytes_per_s", "utilisation", "rtt_s", "loss", "backlog_bytes", "num_transfers",
)  # fmt: skip
_CLUSTER: Final = ("healthy", "heard", "queue_depth", "running", "max_queued", "reason", "version")
_DECISION: Final = ("at_s", "model", "pd", "reason", "done", "notes")
_PLAN: Final = ("mode", "period_s", "thresholds", "conversion")
_COUNTED: Final = ("in_flight", "buffered_bytes", "settling", "threshold_tokens")


def view(pages: Mapping[str, Any]) -> View:
    """The view of these answers, by path; an answer may be missing."""
    region = pages.get("/prfaas/region") or {}
    plan = pages.get("/prfaas/plan") or {}
    links = (pages.get("/prfaas/links") or {}).get("links", ())
    nodes = (pages.get("/prfaas/cache") or {}).get("nodes", ())
    phases = (pages.get("/prfaas/instances") or {}).get("instances", ())
    return {
        "region": {"now": _taken(region, _COUNTED)} if region else {},
        "clusters": dict(_clusters(region)),
        "instances": _instances(region, phases),
        "links": _links(region, links),
        "requests": {
            f"{row['started_s']:.6f} {row['request_id']}": _taken(row, _REQUEST)
            for row in (pages.get("/prfaas/requests") or {}).get("requests", ())
        },
        "plan": {"now": _taken(plan, _PLAN)} if plan else {},
        "models": {
            f"{row.get('model')} {row.get('pd')}": _taken(
                row, ("model", "pd", "num_encode", "num_prefill", "num_decode", "unknown")
            )
            for row in plan.get("models", ())
        },
        "decisions": {
            f"{row['at_s']:.6f} {row.get('model')} {row.get('pd')}": _taken(row, _DECISION)
            for row in list(plan.get("decisions", ()))[:20]
        },
        "caches": {f"{row['cluster']}/{row['node']}": _cache(row) for row in nodes},
        "gateways": _gateways(pages.get("/prfaas/gateways") or {}),
    }


def changes(before: View, after: View) -> dict[str, Any]:
    """What turns one view into the other: for each kind that differs, the rows to `set` and the
    keys that are `gone`.
    """
    found: dict[str, Any] = {}
    for kind in before.keys() | after.keys():
        old, new = before.get(kind, {}), after.get(kind, {})
        changed = {key: row for key, row in new.items() if old.get(key) != row}
        gone = [key for key in old if key not in new]
        if changed or gone:
            found[kind] = {"set": changed, "gone": gone}
    return found


def _clusters(region: Mapping[str, Any]) -> Iterable[tuple[str, Row]]:
    for kind, reports in (("pd", region.get("pds")), ("prefill", region.get("prefill"))):
        for name, report in (reports or {}).items():
            row = _taken(report, _CLUSTER) | {"name": name, "kind": kind}
            yield name, row | {"instances": len(report.get("instances", ()))}


def _instances(region: Mapping[str, Any], phases: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    known = {(row["cluster"], row["instance"]): row["phase"] for row in phases}
    found = {}
    for reports in (region.get("pds"), region.get("prefill")):
        for cluster, report in (reports or {}).items():
            for item in report.get("instances", ()):
                row = _taken(item, _INSTANCE) | {"cluster": cluster, "name": item["name"]}
                row["phase"] = known.get((cluster, item["name"]), "")
                found[f"{cluster}/{item['name']}"] = row
    return found


def _links(region: Mapping[str, Any], links: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """Every pair of clusters with a threshold or a measured link."""
    found: dict[str, Row] = {}
    for item in region.get("thresholds") or ():
        row: Row = {"source": item["cluster"], "target": item.get("pd", "")}
        row |= {"threshold_tokens": _short(item["tokens"])}
        row |= {"base_tokens": _short(item["base_tokens"]), "threshold_reason": item["reason"]}
        found[f"{row['source']} {row['target']}"] = _shortened(row)
    for item in links:
        key = f"{item['source']} {item['target']}"
        found[key] = found.get(key, {}) | _taken(item, _LINK)
    return found


def _cache(row: Mapping[str, Any]) -> Row:
    cache, embeddings = row.get("cache") or {}, row.get("embeddings") or {}
    return _shortened(
        {
            "cluster": row["cluster"],
            "node": row["node"],
            "error": row.get("error", ""),
            "hit_share": row.get("hit_share"),
            "nbytes": sum((cache.get("nbytes") or {}).values()),
            "num_blocks": cache.get("num_blocks"),
            "hit_tokens": sum((cache.get("hit_tokens") or {}).values()),
            "evictions": sum((cache.get("evictions") or {}).values()),
            "num_embeddings": embeddings.get("num_embeddings"),
            "embedding_bytes": embeddings.get("held_bytes"),
            "embedding_hit_share": row.get("embedding_hit_share"),
        }
    )


def _gateways(overview: Mapping[str, Any]) -> dict[str, Row]:
    """This gateway, its processes and the other gateways."""
    if not overview:
        return {}
    leader = overview.get("leader", "")
    found = {overview["name"]: _taken(overview, ("name", "state", "error"))}
    for item in overview.get("peers", ()):
        found[item["name"]] = {"name": _short(item["name"]), "state": "joined", "error": ""}
    for item in overview.get("processes", ()):
        name = f"process {item['number']}"
        found[name] = {"name": name, "state": item["state"], "error": ""}
    return {name: row | {"leads": name == leader} for name, row in found.items()}


def _taken(row: Mapping[str, Any], names: Iterable[str]) -> Row:
    return _shortened({name: row[name] for name in names if name in row})


def _shortened(row: Row) -> Row:
    return {name: _short(value) for name, value in row.items()}


def _short(value: Any) -> Any:
    """The value with short texts and few digits, so that what nobody can see is no change."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "…"
    if isinstance(value, float) and abs(value) < 1e8:
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {_short(name): _short(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value
