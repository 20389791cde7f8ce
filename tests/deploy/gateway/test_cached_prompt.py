"""Keys of a prompt, the nodes that may hold them, and what that spares each side."""

from typing import Any

import msgspec
import report_cases
from report_cases import cluster

from deploy.gateway.cache.cached_prompt import CachedPrompt, CachePlaces, places_of, prompt_keys
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import Hit, NodeCoverage, NodeName
from kvmanager.hashing import block_keys, join_keys, root_key
from kvmanager.token_ids import TokenIds
from scheduler.reports import InstanceReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, PdCached, RequestShape

NAMESPACE = "ab" * 16
MODEL = CacheModel(NAMESPACE, 64, [(0, 6400, 0), (1, 999, 128), (2, 5000, 0)])


def coverage(
    cluster: str, node: str, usable: int, kv: int, *, pool: int | None = None
) -> NodeCoverage:
    hit = Hit(kv, usable)
    return NodeCoverage(
        cluster,
        node,
        every=hit,
        pool=Hit(kv if pool is None else pool, usable),
        arena=hit,
        ssd=Hit(),
        engine=Hit(),
        age_s=0.5,
    )


PLACES = CachePlaces(
    pd_cluster="home",
    model=MODEL,
    decode_nodes={"b1": "b1:1", "b2": "b2:1"},
    hand_off_nodes={"b2": "b2:1", "b3": "b3:1"},
    prefill_nodes={"far": {"a1": "a1:1", "a2": "a2:1"}, "near": {"c1": "c1:1"}},
)


async def cached(*nodes: NodeCoverage) -> CachedPrompt:
    keys = await prompt_keys(MODEL, TokenIds.of(range(1000)), "")
    return CachedPrompt(keys, PLACES, nodes)


async def test_keys_are_of_full_blocks_before_the_last_token() -> None:
    root = root_key(bytes.fromhex(NAMESPACE), tenant="alice")
    keys = await prompt_keys(MODEL, TokenIds.of(range(129)), "alice")
    assert keys is not None
    assert list(keys.blocks) == block_keys(range(128), 64, root)
    assert keys.joined == join_keys([root, *keys.blocks])
    # The 128th token is computed where decoding happens, so its block is not whole.
    shorter = await prompt_keys(MODEL, TokenIds.of(range(128)), "alice")
    assert shorter is not None
    assert shorter.blocks == keys.blocks[:1]
    assert await prompt_keys(MODEL, TokenIds.of(range(64)), "alice") is None
    other = await prompt_keys(MODEL, TokenIds.of(range(129)), "bob")
    assert other is not None
    assert not set(other.blocks) & set(keys.blocks)
    tuned = await prompt_keys(MODEL, TokenIds.of(range(129)), "alice", adapter="files:1")
    assert tuned is not None
    assert tuned.adapter == "files:1"
    assert tuned.root == root_key(bytes.fromhex(NAMESPACE), tenant="alice", lora="files:1")
    assert not set(tuned.blocks) & set(keys.blocks)


async def test_a_long_prompt_is_hashed_alike() -> None:
    prompt = TokenIds.of(range(20_000))
    keys = await prompt_keys(MODEL, prompt, "")
    assert keys is not None
    assert list(keys.blocks) == block_keys(prompt[:-1], 64, keys.root)


async def test_each_side_is_spared_what_its_best_node_holds() -> None:
    known = await cached(
        coverage("home", "b1", usable=2, kv=9),
        coverage("home", "b2", usable=4, kv=5),
        coverage("home", "b3", usable=12, kv=12),
        coverage("far", "a2", usable=8, kv=8),
        coverage("near", "b1", usable=15, kv=15),
        coverage("gone", "x", usable=15, kv=15),
    )
    assert known.local_tokens == 4 * 64
    assert known.landing_tokens == 9 * 64
    assert known.prefill_tokens == {"far": 8 * 64, "near": 0}
    assert known.landing_nodes() == ("b1:1", "b2:1")
    assert known.direct_nodes() == ("b2:1", "b1:1")
    assert known.computing_tokens("far") == {"a2:1": 8 * 64}
    assert known.computing_tokens(HAND_OFF) == {"b3:1": 12 * 64, "b2:1": 4 * 64}
    assert known.computing_tokens(ONE_ENGINE) == {"b1:1": 2 * 64, "b2:1": 4 * 64}
    assert known.computing_tokens("unheard of") == {}
    sendable = {"home": 12 * 64, "far": 8 * 64, "near": 15 * 64, "gone": 15 * 64}
    assert known.sendable_tokens == sendable


async def test_what_a_node_received_is_cached_there() -> None:
    known = await cached(coverage("far", "a2", usable=8, kv=8), coverage("home", "b2", 1, 9))
    at_known = known.received(NodeName("home", "b2"), 8)
    assert at_known.computing_tokens(ONE_ENGINE) == {"b2:1": 8 * 64}
    assert (at_known.local_tokens, at_known.landing_tokens) == (8 * 64, 9 * 64)
    assert at_known.prefill_tokens == known.prefill_tokens
    at_new = known.received(NodeName("home", "b1"), 8)
    assert at_new.direct_nodes() == ("b1:1", "b2:1")
    assert known.computing_tokens(ONE_ENGINE) == {"b2:1": 64}


async def test_a_landing_cannot_build_on_what_engines_hold() -> None:
    known = await cached(coverage("home", "b1", usable=4, kv=4, pool=1))
    assert (known.local_tokens, known.landing_tokens) == (4 * 64, 64)


async def test_a_shape_takes_what_is_known() -> None:
    shape = RequestShape(num_prompt_tokens=1000)
    known = await cached(coverage("home", "b1", usable=2, kv=3), coverage("far", "a1", 5, 5))
    told = known.shape(shape)
    assert (told.local_cached_tokens, told.landing_cached_tokens) == (128, 192)
    assert dict(told.prefill_cached_tokens) == {"far": 320, "near": 0}
    assert dict(told.sendable_tokens) == {"home": 128, "far": 320}
    assert (await cached()).shape(shape) == shape


async def test_what_other_pd_clusters_hold_counts_for_prompts_that_decode_there() -> None:
    reports = [
        cluster(
            name, instance(f"{name}-d", "decode", cache=MODEL), instance(f"{name}-p", "prefill")
        )
        for name in ("home", "north", "south")
    ]
    places = places_of(reports[0], {}, "tiny", other_pds=reports[1:])
    keys = await prompt_keys(MODEL, TokenIds.of(range(1000)), "")
    found = coverage("home", "home-d", 1, 1), coverage("north", "north-d", usable=3, kv=5)
    known = CachedPrompt(keys, places, found)
    told = known.shape(RequestShape(num_prompt_tokens=1000))
    assert (told.local_cached_tokens, told.landing_cached_tokens) == (64, 64)
    assert dict(told.cached_in_pds) == {"north": PdCached(3 * 64, 5 * 64)}
    north = known.at("north")
    assert (north.local_tokens, north.landing_nodes()) == (3 * 64, ("north-d:1",))
    assert north.computing(HAND_OFF) == ("north", {"north-p": "north-p:1"})
    assert north.at("home").places == places
    assert known.at("unheard of") == known


def test_the_cache_of_a_home_that_does_not_report_is_known_from_others() -> None:
    north = cluster("north", instance("d", "decode", cache=MODEL))
    places = places_of(None, {}, "tiny", other_pds=[None, north])
    assert (places.pd_cluster, places.model, dict(places.decode_nodes)) == ("", MODEL, {})
    assert dict(places.at("north").decode_nodes) == {"d": "d:1"}


async def test_what_a_landing_holds_is_saved_without_windows_and_states() -> None:
    assert (await cached()).kv_bytes(192) == 3 * 6400
    assert CachedPrompt().kv_bytes(192) == 0
    assert CachedPrompt().block_keys == b""
    assert CachedPrompt().landing_nodes() == ()


def instance(name: str, role: Any = "both", **fields: Any) -> InstanceReport:
    values = {"model": "tiny", "node": f"{name}:1", "node_name": name}
    return report_cases.instance(name, role, **(values | fields))


def test_places_are_of_instances_that_serve_the_model() -> None:
    other = CacheModel("cd" * 16, 128, [])
    home = cluster(
        "home",
        instance("p", "prefill", cache=other),
        instance("d", "decode", cache=MODEL),
        instance("old", "decode", node="", node_name=""),
        instance("off", healthy=False),
        instance("out", draining=True),
        instance("else", model="big"),
    )
    far = cluster("far", instance("a", "prefill", node_name=""))
    places = places_of(home, {"far": far, "silent": None}, "tiny")
    assert places.pd_cluster == "home"
    # What decodes says how prompts are cached.
    assert places.model == MODEL
    assert dict(places.decode_nodes) == {"d": "d:1"}
    assert dict(places.hand_off_nodes) == {"p": "p:1"}
    assert {name: dict(nodes) for name, nodes in places.prefill_nodes.items()} == {
        "far": {"a:1": "a:1"}
    }
    assert places_of(None, {"far": far}, "tiny") == CachePlaces()


def test_engines_that_have_said_what_they_have_and_cache_nothing_leave_nothing_to_look_up() -> None:
    silent, said = instance("d"), instance("d", layout_fingerprint="f")
    assert not places_of(None, {}, "tiny").caches_nothing
    assert not places_of(cluster("home", silent), {}, "tiny").caches_nothing
    assert not places_of(cluster("home", said, instance("e")), {}, "tiny").caches_nothing
    assert places_of(cluster("home", said), {}, "tiny").caches_nothing
    caching = instance("e", layout_fingerprint="f", cache=MODEL)
    assert not places_of(cluster("home", said, caching), {}, "tiny").caches_nothing


def test_a_cluster_of_prefill_instances_alone_serves_whole_with_them() -> None:
    places = places_of(cluster("home", instance("p", "prefill", cache=MODEL)), {}, "")
    assert dict(places.decode_nodes) == {"p": "p:1"}
    assert places.model == MODEL


def test_with_several_models_an_instance_that_names_none_is_no_place_to_look() -> None:
    nameless = msgspec.structs.replace(instance("d", "both", cache=MODEL), model="")
    home = cluster("home", nameless)
    # The name may be that of an adapter, whose KVCache has other keys.
    assert places_of(home, {"far": home}, "tiny") == CachePlaces("home", prefill_nodes={"far": {}})
    for places in (places_of(home, {}, ""), places_of(home, {}, "tiny", is_only_model=True)):
        assert (places.model, dict(places.decode_nodes)) == (MODEL, {"d": "d:1"})
