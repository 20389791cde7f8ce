"""What planner and simulator promised for a region, beside what the region then did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from report_figures import Section, number, paced, table
from report_raw import Raw

_UNITS: Final = {"capacity": ("rps", "requests/s"), "conversation": ("s", "s")}
"""By part of the results, the suffix of its keys and the unit in words."""

_BY_ENGINE: Final = "an engine beside a busy one"

_INTRODUCTION: Final = """\
## Planner and simulator

`prfaas plan profile` measured an engine beside a busy one, `prfaas plan profile-live` the engines
of one shape under a full load. `prfaas plan solve` predicted from either what shapes of a region
complete; the load bench measured it. Goal: within 10%. Conversations with a region were recorded,
and `prfaas simulate` played them. Goal: P50 and P90 of TTFT within 15%."""


_PACED: Final = """\
## Planner

`prfaas plan solve` predicted what shapes of a region complete, from the profiles that pace their
engines; each shape was measured with two clients for each decode slot. Goal: within 5%."""


def section(raws: Sequence[Raw]) -> Section:
    """Of the last run: one profile stands behind all its rows."""
    kept = raws[-1].results
    rows = [_cells(row) for row in kept["rows"]]
    head = ["what", "profile of", "limited by", "goal", "predicted", "measured", "error"]
    verdicts = kept.get("pace", {})
    parts = [_PACED if verdicts else _INTRODUCTION, table(head, rows, 4), *paced(verdicts)]
    parts += [f"Not measured: {name} ({why})." for name, why in kept["missing"].items()]
    return Section("capacity", "\n\n".join(parts))


def _cells(row: Mapping[str, Any]) -> list[str]:
    suffix, unit = _UNITS[row["part"]]
    verdict = {True: "met", False: "*missed*", None: "-"}[row.get("met")]
    error = f"{row['error']:+.0%}" if "error" in row else "-"
    values = [number(row[f"{which}_{suffix}"]) for which in ("predicted", "measured")]
    by = row.get("by", _BY_ENGINE)
    return [f"{row['name']}, {unit}", by, row.get("binding", "-"), verdict, *values, error]
