"""The queries of Grafana's dashboards, run against a Prometheus server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

from dashboard_panels import BOARDS, Query
from prometheus_server import Prometheus, running_prometheus
from region_hosts import prfaas, told

PATIENCE_S = 60.0
_OF_ENGINES = ("vllm:", "prfaas_agent_cache_", "ttft_predicted")
"""Parts of queries that find nothing where engines compute nothing."""
_METRIC = re.compile(r"\b(?:prfaas_|vllm:)[a-z0-9_]+")
_OF_HISTOGRAMS_AND_COUNTERS = re.compile(r"_(total|bucket|sum|count)$")


def queries(*, of_engines: bool) -> dict[str, Query]:
    """All queries that need engines that compute, or all others, each by its panel and text."""
    return {
        f"{board.name}: {panel.title}: {query.expr}": query
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
        if any(part in query.expr for part in _OF_ENGINES) == of_engines
    }


def missing(wanted: Mapping[str, Query], server: Prometheus, region: str) -> list[str]:
    """The queries that find nothing, after time for them to find something.

    Those that say why they may be empty are missing only if no target declares their metric.
    """
    left = dict(wanted)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        left = {name: query for name, query in left.items() if not _found(query, server, region)}
        if not left or time.monotonic() > deadline_s:
            return list(left)
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
        return missing(queries(of_engines=True), server, name)


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
