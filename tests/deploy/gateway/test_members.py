"""What a gateway does for instances that leave: their hot prefixes are copied, then they may go."""

import asyncio
from collections.abc import AsyncIterator
from types import MappingProxyType

import pytest
from cache_doubles import FakeDirectory, MovingAgents, coverage
from eventually import eventually
from gateway_region import FakePd, FakePrefill, report
from msgspec import structs
from prometheus_client import CollectorRegistry
from report_cases import cluster

from deploy.gateway.cache.cached_prompt import CachedPrompt, CachePlaces, PromptKeys
from deploy.gateway.cache.moves import CacheMoves, MoveMetrics
from deploy.gateway.cache.placement import PrefixPlacement, node_loads
from deploy.gateway.members.keeper import MemberKeeper
from deploy.gateway.serving.background import Background
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeName
from prfaas.engines.members import LetGo
from scheduler.reports import ClusterReport, InstanceReport

MODEL = CacheModel("ab" * 16, 512, [(0, 1_000_000, 0)])
KEYS = tuple(bytes([index]) * 16 for index in range(10))
NODES = [NodeName("far", name) for name in ("a", "b", "c")]


class Leaving:
    """The cluster `far` with three nodes, of which `a` holds a prefix that requests want."""

    def __init__(self) -> None:
        self.agents = MovingAgents(MODEL, 10_000_000, num_kept=10)
        self.directory = FakeDirectory({NODES[0]: 8})
        self.targets = {node: f"{node.node}:1" for node in NODES}
        self.background = Background()
        self.moves = CacheMoves(
            lambda: self.targets,
            self.agents.at,
            self.background,
            MoveMetrics(CollectorRegistry()),
            lambda event: None,
        )
        self.pd = FakePd([])
        self.far = FakePrefill("far", self.pd)
        self.placement = PrefixPlacement(
            self.moves, self.directory, lambda: node_loads([self.report("a")])
        )
        self.keeper = MemberKeeper(
            {"home": self.pd}, {"far": self.far}, self.agents.at, lambda: self.placement
        )

    def report(self, *leaving: str, names: str = "abc") -> ClusterReport:
        def one(name: str) -> InstanceReport:
            leaves = name in leaving
            return structs.replace(report("prefill", name, True), leaving=leaves, draining=leaves)

        return cluster("far", *map(one, names))

    def wanted(self) -> None:
        """A request for the prefix."""
        places = CachePlaces("home", MODEL, MappingProxyType({}), MappingProxyType({}))
        keys = PromptKeys(MODEL, bytes(16), KEYS)
        self.placement.looked_up(CachedPrompt(keys, places, (coverage(NODES[0], 8),)))

    async def let_go(self) -> None:
        await eventually(lambda: self.far.orders)
        assert self.far.orders == [LetGo(name="a")]


@pytest.fixture
async def leaving() -> AsyncIterator[Leaving]:
    made = Leaving()
    yield made
    await made.keeper.close()
    await made.moves.close()


async def test_hot_prefixes_are_copied_before_an_instance_may_go(leaving: Leaving) -> None:
    leaving.keeper.heard(leaving.report())
    leaving.wanted()
    leaving.keeper.heard(leaving.report("a"))
    await leaving.let_go()
    ((way, order),) = leaving.agents.sent
    assert way == "a:1 -> b:1"
    assert order.block_keys == bytes(16) + b"".join(KEYS[:8])
    said = leaving.keeper.copied["far", "a"]
    assert said == "1 of 1 prefixes, 8000000 bytes"
    # Once it is gone nothing of it is remembered.
    del leaving.targets[NODES[0]]
    leaving.keeper.heard(leaving.report(names="bc"))
    assert (leaving.keeper.copied, leaving.keeper._leaving) == ({}, {})
    assert set(leaving.moves._agents) == {"b:1"}


async def test_what_others_have_is_not_copied(leaving: Leaving) -> None:
    leaving.directory.held = {NODES[0]: 8, NODES[2]: 8}
    leaving.wanted()
    leaving.keeper.heard(leaving.report("a"))
    await leaving.let_go()
    assert leaving.agents.sent == []


async def test_copying_ends_at_its_limit(leaving: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.gateway.members.keeper.COPY_LIMIT_S", 0.2)
    leaving.agents.stalled = True
    leaving.wanted()
    leaving.keeper.heard(leaving.report("a"))
    await leaving.let_go()
    assert leaving.keeper.copied["far", "a"] == "0 of 1 prefixes, 0 bytes; 0.2 s are over"


async def test_a_directory_that_does_not_answer_keeps_no_instance(
    leaving: Leaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("deploy.gateway.members.keeper.COPY_LIMIT_S", 0.2)
    monkeypatch.setattr(leaving.directory, "match", never)
    leaving.wanted()
    leaving.keeper.heard(leaving.report("a"))
    await leaving.let_go()
    assert leaving.keeper.copied["far", "a"] == "0 of 0 prefixes, 0 bytes; 0.2 s are over"


async def test_a_front_that_cannot_be_asked_loses_no_instance(leaving: Leaving) -> None:
    leaving.keeper.heard(leaving.report("a"))
    unheard = structs.replace(leaving.report(), instances=(), heard=False)
    leaving.keeper.heard(unheard)
    assert len(leaving.keeper.instances()) == 3
