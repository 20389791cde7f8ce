"""Attacks by a prefill cluster that somebody has got hold of: what its front answers names memory,
another cluster, or another cluster's nodes, and its texts are orders to a terminal.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacked_agents import AttackedRegion, Way
from cache_doubles import FakeDirectory
from gateway_region import FakePrefill, Region, open_region
from msgspec import inspect, structs
from report_cases import cluster, instance
from rich.console import Console
from scheduler_side_rig import (
    ALLOCATED,
    AnsweringClient,
    arrive,
    request,
    scheduler_side,
    step,
)

from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.region_overview import RegionNow
from deploy.gateway.scheduling.admission import AdmissionOverview
from deploy.ops.clusters import print_clusters
from kvmanager.agent.between_agents import move_cache
from kvmanager.agent.cache.move_messages import ReserveCacheMoveReply
from kvmanager.agent.client import CacheMoveOrder
from kvmanager.directory.messages import NodeName
from kvmanager.landing import consumer_params
from prfaas.jobs import PrefillJob, PrefillResult
from prfaas.remote import RemotePrefillCluster
from prfaas.server import PrefillServer
from scheduler.reports import ClusterReport
from transport.rpc import RpcError

VICTIM = "ab" * 16
PLANTED: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_host": "10.9.9.9",
    "prfaas": {
        "role": "consumer",
        "transfer_id": VICTIM,
        "arena_epoch": "e1",
        "runs": [[5, 1]],
        "cached_runs": [[[5, 1]]],
    },
}


class TakenFront(FakePrefill):
    """A front that does its work and answers what its new owner likes."""

    def __init__(self, *pds: Any) -> None:
        super().__init__("far", *pds)
        self.answers: Callable[[PrefillResult], PrefillResult] = lambda result: result
        self.reports: Callable[[ClusterReport], ClusterReport] = lambda found: found

    async def submit(self, job: PrefillJob) -> PrefillResult:
        return self.answers(await super().submit(job))

    async def report(self) -> ClusterReport:
        return self.reports(await super().report())


@asynccontextmanager
async def taken_region(folder: Path, way: Way) -> AsyncIterator[tuple[Region, TakenFront]]:
    """A gateway with a PD cluster, home, and a prefill cluster, far, whose front was taken over."""
    certified = AttackedRegion(folder, way)
    caches = RegionCaches(FakeDirectory(), lambda target: None)  # type: ignore[arg-type, return-value]
    async with open_region(pds=("home",)) as honest:
        taken = TakenFront(honest.pd)
        server = PrefillServer(taken, "127.0.0.1:0", certified.shown("prefill-front"))
        target = f"127.0.0.1:{await server.start()}"
        far = RemotePrefillCluster("far", target, certified.shown("gateway"))
        honest.prefill = {"far": far}  # type: ignore[dict-item]
        try:
            async with open_region(around=honest, caches=caches) as region:
                region.prefill = {"far": taken}
                yield region, taken
        finally:
            await far.close()
            await server.stop()


@pytest.fixture(params=["tls", "nothing"])
async def attacked(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[Region, TakenFront]]:
    async with taken_region(tmp_path, request.param) as found:
        yield found


def decode_params(region: Region) -> Any:
    return json.loads(region.engine.bodies()[-1]).get("kv_transfer_params")


@pytest.mark.parametrize("hand_off", ["transport", "arena", "nixl"])
async def test_a_prefill_fronts_answer_names_no_memory(
    attacked: tuple[Region, TakenFront], hand_off: Any
) -> None:
    region, taken = attacked
    taken.answers = lambda result: structs.replace(
        result, hand_off=hand_off, kv_transfer_params=PLANTED
    )
    # With "nixl" nothing is said of the landing: the front's answer alone would have to be obeyed.
    region.pd.reports_landings = hand_off != "nixl"
    status, _, _ = await region.post(region.long_body())
    assert status == 200
    landing = taken.jobs[0].landing.transfer_id
    expected = None if hand_off == "nixl" else consumer_params(landing)
    assert decode_params(region) == expected
    await region.assert_nothing_held()


def test_parameters_that_name_memory_are_not_obeyed_by_an_engine() -> None:
    side = scheduler_side(AnsweringClient())
    consumer = request("consumer", 71)
    own = consumer.kv_transfer_params["prfaas"]
    consumer.kv_transfer_params = {"prfaas": PLANTED["prfaas"] | own}
    arrive(side, consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    (load,) = step(side, {}).loads
    assert load.ref is not None
    assert (load.ref.runs, load.cached) == (((0, 4),), None), "where its agent says"


async def test_a_front_reports_its_own_cluster_only(
    attacked: tuple[Region, TakenFront],
) -> None:
    region, taken = attacked
    taken.reports = lambda found: structs.replace(
        found,
        name="home",
        instances=tuple(
            structs.replace(i, node_name="d0", node="9.9.9.9:1") for i in found.instances
        ),
    )
    await region.heard()
    caches = region.gateway._caches
    assert caches is not None
    assert caches.targets == {NodeName("home", "d0"): "d0:1", NodeName("far", "d0"): "9.9.9.9:1"}


async def test_a_node_stays_in_the_cluster_that_reported_it_first(
    attacked: tuple[Region, TakenFront], caplog: pytest.LogCaptureFixture
) -> None:
    """Its front would have the caches of an instance that leaves copied to its other nodes."""
    region, taken = attacked

    def stolen(found: ClusterReport) -> ClusterReport:
        (own,) = found.instances
        theirs = structs.replace(own, name="x", node="d0:1", node_name="x", leaving=True)
        return structs.replace(found, instances=(own, theirs))

    taken.reports = stolen
    await region.heard()
    caches = region.gateway._caches
    assert caches is not None
    assert [name for name, at in caches.targets.items() if at == "d0:1"] == [NodeName("home", "d0")]
    assert "far reports the node agent at d0:1, which is home's" in caplog.text


async def test_a_node_gets_no_more_of_a_prefix_than_it_is_to_get() -> None:
    """The gateway would sign for whatever the destination says that it lacks."""

    class Destination:
        target = "9.9.9.9:1"

        async def reserve_cache_move(self, *_: Any) -> ReserveCacheMoveReply:
            parts = [(0, 0), (1, 0), (1, 2)]
            return ReserveCacheMoveReply(parts, "ab" * 16, "cd" * 32, 10, "9.9.9.9", 1, 5.0)

    order = CacheMoveOrder("ef" * 32, b"", [(0, 0), (1, 0)])
    destination: Any = Destination()
    with pytest.raises(RpcError, match=r"9\.9\.9\.9:1 asks for parts of the prefix"):
        await move_cache(destination, destination, order)


HOSTILE = ("home", "d0", "d0:1", VICTIM, "[/x]", "\x1b[2J", "a\nb", "", "../..", "{}", "nixl")
NUMBERS = (-(2**62), -1, 0, 1, 2**31, 2**62)


def fuzzed(kind: inspect.Type, rng: random.Random) -> Any:
    """Any value of this type, and rather one that an attacker would choose."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            values = {field.name: fuzzed(field.type, rng) for field in fields}
            try:
                return cls(**values)
            except ValueError:  # it would not be decoded either
                return fuzzed(kind, rng)
        case inspect.StrType():
            return rng.choice(HOSTILE)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType():
            return rng.choice(NUMBERS)
        case inspect.FloatType():
            return rng.choice((-1.0, 0.0, 1e-9, 1e300, float("inf"), float("nan")))
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.UnionType(types=types):
            return fuzzed(rng.choice(types), rng)
        case inspect.NoneType():
            return None
        case inspect.TupleType(item_types=items):
            return tuple(fuzzed(item, rng) for item in items)
        case inspect.VarTupleType(item_type=item):
            return tuple(fuzzed(item, rng) for _ in range(rng.randrange(3)))
        case inspect.ListType(item_type=item):
            return [fuzzed(item, rng) for _ in range(rng.randrange(3))]
        case inspect.DictType(value_type=inspect.AnyType()):
            return rng.choice([{}, PLANTED, {"do_remote_prefill": True, "remote_host": "9.9.9.9"}])
        case inspect.DictType(key_type=key, value_type=value):
            return {fuzzed(key, rng): fuzzed(value, rng) for _ in range(rng.randrange(3))}
        case _:
            raise NotImplementedError(str(kind))


@pytest.mark.parametrize("seed", range(3))
async def test_no_field_of_a_reply_changes_a_decision_above(tmp_path: Path, seed: int) -> None:
    """Whatever the front says: requests are answered, engines are told of the landing that the
    gateway had reserved or of none, and of the other cluster everything stays known.
    """
    rng = random.Random(seed)
    result, found = inspect.type_info(PrefillResult), inspect.type_info(ClusterReport)
    async with taken_region(tmp_path, "nothing") as (region, taken):
        caches = region.gateway._caches
        assert caches is not None
        taken.answers = lambda _: fuzzed(result, rng)
        for number in range(40):
            # Every second report is a true one, so that far gets prompts.
            taken.reports = (lambda _: fuzzed(found, rng)) if number % 2 else (lambda true: true)
            taken.jobs.clear()
            await region.heard()
            status, _, answer = await region.post(region.long_body())
            assert status == 200, answer
            params = decode_params(region)
            reserved = [consumer_params(job.landing.transfer_id) for job in taken.jobs]
            assert params is None or params in reserved
            assert caches.targets[NodeName("home", "d0")] == "d0:1"
            assert all(name.cluster in ("home", "far") for name in caches.targets)
            home = region.gateway._watcher.pd_report("home")
            assert home is not None
            assert (home.name, home.healthy, len(home.instances)) == ("home", True, 1)
        await region.assert_nothing_held()


def test_names_are_no_orders_to_an_operators_terminal() -> None:
    reason = "\x1b]0;owned\x07\x1b[2J[link=http://evil]click[/link]"
    evil = instance("[/x]", "prefill", healthy=False, max_concurrent=0, reason=reason)
    report = cluster("far", evil, reason="\x1b[2J:boom:")
    shown = io.StringIO()
    overview = RegionNow(
        threshold_tokens=1,
        in_flight=0,
        buffered_bytes=0,
        settling=0,
        links={},
        thresholds=[],
        admission=AdmissionOverview("", 0, {}, {}),
        pd=None,
        pds={},
        prefill={"far": report},
    )
    print_clusters(Console(file=shown, force_terminal=True, width=200), overview)
    assert "[/x]" in shown.getvalue()
    assert "[link=http://evil]click[/link]" in shown.getvalue()
    assert "\x1b]" not in shown.getvalue()
    assert "\x1b[2J" not in shown.getvalue()
    assert ":boom:" in shown.getvalue()


async def test_texts_of_a_report_are_printable_where_they_come_in(
    attacked: tuple[Region, TakenFront],
) -> None:
    region, taken = attacked
    taken.reports = lambda found: structs.replace(found, reason="a\x1b[2Jb", healthy=False)
    await region.heard()
    report = region.gateway._watcher.by_name()["far"]
    assert report is not None
    assert report.reason == "a?[2Jb"
    assert msgspec.json.encode(report).isascii()
