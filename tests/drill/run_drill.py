"""Five faults in a region of two hosts with a real Prometheus server: `make drill`.

    make drill                                  everything, about ten minutes
    make drill DRILL_ARGS="--only link"         faults with one of these words

The hosts are two addresses of this machine, and engines compute nothing. Prometheus has the
configuration and the rules that `prfaas region render` writes, as they are. For each fault it waits
for the alert, reads the page that the alert names, does what the page says, and waits until the
region is well. It prints a table, and exits 1 if an alert did not fire or a page did not help.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("support", "drill"))]

from drill_region import DrillRegion, drill_region  # noqa: E402
from faults import FAULTS, Fault  # noqa: E402
from prometheus_server import Prometheus, running_prometheus  # noqa: E402
from rich.console import Console  # noqa: E402

from deploy.region.launch.prometheus import INTERVAL_S  # noqa: E402
from deploy.table_style import new_table, say  # noqa: E402

PATIENCE_S = 240.0
OVER_S = 60.0
"""How long to wait for an alert to end; those of rates over 5 minutes take longer."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault. Times in seconds; None: it did not happen while the drill waited."""

    fault: str
    alert: str
    fired_after_s: float | None
    page: str
    others: tuple[str, ...]
    """Other alerts that fired meanwhile."""
    step: str
    well_after_s: float | None
    """From the beginning of what the page says to do until the region serves as before."""
    over_after_s: float | None
    """From then until the alert is over."""

    @property
    def is_good(self) -> bool:
        return None not in (self.fired_after_s, self.well_after_s)


def waited(condition: object, limit_s: float) -> float | None:
    """The seconds until `condition` held, or None."""
    assert callable(condition)
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > limit_s:
            return None
        time.sleep(0.5)
    return time.monotonic() - began_s


def drill(fault: Fault, region: DrillRegion, server: Prometheus) -> Outcome:
    """Cause a fault, wait for its alert, and do what the page says."""
    if waited(lambda: fault.is_well(region), PATIENCE_S) is None:
        raise AssertionError(f"{fault.name}: the region is not well before")
    fault.cause(region)
    fired_s = waited(lambda: fault.alert in server.firing(), PATIENCE_S)
    firing = server.firing()
    page = ""
    if fired_s is not None:
        page = firing[fault.alert]["annotations"]["runbook_url"]
        if fault.step not in (ROOT / page).read_text(encoding="utf-8"):
            raise AssertionError(f"{page} does not say {fault.step!r}")
    began_s = time.monotonic()
    fault.mend(region)
    is_well = waited(lambda: fault.is_well(region), PATIENCE_S) is not None
    well_s = time.monotonic() - began_s if is_well else None
    over_s = waited(lambda: fault.alert not in server.firing(), OVER_S)
    others = tuple(sorted(set(firing) - {fault.alert}))
    return Outcome(fault.name, fault.alert, fired_s, page, others, fault.step, well_s, over_s)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make drill", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="faults with one of these words")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("prometheus is not installed; `make system` does that", file=sys.stderr)
        return 2
    console = Console()
    outcomes: list[Outcome] = []
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in arguments.only)]
    with (
        tempfile.TemporaryDirectory(prefix="drill-") as folder,
        drill_region(Path(folder)) as region,
    ):
        with running_prometheus(region.rendered, Path(folder) / "data", INTERVAL_S) as server:
            for fault in chosen:
                say(console, f"{fault.name} ...")
                outcomes.append(drill(fault, region, server))
                one = outcomes[-1]
                say(
                    console,
                    f"{one.alert} after {seconds(one.fired_after_s)} s, {one.page}, also "
                    f"{', '.join(one.others) or 'none'}; well {seconds(one.well_after_s)} s after "
                    f"`{one.step}`, alert over {seconds(one.over_after_s)} s later",
                )
    numbers = ("fired after s", "well after s", "over after s")
    table = new_table("fault", "alert", "page", numbers=numbers)
    for one in outcomes:
        times = map(seconds, (one.fired_after_s, one.well_after_s, one.over_after_s))
        table.add_row(one.fault, one.alert, Path(one.page).stem, *times)
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    return 0 if all(one.is_good for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
