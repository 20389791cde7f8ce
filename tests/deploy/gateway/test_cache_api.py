"""What /prfaas/cache answers, from what agents and the directory say."""

from msgspec import structs
from report_cases import agent_status

from deploy.gateway.cache.api import KeyNames, explanation, hot_prefixes, node_caches
from deploy.gateway.cache.cached_prompt import CachedPrompt, CachePlaces, PdNodes, prompt_keys
from kvmanager.agent.messages import (
    CacheModel,
    CacheStatus,
    EmbeddingStatus,
    ListCacheReply,
    PrefixLeaf,
    StatusReply,
)
from kvmanager.directory.messages import Hit, NodeCoverage, NodeName, NodeState
from kvmanager.hashing import KEY_BYTES
from kvmanager.token_ids import TokenIds
from scheduler.routing.decision import Decision, Reason, RequestShape, one_engine

A1, B1, B2 = NodeName("far", "a1"), NodeName("home", "b1"), NodeName("home", "b2")
MODEL = CacheModel("ab" * 16, 64, [(0, 6400, 0), (1, 6400, 128), (2, 5000, 0)])


def status(cache: CacheStatus | None) -> StatusReply:
    return agent_status(free_bytes=0, cache=cache)


def test_every_node_is_listed_with_what_is_known_of_it() -> None:
    cache = CacheStatus(query_tokens=1000, hit_tokens={"arena": 200, "ssd": 50})
    known = NodeState("home", "b1", 7, "e", 3, 0.5, 0.1, True)
    nodes = node_caches(
        {B1: "b1:1", A1: "a1:1", B2: "b2:1"},
        {A1: "no answer", B1: status(cache), B2: status(None)},
        [known, NodeState("home", "left", 1, "e", 1, 9.0, 0.0, True)],
    )
    assert [(item.cluster, item.node) for item in nodes] == [A1, B1, B2]
    assert [item.error for item in nodes] == ["no answer", "", "this agent keeps no prefix cache"]
    assert nodes[1].hit_share == 0.25
    assert nodes[1].directory == known
    assert nodes[0].cache is None
    assert nodes[1].embeddings is nodes[1].embedding_hit_share is None
    kept = EmbeddingStatus(3, 100, 1000, num_queries=8, num_hits=6)
    (told,) = node_caches({B2: "b2:1"}, {B2: structs.replace(status(None), embeddings=kept)}, [])
    assert (told.embeddings, told.embedding_hit_share) == (kept, 0.75)
    assert node_caches({B1: "b1:1"}, {B1: status(CacheStatus())}, [])[0].hit_share is None


NAMES = KeyNames(bytes(32))


def name(key: str) -> str:
    return NAMES.name(bytes.fromhex(key))


def prefix(key: str, hits: int, *, nbytes: int = 10, idle_s: float = 1.0) -> PrefixLeaf:
    return PrefixLeaf(key, 640, {"arena/kv": nbytes}, hits, idle_s, 0, 320, False)


def test_a_prefix_that_several_nodes_hold_comes_once() -> None:
    listed: dict[NodeName, ListCacheReply | str] = {
        B1: ListCacheReply([prefix("aa", 2, idle_s=3.0), prefix("bb", 4, nbytes=1)], 2),
        A1: ListCacheReply([prefix("aa", 3)], 1),
        B2: "no answer",
    }
    first, second = hot_prefixes(listed, "hits", 10, NAMES)
    assert (first.key, first.hits, first.nodes) == (name("aa"), 5, ["far/a1", "home/b1"])
    assert (first.nbytes, first.idle_s) == ({"arena/kv": 20}, 1.0)
    assert second.key == name("bb")
    assert [item.key for item in hot_prefixes(listed, "size", 1, NAMES)] == [name("aa")]
    latest: dict[NodeName, ListCacheReply | str] = {
        B1: ListCacheReply([prefix("0d", 9, idle_s=60.0), prefix("ee", 1)], 2)
    }
    recent = hot_prefixes(latest, "recent", 10, NAMES)
    assert [item.key for item in recent] == [name("ee"), name("0d")]


def test_keys_are_shown_by_names_that_only_this_process_can_make() -> None:
    assert name("aa") == name("aa") != name("bb")
    assert KeyNames(bytes(31) + b"x").name(b"\xaa") != name("aa")
    assert len(name("aa")) == 2 * KEY_BYTES


async def test_an_explanation_says_what_each_route_would_take() -> None:
    places = CachePlaces(
        pd_cluster="home",
        model=MODEL,
        decode_nodes={"b1": "b1:1"},
        prefill_nodes={"far": {"a1": "a1:1"}},
    )
    keys = await prompt_keys(MODEL, TokenIds.of(range(1001)))
    assert keys is not None
    coverage = (
        NodeCoverage("far", "a1", Hit(10, 10), Hit(), Hit(), Hit(), Hit(10, 10), 1.0),
        NodeCoverage("home", "b1", Hit(5, 0), Hit(5, 0), Hit(5, 0), Hit(), Hit(), 1.0),
    )
    cached = CachedPrompt(keys, places, coverage)
    shape = cached.shape(RequestShape(num_prompt_tokens=1001))
    decision = Decision("prefill_cluster", "far", Reason.ABOVE_THRESHOLD)
    told = explanation("tiny", shape, cached, decision, NAMES)
    key = NAMES.name(keys.blocks[-1])
    assert (told.num_blocks, told.block_tokens, told.key) == (15, 64, key)
    assert (told.route, told.target, told.note) == ("prefill_cluster", "far", "")
    local, far = told.routes
    assert (local.target, local.computed_tokens, local.sent_bytes) == ("home", 1001, 0)
    assert (far.computed_tokens, far.sent_tokens) == (1001 - 640, 1000 - 320)
    assert far.sent_bytes == 100 * 680 + 100 * 128 + 5000
    assert told.nodes[0].engine.usable_tokens == 640
    assert told.nodes[1].together.kv_tokens == 320


def test_an_explanation_is_of_the_cluster_that_decodes_and_its_links() -> None:
    places = CachePlaces(
        pd_cluster="home",
        model=MODEL,
        prefill_nodes={"far": {"a": "a:1"}, "near": {"b": "b:1"}},
        other_pds={"north": PdNodes({"c": "c:1"}, {})},
    )
    shape = RequestShape(num_prompt_tokens=10)
    decision = Decision("local", "one_engine", Reason.BELOW_THRESHOLD, pd="north")
    cached = CachedPrompt(places=places).at("north")
    told = explanation("tiny", shape, cached, decision, NAMES, home="home", linked={"near"})
    assert (told.home, told.cluster) == ("home", "north")
    assert [work.target for work in told.routes] == ["north", "near"]


def test_an_explanation_says_why_nothing_is_known() -> None:
    shape = RequestShape(num_prompt_tokens=10)
    decision = one_engine(shape, Reason.NOTHING_TO_HAND_OVER)
    uncached = explanation("tiny", shape, CachedPrompt(), decision, NAMES)
    assert "no engine of the PD cluster" in uncached.note
    assert (uncached.block_tokens, uncached.key) == (0, "")
    places = CachePlaces(pd_cluster="home", model=MODEL)
    short = explanation("tiny", shape, CachedPrompt(places=places), decision, NAMES)
    assert short.note == "shorter than a block of 64 tokens"
