"""The connector's scheduler half: what a request loads from the node's prefix cache, beside a
landing or without one.
"""

from typing import Any

import pytest
from scheduler_side_rig import (
    ALLOCATED,
    BLOCK_TABLES,
    TRANSFER,
    AnsweringClient,
    CachingClient,
    arrive,
    check_never_loads,
    finish_load,
    request,
    scheduler_side,
    step,
)

from kvmanager.vllm_connector.cache.keys import LOSSY_SALT
from kvmanager.vllm_connector.metadata import PartPages


def test_what_lands_with_less_precision_is_shared_with_no_other_request() -> None:
    client = CachingClient(4)
    side = scheduler_side(client, is_lossy=True)
    consumer = request("consumer", 71)
    consumer.cache_salt, consumer.block_hashes = "tenant", ["of exact bytes"]
    consumer.update_block_hashes = lambda: consumer.block_hashes.append(consumer.cache_salt)
    side.on_new_request(consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    finish_load(side)
    assert consumer.block_hashes == [f"tenant{LOSSY_SALT}"], "vLLM's own cache keeps it apart"
    meta = step(side, {"r1": (70, 26)})
    assert meta.stores == [], "nothing of it goes to the node's cache"


CACHED = {"cached_tokens": 32, "cached_runs": [[(90, 1)], [(92, 2), (97, 1)]]}


@pytest.mark.parametrize(
    ("local_tokens", "cached", "landed"),
    [(0, [0, 1], [12, 13, 14]), (16, [1], [12, 13, 14]), (48, [], [13, 14])],
)
def test_what_a_landing_leaves_out_is_loaded_from_the_prefix_cache(
    local_tokens: int, cached: list[int], landed: list[int]
) -> None:
    side = scheduler_side(AnsweringClient())
    consumer = request("consumer", 71, said=CACHED)
    side.on_new_request(consumer)
    side.on_landed(consumer.said)
    num_new = 70 - local_tokens
    assert side.get_num_new_matched_tokens(consumer, local_tokens) == (num_new, True)
    side.update_state_after_alloc(consumer, ALLOCATED, num_new)
    (load,) = step(side, {}).loads
    assert load.ref is not None
    assert load.ref.cached_tokens == 32
    assert load.blocks[0] == landed
    parts = load.cached.parts if load.cached is not None else ()
    runs = (((90, 1),), ((92, 2), (97, 1)))
    assert parts == tuple(PartPages(i, 0, runs[i], ([10 + i],)) for i in cached)


@pytest.mark.parametrize(
    "said",
    [
        {"cached_tokens": 32, "cached_runs": [[(90, 1)]]},
        {"cached_tokens": 0, "cached_runs": [[(90, 1)]]},
        {"cached_tokens": 24, "cached_runs": []},
    ],
)
def test_a_landing_whose_cached_part_is_not_whole_is_never_loaded(said: dict[str, Any]) -> None:
    check_never_loads(said)


def test_a_plain_request_loads_what_the_agent_has_of_it() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    plain = request("consumer", 71)
    plain.kv_transfer_params = None
    side.on_new_request(plain)
    assert side.get_num_new_matched_tokens(plain, 0) == (None, False)
    client.answer()
    assert side.get_num_new_matched_tokens(plain, 0) == (64, True)
    side.update_state_after_alloc(plain, ALLOCATED, 64)
    (load,) = step(side, {}).loads
    assert load.ref is None
    assert load.cached is not None
    assert [(part.index, part.part, part.blocks) for part in load.cached.parts] == [
        (0, 0, ([10],)),
        (1, 0, ([11],)),
        (2, 0, ([12],)),
        (3, 0, ([13],)),
        (2, 1, ([22],)),
        (3, 1, ([23],)),
        (3, 2, ([33],)),
    ]
    assert client.handles
    finish_load(side)
    assert client.handles == []


def test_after_a_reset_nothing_that_landed_or_was_cached_is_loaded() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    side.reset_cache()
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    assert client.said[-1] == ("release", TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)
    assert client.handles == []


def test_a_landing_that_is_lost_before_its_load_leaves_the_cache_to_be_asked() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.on_failed(TRANSFER, "the agent went", 0)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    (load,) = step(side, {}).loads
    assert (load.ref, load.cached) == (None, None)
    finish_load(side)
    assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    client.answer()
    assert side.get_num_new_matched_tokens(consumer, 0) == (64, True)


def test_what_another_connector_loads_is_neither_looked_up_nor_cached() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    taken = request("consumer", 65)
    taken.kv_transfer_params = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    side.on_new_request(taken)
    assert client.handles == []
    assert side.get_num_new_matched_tokens(taken, 0) == (0, False)
    side.update_state_after_alloc(taken, ALLOCATED, 0)
    finish_load(side)
    assert step(side, {"r1": (64, 1)}).stores == []
    side.request_finished(taken, aborted=False)


def test_a_producer_uses_the_prefix_cache_too() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    producer = request("producer", 70)
    arrive(side, producer)
    client.answer()
    assert side.get_num_new_matched_tokens(producer, 0) == (64, True)
    side.update_state_after_alloc(producer, ALLOCATED, 64)
    finish_load(side)
    (send,) = step(side, {"r1": (64, 6)}).sends
    assert send.is_last
    assert send.blocks[0] == BLOCK_TABLES[0]


def test_a_prefix_that_is_lost_before_its_load_counts_as_a_failed_load() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    plain = request("producer", 70)
    side.on_new_request(plain)
    client.answer()
    side.get_num_new_matched_tokens(plain, 0)
    side.on_disconnected()
    side.update_state_after_alloc(plain, ALLOCATED, 64)
    (load,) = step(side, {}).loads
    assert load.ref is None
    assert load.cached is None


def test_when_a_landing_fails_the_prefix_cache_is_asked() -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    side.on_new_request(consumer)
    side.on_failed(TRANSFER, "cancelled", 0)
    assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    client.answer()
    assert side.get_num_new_matched_tokens(consumer, 0) == (64, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 64)
    (load,) = step(side, {}).loads
    assert load.ref is None
    assert load.cached is not None


def test_an_idle_engine_takes_an_answer_in_the_pass_in_which_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = CachingClient(4)
    side = scheduler_side(client)
    plain = request("producer", 70)
    side.on_new_request(plain)
    step(side, {})
    waits: list[float] = []

    def answer_meanwhile(timeout_s: float) -> bool:
        waits.append(timeout_s)
        client.answer()
        return True

    monkeypatch.setattr(side._agent_said, "wait", answer_meanwhile)
    assert side.get_num_new_matched_tokens(plain, 0) == (64, True)
    assert len(waits) == 1
    # Differences of times on the clock round.
    assert 0 < waits[0] <= 0.025 + 1e-9
