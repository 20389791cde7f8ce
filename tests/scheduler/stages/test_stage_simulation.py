"""Requests through the stages: times add up, room is kept, nothing is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_cases import model, profile, request, sizes

from scheduler.encoding.values import EncodeConfig
from scheduler.stages import simulation
from scheduler.stages.arrangement import Arrangement, Division
from scheduler.stages.batching import Batching
from scheduler.stages.outcome import StageOutcome
from scheduler.stages.profile import StageSlo
from scheduler.stages.simulation import simulate
from scheduler.stages.traffic import StageRequest

EP_D = Division(Arrangement.EP_D, (1, 1))
ED_P = Division(Arrangement.ED_P, (1, 1))
E_P_D = Division(Arrangement.E_P_D, (1, 1, 1))
EPD = Division(Arrangement.EPD, (1,))
ALL = (EP_D, ED_P, E_P_D, EPD)

ENCODE_S = 0.002 + 500e-5
PREFILL_S = 0.010 + 600e-4
EMBEDDING_S = 0.001 + 500 * 100 / 1e9
KV_S = 0.001 + 600 * 1000 / 1e9
STEP_S = 0.011


def play(division: Division, *requests: StageRequest, **changes: object) -> StageOutcome:
    """With a request an hour before, so that the others count."""
    early = request(-3600.0, 1, output=1)
    shifted = [
        StageRequest(
            one.arrival_s + 3600, one.prompt_tokens, one.media, one.output_tokens, one.is_prefilled
        )
        for one in (early, *requests)
    ]
    return simulate(model(**changes), division, shifted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("division", "ttft_s", "total_s"),
    [
        (EPD, ENCODE_S + PREFILL_S, ENCODE_S + PREFILL_S + 2 * STEP_S),
        (EP_D, ENCODE_S + PREFILL_S, ENCODE_S + PREFILL_S + KV_S + 2 * STEP_S),
        (
            E_P_D,
            ENCODE_S + EMBEDDING_S + PREFILL_S,
            ENCODE_S + EMBEDDING_S + PREFILL_S + KV_S + 2 * STEP_S,
        ),
        (
            ED_P,
            ENCODE_S + EMBEDDING_S + PREFILL_S,
            ENCODE_S + EMBEDDING_S + PREFILL_S + KV_S + 2 * STEP_S,
        ),
    ],
)
@pytest.mark.parametrize("batching", [Batching.ENGINE, Batching.PREFILL_FIRST])
def test_the_parts_of_one_request_add_up(
    division: Division, ttft_s: float, total_s: float, batching: Batching
) -> None:
    found = play(division, request(0.0, 100, "a"), batching=batching)
    assert found.ttft_s.tolist() == pytest.approx([ttft_s])
    assert found.request_s.tolist() == pytest.approx([total_s])
    assert found.attainment == 1.0


def test_what_was_pulled_is_told_apart() -> None:
    found = play(E_P_D, request(0.0, 100, "a"))
    assert found.embedding_pull_s.tolist() == pytest.approx([EMBEDDING_S])
    assert found.kv_pull_s.tolist() == pytest.approx([KV_S])
    assert found.moved_share == pytest.approx((EMBEDDING_S + KV_S) / found.request_s[0])


@pytest.mark.parametrize("division", ALL)
def test_an_image_that_was_encoded_is_not_encoded_again(division: Division) -> None:
    found = play(division, request(0.0, 100, "a"), request(5.0, 100, "a"))
    first_s, second_s = found.ttft_s
    assert second_s == pytest.approx(PREFILL_S)
    assert first_s > second_s


def test_equal_images_under_way_are_encoded_once() -> None:
    found = play(E_P_D, request(0.0, 100, "a"), request(0.001, 100, "a"))
    # The second one waits for the first one's pass and prefill only.
    assert found.used["E"] * 3605 < 2 * ENCODE_S


def test_prompts_that_come_with_their_kvcache_only_decode() -> None:
    prefilled = StageRequest(0.0, 600, (), 3, is_prefilled=True)
    found = play(EP_D, prefilled)
    assert found.ttft_s.tolist() == []
    assert found.request_s.tolist() == pytest.approx([KV_S + 2 * STEP_S])


def test_media_that_the_stage_leaves_are_encoded_where_the_prompt_is_prefilled() -> None:
    # The second image would wait too long for the only encode instance.
    config = EncodeConfig(own_cost=1.0)
    requests = [request(0.0001 * at, 100, f"i{at}", tokens=5000) for at in range(4)]
    found = play(Division(Arrangement.E_P_D, (1, 4, 4)), *requests, encoding=config)
    assert len(found.embedding_pull_s) < len(requests)
    assert found.is_whole


def test_late_tokens_are_those_after_the_objective() -> None:
    # The second prompt's prefill is in one pass with a decode of the first one.
    slo = StageSlo(10.0, 0.050)
    requests = (request(0.0, 100, output=8), request(0.030, 5000, output=1))
    late = play(EPD, *requests, slo=slo, batching=Batching.PREFILL_FIRST)
    assert (late.num_late_tokens, late.num_late_first) == (1, 0)
    apart = play(EP_D, *requests, slo=slo, batching=Batching.PREFILL_FIRST)
    assert apart.num_late_tokens == 0


def test_a_decode_instance_pulls_only_what_it_has_room_for() -> None:
    # Room for one request: the second one is kept where it was prefilled.
    small = sizes(kv_room_bytes=700_000)
    found = play(EP_D, request(0.0, 600, output=50), request(0.0, 600, output=50), sizes=small)
    first_s, second_s = sorted(found.request_s.tolist())
    assert second_s > first_s + 49 * STEP_S - PREFILL_S
    assert found.is_whole


def test_it_stops_once_too_many_are_late() -> None:
    requests = [request(at * 0.001, 3000, output=2) for at in range(200)]
    found = simulate(model(slo=StageSlo(0.5, 0.1)), EP_D, requests, stop_below=0.9)
    assert not found.is_whole
    assert found.attainment < 0.9


def test_the_backlog_of_too_many_requests_grows() -> None:
    # 3000 tokens take 0.31 s.
    slow = simulate(model(), EP_D, [request(at * 0.2, 3000, output=1) for at in range(200)])
    fine = simulate(model(), EP_D, [request(at * 0.4, 3000, output=1) for at in range(200)])
    assert slow.backlog_growth > 0.2
    assert abs(fine.backlog_growth) < 0.02


REQUESTS = st.lists(
    st.builds(
        lambda gap, text, media, output: (gap, text, media, output),
        st.floats(0, 0.2),
        st.integers(1, 2000),
        st.lists(st.sampled_from("abcdef"), max_size=3),
        st.integers(1, 30),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=40)
@given(
    drawn=REQUESTS,
    division=st.sampled_from((*ALL, Division(Arrangement.E_P_D, (2, 1, 2)))),
    batching=st.sampled_from(list(Batching)),
    room_bytes=st.sampled_from([math.inf, 6e6]),
    overlap=st.sampled_from([0.0, 0.8]),
)
def test_every_request_ends_and_all_room_comes_back(
    drawn: list[tuple[float, int, list[str], int]],
    division: Division,
    batching: Batching,
    room_bytes: float,
    overlap: float,
) -> None:
    requests, now_s = [], 0.0
    for gap, text, media, output in drawn:
        now_s += gap
        requests.append(request(now_s, text, *media, output=output))
    played = model(
        batching, sizes=sizes(kv_room_bytes=room_bytes), profile=profile(overlap=overlap)
    )
    run = simulation._Simulation(played, division, requests, 0.0)
    found = run.run()
    assert found.is_whole
    assert (found.ttft_s > 0).all()
    for one in run._instances:
        assert one.kv_used_bytes == pytest.approx(0, abs=1)
        assert one.num_requests == one.num_decoding == one.num_pulling == one.num_admitted == 0
        assert one.pending_tokens == 0
    again = simulate(played, division, requests)
    assert again.request_s.tolist() == found.request_s.tolist()
