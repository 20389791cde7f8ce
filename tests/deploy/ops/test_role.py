"""`prfaas role` without a gateway: what it prints, what it waits for, how it ends."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from fake_gateway import FakeGateway
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.scheduling.role_pages import (
    InstanceRole,
    RoleChangeEnded,
    RoleChangeNow,
    RolesOverview,
)
from deploy.region import client
from scheduler.live.long_term.conversion import PdRole

AT = ["--gateway", "http://g"]


def instance(role: PdRole, epoch: int, phase: str = "ready") -> InstanceRole:
    return InstanceRole(
        instance="d1",
        role=role,
        epoch=epoch,
        phase=phase,
        ready=phase == "ready",
        healthy=True,
        requests=3,
    )


def overview(
    now: InstanceRole, phase: str = "", outcome: str = "", busy_with: str = ""
) -> RolesOverview:
    way: dict[str, Any] = {"instance": "d1", "from_role": "decode", "to_role": "prefill"}
    sick = InstanceRole(
        instance="d0",
        role="decode",
        epoch=0,
        phase="ready",
        ready=False,
        healthy=False,
        requests=0,
        reason="engine: no answer",
    )
    return RolesOverview(
        cluster="home",
        instances=[sick, now],
        conversion=RoleChangeNow(**way, epoch=1, phase=phase, for_s=4.0) if phase else None,
        busy_with=busy_with,
        last=RoleChangeEnded(**way, outcome=outcome, detail="because", ago_s=2.0)
        if outcome
        else None,
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    def given(*answers: object) -> FakeGateway:
        gateway = FakeGateway("/v1/pd_role", answers)
        monkeypatch.setattr(client, "ask", gateway.ask)
        return gateway

    monkeypatch.setattr(time, "sleep", lambda _: None)
    return given


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["role", *words, *AT])
    return result.exit_code, result.output


def test_roles_and_changes_are_listed(answers: Any) -> None:
    shown = overview(instance("decode", 0, "draining"), "draining", "failed")
    answers(shown)
    status, text = run("ls")
    assert status == 0
    assert "not healthy" in text
    assert "d0: engine: no answer" in text
    assert "d1 from decode to prefill, epoch 1: draining for 4 s" in text
    assert "last: d1 from decode to prefill: failed 2 s ago: because" in text
    answers(shown)
    status, text = run("ls", "--json")
    assert json.loads(text)["instances"][1]["role"] == "decode"


def test_every_pd_cluster_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(url: str, path: str, kind: object, *, key: str = "") -> RolesOverview:
        asked.append(path)
        name = "north" if path.endswith("cluster=north") else "home"
        shown = overview(instance("decode", 0))
        return msgspec.structs.replace(shown, cluster=name, clusters=["home", "north"])

    monkeypatch.setattr(client, "ask", ask)
    status, text = run("ls")
    assert status == 0
    assert asked == ["/v1/pd_role", "/v1/pd_role?cluster=north"]
    assert text.index("home") < text.index("north")
    status, text = run("ls", "--json")
    assert [json.loads(line)["cluster"] for line in text.splitlines()] == ["home", "north"]


def test_an_order_is_waited_for(answers: Any) -> None:
    draining = instance("decode", 0, "draining")
    gateway = answers(
        draining,
        overview(draining, "draining"),
        overview(instance("prefill", 1), "dwelling", "converted"),
    )
    assert run("set", "d1", "prefill", "--epoch", "0") == (0, "d1 is prefill, epoch 1, ready\n")
    assert gateway.bodies == [{"instance": "d1", "role": "prefill", "expected_epoch": 0}]


def test_the_end_of_an_undo_is_waited_for(answers: Any) -> None:
    """Until then the last change is an earlier one."""
    draining = instance("decode", 0, "draining")
    undone = overview(draining, outcome="converted", busy_with="d1 is still being given back")
    answers(draining, undone, undone, overview(instance("decode", 2), outcome="too_slow"))
    assert run("set", "d1", "prefill") == (1, "d1 is still decode; too_slow: because\n")
    answers(undone)
    assert "\nd1 is still being given back\n" in run("ls")[1]


def test_one_that_has_its_role_is_waited_for_until_it_is_given_work(answers: Any) -> None:
    draining = instance("prefill", 1, "draining")
    done = overview(instance("prefill", 1), "dwelling", "converted")
    answers(instance("decode", 0, "draining"), overview(draining, "dwelling"), done)
    assert run("set", "d1", "prefill") == (0, "d1 is prefill, epoch 1, ready\n")


def test_one_need_not_wait(answers: Any) -> None:
    answers(instance("decode", 0, "draining"))
    status, text = run("set", "d1", "prefill", "--no-wait", "--json")
    assert (status, json.loads(text)["phase"]) == (0, "draining")
    answers(instance("prefill", 1))
    assert run("set", "d1", "prefill") == (0, "d1 is prefill, epoch 1, ready\n")


def test_what_keeps_its_role_is_an_error(answers: Any) -> None:
    draining = instance("decode", 0, "draining")
    answers(draining, overview(instance("decode", 0), "", "too_slow"))
    assert run("set", "d1", "prefill") == (1, "d1 is still decode; too_slow: because\n")
    answers(draining, overview(instance("decode", 0)))
    assert run("set", "d1", "prefill")[1].endswith("the gateway does not say why\n")


def test_refusals_and_gateways_that_are_away_are_errors(answers: Any) -> None:
    answers(client.CannotAsk("http://g answered 409: d0 is draining", 409))
    assert run("set", "d1", "prefill") == (1, "http://g answered 409: d0 is draining\n")
    answers(client.CannotAsk("http://g: gone"))
    assert run("ls") == (3, "http://g: gone\n")
    assert run("set", "d1", "both")[0] == 2


def test_ctrl_c_ends_the_wait_and_not_the_change(answers: Any) -> None:
    answers(instance("decode", 0, "draining"), KeyboardInterrupt())
    status, text = run("set", "d1", "prefill")
    assert (status, "goes on" in text) == (130, True)
