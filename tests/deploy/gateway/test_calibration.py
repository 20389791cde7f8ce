"""When idle instances are timed, which ones, and what becomes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from live_region_cases import MODEL, instance, report
from msgspec import structs

from deploy.gateway.scheduling.calibration import AGAIN_S, LENGTHS, Calibration
from deploy.gateway.scheduling.config import CalibrationSection
from deploy.gateway.scheduling.scheduler import RegionScheduler
from prfaas.engines.errors import UnknownInstance
from prfaas.engines.timing import TimedPrefills, TimingOrder
from scheduler.live.core import Event
from scheduler.live.feedback import Calibrated
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.snapshots import Reported
from scheduler.reports import ClusterReport, InstanceReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE
from transport.rpc import RpcError

TIMED = TimedPrefills(((256, 9.0), (256, 0.3), (4096, 2.4)))


class Front:
    """Gives one answer to every order, once its gate is open."""

    def __init__(self) -> None:
        self.orders: list[TimingOrder] = []
        self.answer: TimedPrefills | Exception = TIMED
        self.gate = asyncio.Event()
        self.gate.set()

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        self.orders.append(order)
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class NoReports:
    def reported_pds(self) -> list[Reported]:
        return []

    def reported_prefill(self) -> list[Reported]:
        return []


class Case:
    """The calibration of a PD cluster and a prefill cluster; its clock is `now_s`."""

    def __init__(self, *, is_started: bool = True, **settings: Any) -> None:
        self.now_s = 100.0
        self.fronts = {"home": Front(), "far": Front()}
        live = LiveSettings(
            pd_clusters=(PdSettings("home", ("far",)),),
            threshold_tokens=1000,
            hand_off_tokens=256,
            models=(MODEL,),
        )
        self.scheduler = RegionScheduler(live, NoReports(), clock=lambda: self.now_s)
        self.told: list[Event[Any]] = []
        self.scheduler.on_taken(lambda event, _: self.told.append(event))
        self.known = self.scheduler.knowledge(MODEL)
        self.calibration = Calibration(
            CalibrationSection(**settings),
            self.scheduler,
            {"home": self.fronts["home"]},
            {"far": self.fronts["far"]},
            clock=lambda: self.now_s,
        )
        if is_started:
            self.calibration.start()

    async def hear(self, *reports: ClusterReport) -> None:
        for one in reports:
            self.calibration.heard(one)
        await self.calibration.settle(5.0)

    def orders(self, cluster: str = "far") -> list[str]:
        return [order.instance for order in self.fronts[cluster].orders]


def idle(name: str, role: Any = "prefill", **fields: Any) -> InstanceReport:
    return structs.replace(instance(name, role, layout_fingerprint="a"), **fields)


async def test_each_place_is_timed_once() -> None:
    case = Case(limit_s=3.0)
    home = report("home", idle("p1"), idle("d0", "decode"))
    for _ in range(2):
        await case.hear(home, report("far", idle("p0"), idle("p9")))
    assert case.fronts["far"].orders == [TimingOrder(instance="p0", lengths=LENGTHS, limit_s=3.0)]
    assert case.orders("home") == ["p1", "d0"]
    for place in ("far", HAND_OFF, ONE_ENGINE):
        # The first prompt was a warm-up.
        assert case.known.prefill(place).prefill_s(256) == pytest.approx(0.3)
        assert case.known.prefill(place).prefill_s(4096) == pytest.approx(2.4)
    assert all(isinstance(event, Calibrated) for event in case.told)


async def test_another_layout_is_timed_anew() -> None:
    case = Case()
    await case.hear(report("far", idle("p0")))
    case.now_s += AGAIN_S
    await case.hear(report("far", idle("p0", layout_fingerprint="b")))
    assert case.orders() == ["p0", "p0"]


@pytest.mark.parametrize(
    "fields",
    [
        {"running": 1},
        {"num_running": 1},
        {"num_waiting": 1},
        {"healthy": False},
        {"draining": True},
        {"role_ready": False},
        {"layout_fingerprint": ""},
        {"model": "another"},
    ],
)
async def test_what_is_busy_unusable_or_unknown_is_not_timed(fields: dict[str, Any]) -> None:
    case = Case()
    await case.hear(report("far", idle("p0", **fields)))
    assert not case.orders()


async def test_nothing_is_timed_before_it_is_known_what_was_learnt() -> None:
    case = Case(is_started=False)
    await case.hear(report("far", idle("p0")), report("home", idle("d0", "decode")))
    assert not case.orders()
    case.known.calibrated("far", "a ", [(256, 0.3), (4096, 2.4)])
    case.calibration.start()
    await case.calibration.settle()
    assert (case.orders(), case.orders("home")) == ([], ["d0"])


async def test_off_means_off() -> None:
    case = Case(mode="off")
    await case.hear(report("far", idle("p0")))
    assert not case.orders()


@pytest.mark.parametrize(
    "answer",
    [
        TimedPrefills(reason="p0 is busy"),
        TimedPrefills(((256, 9.0),), "p0 took longer than 5 s"),  # no more than a warm-up
        RpcError("INTERNAL", "Method not found!"),  # a front of an older version
        UnknownInstance("far", "p0"),
        OSError("no route"),
    ],
)
async def test_a_try_that_timed_nothing_is_made_again_later(answer: Any) -> None:
    case = Case()
    case.fronts["far"].answer = answer
    for _ in range(3):
        await case.hear(report("far", idle("p0")))
    assert case.orders() == ["p0"]
    assert not case.known.is_known
    case.now_s += AGAIN_S
    case.fronts["far"].answer = TIMED
    await case.hear(report("far", idle("p0")))
    assert case.known.is_known


async def test_one_instance_at_a_time_and_none_after_the_end() -> None:
    case = Case()
    far, home = case.fronts["far"], case.fronts["home"]
    far.gate.clear()
    case.calibration.heard(report("far", idle("p0")))
    case.calibration.heard(report("home", idle("d0", "decode")))
    await case.calibration.settle(0.01)
    assert (len(far.orders), len(home.orders)) == (1, 0)
    await case.calibration.close()
    far.gate.set()
    assert (len(far.orders), len(home.orders)) == (1, 0)
    assert not case.known.is_known
