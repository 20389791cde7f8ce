"""Converting instances live: effects in order, every failure of the front, and giving back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from role_cluster import FakeCluster, drained

from deploy.gateway.scheduling.leadership import Leadership
from deploy.gateway.scheduling.roles import RoleKeeper, RoleMetrics
from local_pd.errors import FrontUnreachable, NoInstance, RoleRefused
from scheduler.live.long_term.conversion import (
    ConversionConfig,
    ConversionOutcome,
    ConversionPhase,
    ConversionWish,
    Ended,
)
from transport.rpc import RpcError

TO_PREFILL = ConversionWish("home", "decode", "prefill")
CONFIG = ConversionConfig(drain_limit_s=100, relabel_limit_s=30, dwell_s=50)


class Rig:
    """A keeper that is stepped by hand, its cluster and its clock."""

    def __init__(self, pd: FakeCluster | None = None) -> None:
        self.pd = pd or FakeCluster(d0="decode", d1="decode", p0="prefill")
        self.now_s = 0.0
        self.registry = CollectorRegistry()
        self.ends: list[Ended] = []
        cluster: Any = self.pd
        self.keeper = RoleKeeper(
            cluster, self.pd.latest, CONFIG, RoleMetrics(self.registry), clock=lambda: self.now_s
        )
        self.keeper.on_ended(self.ends.append)

    async def steps(self, number: int = 3) -> None:
        """As many as any event needs; what is scheduled runs between them."""
        for _ in range(number):
            await self.keeper.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def until_draining(self) -> None:
        assert self.keeper.ask(TO_PREFILL).effects
        await self.steps()

    def changes(self, outcome: ConversionOutcome) -> float | None:
        labels = {"cluster": "home", "to": "prefill", "outcome": outcome.value}
        return self.registry.get_sample_value("prfaas_gateway_role_changes_total", labels)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.keeper.close()


async def test_a_conversion_from_the_wish_to_the_end_of_its_dwell(rig: Rig) -> None:
    rig.pd.instances["d0"].running = 2
    assert rig.keeper.ask(TO_PREFILL).reason == "d1 has the fewest requests (0) of 2"
    assert rig.keeper.converting == {"home"}
    await rig.steps()
    assert rig.pd.calls == ["drain d1"]
    assert rig.keeper.current is not None
    assert rig.keeper.current.phase is ConversionPhase.DRAINING
    drained(rig.pd, "d1")
    await rig.steps()
    assert rig.pd.calls == ["drain d1", "set d1 prefill 1", "resume d1"]
    assert [(end.instance, end.outcome) for end in rig.ends] == [
        ("d1", ConversionOutcome.CONVERTED)
    ]
    assert (await rig.keeper.ended()) == rig.ends[0]
    assert rig.changes(ConversionOutcome.CONVERTED) == 1
    rig.now_s = 49
    await rig.steps()
    assert rig.keeper.ask(TO_PREFILL).reason == "d1 is dwelling"
    assert rig.keeper.last == (rig.ends[0], 49)
    rig.now_s = 50
    await rig.steps()
    assert rig.keeper.converting == frozenset()


async def test_the_last_usable_instance_of_a_role_and_model_stays(rig: Rig) -> None:
    to_decode = ConversionWish("home", "prefill", "decode")
    assert "1 usable prefill instances" in rig.keeper.ask(to_decode).reason
    rig.pd.instances["d1"].model = "other"
    assert "1 usable decode instances" in rig.keeper.ask(TO_PREFILL).reason
    rig.pd.instances["d1"].model = ""
    rig.pd.instances["d1"].healthy = False
    assert "1 usable decode instances" in rig.keeper.ask(TO_PREFILL).reason
    assert "no report" in rig.keeper.ask(ConversionWish("away", "decode", "prefill")).reason
    rig.pd.is_silent = True
    assert "no report" in rig.keeper.ask(TO_PREFILL).reason
    assert rig.pd.calls == []


async def test_nothing_is_converted_while_an_instance_drains_that_somebody_left(rig: Rig) -> None:
    rig.pd.instances["p0"].draining = True
    reason = "p0 drains, and not for this gateway"
    assert rig.keeper.ask(TO_PREFILL).reason == reason
    assert rig.keeper.ask(TO_PREFILL, only="d0").reason == reason
    assert rig.keeper.converting == frozenset()
    rig.pd.instances["p0"].draining = False
    assert rig.keeper.ask(TO_PREFILL).effects


async def test_an_instance_may_be_asked_for(rig: Rig) -> None:
    rig.pd.instances["d1"].running = 9
    start = rig.keeper.ask(TO_PREFILL, only="d1")
    assert (len(start.effects), start.reason) == (1, "d1 was asked for")
    await rig.steps()
    assert rig.pd.calls == ["drain d1"]
    assert rig.keeper.ask(TO_PREFILL, only="d0").reason == "d1 is draining"


async def test_a_drain_is_given_up_when_the_other_instance_dies(rig: Rig) -> None:
    await rig.until_draining()
    rig.pd.instances["d1"].healthy = False
    await rig.steps()
    assert rig.pd.calls == ["drain d0", "resume d0"]
    assert rig.ends[0].detail == "no other usable decode instance is left"
    assert not rig.pd.instances["d0"].draining


async def test_a_drain_that_takes_too_long_is_given_up(rig: Rig) -> None:
    await rig.until_draining()
    rig.now_s = 100
    await rig.steps()
    assert rig.pd.calls == ["drain d0", "resume d0"]
    assert rig.ends[0].outcome is ConversionOutcome.TOO_SLOW
    assert rig.pd.num_draining == 0


@pytest.mark.parametrize(
    "error",
    [
        FrontUnreachable("gone"),
        NoInstance("not drained but gone"),
        RpcError("UNAVAILABLE", "gone"),
        LookupError("bug"),
    ],
)
async def test_a_drain_that_fails_gives_the_instance_back(rig: Rig, error: Exception) -> None:
    rig.pd.errors["drain"] = [error]
    await rig.until_draining()
    assert rig.pd.calls == ["drain d0", "resume d0"]
    assert rig.ends[0].outcome is ConversionOutcome.FAILED
    assert rig.ends[0].detail == str(error)


async def test_a_refused_order_is_undone_at_once(rig: Rig) -> None:
    await rig.until_draining()
    rig.pd.errors["set_role"] = [RoleRefused("too old"), RoleRefused("too old")]
    drained(rig.pd, "d0")
    await rig.steps()
    assert rig.pd.calls == ["drain d0", "set d0 prefill 1", "set d0 decode 2", "resume d0"]
    assert rig.ends[0].outcome is ConversionOutcome.FAILED
    assert rig.keeper.converting == frozenset()


async def test_an_instance_is_given_back_however_long_the_front_is_away(rig: Rig) -> None:
    await rig.until_draining()
    drained(rig.pd, "d0")
    rig.pd.errors["set_role"] = [FrontUnreachable("gone")] * 3
    rig.pd.errors["resume"] = [TimeoutError()]
    await rig.steps()
    assert rig.ends == []
    assert "d0 is still being given back" in rig.keeper.ask(TO_PREFILL).reason
    assert rig.keeper.converting == {"home"}
    await rig.steps()
    assert rig.pd.calls[-2:] == ["resume d0", "resume d0"]
    now = rig.pd.instances["d0"]
    assert (now.role, now.epoch, now.draining) == ("decode", 2, False)
    assert rig.ends[0].outcome is ConversionOutcome.FAILED
    assert rig.keeper.ask(TO_PREFILL).effects


async def test_an_instance_that_is_gone_ends_its_conversion(rig: Rig) -> None:
    await rig.until_draining()
    del rig.pd.instances["d0"]
    await rig.steps()
    assert rig.ends[0].detail == "home has no instance d0 any more"
    assert rig.keeper.converting == frozenset()


@pytest.mark.parametrize("phase", [ConversionPhase.DRAINING, ConversionPhase.RELABELLING])
async def test_closing_gives_the_instance_back(rig: Rig, phase: ConversionPhase) -> None:
    rig.keeper.start()
    rig.keeper.ask(TO_PREFILL)
    async with asyncio.timeout(5):
        while "drain d0" not in rig.pd.calls:
            await asyncio.sleep(0)
        if phase is ConversionPhase.RELABELLING:
            rig.pd.answers.clear()
            drained(rig.pd, "d0")
            while "set d0 prefill 1" not in rig.pd.calls:
                await asyncio.sleep(0)
            rig.pd.answers_from_now_on()
    await rig.keeper.close()
    now = rig.pd.instances["d0"]
    assert (now.role, now.draining) == ("decode", False)
    assert rig.pd.num_draining == 0
    assert [(end.outcome, end.detail) for end in rig.ends] == [
        (ConversionOutcome.FAILED, "the gateway ended")
    ]
    await rig.keeper.close()


async def test_it_runs_by_itself_and_outlives_listeners_and_reports_that_fail(rig: Rig) -> None:
    def break_down(_: Ended) -> None:
        raise ValueError("a listener's bug")

    rig.keeper.on_ended(break_down)
    rig.keeper.start()
    drained(rig.pd, "d0")
    rig.keeper.ask(TO_PREFILL)
    async with asyncio.timeout(5):
        assert (await rig.keeper.ended()).outcome is ConversionOutcome.CONVERTED
    assert rig.pd.instances["d0"].role == "prefill"


async def test_a_frozen_leader_does_no_harm_when_it_wakes() -> None:
    old = Rig()
    new = Rig(old.pd)
    for rig in (old, new):
        rig.keeper.leadership = Leadership(is_shared=True)
    old.keeper.leadership.granted(7, 5.0, "old")
    await old.until_draining()
    # Frozen here. Its lease ends, and the front gives the instance work again.
    new.now_s = 70.0
    old.pd.instances["d0"].draining = False
    new.keeper.leadership.granted(8, 75.0, "new")
    assert new.keeper.ask(TO_PREFILL, only="d0").effects
    await new.steps()
    assert old.pd.instances["d0"].draining
    # It wakes, and hears that its drain is over.
    old.now_s = 71.0
    drained(old.pd, "d0")
    assert not old.keeper.leads()
    await old.steps(5)
    await new.steps(5)
    assert [end.outcome for end in old.ends] == [ConversionOutcome.FAILED]
    assert (old.pd.instances["d0"].role, old.pd.instances["d0"].epoch) == ("prefill", 1)
    assert not old.pd.instances["d0"].draining
    await old.keeper.close()
    await new.keeper.close()


async def test_who_does_not_lead_converts_nothing(rig: Rig) -> None:
    rig.keeper.leadership = Leadership(is_shared=True)
    rig.keeper.leadership.taken("other")
    start = rig.keeper.ask(TO_PREFILL)
    assert not start.effects
    assert start.reason == "the gateway other leads the region and converts instances"
    assert rig.pd.calls == []
