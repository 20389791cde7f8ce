"""The connector and the agent's prefix cache: what of a request is stored, and when."""

from typing import Any

from cache_engine import KV, NAMESPACE, SHORT_WINDOW, ST, WIN, Engine, engine, ready, request

from kvmanager.hashing import root_key
from kvmanager.vllm_connector.cache.keys import RequestKeys


def keys_of(asked: Any) -> list[bytes]:
    return RequestKeys(asked, 16, NAMESPACE).keys


# Branches.


def test_where_prompts_part_a_state_is_made_and_kept() -> None:
    made = engine()
    asked = request(110)
    assert ready(made, asked, 1, 4) == 16
    assert asked.shared_prefix_boundary == 64
    assert made.agent.asked() == [
        (2, WIN),
        (3, WIN),
        (3, ST),
        (4, KV),
        (4, WIN),
        (5, KV),
        (5, WIN),
        (5, ST),
    ]
    assert made.stored(asked, 16, 64) == [(2, WIN), (3, WIN), (3, ST)]
    asked.shared_prefix_boundary = 80
    made.cache.matched(asked, 0)
    assert asked.shared_prefix_boundary == 80, "a later one of vLLM's own is left"


def test_an_engine_without_states_has_no_use_for_a_step_that_ends_there() -> None:
    made = engine(*SHORT_WINDOW)
    asked = request(300)
    ready(made, asked, 1, 3)
    assert asked.shared_prefix_boundary == 0
    assert (2, WIN) in made.agent.asked()


# Storing.


def test_a_prompt_is_stored_as_its_chunks_complete_it() -> None:
    made = engine()
    asked = request(70)
    assert ready(made, asked) == 0
    (reserve,) = made.agent.reserved
    keys = keys_of(asked)
    assert (reserve.keys, reserve.parent) == (keys, root_key(NAMESPACE))
    assert made.agent.asked() == [(0, KV), (1, KV), (2, KV), (2, WIN), (3, KV), (3, WIN), (3, ST)]
    (step,) = made.step(asked, 0, 40)
    assert [(part.index, part.part, part.blocks) for part in step.cached.parts] == [
        (0, KV, ([1],)),
        (1, KV, ([2],)),
    ]
    assert not step.is_last
    assert step.cached.arena_epoch == "e1"
    (last,) = made.step(asked, 40, 64)
    assert [(part.index, part.part, part.blocks) for part in last.cached.parts] == [
        (2, KV, ([3],)),
        (2, WIN, ([103],)),
        (3, KV, ([4],)),
        (3, WIN, ([104],)),
        (3, ST, ([204],)),
    ]
    assert last.is_last
    assert made.step(asked, 64, 70) == []


def test_a_prompt_of_whole_blocks_can_be_resumed_at_both_its_ends() -> None:
    made = engine()
    asked = request(64)
    ready(made, asked)
    assert {(2, ST), (3, ST)} <= set(made.agent.asked())
    assert (2, ST) in made.stored(asked, 0, 48)
    assert (3, ST) in made.stored(asked, 48, 64)


def test_only_what_the_agent_lacks_is_stored() -> None:
    made = engine()
    asked = request(70)
    ready(made, asked, 3, 3)
    (reserve,) = made.agent.reserved
    keys = keys_of(asked)
    assert (reserve.first_block, reserve.parent, reserve.keys) == (2, keys[1], keys[2:])
    assert made.agent.asked() == [(2, WIN), (3, KV), (3, WIN), (3, ST)]


def test_a_state_that_no_step_ended_at_is_left_out() -> None:
    made = engine()
    asked = request(70)
    ready(made, asked)
    assert made.stored(asked, 0, 70) == [
        (0, KV), (1, KV), (2, KV), (2, WIN), (3, KV), (3, WIN),
    ]  # fmt: skip


def test_a_state_that_the_engine_offers_is_taken_from_where_it_says() -> None:
    made = engine()
    asked = request(70)
    ready(made, asked)
    made.offered = {(2, 64): 77}
    (step,) = made.step(asked, 0, 70)
    assert [part.blocks for part in step.cached.parts if part.part == ST] == [([77],)]


def test_memory_that_comes_late_is_filled_with_what_is_still_there() -> None:
    made = engine()
    asked = request(70)
    made.cache.add(asked)
    made.found(0, 0)
    assert made.stored(asked, 0, 64) == []
    made.give()
    assert made.tables is not None
    made.tables[1][:3] = [0, 0, 0]
    assert made.stored(asked, 64, 70) == [(0, KV), (1, KV), (2, KV), (3, KV), (3, WIN), (3, ST)]


def test_a_state_block_that_the_engine_took_back_is_left_out() -> None:
    made = engine()
    asked = request(70)
    made.cache.add(asked)
    made.found(0, 0)
    made.step(asked, 0, 64)
    made.give()
    assert made.tables is not None
    made.tables[2][3] = 0
    assert (3, ST) not in made.stored(asked, 64, 70)


def test_the_state_of_what_was_loaded_can_be_stored_again() -> None:
    """The agent may have lost it meanwhile, or it is the engine's own cache that had it."""
    made = engine()
    asked = request(70)
    ready(made, asked)
    assert (3, ST) in made.stored(asked, 64, 70)


def test_of_a_window_shorter_than_a_block_its_needed_pages_are_stored() -> None:
    made = engine(*SHORT_WINDOW)
    asked = request(130)
    ready(made, asked)
    assert made.tables is not None
    made.tables[1][4:6] = [0, 0]
    (step,) = made.step(asked, 64, 130)
    assert [part.blocks for part in step.cached.parts if part.part == WIN] == [([107, 108],)]


def test_of_a_window_whose_needed_pages_are_gone_nothing_is_stored() -> None:
    made = engine(*SHORT_WINDOW)
    asked = request(130)
    ready(made, asked)
    assert made.tables is not None
    made.tables[1][6] = 0
    assert (1, WIN) not in made.stored(asked, 64, 130)


def test_an_answer_is_stored_block_by_block_and_makes_room_of_its_last_checkpoint() -> None:
    made = engine()
    asked = request(34)
    ready(made, asked)
    made.step(asked, 0, 32)
    made.step(asked, 32, 34)
    for end in range(35, 100):
        asked.all_token_ids.append(1000 + end)
        made.step(asked, end - 1, end)
        if end in (48, 64, 80, 96):
            made.give()
            done = made.stored(asked, end, end + 1)
            assert done[-3:] == [(end // 16 - 1, part) for part in (KV, WIN, ST)]
    answers = made.agent.reserved[1:]
    keys = keys_of(asked)
    assert [reserve.first_block for reserve in answers] == [1, 2, 3, 4]
    assert [reserve.keys[-1] for reserve in answers] == keys[2:6]
    assert [reserve.replaces for reserve in answers] == [b"", b"", keys[2], keys[3]], (
        "windows reach back over two blocks; the prompt's end is kept"
    )


def test_tokens_that_are_not_known_yet_are_stored_when_they_are() -> None:
    made = engine()
    asked = request(34)
    ready(made, asked)
    made.step(asked, 0, 34)
    asked.all_token_ids.extend(range(13))
    made.step(asked, 47, 48)
    assert len(made.agent.reserved) == 1, "the step's own token is still being sampled"
    asked.all_token_ids.append(7)
    made.step(asked, 48, 49)
    made.give()
    assert made.stored(asked, 49, 50)[-1] == (2, ST)


def test_without_a_wish_for_ends_an_answers_kv_alone_is_stored() -> None:
    made = Engine()
    made.welcome(ends=False, branches=False)
    asked = request(34)
    ready(made, asked)
    assert made.agent.asked() == [(0, KV), (1, KV)]
    asked.all_token_ids.extend(range(14))
    made.step(asked, 47, 48)
    assert made.agent.asked() == [(2, KV)]


def test_a_landings_full_blocks_are_the_agents_to_keep() -> None:
    made = engine()
    asked = request(66)
    made.cache.add(asked, landing_tokens=65)
    assert made.agent.said == []
    made.step(asked, 65, 66)
    assert made.agent.said == []
    asked.all_token_ids.extend(range(14))
    made.step(asked, 79, 80)
    assert made.agent.asked() == [(3, WIN), (4, KV), (4, WIN), (4, ST)]


def test_a_landing_that_failed_leaves_a_request_like_any_other() -> None:
    made = engine()
    asked = request(66)
    made.cache.add(asked, landing_tokens=65)
    assert made.cache.matched(asked, 0) is None
    made.found(4, 4)
    assert made.cache.matched(asked, 0) == 64
