"""`prfaas link top` without a gateway: what it prints, how it ends."""

from __future__ import annotations

import io
import itertools
import json
import time

import pytest
from fake_gateway import FakeGateway
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.links.region_links import LinksOverview
from deploy.ops.link import overview, sparkline
from deploy.region import client
from netmon.estimate import LinkCondition, LinkEstimate, PathReport
from netmon.region_link import LinkNow, LinkPath

run = CliRunner().invoke
MBIT = 125_000.0

BUSY = LinkNow(
    source="far",
    target="home",
    name="wan",
    condition=LinkCondition.CONGESTED,
    reason="carries 48 of 405 Mbit/s",
    condition_s=7.0,
    available_bytes_per_s=50 * MBIT,
    rate_age_s=1.0,
    achieved_bytes_per_s=48 * MBIT,
    utilisation=0.96,
    rtt_s=0.03,
    base_rtt_s=0.02,
    queueing_delay_s=0.01,
    loss=0.013,
    backlog_bytes=300 << 20,
    backlog_s=50.0,
    num_transfers=3,
    num_paths=1,
    age_s=0.1,
    lately_bytes_per_s=[48 * MBIT],
)
PATH = LinkPath(
    "far/a1",
    "home/b1",
    PathReport(
        endpoint="tunnel:9",
        condition=LinkCondition.CLEAR,
        reason="",
        condition_s=1.0,
        reference_bytes_per_s=0.0,
        estimate=LinkEstimate(available_bytes_per_s=50 * MBIT, rtt_s=0.03),
        num_connections=8,
    ),
    0.2,
)
FOUND = LinksOverview([BUSY, LinkNow(source="home", target="far")], [PATH], {"far/a2": "gone"})


def printed(found: LinksOverview, *, with_paths: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(overview(found, with_paths=with_paths))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_link_is_a_line_and_its_trouble_another() -> None:
    text = printed(FOUND)
    for words in ("48Mbit", "50Mbit", "96%", "20ms+10ms", "1.3%"):
        assert words in text
    assert "wan: congested for 7 s: carries 48 of 405 Mbit/s" in text
    assert "wan: 300.0 MiB of 3 transfers wait, for 50 s at this rate" in text
    assert "home to far" in text
    assert "no news" in text
    assert "far/a2: gone" in text
    assert "tunnel:9" not in text
    assert "tunnel:9" in printed(FOUND, with_paths=True)
    assert "no links yet" in printed(LinksOverview([], []))


def test_bars_are_shares_of_the_most() -> None:
    def bars(*rates: float, available: float | None = 8.0) -> str:
        link = LinkNow(
            source="a", target="b", available_bytes_per_s=available, lately_bytes_per_s=[*rates]
        )
        return sparkline(link)

    assert bars(0.0, 1.0, 4.0, 8.0) == "·▂▅█"
    assert bars() == ""
    assert bars(0.0, available=None) == "·"
    assert len(bars(*range(100))) == 16


def sleeps(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C comes in the pause after so many others."""
    left = iter(range(number))

    def sleep(_: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    made = FakeGateway("/prfaas/links", itertools.repeat(FOUND))
    monkeypatch.setattr(client, "ask", made.ask)
    return made


def test_once_and_without_a_terminal_it_looks_once(gateway: FakeGateway) -> None:
    for words in ([], ["--once"], ["--paths"]):
        result = run(app, ["link", "top", "--gateway", "http://g", *words])
        assert (result.exit_code, "wan" in result.output) == (0, True)
    assert gateway.num_asked == 3


def test_json_goes_on_until_ctrl_c(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps(monkeypatch, 2)
    result = run(app, ["link", "top", "--gateway", "http://g", "--json"])
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [line["links"][0]["condition"] for line in lines] == ["congested"] * 3
    result = run(app, ["link", "top", "--gateway", "http://g", "--json", "--once"])
    assert json.loads(result.output)["paths"][0]["view"]["endpoint"] == "tunnel:9"


def test_live_it_outlives_a_gateway_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = client.CannotAsk("http://g is gone")
    away = FakeGateway("/prfaas/links", (FOUND, gone, gone))
    monkeypatch.setattr(client, "ask", away.ask)
    monkeypatch.setattr(Console, "is_terminal", True)
    sleeps(monkeypatch, 2)
    result = run(app, ["link", "top", "--gateway", "http://g"])
    assert result.exit_code == 0
    assert away.num_asked == 3
    assert "no answer: http://g is gone" in result.output


def test_a_gateway_that_is_not_there_is_named() -> None:
    result = run(app, ["link", "top", "--gateway", "http://127.0.0.1:1"])
    assert result.exit_code == 3
    assert "127.0.0.1:1" in result.output
