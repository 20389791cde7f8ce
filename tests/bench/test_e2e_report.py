"""What `bench_e2e.py` makes of its samples, without engines."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench_e2e import Measured, prompts, summarise
from e2e_systems import MODEL, is_whole, region_spec, word_of

from deploy.lab.demo.tiny_specs import MODELS


def measured(system: str, gbps: float, ttft_s: float) -> Measured:
    return Measured(system, gbps, 2000, "prompt", ttft_s=ttft_s, text="abc")


def test_cells_have_medians_their_ratio_and_whether_both_said_the_same() -> None:
    ours = [measured("prfaas", 1.0, ttft_s) for ttft_s in (0.3, 0.5, 0.4)]
    ours = [replace(item, wire_bytes=25_000_000, prefill_s=0.4) for item in ours]
    theirs = [measured("nixl", 1.0, 0.8), replace(measured("nixl", 1.0, 0.0), error="hung")]
    alone = [measured("prfaas", 0.0, 0.25)]
    found = summarise([*ours, *theirs, *alone])
    (cell,) = found["cells"]
    assert (cell["prfaas_ttft_ms"], cell["nixl_ttft_ms"], cell["ratio"]) == (400.0, 800.0, 0.5)
    assert (cell["prfaas_failed"], cell["nixl_failed"], cell["same_text"]) == (0, 1, "1/1")
    assert (cell["alone_prfaas_ms"], cell["alone_nixl_ms"]) == (250.0, None)
    assert cell["emitted_gbps"] == 0.5
    assert found["median_ratio_by_gbps"] == {1.0: 0.5}


def test_one_system_alone_has_no_ratio() -> None:
    (cell,) = summarise([measured("prfaas", 1.0, 0.4)])["cells"]
    assert (cell["prfaas_ttft_ms"], cell["nixl_ttft_ms"], cell["ratio"]) == (400.0, None, None)
    assert (cell["same_text"], cell["emitted_gbps"]) == ("0/0", None)


def test_words_come_from_lines_with_text_only() -> None:
    assert word_of(b'data: {"choices": [{"text": "a"}]}', "url") == "a"
    assert word_of(b'data: {"choices": [{"text": ""}]}', "url") == ""
    for other in (b"data: [DONE]", b": comment", b"\n"):
        assert word_of(other, "url") == ""
    with pytest.raises(RuntimeError, match="overloaded"):
        word_of(b'data: {"error": "overloaded"}', "url")


def test_every_prompt_differs_and_those_for_the_engine_alone_come_last() -> None:
    rounds = [prompts([0.2, 1.0], [2000, 4000], 2, "prfaas", number) for number in range(2)]
    for asked in rounds:
        assert [item.gbps for item in asked] == [0.2] * 4 + [1.0] * 4 + [0.0] * 4
        assert [len(item.prompt) for item in asked] == [2000, 2000, 4000, 4000] * 3
    assert len({item.prompt for asked in rounds for item in asked}) == 24


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
