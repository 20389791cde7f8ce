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


def check_lanes(kept: Any) -> None:
    cases = [one["case"] for one in kept["found"]]
    assert [case["num_pairs"] for case in cases] == [1, 2], cases
    for one in kept["found"]:
        assert is_positive(one["gbit_per_s"], *one["gil_gbit_per_s"].values()), one
        for side in ("sender", "receiver"):
            assert is_positive(*one[side].values()), one


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


def check_sharing(kept: Any) -> None:
    places = {"loopback", LINK} - set(kept["missing"])
    assert "loopback" in places, kept["missing"]
    assert not any("given up" in reason for reason in kept["missing"].values()), kept["missing"]
    for place in places:
        latencies = [one for one in kept["latencies"] if one["place"] == place]
        assert len(latencies) == 5, latencies
        assert is_positive(*(one["p50_s"] for one in latencies)), latencies
        shares = [one for one in kept["shares"] if one["place"] == place]
        assert len(shares) == 5, shares
        assert is_positive(*(one["found"] for one in shares if one["unit"] == "MB/s")), shares
    assert kept["goals"]


def check_codecs(kept: Any) -> None:
    results = kept["results"]
    found = names(results, "array", "codec")
    # Four arrays of bf16 with five codecs, three others without fp8.
    assert len(results) == len(found) == 32, found
    assert {("bf16 K", "fp8"), ("fp16 gaussian", "lz4")} <= found, found
    speeds = ("ratio", "encode_bytes_per_s", "decode_bytes_per_s")
    assert is_positive(*(one[speed] for one in results for speed in speeds)), results


def check_crossover(kept: Any) -> None:
    assert kept["ceiling_from"] == "loopback, measured now", kept["ceiling_from"]
    assert is_positive(kept["ceiling_gbps"])
    assert names(kept["cases"], "model", "engine") == {
        (model, engine)
        for model in ("hybrid (case study)", "full attention")
        for engine in ("H200", "H20")
    }
    assert [len(case["rows"]) for case in kept["cases"]] == [8] * 4
    assert len(kept["links"]) == 37


def check_gateway(kept: Any) -> None:
    always = {"engine", "gateway", "gateway x1", "gateway x2", "bare aiohttp", "bare sockets"}
    assert always <= kept.keys() <= {*always, "vllm-router"}
    for target, numbers in kept.items():
        # So few requests need not take a tick of CPU, nor a page of memory.
        rates = [value for key, value in numbers.items() if not key.startswith(("cpu", "kib"))]
        assert len(rates) == 6, (target, numbers)
        assert is_positive(*rates), (target, numbers)
    assert is_positive(kept["gateway"]["cpu_us_per_event"])


def check_plan(kept: Any) -> None:
    assert len(kept) == 6, kept
    assert is_positive(*(seconds for case in kept for seconds in case["seconds"])), kept


def check_decision(kept: Any) -> None:
    assert len(kept) == 5, kept
    assert is_positive(*(spent for case in kept for spent in case["microseconds"])), kept


def check_scale(kept: Any) -> None:
    (row,) = kept["sizes"]
    assert is_positive(*row["decision_us"].values(), row["request_us"], row["report_us"])
    assert is_positive(row["state_bytes"], row["report_bytes_per_s"], row["event_bytes_per_s"])
    assert is_positive(row["plan_cpu_s"], row["replan_cpu_s"], *row["levels"])
    # A lost cluster is noticed with its next report.
    assert all(row["loss"][name]["until_s"] <= 1.0 for name in ("prefill-0", "pd-0")), row["loss"]


def check_simulate(kept: Any) -> None:
    studies = {"case-study": 7, "congestion": 12, "shift": 8, "steady": 1, "overload": 3}
    studies |= {"loss": 5, "images": 10}
    assert kept.keys() == {"speed", *studies}, kept.keys()
    assert len(kept["speed"]) == 5
    assert is_positive(*(rate for case in kept["speed"] for rate in case["requests_per_s"]))
    for name, num_rows in studies.items():
        assert len(kept[name]["rows"]) == num_rows, (name, kept[name]["rows"])
        assert kept[name]["goals"], name


def check_loops(kept: Any) -> None:
    """A gap may well be too short to be counted."""
    places = [row["name"].partition(":")[0] for row in kept["rows"]]
    assert places == ["directory"] * 3 + ["pool"] * 3 + ["agent"] * 2, places
    assert all(row["longest_own_ms"] >= 0 for row in kept["rows"]), kept["rows"]


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


def check_kv(kept: Any) -> None:
    assert kept.keys() == {"lru", "placement", "policy", "copies", "directory"}
    assert len(kept["lru"]) == 6
    assert all(row["equal"] for row in kept["lru"]), kept["lru"]
    for part, num_rows in (("placement", 18), ("policy", 5)):
        assert len(kept[part]) == num_rows, kept[part]
        assert is_positive(*(row["hit_tokens"] for row in kept[part])), kept[part]
    assert len(kept["copies"]) == 10
    copied = ("store_bytes_per_s", "load_bytes_per_s", "memcpy_bytes_per_s")
    assert is_positive(*(row[key] for row in kept["copies"] for key in copied)), kept["copies"]
    check_directory(kept["directory"])


def check_copier(kept: Any) -> None:
    assert {"device", "python", "host"} <= kept.keys()
    assert is_positive(*kept["python"].values()), kept["python"]
    assert [row["num_heads"] for row in kept["host"]] == [1, 8]
    assert is_positive(*(value for row in kept["host"] for value in row.values())), kept["host"]


def check_directory(kept: Any) -> None:
    (size,) = kept["sizes"]
    assert size["num_blocks"] > 10_000, size
    assert size["match"].keys() == {"cached", "strange", "torn"}
    assert is_positive(*(found["p99_ms"] for found in size["match"].values())), size
    assert is_positive(*(size[part]["events_per_s"] for part in ("fill", "churn"))), size
    assert kept["hashing"].keys() == {"list", "packed"}
    assert kept["readers"].keys() == {"embedded", "gRPC", "Redis"}
    assert is_positive(*(found["p50_ms"] for found in kept["readers"].values())), kept["readers"]


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


def check_images(kept: Any) -> None:
    rows = kept["rows"]
    assert [row["case"] for row in rows] == ["lone", "again", "together", "text"], rows
    for row in rows:
        assert is_positive(row["num"], row["ttft_p50_ms"], row["body_bytes"]), row
        assert is_positive(row["embedding_bytes"]) == (row["case"] != "text"), row
    assert len(kept["raw"]) == 5, kept["raw"]


def check_embeddings(kept: Any) -> None:
    rows = kept["rows"]
    assert names(rows, "what", "width") == {(w, n) for w in ("bytes", "pull") for n in (64, 256)}
    for row in rows:
        if row["what"] == "bytes":
            kinds = ("png_bytes", "jpeg_bytes", "embedding_bytes", "kvcache_bytes")
            assert is_positive(*(row[kind] for kind in kinds)), row
        else:
            assert is_positive(row["nbytes"], *row["seconds"], *row["transfer_s"]), row
            assert len(row["seconds"]) == len(row["transfer_s"]) == 2, row


CHECKS: Final[dict[str, Callable[[Any], None]]] = {
    "transport": check_transport,
    "lanes": check_lanes,
    "wan": check_wan,
    "sharing": check_sharing,
    "codecs": check_codecs,
    "crossover": check_crossover,
    "gateway": check_gateway,
    "plan": check_plan,
    "decision": check_decision,
    "scale": check_scale,
    "simulate": check_simulate,
    "kv": check_kv,
    "copier": check_copier,
    "loops": check_loops,
    "handoff": check_handoff,
    "embeddings": check_embeddings,
    "hostile": check_hostile,
    "prediction": check_prediction,
    "region": check_region,
    "e2e": check_e2e,
    "load": check_load,
    "capacity": check_capacity,
    "rehearsal": check_rehearsal,
    "images": check_images,
}
"""By bench, what must be in its JSON after a smoke run. AssertionError names what is not."""
