"""Made-up results of benches, in the shapes in which they keep them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report_raw import Raw

MACHINE = {"cpu": "A CPU", "cpus": 2, "memory_gib": 23.5, "kernel": "6.18", "python": "3.11.7"}
RUN: dict[str, Any] = {
    "command": "make bench",
    "date": "2026-11-23",
    "commit": "0123456789ab",
    "machine": MACHINE,
}
RATES = (0.1, 1.0, 10.0, 100.0)


def raw(bench: str, results: Any, part: str = "") -> Raw:
    return Raw(f"{bench}{part}", bench, results=results, **RUN)


def keep(folder: Path, bench: str, results: Any) -> None:
    """As `make bench` does."""
    (folder / f"{bench}.json").write_text(json.dumps(results))
    (folder / f"{bench}.run.json").write_text(json.dumps({"bench": bench, **RUN}))


def transfer(
    peer: str, gbit_per_s: float | None, point: str = "1g/10ms", wmem_mib: int | None = None
) -> dict[str, Any]:
    """One of `bench_wan`, of a gigabit; None: it failed."""
    return {
        "cell": {
            "section": "goodput",
            "point": point,
            "congestion": "cubic",
            "wmem_mib": wmem_mib,
        },
        "peer": peer,
        "round_number": 0,
        "nbytes": 125_000_000,
        "seconds": None if gbit_per_s is None else 1 / gbit_per_s,
        "cpu_s_per_gib": 1.0,
        "error": "",
        "gbit_per_s": gbit_per_s,
    }


def grid() -> dict[str, Any]:
    """Two round trip times by two losses."""
    points = ("1g/10ms", "1g/40ms", "1g/10ms/0.1%", "1g/40ms/0.1%")
    rates = {"ours": 0.9, "iperf3 x8": 0.95, "mooncake": 0.5, "nixl": 0.2, "nixl default": 0.25}
    return {
        "raw": [transfer(peer, rate, point) for point in points for peer, rate in rates.items()]
    }


def transport() -> dict[str, Any]:
    """Nobody beats ours but NIXL, which acknowledges sooner; plain sockets are no peer."""

    def peer(name: str, gbit_per_s: float, acked_us: float) -> dict[str, Any]:
        cells = [{"block_kib": 64, "gbit_per_s": gbit_per_s, "cpu_s_per_gib": 0.5}]
        acked = {"p50": acked_us, "p99": None}
        return {"peer": name, "place": "loopback", "cells": cells, "acked_64kib_us": acked}

    return {"measured": [peer("ours", 20, 400), peer("nixl write", 10, 100), peer("raw x4", 90, 1)]}


def crossover() -> dict[str, Any]:
    rows = [
        {
            "num_tokens": num_tokens,
            "kv_bytes": 20_000.0 * num_tokens,
            "prefill_s": num_tokens / 30_000,
            "needed_gbps": 4.8,
            "crossover_gbps": 5.0,
            "hiding_gbps": 4.8,
            "transfer_s": [1.6e-4 * num_tokens / rate for rate in RATES],
            "remaining_s": [0.4e-4 * num_tokens / rate for rate in RATES],
        }
        for num_tokens in (16 * 1024, 32 * 1024)
    ]
    links = [{"gbps": rate, "goodput_gbps": rate, "basis": "measured"} for rate in RATES]
    case = {"model": "hybrid (case study)", "engine": "H200", "rows": rows}
    return {"rtt_s": 0.02, "ceiling_gbps": 20.0, "links": links, "cases": [case]}


def lone(system: str, num_tokens: int, ttft_ms: float, ratio: float, gbps: float = 1.0) -> Any:
    """A cell of `bench_e2e` with two pairs: what it sums up, and they."""
    cell = {
        "gbps": gbps,
        "num_tokens": num_tokens,
        f"{system}_ttft_ms": ttft_ms,
        f"own_{system}_ms": 1000.0,
        f"own_{system}_ratio": ratio,
    }
    one = {"system": system, "gbps": gbps, "num_tokens": num_tokens, "error": ""}
    parts = ({"prefill_s": 1.0, "load_s": 0.02}, {"prefill_s": 1.2, "load_s": 0.04})
    return cell, [one | {"parts": told} for told in parts]


def e2e(*cells: Any) -> dict[str, Any]:
    merged: dict[tuple[float, int], dict[str, Any]] = {}
    for cell, _ in cells:
        merged.setdefault((cell["gbps"], cell["num_tokens"]), {}).update(cell)
    return {
        "rtt_ms": 20.0,
        "own_ratio_goal": 1.15,
        "cells": list(merged.values()),
        "raw": [pair for _, pairs in cells for pair in pairs],
    }


def load_row(system: str, request_rate: float, ttft_s: float) -> dict[str, Any]:
    return {
        "system": system,
        "request_rate": request_rate,
        "ttft_p50_s": ttft_s,
        "ttft_p90_s": 2 * ttft_s,
        "ttft_p99_s": 3 * ttft_s,
        "tpot_p50_s": 0.02,
        "goodput_rps": request_rate,
    }


def load(*rows: dict[str, Any]) -> dict[str, Any]:
    capacity = [{"system": "prfaas", "concurrency": 16, "throughput_rps": 4.0}]
    goal = {"request_rate": 1.0, "what": "TTFT", "found": 0.3, "wanted": "at most 0.4", "met": True}
    return {
        "settings": {"model": "tiny", "tokens": [500, 2500]},
        "missing": {"plain": "no cores"},
        "capacity": capacity,
        "rows": list(rows),
        "goals": [goal],
    }


def capacity() -> dict[str, Any]:
    shape: dict[str, Any] = {
        "part": "capacity",
        "name": "one PD cluster",
        "by": "engines",
        "predicted_rps": 2.2,
        "binding": "decode",
    }
    played: dict[str, Any] = {
        "part": "conversation",
        "name": "TTFT P50",
        "predicted_s": 0.3,
        "measured_s": 0.29,
    }
    return {
        "missing": {"three engines": "2 cores"},
        "rows": [
            {**shape, "measured_rps": 2.0, "error": 0.1, "met": False},
            {**shape, "name": "three engines", "measured_rps": None},
            {**played, "error": 0.034, "met": True},
        ],
    }


def images() -> dict[str, Any]:
    row: dict[str, Any] = {
        "arrangement": "E+P+D",
        "ttft_p50_ms": 512.0,
        "ttft_max_ms": 600.0,
        "body_bytes": 1 << 20,
        "embedding_bytes": 1 << 21,
        "kvcache_bytes": 1 << 22,
    }
    return {
        "rows": [row | {"case": "lone"}, row | {"case": "text", "embedding_bytes": 0}],
        "embeddings": {"E+P+D": {"num_queries": 16, "num_hits": 8}, "EP+D": None},
    }


def prediction() -> list[dict[str, Any]]:
    records = [
        {"target": "local", "ttft_s": 1.0, "predicted_ttft_s": 1.1, "num_retries": 0},
        {"target": "prefill", "ttft_s": 2.0, "predicted_ttft_s": 2.8, "num_retries": 0},
        {"target": "prefill", "ttft_s": 2.0, "predicted_ttft_s": 9.9, "num_retries": 1},
        {"target": "prefill", "ttft_s": 2.0, "predicted_ttft_s": None, "num_retries": 0},
    ]
    rows = [
        {"target": "local", "requests": 1, "median_error": 0.1, "p90_error": 0.1},
        {"target": "prefill", "requests": 1, "median_error": 0.4, "p90_error": 0.4},
    ]
    return [{"model": "tiny", "rows": rows, "records": records}]


def rehearsal() -> Any:
    """One region at one rate, and one point of its curve."""
    column = {"offered_rps": 0.74, "throughput_rps": 0.73, "link_gbps": 2.5, "remote_share": 0.5}
    column |= {f"ttft_{name}_s": 2.0 for name in ("mean", "p50", "p90", "p99")}
    pace = {"num_passes": 900, "off_p50": 1e-3, "off_p99": 0.01, "late": 0.001, "busy": 0.3}
    row = {"region": "PrfaaS-PD", "plan": {"remote_share": 0.4, "link_gbps": 2.4}, "pace": pace}
    curve = {"region": "PrfaaS-PD", "rate": 0.5, "throughput_rps": 0.5, "ttft_p90_s": 3.0}
    return {"rows": [row | {"simulated": column, "live": column}], "curve": [curve]}
