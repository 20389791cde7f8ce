"""Nodes that a gateway asks and has followed, as clusters report them."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs
from report_cases import on_nodes

from deploy.gateway.cache.cached_prompt import CachePlaces
from deploy.gateway.cache.region_caches import RegionCaches
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeCoverage, NodeName, NodeState, ResumeRule
from kvmanager.embedding_keys import embedding_key
from kvmanager.token_ids import TokenIds
from scheduler.reports import EncodeReport


class Directory:
    """Knows nothing but `embeddings`; notes whom it is told to follow."""

    def __init__(self) -> None:
        self.embeddings: dict[bytes, list[NodeName]] = {}
        self.followed: list[Mapping[NodeName, str]] = []

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        return []

    async def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        return [self.embeddings.get(key, []) for key in keys]

    async def nodes(self) -> list[NodeState]:
        return []

    async def close(self) -> None: ...

    async def follow(self, agents: Mapping[NodeName, str]) -> None:
        self.followed.append(dict(agents))


def no_agent(_target: str) -> Any:
    raise AssertionError("no agent is asked here")


class Agent:
    """Says where it is."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.is_closed = False

    async def status(self, timeout_s: float) -> str:
        return self.target

    async def close(self) -> None:
        self.is_closed = True


async def test_the_nodes_of_a_cluster_that_have_embeddings_of_media_are_named() -> None:
    directory = Directory()
    caches = RegionCaches(directory, no_agent, directory.follow)
    home = on_nodes("home", b1="x:1", b2="x:2", b3="x:3")
    await caches.watch(home)
    await caches.watch(on_nodes("far", a1="y:1"))
    media = ["cat", "dog"]
    instances = tuple(structs.replace(one, encoder="w bf16") for one in home.instances)
    encoding = structs.replace(home, instances=instances, encode=EncodeReport())
    gone = NodeName("home", "b9")
    directory.embeddings = {
        embedding_key("w bf16", "cat"): [NodeName("home", "b2"), NodeName("far", "a1"), gone],
        embedding_key("other", "dog"): [NodeName("home", "b3")],
    }
    assert await caches.embedding_nodes(encoding, media) == ("x:2",)
    assert await caches.embedding_nodes(encoding, media[1:]) == ()
    # Where nothing encodes apart, and for text, nobody is asked.
    assert await caches.embedding_nodes(structs.replace(encoding, encode=None), media) == ()
    assert await caches.embedding_nodes(encoding, []) == ()
    assert await caches.embedding_nodes(None, media) == ()


async def test_nodes_come_and_go_with_the_reports_of_their_cluster() -> None:
    directory = Directory()
    caches = RegionCaches(directory, no_agent, directory.follow)
    await caches.watch(on_nodes("home", b1="x:1", b2="x:2"))
    await caches.watch(on_nodes("far", a1="y:1"))
    await caches.watch(on_nodes("home", b1="x:1", b2="x:2"))
    await caches.watch(on_nodes("home", b1="x:3"))
    b1, b2, a1 = NodeName("home", "b1"), NodeName("home", "b2"), NodeName("far", "a1")
    assert directory.followed == [
        {b1: "x:1", b2: "x:2"},
        {b1: "x:1", b2: "x:2", a1: "y:1"},
        {a1: "y:1", b1: "x:3"},
    ]


async def test_connections_to_agents_of_departed_nodes_are_closed() -> None:
    opened: list[Agent] = []

    def open_agent(target: str) -> Any:
        opened.append(Agent(target))
        return opened[-1]

    caches = RegionCaches(Directory(), open_agent)
    for number in range(5):
        await caches.watch(on_nodes("home", b1=f"x:{number}", b2="y:1"))
        assert set((await caches.statuses()).values()) == {f"x:{number}", "y:1"}
    still_open = [agent.target for agent in opened if not agent.is_closed]
    assert sorted(still_open) == ["x:4", "y:1"]
    assert len(opened) == 6
    await caches.close()
    assert all(agent.is_closed for agent in opened)


async def test_a_front_that_cannot_be_asked_takes_no_node_away() -> None:
    directory = Directory()
    caches = RegionCaches(directory, no_agent, directory.follow)
    await caches.watch(on_nodes("home", b1="x:1"))
    await caches.watch(structs.replace(on_nodes("home"), heard=False))
    assert caches.targets == {NodeName("home", "b1"): "x:1"}
    assert len(directory.followed) == 1
    # One that answers and has no instance left takes them away.
    await caches.watch(on_nodes("home"))
    assert not caches.targets
    assert not directory.followed[-1]


async def test_nodes_of_older_fronts_are_not_known() -> None:
    directory = Directory()
    caches = RegionCaches(directory, no_agent, directory.follow)
    await caches.watch(on_nodes("home", b1=""))
    assert not caches.targets
    assert not directory.followed


async def test_what_cannot_be_hashed_is_not_looked_up() -> None:
    caches = RegionCaches(Directory(), no_agent)
    tokens = TokenIds.of(range(200))
    for model in (
        None,
        CacheModel("no hex", 64, [(0, 1, 0)]),
        CacheModel("ab", 64, []),
        CacheModel("ab", 64, [(7, 1, 0)]),
        CacheModel("ab", 256, [(0, 1, 0)]),
    ):
        places = CachePlaces(pd_cluster="home", model=model)
        found = await caches.look_up(places, tokens, "")
        assert found.keys is None
        assert found.places == places
    good = CachePlaces(pd_cluster="home", model=CacheModel("ab", 64, [(0, 1, 0)]))
    assert (await caches.look_up(good, tokens, "")).keys is not None
