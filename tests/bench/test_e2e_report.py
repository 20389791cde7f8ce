"""What `bench_e2e.py` makes of its samples, without engines."""

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from bench_e2e import FixedLink, Measured, _measure_one, prompts, summarise
from e2e_systems import MODEL, Answer, is_whole, region_spec, word_of

from deploy.lab.demo.tiny_specs import MODELS


def measured(system: str, gbps: float, ttft_s: float) -> Measured:
    return Measured(system, gbps, 2000, "prompt", ttft_s=ttft_s, text="abc")


def test_cells_have_medians_their_ratio_and_whether_both_said_the_same() -> None:
    ours = [measured("prfaas", 1.0, ttft_s) for ttft_s in (0.3, 0.5, 0.4)]
    sent = {"prefill_s": 0.4}
    ours = [replace(item, wire_bytes=25_000_000, parts=sent, own_s=0.4) for item in ours]
    theirs = [measured("nixl", 1.0, 0.8), replace(measured("nixl", 1.0, 0.0), error="hung")]
    found = summarise([*ours, *theirs], rtt_s=0.02)
    (cell,) = found["cells"]
    assert (cell["prfaas_ttft_ms"], cell["nixl_ttft_ms"], cell["ratio"]) == (400.0, 800.0, 0.5)
    assert (cell["prfaas_failed"], cell["nixl_failed"], cell["same_text"]) == (0, 1, "1/1")
    assert (cell["own_prfaas_ms"], cell["own_nixl_ms"]) == (400.0, None)
    assert (cell["own_prfaas_ratio"], cell["own_nixl_ratio"]) == (0.95, None)
    assert cell["emitted_gbps"] == 0.5
    assert found["median_ratio_by_gbps"] == {1.0: 0.5}


def test_one_system_alone_has_no_ratio() -> None:
    (cell,) = summarise([measured("prfaas", 1.0, 0.4)], 0.0)["cells"]
    assert (cell["prfaas_ttft_ms"], cell["nixl_ttft_ms"], cell["ratio"]) == (400.0, None, None)
    assert (cell["same_text"], cell["emitted_gbps"]) == ("0/0", None)


def test_words_come_from_lines_with_text_only() -> None:
    assert word_of(b'data: {"choices": [{"text": "a"}]}', "url") == "a"
    assert word_of(b'data: {"choices": [{"text": ""}]}', "url") == ""
    for other in (b"data: [DONE]", b": comment", b"\n"):
        assert word_of(other, "url") == ""
    with pytest.raises(RuntimeError, match="overloaded"):
        word_of(b'data: {"error": "overloaded"}', "url")


def test_the_ratio_to_the_own_ttft_is_of_pairs() -> None:
    """A slow minute slows both of a pair."""
    pairs = [(0.24, 0.2), (0.5, 0.4), (0.9, 0.8)]
    items = [replace(measured("prfaas", 1.0, ttft_s), own_s=own_s) for ttft_s, own_s in pairs]
    (cell,) = summarise(items, rtt_s=0.02)["cells"]
    assert cell["own_prfaas_ratio"] == 1.1


def test_every_prompt_differs_and_lengths_take_turns() -> None:
    rounds = [prompts([0.2, 1.0], [2000, 4000], 2, "prfaas", number) for number in range(2)]
    for asked in rounds:
        assert [item.gbps for item in asked] == [0.2] * 4 + [1.0] * 4
        assert [len(item.prompt) for item in asked] == [2000, 4000] * 4
    assert len({item.prompt for asked in rounds for item in asked}) == 16


def test_each_prompt_is_followed_by_one_for_the_prefill_engine_itself() -> None:
    asked: list[str] = []

    async def ask(prompt: str) -> Answer:
        asked.append(prompt)
        return Answer(0.5, "abc", 1000, {"prefill_s": 0.3})

    async def ask_own(prompt: str) -> float:
        asked.append(prompt)
        if len(asked) == 4:
            raise aiohttp.ClientError("gone")
        return 0.25

    todo = prompts([1.0], [600], 3, "prfaas", 0)
    first, second = asyncio.run(_measure_one(FixedLink(), "prfaas", todo, ask, ask_own))
    assert (first.ttft_s, first.own_s, first.parts) == (0.5, 0.25, {"prefill_s": 0.3})
    assert second.error == "gone"
    assert len(todo) == 1, "an engine that fails is started again for the rest"
    assert {len(prompt) for prompt in asked} == {600}
    assert len(set(asked)) == 4


def test_its_region_offloads_by_the_threshold_whatever_is_predicted() -> None:
    """A prompt that stays at its site has no transfer to measure."""
    spec = region_spec(MODELS[MODEL], Path("/model"))
    assert spec.gateway.scheduling.routing.policy == "threshold"
    assert spec.gateway.threshold_tokens == 100


def test_a_prompt_that_stayed_at_its_site_is_an_error_and_not_a_crash() -> None:
    record = {"is_settled": False, "route": "prefill_cluster", "reason": "", "parts": {}}
    assert not is_whole(record)
    assert not is_whole(record | {"is_settled": True})
    assert is_whole(record | {"is_settled": True, "parts": {"prefill_s": 0.1}})
    with pytest.raises(RuntimeError, match="predicted_sooner"):
        is_whole(record | {"is_settled": True, "route": "local", "reason": "predicted_sooner"})
