"""Transfer against recompute: from which link rate on moving KVCache beats computing it again.

Run: python tests/bench/bench_crossover.py [--json FILE] [--smoke] [--profile FILE --model DIR]. For
links of 0.1 to 100 Gbit/s and prompts of 1Ki to 128Ki tokens: seconds to move a prompt's KVCache at
the goodput that this transport reached, with one RTT, against seconds to prefill it; and what
remains of the transfer after the prefill's end when layers leave while it runs.

The models are the case study's hybrid and one with full attention in every layer. Both have the
case study's prefill times, so that they differ in KVCache alone: full attention would take longer
for long prompts. H200 is the prefill cluster of the case study, H20 its local one.

Goodput comes from what bench_wan and bench_transport left in --results: from the first its share
of an emulated link's rate (paths without loss, the worst of a rate), from the second what both ends
on this machine can move at all. Without the second a short measurement on loopback takes its place.
--profile and --model add an engine of yours: a file of `prfaas plan profile`, and the model's
config.json as `prfaas plan kv` reads it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from crossover_model import PAYLOAD_SHARE, Case, Goodput, Row, interpolated, rows
from peer_end import KIB, MIB
from peers import Kept, Site, ours
from smoke import add_smoke

from deploy.plan.model_config import config_file, read_config
from deploy.plan.solve.case_study import H20_PREFILL, H200_PREFILL, KV
from deploy.plan.solve.served import kv_size_of
from deploy.profile_file import EngineProfileFile
from kvmanager.config_files.problems import FileError
from kvmanager.config_files.units import format_tokens
from kvmanager.hf_config import read_model_kv
from scheduler.planning.curves import CurveError, fit_quadratic, interpolate
from scheduler.planning.lengths import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS: Final = tuple(1024 * 2**power for power in range(8))
NUM_RATES: Final = 37
SHOWN_GBPS: Final = (1.0, 10.0, 100.0)
"""Columns of the table."""
PICTURED_TOKENS: Final = 32 * 1024
HYBRID: Final = "hybrid (case study)"
FULL_ATTENTION: Final = "full attention"
MINIMAX_M2: Final[dict[str, Any]] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 62,
    "attn_type_list": [1] * 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 3072,
}
"""What decides the KVCache in the public config.json of a model with full attention only."""


@dataclass(frozen=True, slots=True)
class Source:
    """The goodput and, in words, where it was found."""

    goodput: Goodput
    shares_from: str
    ceiling_from: str


def case_study_cases() -> list[Case]:
    full = kv_size_of(read_model_kv(MINIMAX_M2))
    engines = (("H200", H200_PREFILL), ("H20", H20_PREFILL))
    kinds = ((HYBRID, KV), (FULL_ATTENTION, full))
    return [Case(model, engine, kv, prefill) for model, kv in kinds for engine, prefill in engines]


def own_case(profile: Path, model: Path) -> Case:
    """An engine and a model of the user's, with straight lines where no quadratic fits the profile;
    FileError or ValueError that says what is wrong with the files.
    """
    points = EngineProfileFile.load(profile).profile.prefill.points
    pairs = [(float(point.tokens), point.seconds) for point in points]
    try:
        fitted = fit_quadratic(pairs)
    except CurveError:
        fitted = interpolate(pairs)
    kv = read_model_kv(read_config(config_file(model)))
    return Case(kv.name, profile.stem, kv_size_of(kv), fitted.curve)


def wan_shares(kept: Any) -> list[tuple[float, float]]:
    """(Gbit/s of the link, share of it) from bench_wan's result: the default transport on paths
    without loss; where a rate has several paths the worst of their medians.
    """
    by_path: dict[str, list[float]] = {}
    for one in kept["raw"]:
        cell = one["cell"]
        is_plain = cell["section"] == "goodput" and cell["wmem_mib"] is None
        if is_plain and one["peer"] == "ours" and "%" not in cell["point"] and one["gbit_per_s"]:
            by_path.setdefault(cell["point"], []).append(one["gbit_per_s"])
    worst: dict[float, float] = {}
    for path, rates in by_path.items():
        link_gbps = float(path.partition("g")[0])
        share = statistics.median(rates) / link_gbps
        worst[link_gbps] = min(share, worst.get(link_gbps, share))
    return sorted(worst.items())


def loopback_gbps(kept: Any) -> float | None:
    """What bench_transport found for the default settings, at the block size that did best."""
    rates = [
        cell["gbit_per_s"]
        for one in kept.get("measured", [])
        if (one["peer"], one["place"]) == ("ours", "loopback")
        for cell in one["cells"]
        if cell["gbit_per_s"]
    ]
    return max(rates, default=None)


def measure_loopback_gbps(nbytes: int) -> float:
    """The median of a few transfers, now; OSError when none succeeds."""
    say("measuring what the ends can move, on loopback")
    with Kept(ours(), Site(nbytes_max=nbytes)) as session:
        samples = [session.transfer(nbytes, 64 * KIB) for _ in range(6)]
        rates = [sample.gbit_per_s for sample in samples[1:] if sample is not None]
        if not rates:
            raise OSError("; ".join(session.failures))
    return statistics.median(rates)


def find_goodput(results: Path, ceiling_gbps: float | None, loopback_bytes: int) -> Source:
    """From the results of other benches, where there are none from transfers of so many bytes."""
    wan, transport = _read(results / "wan.json"), _read(results / "transport.json")
    shares = wan_shares(wan) if wan is not None else []
    shares_from = f"{results / 'wan.json'}: {len(shares)} rates"
    if not shares:
        shares_from = f"assumed: {PAYLOAD_SHARE:.3f}, the payload's share of full TCP segments"
    ceiling_from = "--ceiling"
    if ceiling_gbps is None:
        ceiling_gbps = loopback_gbps(transport) if transport is not None else None
        ceiling_from = f"{results / 'transport.json'}, loopback"
    if ceiling_gbps is None:
        ceiling_gbps, ceiling_from = measure_loopback_gbps(loopback_bytes), "loopback, measured now"
    return Source(Goodput(tuple(shares), ceiling_gbps), shares_from, ceiling_from)


def _read(file: Path) -> Any:
    """None when it is not there; ValueError when it is no JSON."""
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}; run its bench again") from error


def table(found: Sequence[Row], link_gbps: Floats) -> str:
    """One case: a line for each prompt length."""
    shown = [f"{rate:g}" for rate in SHOWN_GBPS]
    head = ["tokens", "KVCache", "prefill s", "goodput needed", "crossover link", "hidden from"]
    cells = [[*head, *(f"moved at {rate}" for rate in shown), *(f"left at {r}" for r in shown)]]
    for row in found:
        cells.append(
            [
                format_tokens(row.num_tokens),
                f"{row.kv_bytes / 2**20:,.0f} MiB",
                f"{row.prefill_s:.2f}",
                _gbps_words(row.needed_gbps),
                _gbps_words(row.crossover_gbps),
                _gbps_words(row.hiding_gbps),
                *(f"{interpolated(row.transfer_s, link_gbps, rate):.2f}" for rate in SHOWN_GBPS),
                *(f"{interpolated(row.remaining_s, link_gbps, rate):.2f}" for rate in SHOWN_GBPS),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def _gbps_words(gbps: float | None) -> str:
    return "-" if gbps is None else f"{gbps:.2f}"


def ratios(study: dict[Case, list[Row]]) -> str:
    """Full attention over the hybrid, on the same engine: KVCache and crossover rate."""
    by_name = {(case.model, case.engine): found for case, found in study.items()}
    lines = ["full attention over hybrid, H200:  tokens  KVCache  goodput needed"]
    pairs = zip(by_name[HYBRID, "H200"], by_name[FULL_ATTENTION, "H200"], strict=True)
    for hybrid, full in pairs:
        needed = "-"
        if hybrid.needed_gbps is not None and full.needed_gbps is not None:
            needed = f"{full.needed_gbps / hybrid.needed_gbps:.1f}x"
        size = f"{full.kv_bytes / hybrid.kv_bytes:.1f}x"
        lines.append(f"{format_tokens(hybrid.num_tokens):>41}{size:>9}{needed:>16}")
    return "\n".join(lines)


def document(study: dict[Case, list[Row]], link_gbps: Floats, source: Source) -> dict[str, Any]:
    """What is kept as JSON."""
    rates = link_gbps.tolist()
    carried = source.goodput.gbps(link_gbps).tolist()
    return {
        "shares_from": source.shares_from,
        "ceiling_from": source.ceiling_from,
        "ceiling_gbps": source.goodput.ceiling_gbps,
        "shares": source.goodput.shares,
        "links": [
            {"gbps": rate, "goodput_gbps": goodput, "basis": source.goodput.basis(rate)}
            for rate, goodput in zip(rates, carried, strict=True)
        ],
        "cases": [
            {"model": case.model, "engine": case.engine, "rows": [asdict(row) for row in found]}
            for case, found in study.items()
        ],
    }


_STYLES: Final[tuple[dict[str, Any], ...]] = (
    {"color": "#1f6fb2", "linestyle": "-", "marker": "o"},
    {"color": "#1f6fb2", "linestyle": "--", "marker": "s"},
    {"color": "#c25b12", "linestyle": "-", "marker": "^"},
    {"color": "#c25b12", "linestyle": "--", "marker": "v"},
    {"color": "#4d8f3c", "linestyle": "-.", "marker": "D"},
)


def plot(study: dict[Case, list[Row]], link_gbps: Floats, source: Source, file: Path) -> None:
    """Crossover over prompt length, and the times of one length over the link's rate; ImportError
    without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_crossovers(left, study, source.goodput.ceiling_gbps)
    _draw_times(right, study, link_gbps)
    figure.savefig(file, dpi=120)


def _draw_crossovers(axes: Axes, study: dict[Case, list[Row]], ceiling_gbps: float) -> None:
    for (case, found), style in zip(study.items(), _STYLES, strict=False):
        values = [np.nan if row.needed_gbps is None else row.needed_gbps for row in found]
        tokens = [row.num_tokens for row in found]
        axes.plot(tokens, values, label=case.name, markersize=5, linewidth=1.6, **style)
    axes.axhline(ceiling_gbps, color="#b3123a", linewidth=1.0, label="what both ends here can move")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="prompt, tokens",
        ylabel="goodput, Gbit/s",
        title="above its line, moving beats recomputing",
    )
    axes.set_xticks(LENGTHS, [format_tokens(tokens) for tokens in LENGTHS])
    axes.set_xticks([], minor=True)
    _plain_numbers(axes, is_both=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8)


def _draw_times(axes: Axes, study: dict[Case, list[Row]], link_gbps: Floats) -> None:
    """The case study's models on its prefill cluster."""
    for case, style in zip(study, _STYLES, strict=False):
        if case.engine != "H200":
            continue
        row = next(row for row in study[case] if row.num_tokens == PICTURED_TOKENS)
        color = style["color"]
        axes.plot(link_gbps, row.transfer_s, color=color, label=f"{case.model}: whole transfer")
        axes.plot(
            link_gbps,
            row.remaining_s,
            color=color,
            linestyle=":",
            linewidth=2.2,
            label=f"{case.model}: left after an overlapped prefill",
        )
        prefill_s = row.prefill_s
    axes.axhline(prefill_s, color="#1b1b1b", linestyle="--", label="prefill again (H200)")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="link, Gbit/s",
        ylabel="seconds",
        title=f"a prompt of {format_tokens(PICTURED_TOKENS)} tokens",
    )
    _plain_numbers(axes, is_both=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8)


def _plain_numbers(axes: Axes, *, is_both: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis) if is_both else (axes.yaxis,):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result here, and a .png beside it")
    parser.add_argument("--results", type=Path, default=Path("bench-results"))
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--ceiling", type=float, metavar="GBPS", help="what the ends can move")
    parser.add_argument(
        "--mib", type=int, default=256, help="of one transfer, where it is measured"
    )
    parser.add_argument("--profile", type=Path, help="of `prfaas plan profile`; with --model")
    parser.add_argument("--model", type=Path, help="config.json or its directory; with --profile")
    add_smoke(parser, results=Path("no results"), mib=8)
    arguments = parser.parse_args()
    if (arguments.profile is None) != (arguments.model is None):
        parser.error("--profile and --model go together")
    return arguments


def main() -> None:
    arguments = parse()
    try:
        cases = case_study_cases()
        if arguments.profile is not None:
            cases.append(own_case(arguments.profile, arguments.model))
        source = find_goodput(arguments.results, arguments.ceiling, arguments.mib * MIB)
    except (OSError, ValueError, FileError) as error:
        sys.exit(str(error))
    link_gbps = np.geomspace(0.1, 100, NUM_RATES)
    rtt_s = arguments.rtt_ms / 1e3
    study = {case: rows(case, LENGTHS, link_gbps, source.goodput, rtt_s) for case in cases}
    print(f"Goodput as a share of the link: {source.shares_from}")
    for rate, share in source.goodput.shares:
        print(f"  {rate:g} Gbit/s: {share:.3f}")
    print(
        f"Most that the ends move: {source.goodput.ceiling_gbps:.1f} Gbit/s ({source.ceiling_from})"
    )
    print(f"RTT {arguments.rtt_ms:g} ms; rates in Gbit/s, times in s\n")
    for case, found in study.items():
        print(f"{case.name}\n{table(found, link_gbps)}\n")
    print(ratios(study))
    if arguments.json is not None:
        kept = {"rtt_s": rtt_s, **document(study, link_gbps, source)}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
        try:
            plot(study, link_gbps, source, arguments.json.with_suffix(".png"))
        except ImportError as error:
            say(f"without a picture: {error}")


if __name__ == "__main__":
    main()
