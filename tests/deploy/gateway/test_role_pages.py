"""`/v1/pd_role`: what it lists, what it orders, and every order that it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from eventually import eventually
from prometheus_client import CollectorRegistry
from role_cluster import FakeCluster, FakeInstance, drained

from deploy.gateway.errors import ApiError
from deploy.gateway.scheduling.role_pages import InstanceRole, RegionRolePages, RolePages
from deploy.gateway.scheduling.roles import RoleKeeper, RoleMetrics
from local_pd.errors import FrontUnreachable
from scheduler.live.long_term.conversion import ConversionConfig


class Rig:
    """Pages over a keeper that runs."""

    def __init__(self) -> None:
        self.pd = FakeCluster(d0="decode", d1="decode", p0="prefill", b0="both")
        pd: Any = self.pd
        config = ConversionConfig(dwell_s=60)
        self.keeper = RoleKeeper(pd, self.pd.latest, config, RoleMetrics(CollectorRegistry()))
        self.pages = RolePages(self.keeper, pd, timeout_s=5)

    async def order(self, query: str = "", **body: object) -> tuple[int, InstanceRole]:
        words = {"wait": query} if query else {}
        return await self.pages.change(json.dumps(body).encode(), words)

    async def refused(self, status: int, code: str, **body: object) -> str:
        with pytest.raises(ApiError) as caught:
            await self.order(**body)
        assert (caught.value.status, caught.value.code) == (status, code)
        return caught.value.message


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    made.keeper.start()
    yield made
    await made.keeper.close()


async def test_an_order_is_taken_and_its_course_shown(rig: Rig) -> None:
    status, role = await rig.order(instance="d1", role="prefill")
    assert status == 202
    assert (role.role, role.epoch, role.phase, role.ready) == ("decode", 0, "draining", False)
    shown = await rig.pages.overview()
    assert shown.cluster == "home"
    assert shown.conversion is not None
    assert (shown.conversion.instance, shown.conversion.epoch) == ("d1", 1)
    assert (shown.conversion.phase, shown.last) == ("draining", None)
    drained(rig.pd, "d1")
    await rig.keeper.ended()
    shown = await rig.pages.overview()
    roles = {item.instance: (item.role, item.epoch, item.phase) for item in shown.instances}
    assert roles["d1"] == ("prefill", 1, "ready")
    assert roles["d0"] == ("decode", 0, "ready")
    assert shown.conversion is not None
    assert shown.conversion.phase == "dwelling"
    assert shown.last is not None
    assert (shown.last.instance, shown.last.outcome) == ("d1", "converted")
    assert (await rig.order(instance="d1", role="prefill", expected_epoch=0))[0] == 200


class Region:
    """The pages of two PD clusters whose fronts answer."""

    def __init__(self) -> None:
        self.home, self.north = FakeCluster(d0="decode"), FakeCluster(d1="decode", d2="decode")
        self.north.name = "north"
        metrics, config = RoleMetrics(CollectorRegistry()), ConversionConfig()
        pages = {}
        for pd in (self.home, self.north):
            front: Any = pd
            keeper = RoleKeeper(front, pd.latest, config, metrics)
            pages[pd.name] = RolePages(keeper, front, timeout_s=5)
        self.pages = RegionRolePages(pages)

    async def order(self, **body: object) -> tuple[int, InstanceRole]:
        return await self.pages.change(json.dumps(body).encode(), {})

    async def refused(self, instance: str) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await self.order(instance=instance, role="prefill")
        return caught.value


async def test_an_order_is_for_the_cluster_that_has_the_instance() -> None:
    region = Region()
    status, role = await region.order(instance="d1", role="prefill")
    assert (status, role.cluster, role.phase) == (202, "north", "draining")
    shown = await region.pages.overview({})
    assert (shown.cluster, shown.clusters, shown.conversion) == ("home", ["home", "north"], None)
    shown = await region.pages.overview({"cluster": "north"})
    assert shown.conversion is not None
    assert [item.cluster for item in shown.instances] == ["north", "north"]


async def test_an_instance_whose_name_several_clusters_have_is_changed_where_it_is_meant() -> None:
    region = Region()
    region.home.instances["d1"] = FakeInstance("decode")
    error = await region.refused("d1")
    assert (error.status, error.code) == (409, "ambiguous_instance")
    assert "home, north. Add ?cluster=NAME" in error.message
    body = json.dumps({"instance": "d1", "role": "prefill"}).encode()
    assert (await region.pages.change(body, {"cluster": "north"}))[1].cluster == "north"
    with pytest.raises(ApiError, match="No PD cluster is called `south`"):
        await region.pages.change(body, {"cluster": "south"})


async def test_an_instance_that_nobody_has_is_not_looked_for_where_no_front_answers() -> None:
    region = Region()
    error = await region.refused("d9")
    assert (error.status, error.code) == (404, "unknown_instance")
    assert "home has no instance `d9`" in error.message
    assert "north has no instance `d9`" in error.message
    region.home.is_silent = True
    error = await region.refused("d9")
    assert (error.status, error.code) == (503, "cluster_unavailable")
    assert (await region.order(instance="d1", role="prefill"))[1].cluster == "north"


@pytest.mark.parametrize("how", ["query", "body"])
async def test_one_may_wait_for_the_end(rig: Rig, how: str) -> None:
    drained(rig.pd, "d1")
    order: dict[str, object] = {"instance": "d1", "role": "prefill", "expected_epoch": 0}
    if how == "query":
        status, role = await rig.order("1", **order)
    else:
        status, role = await rig.order(**order, wait=True)
    assert (status, role.role, role.epoch, role.ready) == (200, "prefill", 1, True)


async def test_one_that_waited_hears_that_nothing_came_of_it(rig: Rig) -> None:
    rig.pd.errors["drain"] = [FrontUnreachable("the front is away")]
    said = await rig.refused(409, "not_converted", instance="d1", role="prefill", wait=True)
    assert said == "d1 is decode still, and serves: the front is away."


async def test_an_instance_that_is_still_given_back_is_shown(rig: Rig) -> None:
    """Otherwise the last change, which is an earlier one, would be taken for its end."""
    rig.pd.errors["drain"] = [FrontUnreachable("away")]
    rig.pd.errors["resume"] = [FrontUnreachable("away")]
    await rig.order(instance="d1", role="prefill")
    await eventually(lambda: not rig.pd.errors["resume"])
    shown = await rig.pages.overview()
    assert (shown.conversion, shown.last) == (None, None)
    assert shown.busy_with == "d1 is still being given back"


async def test_a_caller_that_leaves_does_not_end_the_change(rig: Rig) -> None:
    waiting = asyncio.create_task(rig.order(instance="d1", role="prefill", wait=True))
    await eventually(lambda: rig.pd.num_draining)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    drained(rig.pd, "d1")
    async with asyncio.timeout(5):
        await rig.keeper.ended()
    assert rig.pd.instances["d1"].role == "prefill"


async def test_orders_that_cannot_be_are_refused(rig: Rig) -> None:
    said = await rig.refused(404, "unknown_instance", instance="d9", role="prefill")
    assert "d0, d1, p0, b0" in said
    await rig.refused(409, "role_both", instance="b0", role="prefill")
    said = await rig.refused(409, "last_of_its_role", instance="p0", role="decode")
    assert "1 usable prefill instances; one must stay" in said
    order: dict[str, object] = {"instance": "d1", "role": "prefill"}
    rig.pd.instances["d1"].epoch = 4
    said = await rig.refused(409, "stale_epoch", **order, expected_epoch=3)
    assert "decode since epoch 4, not 3" in said
    await rig.refused(409, "stale_epoch", instance="d1", role="decode", expected_epoch=2)
    rig.pd.instances["d1"].healthy = False
    await rig.refused(409, "not_usable", **order)
    assert rig.pd.calls == []
    rig.pd.is_silent = True
    said = await rig.refused(503, "cluster_unavailable", **order)
    assert said.endswith("gone")


async def test_an_instance_encodes_if_its_engine_can(rig: Rig) -> None:
    said = await rig.refused(409, "role_fixed", instance="d0", role="encode")
    assert "started without an instance that has the role encode" in said
    rig.pd.instances["e0"] = FakeInstance("encode", roles=("encode",))
    said = await rig.refused(409, "role_fixed", instance="e0", role="prefill")
    assert "has not loaded the language model" in said
    assert "whole_model: true" in said
    assert (await rig.order(instance="e0", role="encode"))[0] == 200
    await rig.refused(400, "invalid_body", instance="d0", role="both")
    rig.pd.instances["d0"].roles = ("encode", "prefill", "decode")
    drained(rig.pd, "d0")
    status, role = await rig.order("1", instance="d0", role="encode")
    assert (status, role.role, role.epoch) == (200, "encode", 1)


async def test_one_conversion_runs_at_a_time(rig: Rig) -> None:
    await rig.order(instance="d1", role="prefill")
    said = await rig.refused(409, "conversion_runs", instance="d0", role="prefill")
    assert "d1 is draining; one conversion at a time" in said
    said = await rig.refused(409, "conversion_runs", instance="d1", role="decode")
    assert "d1 is draining, to become prefill" in said


async def test_an_instance_that_was_left_draining_is_given_work_again(rig: Rig) -> None:
    rig.pd.instances["d1"].draining = True
    shown = await rig.pages.overview()
    assert shown.instances[1].phase == "draining"
    assert shown.busy_with == "d1 drains, and not for this gateway"
    said = await rig.refused(409, "conversion_runs", instance="d0", role="prefill")
    assert said == "d1 drains, and not for this gateway. Try again later."
    said = await rig.refused(409, "not_usable", instance="d1", role="prefill")
    assert "Order the role that it has (decode): that gives it work again." in said
    status, role = await rig.order(instance="d1", role="decode")
    assert (status, role.phase, rig.pd.calls) == (200, "ready", ["resume d1"])
    rig.pd.instances["d1"].draining = True
    rig.pd.errors["resume"] = [FrontUnreachable("gone")]
    await rig.refused(503, "cluster_unavailable", instance="d1", role="decode")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"instance": "d1"}',
        b'{"instance": "d1", "role": "both"}',
        b'{"instance": "d1", "role": "decode", "epcoh": 1}',
        b'{"instance": "d1", "role": "decode", "expected_epoch": "1"}',
    ],
)
async def test_bodies_that_are_no_orders_are_refused(rig: Rig, body: bytes) -> None:
    with pytest.raises(ApiError, match=r'Send \{"instance": NAME') as caught:
        await rig.pages.change(body, {})
    assert (caught.value.status, caught.value.code) == (400, "invalid_body")
