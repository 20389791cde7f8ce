"""`prfaas instance` without a gateway: what it asks, what it waits for, what it prints."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fake_gateway import FakeGateway
from msgspec import structs
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.members.pages import InstanceNow, InstancesOverview
from deploy.region import client

AT = ["--gateway", "http://g"]
NOW = InstanceNow(
    cluster="east", instance="p9", phase="serving", role="prefill", node="n9", requests=3
)
JOINING = structs.replace(NOW, phase="joining", reason="engine: not probed yet")
LEAVING = structs.replace(NOW, phase="leaving", copied="2 of 2 prefixes, 8 bytes")


def listed(*instances: InstanceNow) -> InstancesOverview:
    other = structs.replace(NOW, instance="p0", copied="")
    return InstancesOverview([other, *instances])


def run(
    monkeypatch: pytest.MonkeyPatch, words: list[str], *answers: object
) -> tuple[FakeGateway, Any]:
    gateway = FakeGateway("/prfaas/instances", answers)
    monkeypatch.setattr(client, "ask", gateway.ask)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return gateway, CliRunner().invoke(app, ["instance", *words, *AT])


def test_instances_are_listed_with_what_keeps_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = run(monkeypatch, ["list"], listed(JOINING))
    assert shown.exit_code == 0
    assert "p9" in shown.stdout
    assert "p9: engine: not probed yet" in shown.stdout
    _, shown = run(monkeypatch, ["list", "--json"], listed(LEAVING))
    assert json.loads(shown.stdout)["instances"][1]["phase"] == "leaving"


def test_add_waits_until_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["add", "p9", "--cluster", "east", "--url", "http://e:1", "--agent", "a:1"]
    answers = JOINING, listed(), listed(JOINING), listed(NOW)
    gateway, shown = run(monkeypatch, [*words, "--max-concurrent", "2"], *answers)
    assert shown.stdout == "p9 of east is serving\n"
    (order,) = gateway.bodies
    assert (order["name"], order["cluster"], order["max_concurrent"]) == ("p9", "east", 2)
    assert "decode_slots" not in order
    gateway, shown = run(monkeypatch, [*words, "--no-wait", "--json"], JOINING)
    assert json.loads(shown.stdout)["phase"] == "joining"
    refused = client.CannotAsk("http://g answered 409: other weights", 409)
    _, shown = run(monkeypatch, words, refused)
    assert shown.exit_code == 1
    assert "other weights" in shown.output


def test_add_ends_when_the_instance_is_gone_or_never_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["add", "p9", "--cluster", "east", "--url", "http://e:1", "--agent", "a:1"]
    _, shown = run(monkeypatch, words, JOINING, listed(), listed(JOINING), listed())
    assert shown.exit_code == 1
    assert "p9 is gone before it had joined: engine: not probed yet" in shown.output
    times = iter((0.0, 1.0, 601.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    _, shown = run(monkeypatch, words, JOINING, listed(JOINING))
    assert shown.exit_code == 1
    assert "p9 has not joined after 600 s: engine: not probed yet" in shown.output


def test_remove_waits_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = LEAVING, listed(NOW), listed(LEAVING), listed()
    gateway, shown = run(monkeypatch, ["remove", "p9", "--limit", "30s", "--force"], *answers)
    assert gateway.deleted == ["/p9?limit=30s&force=1"]
    assert shown.stdout == "p9 of east has left\ncopied away: 2 of 2 prefixes, 8 bytes\n"
    # Another of the name may have come in its place.
    _, shown = run(monkeypatch, ["remove", "p9", "--json"], LEAVING, listed(LEAVING), listed(NOW))
    assert json.loads(shown.stdout)["phase"] == "left"
    gateway, shown = run(monkeypatch, ["remove", "a/b", "--no-wait"], LEAVING)
    assert gateway.deleted == ["/a%2Fb"]
