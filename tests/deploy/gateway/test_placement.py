import asyncio
from collections.abc import AsyncIterator
from types import MappingProxyType
from typing import Any

import pytest
from cache_doubles import FakeDirectory, MovingAgents, coverage
from eventually import eventually
from prometheus_client import CollectorRegistry
from report_cases import cluster, instance

from deploy.gateway.cache.cached_prompt import CachedPrompt, CachePlaces, PromptKeys
from deploy.gateway.cache.moves import CacheMoves, MoveMetrics
from deploy.gateway.cache.placement import PrefixPlacement, node_loads
from deploy.gateway.serving.background import Background
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeCoverage, NodeName
from scheduler.live.core import Event
from scheduler.live.feedback import CacheMoveBegun, CacheMoveOver
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, CacheMove, MoveReason, Reason
from scheduler.routing.replication import NodeLoad
from scheduler.routing.short_term import RouteDecision
from transport.rpc import RpcError

MODEL = CacheModel("ab" * 16, 512, [(0, 1_000_000, 0), (2, 5_000_000, 0)])
KEYS = tuple(bytes([index]) * 16 for index in range(10))
TARGETS = {
    NodeName("pd", "a"): "pd-a:1",
    NodeName("pd", "b"): "pd-b:1",
    NodeName("pd", "h"): "pd-h:1",
    NodeName("prefill", "x"): "prefill-x:1",
    NodeName("prefill", "y"): "prefill-y:1",
}


class World(MovingAgents):
    """The agents, the time, and what the scheduler is told."""

    def __init__(self) -> None:
        super().__init__(MODEL, 10_000_000, num_kept=11)
        self.now_s = 0.0
        self.told: list[Event[Any]] = []

    def clock(self) -> float:
        return self.now_s

    def tell(self, event: Event[Any]) -> int:
        self.told.append(event)
        return 1


def prompt(*held: NodeCoverage) -> CachedPrompt:
    places = CachePlaces(
        "pd",
        MODEL,
        MappingProxyType({"a": "pd-a:1", "b": "pd-b:1"}),
        MappingProxyType({"h": "pd-h:1"}),
        prefill_nodes=MappingProxyType(
            {"prefill": MappingProxyType({"x": "prefill-x:1", "y": "prefill-y:1"})}
        ),
    )
    return CachedPrompt(PromptKeys(MODEL, bytes(16), KEYS, "blue"), places, held)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def moves(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CacheMoves]:
    monkeypatch.setattr("deploy.gateway.cache.moves.MAX_MOVE_S", 0.2)
    moves = CacheMoves(
        lambda: TARGETS,
        world.at,
        Background(),
        MoveMetrics(CollectorRegistry()),
        world.tell,
    )
    yield moves
    await moves.close()


def count(moves: CacheMoves, kind: str, outcome: str) -> float:
    return moves.metrics.moves.labels(kind, outcome)._value.get()


async def settled(moves: CacheMoves) -> None:
    await eventually(lambda: not moves.moving)


def route(target: str, source: str, reason: MoveReason = MoveReason.PAYS) -> RouteDecision:
    move = CacheMove(reason=reason, source=source)
    side: Any = "prefill_cluster" if target == "prefill" else "local"
    return RouteDecision(side, target, Reason.BELOW_THRESHOLD, move=move)


class TestBring:
    async def test_a_prefix_comes_to_the_node_that_has_most_of_it(
        self, world: World, moves: CacheMoves
    ) -> None:
        cached = prompt(coverage(NodeName("pd", "a"), 10), coverage(NodeName("prefill", "y"), 4))
        found = await moves.bring(cached, route("prefill", "pd"))
        ((way, order),) = world.sent
        assert way == "pd-a:1 -> prefill-y:1"
        assert order.priority == "request"
        assert order.block_keys == bytes(16) + b"".join(KEYS)
        assert order.parts == (*((index, 0) for index in range(4, 10)), (9, 1))
        assert (order.layout_fingerprint, order.tenant) == ("f0" * 32, "blue")
        assert found.prefill_tokens == {"prefill": 5120}
        assert found.computing_tokens("prefill") == {"prefill-y:1": 5120}
        assert world.told == [
            CacheMoveBegun("pd", "prefill"),
            CacheMoveOver(1, False, 10_000_000, 0.01, 0.001),
        ]
        assert count(moves, "request", "complete") == 1
        assert moves.metrics.decisions.labels("pays")._value.get() == 1

    @pytest.mark.parametrize(
        ("target", "nodes", "way"),
        [
            (ONE_ENGINE, (coverage(NodeName("pd", "b"), 2),), "prefill-x:1 -> pd-b:1"),
            (ONE_ENGINE, (), "prefill-x:1 -> pd-a:1"),
            (HAND_OFF, (coverage(NodeName("pd", "b"), 2),), "prefill-x:1 -> pd-h:1"),
        ],
    )
    async def test_the_pd_cluster_gets_the_prefill_clusters_cache(
        self, world: World, moves: CacheMoves, target: str, nodes: Any, way: str
    ) -> None:
        cached = prompt(coverage(NodeName("prefill", "x"), 10), *nodes)
        found = await moves.bring(cached, route(target, "prefill"))
        assert [sent for sent, _ in world.sent] == [way]
        assert found.computing_tokens(target)[way.split()[-1]] == 5120
        assert (found.direct_nodes()[0] == way.split()[-1]) == (target == ONE_ENGINE)

    async def test_a_move_that_measures_a_link_is_not_waited_for(
        self, world: World, moves: CacheMoves
    ) -> None:
        cached = prompt(coverage(NodeName("pd", "a"), 10))
        decision = route("prefill", "pd", MoveReason.LINK_RATE_UNKNOWN)
        assert await moves.bring(cached, decision) is cached
        await settled(moves)
        assert [order.priority for _, order in world.sent] == ["replication"]
        assert world.told[1:] == [CacheMoveOver(1, False, 10_000_000, 0.01, 0.001)]

    async def test_a_move_that_takes_too_long_goes_on_without_the_request(
        self, world: World, moves: CacheMoves
    ) -> None:
        cached, decision = prompt(coverage(NodeName("pd", "a"), 10)), route("prefill", "pd")
        world.stalled = True
        first, second = await asyncio.gather(
            moves.bring(cached, decision), moves.bring(cached, decision)
        )
        assert first is second is cached
        assert len(world.sent) == 1  # both waited for the same move
        assert world.told == [CacheMoveBegun("pd", "prefill")]
        world.stalled = False
        await settled(moves)
        assert count(moves, "request", "complete") == 1
        assert len(world.told) == 2

    async def test_a_move_that_fails_costs_nothing_but_is_told(
        self, world: World, moves: CacheMoves
    ) -> None:
        cached = prompt(coverage(NodeName("pd", "a"), 10))
        world.failing = RpcError("NO_ROOM", "full")
        assert await moves.bring(cached, route("prefill", "pd")) is cached
        assert count(moves, "request", "no_room") == 1
        assert world.told[1:] == [CacheMoveOver(1, True)]

    async def test_a_prefix_that_was_not_kept_whole_is_not_counted_on(
        self, world: World, moves: CacheMoves
    ) -> None:
        world.num_kept = 10
        cached = prompt(coverage(NodeName("pd", "a"), 10))
        assert await moves.bring(cached, route("prefill", "pd")) is cached
        assert world.told[1:] == [CacheMoveOver(1, True, 10_000_000, 0.01, 0.001)]

    @pytest.mark.parametrize("reason", sorted(set(MoveReason) - {"pays", "link_rate_unknown"}))
    async def test_any_other_reason_moves_nothing(
        self, world: World, moves: CacheMoves, reason: MoveReason
    ) -> None:
        cached = prompt(coverage(NodeName("pd", "a"), 10))
        assert await moves.bring(cached, route("prefill", "pd", reason)) is cached
        assert (world.sent, world.told) == ([], [])
        assert moves.metrics.decisions.labels(reason.value)._value.get() == 1

    @pytest.mark.parametrize("cached", [CachedPrompt(), prompt()])
    async def test_what_no_node_has_any_more_is_not_moved(
        self, world: World, moves: CacheMoves, cached: CachedPrompt
    ) -> None:
        assert await moves.bring(cached, route("prefill", "pd")) is cached
        assert world.sent == []


class TestPlacement:
    @pytest.fixture
    def directory(self) -> FakeDirectory:
        return FakeDirectory()

    @pytest.fixture
    async def placement(
        self,
        world: World,
        moves: CacheMoves,
        directory: FakeDirectory,
        monkeypatch: pytest.MonkeyPatch,
    ) -> AsyncIterator[PrefixPlacement]:
        def loads() -> list[NodeLoad]:
            return [NodeLoad(cluster="pd", node=node, load=1.0) for node in ("a", "b")]

        monkeypatch.setattr("deploy.gateway.cache.placement.INTERVAL_S", 0.01)
        one = PrefixPlacement(moves, directory, loads, clock=world.clock)
        yield one
        await one.close()

    def routed(self, placement: PrefixPlacement, directory: FakeDirectory, times: int) -> None:
        directory.held = {NodeName("pd", "a"): 6}
        for _ in range(times):
            placement.looked_up(prompt(coverage(NodeName("pd", "a"), 6)))

    async def test_a_hot_prefix_is_copied_and_dropped_when_it_is_cold(
        self, world: World, moves: CacheMoves, directory: FakeDirectory, placement: PrefixPlacement
    ) -> None:
        self.routed(placement, directory, 30)
        await placement.step()
        assert moves.moving == {(KEYS[5], NodeName("pd", "b"))}
        await settled(moves)
        ((way, order),) = world.sent
        assert (way, order.priority, order.tenant) == ("pd-a:1 -> pd-b:1", "replication", "")
        assert order.parts == (*((index, 0) for index in range(6)), (5, 1))
        directory.held = {NodeName("pd", "a"): 6, NodeName("pd", "b"): 6}
        assert (await placement.step()).notes[0].endswith("2 copies, 0 coming, 2 wanted")
        world.now_s = 10_000.0
        await placement.step()
        assert world.dropped == [("pd-b:1", 0)]
        assert (await placement.step()).demote == ()

    async def test_a_cold_copy_that_its_node_gave_up_is_not_looked_for_any_more(
        self, world: World, moves: CacheMoves, directory: FakeDirectory, placement: PrefixPlacement
    ) -> None:
        self.routed(placement, directory, 30)
        await placement.step()
        await settled(moves)
        world.now_s = 10_000.0
        for number in range(300):  # others take its place among those that are counted
            keys = PromptKeys(MODEL, bytes(16), (number.to_bytes(16, "big"),))
            placement.looked_up(
                CachedPrompt(keys, CachePlaces(), (coverage(NodeName("pd", "a"), 1),))
            )
        directory.held = {}
        await placement.step()
        directory.asked.clear()
        await placement.step()
        assert list(KEYS[:6]) not in [keys for _, keys in directory.asked]

    async def test_what_failed_is_left_alone_for_a_while(
        self, world: World, moves: CacheMoves, directory: FakeDirectory, placement: PrefixPlacement
    ) -> None:
        world.failing = RpcError("NO_ROOM", "full")
        self.routed(placement, directory, 30)
        await placement.step()
        await settled(moves)
        assert (await placement.step()).replicate == ()
        world.now_s = 61.0
        assert len((await placement.step()).replicate) == 1

    async def test_it_goes_on_by_itself(
        self, world: World, moves: CacheMoves, directory: FakeDirectory, placement: PrefixPlacement
    ) -> None:
        placement.start()
        self.routed(placement, directory, 30)
        await eventually(lambda: world.sent)

    async def test_prompts_of_which_nothing_is_cached_count_for_nothing(
        self, placement: PrefixPlacement
    ) -> None:
        placement.looked_up(CachedPrompt())
        placement.looked_up(prompt())
        assert (await placement.step()).notes == ("nothing is in demand",)


def test_loads_are_those_of_a_nodes_instances_together() -> None:
    report = cluster(
        "pd",
        instance("1", node="a:1", running=2),
        instance("2", node="a:1", running=3, healthy=False),
        instance("3", node="b:1", running=1, healthy=False),
        instance("4", running=9),
    )
    assert node_loads([None, report]) == [
        NodeLoad(cluster="pd", node="a:1", load=5, is_healthy=True),
        NodeLoad(cluster="pd", node="b:1", load=1, is_healthy=False),
    ]
