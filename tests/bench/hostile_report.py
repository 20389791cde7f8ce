"""Makes goals and tables of the findings of bench_hostile. Runs nothing.

A round has one phase of each condition. Ratios are taken within rounds and their median counts, so
that a slow minute of the machine is in both. The goal compares with "elsewhere": the same attackers
at the same rate, against a process that nobody depends on. Where the attackers share the cores of
the region, "idle" leaves more CPU to true traffic; the ratio to it is told as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Condition = Literal["idle", "elsewhere", "attacked"]
CONDITIONS: tuple[Condition, ...] = ("idle", "elsewhere", "attacked")
PATHS = ("short", "offloaded")
"""Prompts that the PD cluster serves alone, and those whose KVCache crosses the transport."""
SLOWDOWN_BOUND = 2.0
GROWTH_BOUND_MIB = 64.0
"""Most memory that a process may need for its attackers."""
LASTING_BOUND_MIB = 16.0
"""Most memory that may come to stay from the first round of attackers to the last."""
REROUTED_BOUND = 0.01
"""Most of the prompts that may take another route because of attackers."""
LEFT_BOUND = 8
"""Most descriptors that may be left over when the attackers have gone."""


@dataclass(frozen=True, slots=True)
class Goal:
    """`found` is asked to be at most `bound`."""

    name: str
    found: float
    bound: float
    is_met: bool

    def __str__(self) -> str:
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.name}: {self.found:.3g} (goal <= {self.bound:.3g}) {verdict}"


@dataclass(frozen=True, slots=True)
class Watched:
    """The most that one process had while true requests ran, and the CPU that it used, seconds."""

    rss_mib: float
    num_descriptors: int
    num_threads: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of true traffic under one condition.

    `let_in_s`: until the first KVCache of a sending agent that was started after the attackers had
    begun; None: it never came. By path: `taken_s` (whole answers, from when they were due),
    `failed` (reasons) and `rerouted` (heads of whole answers that took another route). `processes`
    by name. `left`: descriptors that were still open when the
    attackers had gone, beyond those before they came. `attacks`: what each attack did.
    """

    way: str
    condition: Condition
    let_in_s: float | None
    taken_s: dict[str, list[float]]
    failed: dict[str, list[str]]
    rerouted: dict[str, list[str]]
    processes: dict[str, Watched]
    left: dict[str, int]
    attacks: dict[str, dict[str, int]]

    def quantile_s(self, path: str, share: float) -> float:
        """The smallest time that `share` of the answers do not exceed; infinite without answers."""
        ascending = sorted(self.taken_s[path])
        if not ascending:
            return math.inf
        return ascending[max(0, math.ceil(share * len(ascending)) - 1)]

    @property
    def num_failed(self) -> int:
        """True requests without their whole answer, a sender that was kept out included."""
        return sum(map(len, self.failed.values())) + (self.let_in_s is None)


def slowdown(phases: Sequence[Phase], path: str, base: Condition) -> float:
    """The median over rounds of p99 while attacked, over p99 under `base`."""
    attacked, others = _of(phases, "attacked"), _of(phases, base)
    ratios = [
        one.quantile_s(path, 0.99) / other.quantile_s(path, 0.99)
        for one, other in zip(attacked, others, strict=True)
        if other.taken_s[path]
    ]
    return statistics.median(ratios) if ratios else math.inf


def goals(phases: Sequence[Phase]) -> list[Goal]:
    """Everything that was asked, for each way in which the region's processes know each other."""
    asked = []
    for way in dict.fromkeys(phase.way for phase in phases):
        here = [phase for phase in phases if phase.way == way]
        attacked, elsewhere = _of(here, "attacked"), _of(here, "elsewhere")
        num_failed = sum(phase.num_failed for phase in attacked)
        asked.append(_at_most(f"{way}: true requests that failed", num_failed, 0))
        more = _rerouted_share(attacked) - _rerouted_share(elsewhere)
        what = f"{way}: share of offloaded prompts that went local, over quiet"
        asked.append(_at_most(what, more, REROUTED_BOUND))
        for path in PATHS:
            found = slowdown(here, path, "elsewhere")
            asked.append(_at_most(f"{way}: p99 of {path}, x quiet", found, SLOWDOWN_BOUND))
        for name in attacked[0].processes:
            grown = _most_mib(attacked, name) - _most_mib(elsewhere, name)
            asked.append(
                _at_most(f"{way}: memory of the {name}, over quiet, MiB", grown, GROWTH_BOUND_MIB)
            )
        for name in attacked[0].left:
            lasting = _most_mib(attacked[-1:], name) - _most_mib(attacked[:1], name)
            what = f"{way}: memory of the {name}, last round over first, MiB"
            asked.append(_at_most(what, lasting, LASTING_BOUND_MIB))
            left = max(phase.left[name] for phase in attacked)
            asked.append(_at_most(f"{way}: descriptors left at the {name}", left, LEFT_BOUND))
    return asked


def tables(phases: Sequence[Phase]) -> str:
    """Latencies, processes, what the attackers did, goals; medians over the rounds."""
    latencies = [
        [
            "way, path",
            "condition",
            "answers",
            "rerouted",
            "failed",
            "p50 ms",
            "p99 ms",
            "first KVCache s",
        ]
    ]
    processes = [["way, process", "condition", "MiB", "descriptors", "threads", "CPU s"]]
    attacks = [["way, attack", "begun", "ended"]]
    for way in dict.fromkeys(phase.way for phase in phases):
        here = [phase for phase in phases if phase.way == way]
        for path in PATHS:
            latencies += [_latencies(way, path, name, _of(here, name)) for name in CONDITIONS]
        for process in here[0].processes:
            processes += [_process(way, process, name, _of(here, name)) for name in CONDITIONS]
        attacked = _of(here, "attacked")
        for attack in attacked[0].attacks:
            did = [phase.attacks[attack] for phase in attacked]
            sums = (sum(one[key] for one in did) for key in ("num_begun", "num_ended"))
            attacks.append([f"{way}, {attack}", *map(str, sums)])
    lines = [f"  {goal}" for goal in goals(phases)]
    for way in dict.fromkeys(phase.way for phase in phases):
        here = [phase for phase in phases if phase.way == way]
        told = ", ".join(f"{path} {slowdown(here, path, 'idle'):.2f}" for path in PATHS)
        lines.append(f"  {way}: p99, x no attackers at all: {told}")
    parts = [_table(latencies), _table(processes), _table(attacks), "Goals", "\n".join(lines)]
    return "\n".join(parts) + "\n"


def _of(phases: Sequence[Phase], condition: Condition) -> list[Phase]:
    return [phase for phase in phases if phase.condition == condition]


def _rerouted_share(phases: Sequence[Phase]) -> float:
    num_rerouted = sum(len(phase.rerouted["offloaded"]) for phase in phases)
    num_answered = sum(len(phase.taken_s["offloaded"]) for phase in phases)
    return num_rerouted / max(1, num_rerouted + num_answered)


def _most_mib(phases: Iterable[Phase], name: str) -> float:
    return max(phase.processes[name].rss_mib for phase in phases)


def _at_most(name: str, found: float, bound: float) -> Goal:
    return Goal(name, found, bound, found <= bound)


def _latencies(way: str, path: str, condition: str, phases: Sequence[Phase]) -> list[str]:
    def median_ms(share: float) -> str:
        return f"{1e3 * statistics.median(phase.quantile_s(path, share) for phase in phases):.1f}"

    let_in = [math.inf if phase.let_in_s is None else phase.let_in_s for phase in phases]
    return [
        f"{way}, {path}",
        condition,
        str(sum(len(phase.taken_s[path]) for phase in phases)),
        str(sum(len(phase.rerouted[path]) for phase in phases)),
        str(sum(len(phase.failed[path]) for phase in phases)),
        median_ms(0.5),
        median_ms(0.99),
        f"{statistics.median(let_in):.1f}" if path == "offloaded" else "-",
    ]


def _process(way: str, name: str, condition: str, phases: Sequence[Phase]) -> list[str]:
    found = [phase.processes[name] for phase in phases]
    return [
        f"{way}, {name}",
        condition,
        f"{max(one.rss_mib for one in found):.0f}",
        str(max(one.num_descriptors for one in found)),
        str(max(one.num_threads for one in found)),
        f"{statistics.median(one.cpu_s for one in found):.1f}",
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, second, *rest in rows:
        padded = [f"{text:>{width}}" for text, width in zip(rest, widths[2:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", f"{second:<{widths[1]}}", *padded]))
    return "\n".join(lines) + "\n"
