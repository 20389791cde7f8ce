"""The connector's scheduler half: when a request waits, loads, sends, and when it goes alone."""

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_side_rig import (
    ALLOCATED,
    TRANSFER,
    AnsweringClient,
    arrive,
    check_never_loads,
    finish_load,
    request,
    scheduler_side,
    step,
)

from kvmanager.hashing import token_digest
from kvmanager.media_items import MediaItem
from kvmanager.vllm_connector import landings
from kvmanager.vllm_connector.idle_wait import idle_wait_s
from kvmanager.vllm_connector.metadata import FirstStep
from kvmanager.vllm_connector.weights import Adapters


def test_a_waiting_engine_rests_nine_tenths_of_the_time_within_bounds() -> None:
    assert idle_wait_s(0.001) == pytest.approx(0.009)
    assert idle_wait_s(0.0001) == 0.004
    assert idle_wait_s(1.0) == 0.025, "a new request may have to wait this long"


def test_a_consumer_waits_loads_and_gives_the_landing_back() -> None:
    client = AnsweringClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    arrive(side, consumer)
    assert client.said == [("watch", TRANSFER)]
    assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    (load,) = step(side, {}).loads
    assert load.blocks == ([10, 11, 12, 13, 14], [22, 23, 24], [34])
    assert ("release", TRANSFER) not in client.said
    finish_load(side)
    assert client.said[-1] == ("release", TRANSFER)
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)


def test_pages_of_the_engines_own_prefix_cache_are_not_written() -> None:
    side = scheduler_side(AnsweringClient())
    consumer = request("consumer", 71)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 48) == (22, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 22)
    (load,) = step(side, {}).loads
    assert load.blocks == ([13, 14], [23, 24], [34])


def test_a_landing_the_engine_does_not_need_goes_back_at_once() -> None:
    client = AnsweringClient()
    side = scheduler_side(client)
    consumer = request("consumer", 65)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 64) == (0, False)
    assert client.said[-1] == ("release", TRANSFER)


@pytest.mark.parametrize(
    "said",
    [
        {"token_digest": bytes(32)},
        {"num_tokens": 69},
        # Half of a page would come, which vLLM would keep as a whole one.
        {"window_step": 0},
        {"window_step": 8},
    ],
)
def test_a_landing_of_something_else_is_never_loaded(said: dict[str, Any]) -> None:
    check_never_loads(said)


def picture(identifier: str) -> SimpleNamespace:
    place = SimpleNamespace(offset=8, length=16)
    return SimpleNamespace(identifier=identifier, mm_position=place)


@pytest.mark.parametrize(
    ("held", "asked", "is_loaded"),
    [
        (["cat"], ["cat"], True),
        (["cat"], ["dog"], False),
        (["cat"], [], False),
        ([], ["cat"], False),
    ],
)
def test_kvcache_of_another_picture_is_never_loaded(
    held: list[str], asked: list[str], is_loaded: bool
) -> None:
    media = [MediaItem(name, 8, 16) for name in held]
    client = AnsweringClient()
    side = scheduler_side(client)
    # The token ids are the same in all cases.
    consumer = request("consumer", 71, said={"token_digest": token_digest(range(70), media)})
    consumer.mm_features = [picture(name) for name in asked]
    arrive(side, consumer)
    side.on_landed(consumer.said)
    waits = (70, True) if is_loaded else (0, False)
    assert side.get_num_new_matched_tokens(consumer, 0) == waits
    assert (("release", TRANSFER) in client.said) == (not is_loaded), "the engine prefills itself"


POET = "files:poet"


class OneAdapter(Adapters):
    """An engine that has loaded the adapter "poet", and can identify no other one."""

    def identity(self, lora_request: Any) -> str | None:
        if not lora_request:
            return ""
        return POET if lora_request.lora_name == "poet" else None


def tuned(role: str, name: str, told: str) -> Any:
    """A request with a LoRA adapter, or with none for "". The other engine's has the identity
    `told`.
    """
    made = request(role, 70 if role == "producer" else 71, adapter=told)
    made.lora_request = SimpleNamespace(lora_name=name) if name else None
    return made


@pytest.mark.parametrize(
    ("adapter", "told", "failure"),
    [
        ("poet", POET, ""),
        ("", "", ""),
        ("poet", "files:other", "of the adapter files:other, here it is the adapter files:poet"),
        ("poet", "", "of the base model, here it is the adapter files:poet"),
        ("", POET, "of the adapter files:poet, here it is the base model"),
        ("stranger", POET, "the adapter stranger cannot be identified"),
    ],
)
def test_kvcache_moves_between_engines_with_the_same_adapter(
    adapter: str, told: str, failure: str
) -> None:
    client = AnsweringClient()
    side = scheduler_side(client, adapters=OneAdapter())
    consumer = tuned("consumer", adapter, told)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    waits = (0, False) if failure else (70, True)
    assert side.get_num_new_matched_tokens(consumer, 0) == waits
    assert (("release", TRANSFER) in client.said) == bool(failure), "a refused landing goes back"

    producing = scheduler_side(AnsweringClient(), adapters=OneAdapter())
    arrive(producing, tuned("producer", adapter, told))
    meta = step(producing, {"r1": (0, 70)})
    assert len(meta.sends) == (not failure)
    assert [ended.failure for ended in meta.ended if failure not in ended.failure] == []
    assert len(meta.ended) == bool(failure)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"prfaas": {"role": "consumer"}},
        {"prfaas": 7},
        {"prfaas": {"role": "thief", "transfer_id": "zz"}},
    ],
)
def test_parameters_that_are_none_or_nonsense_mean_an_ordinary_request(params: Any) -> None:
    client = AnsweringClient()
    side = scheduler_side(client)
    ordinary = request("consumer", 10)
    ordinary.kv_transfer_params = params
    side.on_new_request(ordinary)
    assert side.get_num_new_matched_tokens(ordinary, 0) == (0, False)
    assert step(side, {"r1": (0, 10)}).sends == []
    assert client.said == []


@pytest.mark.parametrize("event", ["failed", "disconnected", "no agent", "timeout"])
def test_without_a_landing_the_engine_computes_the_prompt(event: str) -> None:
    client = AnsweringClient(connected=event != "no agent")
    side = scheduler_side(client, landing_timeout_s=0 if event == "timeout" else 60)
    consumer = request("consumer", 71)
    arrive(side, consumer)
    if event == "failed":
        side.on_failed(TRANSFER, "cancelled", 0)
    elif event == "disconnected":
        side.on_landed(consumer.said)
        side.on_disconnected()
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)
    assert (("release", TRANSFER) in client.said) == (event == "timeout")


def test_a_client_that_leaves_while_its_landing_loads_gives_it_back_after_the_load() -> None:
    client = AnsweringClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    side.get_num_new_matched_tokens(consumer, 0)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    side.request_finished(consumer, aborted=True)
    assert ("release", TRANSFER) not in client.said
    finish_load(side)
    assert client.said[-1] == ("release", TRANSFER)
    finish_load(side)
    assert client.said.count(("release", TRANSFER)) == 1


def test_a_client_that_leaves_while_waiting_gives_the_landing_back() -> None:
    client = AnsweringClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    arrive(side, consumer)
    side.request_finished(consumer, aborted=True)
    assert client.said[-1] == ("release", TRANSFER)


def test_a_producer_sends_with_every_chunk_until_its_last() -> None:
    side = scheduler_side(AnsweringClient())
    producer = request("producer", 70)
    arrive(side, producer)
    assert side.get_num_new_matched_tokens(producer, 0) == (0, False)
    (first,) = step(side, {"r1": (0, 32)}).sends
    assert (first.computed_tokens, first.is_last) == (32, False)
    assert first.blocks == ([10, 11, 12, 13, 14], [22, 23, 24], [31])
    (last,) = step(side, {"r1": (32, 38)}).sends
    assert last.is_last
    assert last.blocks[2] == [34]
    side.request_finished(producer, aborted=False)
    (ended,) = step(side, {}).ended
    assert ended.failure == ""


@pytest.mark.parametrize(
    ("shown", "num_tokens", "problem"),
    [("cat", 71, ""), ("dog", 71, "other tokens or media"), ("cat", 70, "70 prompt tokens")],
)
def test_a_producer_that_makes_its_own_prompt_leaves_out_the_last_token(
    shown: str, num_tokens: int, problem: str
) -> None:
    digest = token_digest(range(70), [MediaItem("cat", 8, 16)]).hex()
    side = scheduler_side(AnsweringClient())
    producer = request("producer", num_tokens, said={"num_tokens": 70}, token_digest=digest)
    producer.mm_features = [picture(shown)]
    producer._all_token_ids = producer.all_token_ids = list(producer.prompt_token_ids)
    producer.num_prompt_tokens, producer.block_hashes = num_tokens, ["old"]
    producer.update_block_hashes = lambda: producer.block_hashes.append("new")
    arrive(side, producer)
    meta = step(side, {"r1": (0, 70)})
    if problem:
        assert meta.sends == []
        assert problem in meta.ended[0].failure
        assert len(producer.all_token_ids) == num_tokens, "the engine computes it for itself"
        return
    assert meta.sends[0].is_last
    assert producer.prompt_token_ids == producer.all_token_ids == list(range(70))
    assert (producer.num_prompt_tokens, producer.block_hashes) == (70, ["new"])


def test_a_producer_that_is_aborted_says_so_with_the_next_step() -> None:
    side = scheduler_side(AnsweringClient())
    producer = request("producer", 70)
    arrive(side, producer)
    step(side, {"r1": (0, 32)})
    side.request_finished(producer, aborted=True)
    (ended,) = step(side, {}).ended
    assert "ABORTED" in ended.failure
    assert step(side, {"r1": (32, 38)}).sends == []


def test_a_role_the_engine_was_not_started_for_is_refused() -> None:
    side = scheduler_side(AnsweringClient(), produces=False)
    producer = request("producer", 70)
    arrive(side, producer)
    meta = step(side, {"r1": (0, 70)})
    assert meta.sends == []
    assert "kv_role" in meta.ended[0].failure


def test_a_producer_leaves_out_what_the_receiver_has() -> None:
    side = scheduler_side(AnsweringClient())
    producer = request("producer", 70, said={"cached_tokens": 32})
    arrive(side, producer)
    (send,) = step(side, {"r1": (0, 70)}).sends
    assert send.ref.cached_tokens == 32
    assert send.blocks == ([12, 13, 14], [22, 23, 24], [34])


def test_after_a_reset_nothing_is_sent_under_the_weights_of_the_start() -> None:
    side = scheduler_side(AnsweringClient())
    side.reset_cache()
    arrive(side, request("producer", 70))
    meta = step(side, {"r1": (0, 70)})
    assert meta.sends == []
    assert "weights may have changed" in meta.ended[0].failure


def test_a_reset_ends_what_is_being_sent() -> None:
    """The rest would be computed with other weights, and the receiver would decode with a mix."""
    side = scheduler_side(AnsweringClient())
    arrive(side, request("producer", 70))
    assert step(side, {"r1": (0, 32)}, "r1").sends
    side.reset_cache()
    meta = step(side, {"r1": (0, 70)}, "r1")
    assert meta.sends == []
    assert "weights may have changed" in meta.ended[0].failure


def test_a_reset_leaves_what_was_sent_whole() -> None:
    side = scheduler_side(AnsweringClient())
    arrive(side, request("producer", 70))
    assert step(side, {"r1": (0, 70)}, "r1").sends[0].is_last
    side.reset_cache()
    assert step(side, {"r1": (0, 70)}, "r1").ended == []


def test_a_reset_gives_back_what_has_landed() -> None:
    client = AnsweringClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    side.reset_cache()
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]
    assert side.get_num_new_matched_tokens(consumer, 0) == (0, False)


def test_a_reset_fails_a_load_under_way_and_a_lost_connection_gives_it_time() -> None:
    client = AnsweringClient()
    side = scheduler_side(client)
    consumer = request("consumer", 71)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    begun_s = time.monotonic()
    assert step(side, {}).kept_s["r1"] >= begun_s
    renewed_s = step(side, {}).kept_s["r1"]
    side.on_disconnected()
    lost_s = step(side, {}).kept_s["r1"]
    assert step(side, {}).kept_s["r1"] == lost_s >= renewed_s > begun_s
    side.reset_cache()
    assert step(side, {}).kept_s == {"r1": -math.inf}
    finish_load(side)
    assert step(side, {}).kept_s == {}


@pytest.mark.parametrize(
    ("role", "said", "named"),
    [
        ("producer", {"draft": bytes(32)}, "room for the KVCache of another drafter"),
        (
            "consumer",
            {"draft": bytes(32), "cached_tokens": 64, "cached_runs": [[(1, 1)]]},
            "engines with another drafter filled the cached blocks",
        ),
    ],
)
def test_kvcache_of_another_drafter_is_refused(
    role: str, said: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = scheduler_side(AnsweringClient())
    asked = request(role, 100 if role == "producer" else 101, said=said)
    arrive(side, asked)
    if role == "consumer":
        side.on_landed(asked.said)
    assert named in caplog.text


def test_workers_are_told_of_the_first_step_behind_a_landing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduler_side(AnsweringClient())
    monkeypatch.setattr(landings.time, "monotonic", lambda: 12.5)
    consumer = request("consumer", 71)
    arrive(side, consumer)
    side.on_landed(consumer.said)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
    side.update_state_after_alloc(consumer, ALLOCATED, 70)
    loading = step(side, {})
    assert (loading.first_steps, loading.is_idle) == ([], True)
    finish_load(side)
    first = step(side, {"r1": (70, 1)}, "r1")
    assert first.first_steps == [FirstStep("r1", TRANSFER, "e1", 12.5)]
    assert not first.is_idle
    assert step(side, {"r1": (71, 1)}).first_steps == []


def test_a_request_without_a_landing_has_no_such_step() -> None:
    side = scheduler_side(AnsweringClient())
    arrive(side, request("producer", 71))
    assert step(side, {"r1": (0, 71)}, "r1").first_steps == []


def test_a_busy_engine_waits_for_the_answer_about_a_new_request_only_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduler_side(AnsweringClient())
    waits: list[float] = []
    clock_s = 5.0

    def wait(timeout_s: float) -> bool:
        nonlocal clock_s
        waits.append(timeout_s)
        clock_s += timeout_s
        return len(waits) > 1 and (side.on_landed(consumer.said) or True)

    monkeypatch.setattr("kvmanager.vllm_connector.scheduler.time.monotonic", lambda: clock_s)
    monkeypatch.setattr(side._agent_said, "wait", wait)
    consumer, other = request("consumer", 71), request("producer", 71)
    other.request_id, other.kv_transfer_params = "r2", None
    arrive(side, other)
    arrive(side, consumer)
    side._engine_is_idle = False  # the other request is computed
    for _ in range(2):
        assert side.get_num_new_matched_tokens(consumer, 0) == (None, False)
    assert waits == [pytest.approx(0.002)]
    for over in (other, consumer):
        side.request_finished(over, aborted=True)
    arrive(side, consumer)
    assert side.get_num_new_matched_tokens(consumer, 0) == (70, True)
