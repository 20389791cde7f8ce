"""`prfaas clusters` and `prfaas gateways` without a gateway: what they print of its answers."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest
import report_cases
from fake_gateway import FakeGateway
from report_cases import cluster
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.region_overview import RegionNow
from deploy.gateway.scheduling.admission import AdmissionOverview, TenantNow
from deploy.gateway.sharing.overview import Peer, ProcessNow, SharingOverview
from deploy.ops.clusters import print_clusters, print_gateways
from deploy.region import client
from scheduler.live.thresholds import ThresholdNow

run = CliRunner().invoke


instance = partial(report_cases.instance, running=2, num_running=1, num_waiting=3, kv_usage=0.25)
HOME = cluster(
    "home",
    instance("d0"),
    instance("d1", healthy=False, reason="engine: no answer", kv_usage=None),
    instance("d2", draining=True, decode_slots=8),
    instance("d3", role_ready=False),
    running=2,
)
EAST = cluster("east", healthy=False, queue_depth=7, running=1, max_queued=64, reason="full")
FOUND = RegionNow(
    threshold_tokens=1024,
    in_flight=5,
    buffered_bytes=0,
    settling=0,
    links={"east": "wan"},
    thresholds=[
        ThresholdNow(cluster="east", base_tokens=1024, tokens=4096, reason="congested", pd="home")
    ],
    admission=AdmissionOverview("limits", 1200, {"load": 3}, {"acme": TenantNow(2, 9000)}),
    pd=HOME,
    pds={"home": HOME},
    prefill={"east": EAST, "west": None},
)


@dataclass
class Printed:
    text: str

    def row(self, name: str) -> list[str]:
        """The cells of the first line that begins with `name`."""
        lines = map(str.split, self.text.splitlines())
        return next(line[1:] for line in lines if line[:1] == [name])


def shown(found: RegionNow) -> Printed:
    console = Console(file=io.StringIO(), width=120)
    print_clusters(console, found)
    assert isinstance(console.file, io.StringIO)
    return Printed(console.file.getvalue())


def test_clusters_and_instances_have_a_line_each() -> None:
    out = shown(FOUND)
    assert out.row("home") == ["pd", "healthy", "0", "2", "2", "of", "4"]
    assert out.row("east")[:4] == ["prefill", "not", "healthy", "7"]
    assert out.row("west") == ["prefill", "no", "news"]
    assert out.row("d0") == ["home", "both", "serving", "2", "of", "4", "1", "3", "25%"]
    assert out.row("d1") == ["home", "both", "not", "healthy", "2", "of", "4", "1", "3"]
    assert out.row("d2")[2:6] == ["draining", "2", "of", "8"]
    assert out.row("d3")[2:4] == ["changes", "role"]
    for line in ("east: full", "d1: engine: no answer", "tenant acme: 2 requests, 9,000 tokens"):
        assert line in out.text
    assert "5 requests in flight; admitted 1,200, refused 3" in out.text


def test_a_threshold_stands_beside_that_of_the_plan() -> None:
    lines = [line.split() for line in shown(FOUND).text.splitlines()]
    assert ["east", "to", "home", "4,096", "1,024", "congested"] in lines


def test_gateways_and_their_leader() -> None:
    found = SharingOverview(
        name="g1",
        state="alone",
        for_s=3.0,
        error="redis: no answer",
        leads=False,
        leader="g2",
        token=1,
        peers=[Peer(name="g2", requests=12)],
        pending=0,
        processes=[ProcessNow(number=0, state="serving", pid=7, for_s=5.0, restarts=1)],
    )
    console = Console(file=io.StringIO(), width=120)
    print_gateways(console, found)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "g2 (leads)" in text
    assert "g1 (leads)" not in text
    assert "alone for 3 s" in text
    assert "process 0: serving for 5 s, 1 restarts" in text
    assert text.rstrip().endswith("redis: no answer")


def test_json_has_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ask", FakeGateway("/prfaas/region", [FOUND]).ask)
    result = run(app, ["clusters", "--gateway", "http://g", "--json"])
    assert result.exit_code == 0, result.output
    assert msgspec.json.decode(result.output, type=RegionNow) == FOUND
    assert json.loads(result.output)["prefill"]["west"] is None
