"""The queries of Grafana's dashboards, run against a Prometheus server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from dashboard_panels import BOARDS, Board, Query
from prometheus_server import Prometheus, running_prometheus
from region_hosts import prfaas, told

PATIENCE_S = 60.0
ENGINES, CACHES = "vllm:", "prfaas_agent_cache_"
"""What engines that compute nothing do not have."""
_METRIC = re.compile(r"\b(?:prfaas_|vllm:)[a-z0-9_]+")
_OF_HISTOGRAMS_AND_COUNTERS = re.compile(r"_(total|bucket|sum|count)$")


def missing(
    boards: Sequence[Board], server: Prometheus, region: str, *, but: str = "", only: str = ""
) -> list[str]:
    """The queries that find nothing, each with its panel, after time for them to find something.

    Those that say why they may be empty are missing only if no target declares their metric.
    Queries with the text `but` are left out; of `only`, where it is given, all others.
    """
    wanted = {
        f"{board.name}: {panel.title}: {query.expr}": query
        for board in boards
        for panel in board.panels
        for query in panel.queries
        if only in query.expr and not (but and but in query.expr)
    }
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        wanted = {
            name: query for name, query in wanted.items() if not _found(query, server, region)
        }
        if not wanted or time.monotonic() > deadline_s:
            return list(wanted)
        time.sleep(1.0)


def missing_of_engines(run_dir: Path, folder: Path) -> list[str]:
    """The queries about engines and caches that find nothing in a Prometheus server, with its files
    in `folder`, that scrapes the region that runs in `run_dir`.
    """
    file, out = run_dir / "region.json", folder / "watch"
    words = ("region", "render", str(file), "--prometheus", str(out), "--run-dir", str(run_dir))
    said = told(prfaas(*words))
    assert said.returncode == 0, said.stderr
    name = json.loads(file.read_text())["name"]
    with running_prometheus(out, folder / "data", 1.0) as server:
        return [
            one for word in (ENGINES, CACHES) for one in missing(BOARDS, server, name, only=word)
        ]


def _found(query: Query, server: Prometheus, region: str) -> bool:
    expr = query.expr.replace("$region", region).replace("$__rate_interval", "10s")
    if server.values(expr):
        return True
    return bool(query.quiet) and _are_declared(query, server)


def _are_declared(query: Query, server: Prometheus) -> bool:
    names = {_OF_HISTOGRAMS_AND_COUNTERS.sub("", name) for name in _METRIC.findall(query.expr)}
    # The name of a counter's family has _total or not, by the format that is scraped.
    declared = {_OF_HISTOGRAMS_AND_COUNTERS.sub("", name) for name in server.metric_names()}
    return names <= declared
