"""The connector and the agent's prefix cache: block keys, what is found and loaded, and ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from cache_engine import (
    KV,
    NAMESPACE,
    SHORT_WINDOW,
    ST,
    STATE,
    WIN,
    Engine,
    engine,
    ready,
    request,
    tables_of,
)

from kvmanager.agent.engines.protocol import CacheSlots
from kvmanager.hashing import block_keys, root_key
from kvmanager.vllm_connector.cache import scheduler as cache_scheduler
from kvmanager.vllm_connector.cache.keys import RequestKeys
from kvmanager.vllm_connector.connector import PrfaasConnector

# Keys.


def keys_of(asked: Any) -> list[bytes]:
    return RequestKeys(asked, 16, NAMESPACE).keys


def test_keys_are_those_that_the_gateway_computes_of_the_same_tokens() -> None:
    asked = request(40)
    assert keys_of(asked) == block_keys(range(40), 16, root_key(NAMESPACE))
    salted = keys_of(request(40, cache_salt="tenant"))
    assert salted == block_keys(range(40), 16, root_key(NAMESPACE, tenant="tenant"))


def test_keys_grow_with_the_answer_as_if_it_had_been_a_prompt() -> None:
    place = SimpleNamespace(offset=20, length=5)
    features = [SimpleNamespace(identifier="image", mm_position=place)]
    short = request(20, mm_features=features)
    keys = RequestKeys(short, 16, NAMESPACE)
    keys.extend(list(range(70)))
    assert keys.keys == keys_of(request(70, mm_features=features))
    assert keys.before(0) == keys.root
    assert keys.before(3) == keys.keys[2]


def test_adapters_and_images_have_keys_of_their_own() -> None:
    image = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=20, length=20))
    moved = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=21, length=20))
    plain = keys_of(request(64))
    tuned = RequestKeys(request(64), 16, NAMESPACE, "files:0").keys
    seen = keys_of(request(64, mm_features=[image]))
    elsewhere = keys_of(request(64, mm_features=[moved]))
    assert plain[0] != tuned[0]
    assert seen[0] == plain[0], "the image begins in the second block"
    assert len({plain[1], seen[1], elsewhere[1]}) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"pooling_params": object()},
        {"resumable": True},
    ],
)
def test_what_no_key_names_does_not_use_the_cache(changes: dict[str, Any]) -> None:
    made = engine()
    asked = request(64, **changes)
    made.cache.add(asked)
    assert made.cache.matched(asked, 0) == 0
    assert made.step(asked, 0, 64) == []
    assert made.agent.said == []


def test_an_adapter_that_cannot_be_identified_does_not_use_the_cache() -> None:
    made = engine()
    adapter = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path="/no/such/adapter")
    asked = request(64, lora_request=adapter)
    made.cache.add(asked)
    assert made.cache.matched(asked, 0) == 0
    assert made.agent.said == []


# Finding and loading.


def test_a_prefix_is_found_waited_for_loaded_and_let_go() -> None:
    made = engine()
    asked = request(70)
    made.cache.add(asked)
    assert made.cache.matched(asked, 0) is None
    made.found(num_blocks=3, kv_blocks=3)
    assert made.event.is_set()
    assert made.cache.matched(asked, 0) is None, "memory for the fourth block is not there yet"
    made.give()
    assert made.cache.matched(asked, 0) == 48
    assert made.tables is not None
    loaded = made.cache.load(asked, made.tables, 48)
    assert loaded is not None
    assert loaded.arena_epoch == "e1"
    assert [(part.index, part.part, part.blocks) for part in loaded.parts] == [
        (0, KV, ([1],)),
        (1, KV, ([2],)),
        (2, KV, ([3],)),
        (1, WIN, ([102],)),
        (2, WIN, ([103],)),
        (2, ST, ([203],)),
    ]
    assert loaded.parts[0].runs == ((0, 1),)
    assert "free" not in made.agent.names()
    made.cache.loaded("r1")
    made.cache.loaded("r1")
    assert made.agent.names().count("free") == 1
    assert made.cache.matched(asked, 0) == 0, "after a failed load it is computed"


def test_pages_of_the_engines_own_cache_and_outside_the_window_are_not_loaded() -> None:
    made = engine(*SHORT_WINDOW)
    asked = request(200)
    assert ready(made, asked, 3, 3) == 192
    assert made.tables is not None
    loaded = made.cache.load(asked, made.tables, 192 - 80)
    assert loaded is not None
    assert [(part.index, part.part, part.blocks) for part in loaded.parts] == [
        (1, KV, ([6, 7, 8],)),
        (2, KV, ([9, 10, 11, 12],)),
        (2, WIN, ([111, 112],)),
    ]


def test_the_last_token_is_never_looked_for() -> None:
    made = engine()
    made.cache.add(request(64))
    made.cache.add(request(65, "r2"))
    assert [said[2] for said in made.agent.said] == [3, 4]


def test_what_the_engine_has_itself_is_let_go_at_once() -> None:
    made = engine(min_load_tokens=16)
    asked = request(70)
    assert ready(made, asked, 3, 3) == 48
    assert made.cache.matched(asked, 32) == 16
    assert made.cache.matched(asked, 40) == 0
    assert made.agent.names()[-1] == "free"
    assert made.cache.load(asked, tables_of(made.layout), 8) is None


@pytest.mark.parametrize("trouble", ["timeout", "disconnected", "no agent", "no cache"])
def test_without_an_answer_the_engine_computes(trouble: str) -> None:
    made = Engine(find_timeout_s=0 if trouble == "timeout" else 60)
    if trouble != "no cache":
        made.welcome()
    made.agent.connected = trouble != "no agent"
    asked = request(70)
    made.cache.add(asked)
    if trouble == "disconnected":
        made.cache.on_disconnected()
    if trouble == "timeout":
        assert made.cache.matched(asked, 0) is None, "memory to store into is asked for"
        made.give()
        assert ("free", made.agent.said[0][1]) in made.agent.said
        made.found(3, 3)
    assert made.cache.matched(asked, 0) == 0
    assert made.cache.load(asked, tables_of(made.layout), 48) is None


def test_an_agent_that_comes_back_is_asked_by_later_requests() -> None:
    made = engine()
    asked = request(70)
    assert ready(made, asked, 3, 3) == 48
    made.cache.on_disconnected()
    assert made.cache.matched(asked, 0) == 0
    made.welcome()
    assert ready(made, request(70, "r2"), 3, 3) == 48


def test_requests_that_must_not_read_still_store() -> None:
    made = engine()
    asked = request(70, skip_reading_prefix_cache=True)
    made.cache.add(asked)
    assert made.agent.names() == ["reserve"]
    made.give()
    assert made.cache.matched(asked, 0) == 0
    assert (0, KV) in made.stored(asked, 0, 70)


@pytest.mark.parametrize(
    ("is_consumer", "num_batches", "loads"), [(True, 2, True), (False, 1, True), (False, 2, False)]
)
def test_only_where_no_running_step_can_write_a_freed_block_it_is_loaded_into(
    is_consumer: bool, num_batches: int, loads: bool
) -> None:
    role: Any = SimpleNamespace(_kv_transfer_config=SimpleNamespace(is_kv_consumer=is_consumer))
    config: Any = SimpleNamespace(max_concurrent_batches=num_batches)
    assert PrfaasConnector._may_load(role, config) is loads


def test_an_engine_that_must_not_load_still_stores() -> None:
    made = engine(loads=False)
    asked = request(70)
    made.cache.add(asked)
    assert made.agent.names() == ["reserve"]
    made.give()
    assert made.cache.matched(asked, 0) == 0
    assert (0, KV) in made.stored(asked, 0, 70)


def test_a_queue_of_requests_does_not_take_all_memory_ahead(monkeypatch: Any) -> None:
    made = engine()
    monkeypatch.setattr(cache_scheduler, "MAX_AHEAD_BLOCKS", 6)
    first, second, third = request(64), request(64, "r2"), request(64, "r3")
    for asked in (first, second):
        made.cache.add(asked)
        made.found(0, 0)
    assert made.agent.names().count("reserve") == 1
    made.give()
    assert made.cache.matched(first, 0) == 0
    assert made.cache.matched(second, 0) is None
    made.step(first, 0, 64)
    assert made.cache.matched(second, 0) is None
    made.give()
    assert made.cache.matched(second, 0) == 0
    monkeypatch.setattr(cache_scheduler, "HOLD_TIMEOUT_S", 0)
    made.cache.add(third)
    made.found(0, 0)
    assert made.cache.matched(third, 0) == 0, "whoever waited long enough goes on"
    made.step(third, 0, 64)
    assert made.agent.names().count("reserve") == 3


# Ends.


def test_an_aborted_request_gives_back_what_no_worker_knows() -> None:
    made = engine()
    asked = request(70)
    ready(made, asked, 3, 3)
    made.cache.finished("r1")
    find, reserve = made.agent.said[0][1], made.agent.reserved[0].handle
    assert made.agent.said[-2:] == [("free", find), ("cancel", reserve)]
    assert made.cache.take_ended() == []
    made.give()
    assert made.step(asked, 0, 70) == []


def test_workers_end_what_they_know_of() -> None:
    made = engine()
    asked = request(70)
    ready(made, asked)
    made.step(asked, 0, 40)
    made.cache.finished("r1")
    assert "cancel" not in made.agent.names()
    (ended,) = made.cache.take_ended()
    assert ended.is_last
    assert ended.cached.parts == ()
    assert made.cache.take_ended() == []


def test_a_handle_of_which_nothing_could_be_stored_is_taken_back() -> None:
    made = engine(STATE)
    asked = request(1100)
    ready(made, asked)
    assert made.agent.asked() == [(1, KV)], "a model of states alone has one part"
    assert made.step(asked, 0, 1100) == []
    assert made.agent.names()[-1] == "cancel"


def test_an_answer_without_memory_ends_the_handle() -> None:
    made = engine()
    asked = request(70)
    made.cache.add(asked)
    made.found(0, 0)
    made.cache.on_slots(CacheSlots(made.agent.reserved[0].handle, []))
    assert made.cache.matched(asked, 0) == 0
    assert made.step(asked, 0, 64) == []
    made.cache.finished("r1")
    assert "cancel" not in made.agent.names()


def test_a_client_that_leaves_while_a_prefix_loads_lets_go_after_the_load() -> None:
    made = engine()
    asked = request(70)
    ready(made, asked, 3, 3)
    made.cache.load(asked, tables_of(made.layout), 48)
    made.cache.finished("r1")
    assert "free" not in made.agent.names()
    made.cache.loaded("r1")
    assert made.agent.names()[-1] == "free"


def test_a_stopped_cache_lets_go_of_everything_and_is_not_used_again() -> None:
    made = engine()
    loading, storing, waiting = request(70), request(64, "r2"), request(70, "r3")
    ready(made, loading, 3, 3)
    made.cache.load(loading, tables_of(made.layout), 48)
    ready(made, storing, 0, 0)
    assert made.stored(storing, 0, 32)
    made.cache.add(waiting)
    made.cache.stop()
    assert made.agent.names().count("cancel") == 1, "of what is loading; the other is handed over"
    (ended,) = made.cache.take_ended()
    assert ended.is_last
    assert not ended.cached.parts
    assert made.agent.names()[-1] == "free"
    made.cache.loaded("r1")
    assert made.agent.names().count("free") == made.agent.names().count("find")
    said = len(made.agent.said)
    made.cache.add(request(70, "r4"))
    assert made.cache.matched(waiting, 0) == 0
    assert made.step(storing, 32, 64) == []
    assert len(made.agent.said) == said


def test_a_preempted_request_starts_again_with_what_the_agent_kept() -> None:
    made = engine()
    asked = request(70)
    ready(made, asked)
    made.step(asked, 0, 64)
    asked.all_token_ids.extend(range(14))
    made.step(asked, 83, 84)
    made.give()
    made.cache.preempted("r1")
    assert made.agent.names()[-2:] == ["cancel", "find"]
    assert made.agent.said[-1][2] == 5
    made.found(5, 5)
    assert made.cache.matched(asked, 0) == 80
    assert made.stored(asked, 80, 84) == [], "states of the former life are not there"


def test_the_end_of_a_connection_ends_all_handles() -> None:
    made = engine()
    one, two = request(70), request(70, "r2")
    ready(made, one)
    made.step(one, 0, 40)
    made.cache.add(two)
    made.cache.on_disconnected()
    (ended,) = made.cache.take_ended()
    assert ended.handle == made.agent.reserved[0].handle
    assert ended.is_last
    assert made.cache.matched(two, 0) == 0
    assert made.step(one, 40, 64) == [] == made.step(two, 0, 70)
    assert "cancel" not in made.agent.names()[-2:]


def test_an_error_ends_one_requests_use_of_the_cache_and_nothing_else() -> None:
    made = engine()
    broken = request(70, cache_salt=7)
    made.cache.add(broken)
    assert made.cache.matched(broken, 0) == 0
    asked = request(70, "r2")
    assert ready(made, asked) == 0
    made.tables = [[]]
    assert made.step(asked, 0, 64) == []
    made.tables = tables_of(made.layout)
    assert made.step(asked, 64, 70) == []
    assert made.agent.names()[-1] == "cancel"
