"""One landing for several requests of an engine: vLLM makes one of each choice of a client."""

from typing import Any

from scheduler_side_rig import (
    ALLOCATED,
    TRANSFER,
    AnsweringClient,
    finish_load,
    request,
    scheduler_side,
    step,
)

from kvmanager.vllm_connector.scheduler import SchedulerSide

NUM_TOKENS = 71


def choice(index: int, num_requests: int = 3) -> Any:
    made = request("consumer", NUM_TOKENS, num_requests=num_requests)
    made.request_id = f"{index}_r"
    return made


def side_with(client: AnsweringClient, *choices: Any) -> SchedulerSide:
    side = scheduler_side(client)
    for one in choices:
        side.on_new_request(one)
    return side


def load(side: SchedulerSide, one: Any, num_cached: int = 0) -> None:
    """The engine gives `one` its blocks, and its load ends."""
    num_new = NUM_TOKENS - 1 - num_cached
    assert side.get_num_new_matched_tokens(one, num_cached) == (num_new, True)
    side.update_state_after_alloc(one, ALLOCATED, num_new)
    (loading,) = step(side, {}).loads
    assert loading.request_id == one.request_id
    finish_load(side, one.request_id)


def test_the_first_choice_loads_alone_and_the_others_what_the_engines_cache_lacks() -> None:
    client = AnsweringClient()
    first, second, third = choices = [choice(index) for index in range(3)]
    side = side_with(client, *choices)
    assert client.said == [("watch", TRANSFER)]
    side.on_landed(choice(0).said)
    assert side.get_num_new_matched_tokens(first, 0) == (70, True)
    side.update_state_after_alloc(first, ALLOCATED, 70)
    # Its blocks are in the engine's cache once they are loaded.
    assert side.get_num_new_matched_tokens(second, 0) == (None, False)
    step(side, {})
    finish_load(side, first.request_id)
    assert side.get_num_new_matched_tokens(second, 64) == (6, True)
    side.update_state_after_alloc(second, ALLOCATED, 6)
    assert side.get_num_new_matched_tokens(third, 64) == (6, True), "the others load at once"
    side.update_state_after_alloc(third, ALLOCATED, 6)
    assert [one.request_id for one in step(side, {}).loads] == ["1_r", "2_r"]
    finish_load(side, second.request_id)
    assert client.said == [("watch", TRANSFER)]
    finish_load(side, third.request_id)
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]
    for one in choices:
        side.request_finished(one, aborted=False)
    assert client.said[-1] == ("release", TRANSFER)
    assert len(client.said) == 2


def test_a_landing_is_kept_for_choices_that_are_still_to_come() -> None:
    client = AnsweringClient()
    first, second = choice(0, 2), choice(1, 2)
    side = side_with(client, first)
    side.on_landed(choice(0).said)
    load(side, first)
    assert client.said == [("watch", TRANSFER)]
    side.on_new_request(second)
    load(side, second, 64)
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]


def test_choices_that_never_come_are_not_waited_for_once_one_is_over() -> None:
    client = AnsweringClient()
    first = choice(0)
    side = side_with(client, first)
    side.on_landed(choice(0).said)
    load(side, first)
    side.request_finished(first, aborted=False)
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]
    late = choice(1)
    side.on_new_request(late)
    side.on_failed(TRANSFER, "unknown", 0)
    assert side.get_num_new_matched_tokens(late, 64) == (0, False)


def test_all_choices_compute_the_prompt_when_the_landing_fails() -> None:
    client = AnsweringClient()
    choices = [choice(0), choice(1)]
    side = side_with(client, *choices)
    side.on_failed(TRANSFER, "lost", 0)
    late = choice(2)
    side.on_new_request(late)
    for one in (*choices, late):
        assert side.get_num_new_matched_tokens(one, 0) == (0, False)
        side.request_finished(one, aborted=False)
    assert client.said == [("watch", TRANSFER)], "the agent has it no more"


def test_a_client_that_leaves_gives_the_landing_back_after_the_last_load() -> None:
    client = AnsweringClient()
    choices = [choice(0, 2), choice(1, 2)]
    side = side_with(client, *choices)
    side.on_landed(choice(0).said)
    side.get_num_new_matched_tokens(choices[0], 0)
    side.update_state_after_alloc(choices[0], ALLOCATED, 70)
    for one in choices:
        side.request_finished(one, aborted=False)
    assert client.said == [("watch", TRANSFER)]
    finish_load(side, choices[0].request_id)
    assert client.said == [("watch", TRANSFER), ("release", TRANSFER)]


def test_workers_hear_of_the_first_step_once() -> None:
    side = side_with(AnsweringClient(), *(choices := [choice(0, 2), choice(1, 2)]))
    side.on_landed(choice(0).said)
    load(side, choices[0])
    load(side, choices[1], 64)
    steps = {one.request_id: (70, 1) for one in choices}
    (first,) = step(side, steps, *steps).first_steps
    assert first.request_id == "0_r"
