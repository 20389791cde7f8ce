"""Runs a bench at its smallest size and checks what it keeps: every row, no empty number."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

BENCHES: Final = Path(__file__).resolve().parents[1] / "bench"
TIMEOUT_S: Final = 280.0
"""Of a machine that does much else meanwhile: alone none takes more than 20."""

LINK = "1g/10ms"


def run_smoke(name: str, folder: Path, *more: str, timeout_s: float = TIMEOUT_S) -> None:
    """`bench_NAME.py --smoke`, with `more` options. AssertionError with its output if it fails or
    keeps other rows than `CHECKS` wants.
    """
    kept = folder / f"{name}.json"
    command = [sys.executable, str(BENCHES / f"bench_{name}.py"), "--smoke", "--json", str(kept)]
    done = subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    told = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, told
    try:
        CHECKS[name](json.loads(kept.read_text()))
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        raise AssertionError(f"what {name} keeps: {error!r}\n{told}") from error


def is_positive(*numbers: Any) -> bool:
    return all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers)


def names(rows: Iterable[dict[str, Any]], *keys: str) -> set[tuple[Any, ...]]:
    return {tuple(row[key] for key in keys) for row in rows}


def check_transport(kept: Any) -> None:
    """A place or a peer that is not measured is named as missing."""
    missing, measured = kept["missing"], kept["measured"]
    found = names(measured, "peer", "place")
    for peer in ("ours", "ours tls", "raw x4"):
        assert (peer, "loopback") in found, found
    for peer in ("iperf3 -P4", "mooncake", "nixl write"):
        assert (peer, "loopback") in found or peer in missing, (found, missing)
    assert ("ours", "veth") in found or "veth" in missing, (found, missing)
    for one in measured:
        assert len(one["cells"]) == 3, one
        if one["peer"] in ("ours", "ours tls", "raw x4"):
            assert one["verified"], one
            assert not one["failures"], one
            assert is_positive(*(cell["gbit_per_s"] for cell in one["cells"])), one
            assert is_positive(one["acked_64kib_us"]["p50"]), one
    assert all(kept["goals"][place] for _, place in found), kept["goals"]


def check_wan(kept: Any) -> None:
    if "link" in kept["missing"]:
        assert kept["raw"] == []
        return
    ours = [one for one in kept["raw"] if one["peer"] == "ours"]
    sections = {one["cell"]["section"] for one in ours}
    assert sections == {"goodput", "cap", "layer", "burst", "burst_warm"}, sections
    assert is_positive(*(one["gbit_per_s"] for one in ours)), ours
    assert not any(one["error"] for one in ours), ours
    assert kept["goals"]


def check_gateway(kept: Any) -> None:
    always = {"engine", "gateway", "gateway x1", "gateway x2", "bare aiohttp", "bare sockets"}
    assert always <= kept.keys() <= {*always, "vllm-router"}
    for target, numbers in kept.items():
        # So few requests need not take a tick of CPU, nor a page of memory.
        rates = [value for key, value in numbers.items() if not key.startswith(("cpu", "kib"))]
        assert len(rates) == 6, (target, numbers)
        assert is_positive(*rates), (target, numbers)
    assert is_positive(kept["gateway"]["cpu_us_per_event"])


def check_copier(kept: Any) -> None:
    assert {"device", "python", "host"} <= kept.keys()
    assert is_positive(*kept["python"].values()), kept["python"]
    assert is_positive(*(value for row in kept["host"] for value in row.values())), kept["host"]


def check_handoff(kept: Any) -> None:
    """`ttft` needs engines: without them it has no rows."""
    rows = kept["rows"]
    expected = {(what, way) for what in ("block", "prompt") for way in ("arena", "transport")}
    expected |= {("echo", kind) for kind in ("thread", "asyncio", "uvloop")}
    found = names(rows, "what", "hand_off")
    assert found in (expected, expected | {("ttft", "arena"), ("ttft", "transport")}), found
    for row in rows:
        seconds = row["seconds"]
        assert is_positive(*(seconds if isinstance(seconds, list) else [seconds])), row


def check_hostile(kept: Any) -> None:
    """The times say nothing here, and so does an offload that a busy machine let go local."""
    assert [phase["condition"] for phase in kept["phases"]] == ["idle", "elsewhere", "attacked"]
    for phase in kept["phases"]:
        assert phase["way"] == "tls"
        assert phase["failed"]["short"] == [], phase["failed"]
        assert is_positive(phase["let_in_s"], *phase["taken_s"]["short"]), phase
        assert phase["processes"].keys() == {"gateway", "receiving agent", "sending agent"}
        assert phase["left"].keys() == {"gateway", "receiving agent"}
    attacks = kept["phases"][-1]["attacks"]
    assert len(attacks) == 13, attacks
    assert is_positive(*(did["num_begun"] for did in attacks.values())), attacks
    assert kept["goals"]


def check_prediction(kept: Any) -> None:
    """`rows` are empty where the region had learnt nothing to predict from."""
    (result,) = kept
    assert len(result["records"]) >= 2, result
    assert is_positive(*(record["ttft_s"] for record in result["records"])), result
    predicted = [one for one in result["records"][1:] if one["predicted_ttft_s"]]
    assert result["rows"] or not predicted, result["rows"]
    assert all(row["median_error"] >= 0 for row in result["rows"]), result["rows"]


def check_region(kept: Any) -> None:
    assert kept.keys() == {"shift", "overload"}
    shift, (overload,) = kept["shift"], kept["overload"].values()
    assert shift["failed"] == []
    assert shift["changes"][0]["roles"], shift["changes"]
    for part in (shift, overload):
        assert part["answered"], part
        assert all(one["is_whole"] or one["status"] == 429 for one in part["answered"]), part
        first = [one["ttft_s"] for one in part["answered"] if one["status"] == 200]
        assert first, part
        assert is_positive(*first), part
    assert is_positive(overload["took_s"])


def check_e2e(kept: Any) -> None:
    assert set(kept["missing"]) == {"nixl"}
    (cell,) = kept["cells"]
    assert (cell["prfaas_failed"], cell["nixl_failed"]) == (0, 0), cell
    assert is_positive(cell["prfaas_ttft_ms"], cell["own_prfaas_ms"], cell["emitted_gbps"]), cell
    assert is_positive(cell["own_prfaas_ratio"]), cell
    assert [one["error"] for one in kept["raw"]] == [""], kept["raw"]


def check_load(kept: Any) -> None:
    """Only the region is there, with its capacity and a row for its rate."""
    assert set(kept["missing"]) == {"prfaas-remote", "prfaas-pd", "nixl", "plain"}
    (capacity,), (row,) = kept["capacity"], kept["rows"]
    for one in (capacity, row):
        assert one["system"] == "prfaas", one
        assert one["failed"] == 0, one
        assert is_positive(one["throughput_rps"], one["ttft_p99_s"], one["tpot_p50_s"]), one
        assert 0 <= one["remote_share"] <= 1, one
    assert is_positive(row["request_rate"]), row
    assert row["goodput_rps"] >= 0, row


def check_rehearsal(kept: Any) -> None:
    (row,) = kept["rows"]
    for way in ("simulated", "live"):
        assert is_positive(row[way]["ttft_p50_s"], row[way]["throughput_rps"]), row
    assert is_positive(*(one["ttft_p90_s"] for one in kept["curve"])), kept["curve"]


def check_capacity(kept: Any) -> None:
    """Every shape is planned, none was measured; the conversations were played."""
    shapes = [row for row in kept["rows"] if row["part"] == "capacity"]
    assert len(shapes) == 4, shapes
    assert is_positive(*(row["predicted_rps"] for row in shapes)), shapes
    assert set(kept["missing"]) == {row["name"] for row in shapes}, kept["missing"]
    played = [row for row in kept["rows"] if row["part"] == "conversation"]
    assert [row["name"] for row in played] == ["TTFT P50", "TTFT P90"], played
    assert is_positive(*(row[key] for row in played for key in ("predicted_s", "measured_s")))
    assert len(kept["turns"]) == 4, kept["turns"]


CHECKS: Final[dict[str, Callable[[Any], None]]] = {
    "transport": check_transport,
    "wan": check_wan,
    "gateway": check_gateway,
    "handoff": check_handoff,
    "copier": check_copier,
    "hostile": check_hostile,
    "prediction": check_prediction,
    "region": check_region,
    "e2e": check_e2e,
    "load": check_load,
    "capacity": check_capacity,
    "rehearsal": check_rehearsal,
}
"""By bench, what must be in its JSON after a smoke run. AssertionError names what is not."""
