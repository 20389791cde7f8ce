"""Small urgent transfers on a link that something else fills, and how a link is divided.

Run: python tests/bench/bench_sharing.py [--quick | --full | --smoke] [--json FILE]; as root for the
emulated links, otherwise on loopback only. Two processes, one per end, with `TransportConfig()`.
Measured at each place:

latency  4 MiB request transfers, one at a time with short random pauses, opened to complete: on the
         idle link, and beside bulk transfers that fill it: one of REPLICATION, one of their own
         class, eight of their own class, and eight that are another tenant's.
shares   two tenants with eight bulk transfers and one; REPLICATION beside a REQUEST bulk;
         tenant_bytes_per_s and pace_bytes_per_s on a link that carries more.

A bulk transfer never ends by itself: it is cancelled when the phase is over. The link's rate is
what one bulk alone reaches. Small transfers are compared by checksum, after their time was taken.
The default takes two and a half minutes; --full has longer phases and more transfers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import wan as emulated
from peer_end import SIDES, Side
from peer_process import EndProcess, PeerFailure
from sharing_end import SMALL_BYTES
from sharing_report import IDLE, Beside, Latency, Share, goals, plot, tables
from smoke import add_smoke
from wan import FAR, wan

from transport import Priority
from transport.sending.fair_queue import CLASS_WEIGHTS

END = Path(__file__).with_name("sharing_end.py")
LOOPBACK = "loopback"
LINKS = (emulated.Path(1e9, 0.040), emulated.Path(1e9, 0.010))
PLACES = (LOOPBACK, *map(str, LINKS))
TIMEOUT_S = 90.0
MAX_LIMIT_BYTES_PER_S = 250e6
"""For budgets and pacing: they are for links between sites, not for loopback."""
PAUSE_S = (0.005, 0.030)
"""Between small transfers: from, to."""
CONDITIONS = (
    Beside(IDLE, 0),
    Beside("one replication", 1, is_replication=True),
    Beside("one bulk", 1, shares=2),
    Beside("8 bulks", 8, shares=9),
    Beside("8 bulks of another tenant", 8, tenant="other", shares=2),
)
REPLICATION_SHARE = CLASS_WEIGHTS[Priority.REPLICATION] / sum(CLASS_WEIGHTS.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """How long everything takes. `num_crowded`: small transfers beside more than one bulk."""

    num_warm: int
    num_small: int
    num_crowded: int
    settle_s: float
    window_s: float


SMOKE = Plan(num_warm=1, num_small=2, num_crowded=1, settle_s=0.1, window_s=0.4)
QUICK = Plan(num_warm=10, num_small=60, num_crowded=16, settle_s=1.0, window_s=2.0)
FULL = Plan(num_warm=10, num_small=300, num_crowded=150, settle_s=4.0, window_s=10.0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ends run and what is known of the way between them."""

    name: str
    host: str
    rtt_s: float
    prefixes: dict[Side, list[str]]


class Ends:
    """Both processes, connected; they live as long as the `with`. PeerFailure from everything."""

    def __init__(self, place: Place, config: dict[str, float]) -> None:
        self._ends: dict[Side, EndProcess] = {}
        try:
            for side in SIDES:
                argv = [*place.prefixes[side], sys.executable, str(END), side, place.host]
                self._ends[side] = EndProcess(side, [*argv, json.dumps(config)], {})
            port = self._ends["receiver"].ask("hello")
            self.ask("connect", port=port)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for end in self._ends.values():
            end.kill()

    def ask(self, command: str, **arguments: Any) -> Any:
        """The sender's answer."""
        return self._ends["sender"].ask(command, TIMEOUT_S, **arguments)

    def small(self) -> float:
        """Seconds of one small transfer, whose bytes are then compared."""
        taken_s, sent = self.ask("small", tenant="")
        if self._ends["receiver"].ask("digest") != sent:
            raise PeerFailure("wrong bytes arrived")
        return float(taken_s)

    @contextmanager
    def bulks(self, *bulks: tuple[Priority, str], settle_s: float) -> Iterator[None]:
        """(class, tenant) of each, under way for `settle_s` when the body begins."""
        for priority, tenant in bulks:
            self.ask("start_bulk", priority=int(priority), tenant=tenant)
        time.sleep(settle_s if bulks else 0.0)
        yield
        self.ask("stop_bulks")

    def rates(self, window_s: float) -> list[float]:
        """Bytes/s of each bulk over the window, in the order they began."""
        began = self.ask("acked")
        time.sleep(window_s)
        return rates_between(began, self.ask("acked"))


def rates_between(began: Any, ended: Any) -> list[float]:
    """Of two answers to `acked`."""
    span_s = ended[0] - began[0]
    return [(b[1] - a[1]) / span_s for a, b in zip(began[1], ended[1], strict=True)]


class Bench:
    """Measures one place after the other and keeps what was found."""

    def __init__(self, plan: Plan) -> None:
        self.latencies: list[Latency] = []
        self.shares: list[Share] = []
        self._plan = plan
        self._pauses = random.Random(11)

    def measure(self, place: Place, sections: Sequence[str]) -> None:
        say(f"{place.name}:")
        with Ends(place, {}) as ends:
            for _ in range(self._plan.num_warm):
                ends.small()
            with ends.bulks((Priority.REQUEST, ""), settle_s=2 * self._plan.settle_s):
                (link_bytes_per_s,) = ends.rates(self._plan.window_s)
            say(f"  one bulk alone: {link_bytes_per_s / 1e6:.1f} MB/s")
            if "latency" in sections:
                for beside in CONDITIONS:
                    self._latency(ends, place, beside, link_bytes_per_s)
            if "shares" in sections:
                self._divide(ends, place)
        if "shares" in sections:
            self._limits(place, link_bytes_per_s)

    def _latency(self, ends: Ends, place: Place, beside: Beside, link_bytes_per_s: float) -> None:
        priority = Priority.REPLICATION if beside.is_replication else Priority.REQUEST
        bulks = [(priority, beside.tenant)] * beside.num_bulks
        is_crowded = beside.num_bulks > 1
        num = self._plan.num_crowded if is_crowded else self._plan.num_small
        taken_s = []
        with ends.bulks(*bulks, settle_s=self._plan.settle_s):
            link = ends.ask("link")
            began = ends.ask("acked")
            for _ in range(num):
                time.sleep(self._pauses.uniform(*PAUSE_S))
                taken_s.append(ends.small())
            bulk_bytes_per_s = sum(rates_between(began, ends.ask("acked")))
        latency = Latency(
            place=place.name,
            beside=beside,
            rtt_s=place.rtt_s,
            taken_s=tuple(taken_s),
            nbytes=SMALL_BYTES,
            frame_bytes=link["frame_bytes"],
            num_connections=link["num_connections"],
            bulk_bytes_per_s=bulk_bytes_per_s,
            link_bytes_per_s=link_bytes_per_s,
        )
        self.latencies.append(latency)
        p50_s, p99_s = latency.quantile_s(0.5), latency.quantile_s(0.99)
        words = f"p50 {1e3 * p50_s:.1f} ms, p99 {1e3 * p99_s:.1f} ms"
        say(f"  {beside.name}: {words}, bulk {bulk_bytes_per_s / 1e6:.1f} MB/s")

    def _divide(self, ends: Ends, place: Place) -> None:
        many, one = (Priority.REQUEST, "many"), (Priority.REQUEST, "one")
        rates = self._rates(ends, *[many] * 8, one)
        share = rates[-1] / sum(rates)
        self._keep(place, "tenants with 8 bulks and 1: the latter's share", share, 0.5, "of 1")
        rates = self._rates(ends, (Priority.REQUEST, ""), (Priority.REPLICATION, ""))
        share, name = rates[1] / sum(rates), "replication beside a request bulk: its share"
        self._keep(place, name, share, 0.8 * REPLICATION_SHARE, "of 1", is_least=True)

    def _limits(self, place: Place, link_bytes_per_s: float) -> None:
        """Pace is half of what the link carries, two tenants' budgets together as much."""
        half = min(link_bytes_per_s / 2, MAX_LIMIT_BYTES_PER_S)
        many, one = (Priority.REQUEST, "many"), (Priority.REQUEST, "one")
        with Ends(place, {"tenant_bytes_per_s": half / 2}) as ends:
            rates = self._rates(ends, *[many] * 8, one)
        for name, rate in (("8 bulks", sum(rates[:8])), ("1 bulk", rates[8])):
            what = f"tenant_bytes_per_s, {name}"
            self._keep(place, what, rate / 1e6, half / 2e6, "MB/s")
        with Ends(place, {"pace_bytes_per_s": half}) as ends:
            rate = sum(self._rates(ends, many, one))
        self._keep(place, "pace_bytes_per_s", rate / 1e6, half / 1e6, "MB/s")

    def _rates(self, ends: Ends, *bulks: tuple[Priority, str]) -> list[float]:
        with ends.bulks(*bulks, settle_s=self._plan.settle_s):
            rates = ends.rates(self._plan.window_s)
        if not sum(rates):
            raise PeerFailure(f"no byte of {len(bulks)} bulks was acknowledged")
        return rates

    def _keep(
        self, place: Place, name: str, found: float, wanted: float, unit: str, **more: bool
    ) -> None:
        self.shares.append(Share(place.name, name, found, wanted, unit, **more))
        say(f"  {name}: {found:.4g} {unit}")


def run(bench: Bench, places: Sequence[str], sections: Sequence[str]) -> dict[str, str]:
    """Every chosen place; why some were left out or given up."""
    missing: dict[str, str] = {}
    if LOOPBACK in places:
        here = Place(LOOPBACK, "127.0.0.1", 0.0, {"sender": [], "receiver": []})
        _measure(bench, here, sections, missing)
    chosen = [path for path in LINKS if str(path) in places]
    if not chosen:
        return missing
    with ExitStack() as stack:
        try:
            link = stack.enter_context(wan())
        except OSError as error:
            missing |= {str(path): str(error) for path in chosen}
            say(f"loopback only: {error}")
            return missing
        prefixes: dict[Side, list[str]] = {
            "sender": link.at_site(link.near, []),
            "receiver": link.at_site(link.far, []),
        }
        for path in chosen:
            link.set_path(path)
            _measure(bench, Place(str(path), FAR, path.rtt_s, prefixes), sections, missing)
    return missing


def _measure(bench: Bench, place: Place, sections: Sequence[str], missing: dict[str, str]) -> None:
    try:
        bench.measure(place, sections)
    except PeerFailure as error:
        missing[place.name] = f"given up: {error}"
        say(f"{place.name}: given up: {error}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="the default: about 2.5 minutes")
    depth.add_argument("--full", action="store_true", help="more transfers, longer phases")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    sections = ["latency", "shares"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--json", type=Path, help="write the result here, and a .png beside it")
    add_smoke(parser, places=[LOOPBACK, str(LINKS[1])])
    return parser.parse_args()


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, _stop)
    bench = Bench(SMOKE if arguments.smoke else FULL if arguments.full else QUICK)
    missing: dict[str, str] = {}
    status = 0
    try:
        missing = run(bench, arguments.places, arguments.sections)
    except KeyboardInterrupt:
        say("stopped: what follows is what was measured so far")
        status = 130
    if bench.latencies or bench.shares:
        print(tables(bench.latencies, bench.shares))
        if arguments.json is not None:
            keep(bench, missing, arguments.json)
    sys.exit(status)


def keep(bench: Bench, missing: dict[str, str], file: Path) -> None:
    """The raw numbers, and a picture of the latencies beside them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "missing": missing,
        "goals": [asdict(goal) for goal in goals(bench.latencies, bench.shares)],
        "latencies": [
            {**asdict(one), "p50_s": one.quantile_s(0.5), "p99_s": one.quantile_s(0.99)}
            for one in bench.latencies
        ],
        "shares": [{**asdict(share), "is_met": share.is_met} for share in bench.shares],
    }
    file.write_text(json.dumps(kept, indent=1) + "\n")
    if not bench.latencies:
        return
    try:
        plot(bench.latencies, file.with_suffix(".png"))
    except ImportError as error:
        say(f"without a picture: {error}")


if __name__ == "__main__":
    main()
