"""What an instance computes next: HydraInfer's Algorithm 1, and the rules of engines."""

import pytest
from stage_cases import profile, request, sizes

from scheduler.stages.batching import Batching, Budgets, next_batch
from scheduler.stages.instance import Instance, Running

BUDGETS = Budgets(tokens=400, media_tokens=1000)


def instance(group: str = "EPD", **changes: object) -> Instance:
    return Instance("i0", group, profile(), sizes(**changes), tpot_s=0.1)


def waiting(to: Instance, text: int, *media: str, is_encoded: bool = False) -> Running:
    running = Running(request(0.0, text, *media))
    running.unencoded = () if is_encoded else running.request.media
    (to.to_encode if running.unencoded else to.to_prefill).append(running)
    return running


def decoding(on: Instance) -> None:
    running = Running(request(0.0, 10))
    assert on.reserve(running, 10)
    running.first_token_s = 0.0
    on.add_decode(running, 0.0)


def test_algorithm_1_fills_a_pass_with_decodes_and_chunks_within_the_budget() -> None:
    one = instance()
    decoding(one)
    first, second = waiting(one, 300), waiting(one, 300)
    batch = next_batch(one, Batching.STAGE_LEVEL, BUDGETS)
    assert batch is not None
    assert batch.decodes
    # The decode is one token of the budget.
    assert batch.chunks == ((first, (0, 300)), (second, (0, 99)))


def test_algorithm_1_encodes_only_while_nothing_is_prefilled() -> None:
    one = instance()
    decoding(one)
    text = waiting(one, 100)
    image = waiting(one, 100, "a")
    batch = next_batch(one, Batching.STAGE_LEVEL, BUDGETS)
    assert batch is not None
    assert (batch.chunks, batch.media) == (((text, (0, 100)),), ())
    one.to_prefill.clear()
    batch = next_batch(one, Batching.STAGE_LEVEL, BUDGETS)
    assert batch is not None
    assert batch.media == ((image, image.request.media),)
    assert batch.decodes
    assert batch.in_parallel


def test_images_keep_to_their_budget_but_one_is_always_encoded() -> None:
    one = instance()
    first, second = waiting(one, 10, "a", "b"), waiting(one, 10, "c")
    batch = next_batch(one, Batching.STAGE_LEVEL, BUDGETS)
    assert batch is not None
    assert batch.media == ((first, first.request.media),)
    small = next_batch(one, Batching.STAGE_LEVEL, Budgets(400, 1))
    assert small is not None
    assert small.media_tokens == 500
    assert second in one.to_encode


def test_an_engine_encodes_in_the_pass_that_begins_the_prompt() -> None:
    one = instance()
    decoding(one)
    running = Running(request(0.0, 100, "a"))
    running.unencoded = running.request.media
    one.to_prefill.append(running)
    batch = next_batch(one, Batching.ENGINE, BUDGETS)
    assert batch is not None
    assert batch.chunks == ((running, (0, 399)),)
    assert batch.media_tokens == 500
    assert not batch.in_parallel


def test_prefill_first_lets_decodes_stand_still_and_cuts_no_prompt() -> None:
    one = instance()
    decoding(one)
    running = waiting(one, 5000)
    batch = next_batch(one, Batching.PREFILL_FIRST, BUDGETS)
    assert batch is not None
    assert not batch.decodes
    assert batch.chunks == ((running, (0, 5000)),)


@pytest.mark.parametrize("batching", list(Batching))
def test_a_prompt_without_room_holds_up_those_behind_it(batching: Batching) -> None:
    one = instance(kv_room_bytes=250_000)
    decoding(one)
    waiting(one, 300)
    waiting(one, 50)
    batch = next_batch(one, batching, BUDGETS)
    assert batch is not None
    assert not batch.chunks
    assert batch.decodes


def test_nothing_to_do_is_no_pass() -> None:
    for batching in Batching:
        assert next_batch(instance(), batching, BUDGETS) is None
