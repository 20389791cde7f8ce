"""Divisions, bounds and the search of the highest rate."""

import pytest
from stage_cases import model, sizes

from scheduler.planning.lengths import EmpiricalLengths
from scheduler.stages.arrangement import DISAGGREGATED, Arrangement, Division, divisions
from scheduler.stages.capacity import StageWork, bound_rps, stage_work
from scheduler.stages.goodput import Binding, Samples, best_division, goodput, search
from scheduler.stages.profile import StageSlo
from scheduler.stages.traffic import MediaTraffic, draw

TRAFFIC = MediaTraffic(
    text=EmpiricalLengths.of([100]), output_tokens=10, media_tokens=500, share=0.5
)


def samples(traffic: MediaTraffic = TRAFFIC, num: int = 200) -> Samples:
    return Samples((draw(traffic, num, 1),), 20.0)


def test_all_divisions_are_tried() -> None:
    assert [str(one) for one in divisions(Arrangement.EP_D, 4)] == ["1EP3D", "2EP2D", "3EP1D"]
    assert len(list(divisions(Arrangement.E_P_D, 8))) == 21
    assert [str(one) for one in divisions(Arrangement.EPD, 3)] == ["3EPD"]
    assert list(divisions(Arrangement.E_P_D, 2)) == []
    with pytest.raises(ValueError, match="at least 1 for each of ED, P"):
        Division(Arrangement.ED_P, (0, 4))


def test_a_division_is_bounded_by_its_fullest_group() -> None:
    work = StageWork(encode_s=0.01, prefill_s=0.02, decode_s=0.04)
    assert bound_rps(work, Division(Arrangement.E_P_D, (1, 3, 4))) == pytest.approx(100)
    assert bound_rps(work, Division(Arrangement.EP_D, (3, 5))) == pytest.approx(100)
    hidden = StageWork(encode_s=0.01, prefill_s=0.02, decode_s=0.04, overlap=1.0)
    assert hidden.of("ED") == pytest.approx(0.04)


def test_what_another_cluster_prefills_needs_only_decodes() -> None:
    whole, none = stage_work(model(), TRAFFIC), stage_work(model(), TRAFFIC, prefilled_share=1.0)
    assert none.prefill_s == none.encode_s == 0
    assert none.decode_s == whole.decode_s > 0


def test_goodput_is_near_the_bound_and_keeps_the_objectives() -> None:
    division = Division(Arrangement.EP_D, (2, 2))
    highest_rps = bound_rps(stage_work(model(), TRAFFIC), division)
    found = goodput(model(), division, samples(), highest_rps)
    assert 0.5 * highest_rps < found.rate_rps <= 1.1 * highest_rps
    assert found.quantile("ttft_s", 0.9) <= 1.0
    assert set(found.used) == {"EP", "D"}


def test_objectives_that_no_rate_keeps_have_no_goodput() -> None:
    tight = model(slo=StageSlo(0.001, 0.1))
    division = Division(Arrangement.EP_D, (1, 1))
    found = goodput(tight, division, samples(), bound_rps(stage_work(tight, TRAFFIC), division))
    assert (found.rate_rps, found.binding, found.used) == (0.0, Binding.TTFT, {})
    assert found.quantile("ttft_s", 0.9) == 0.0


def test_slow_tokens_are_named() -> None:
    # A step of one decode takes 11 ms.
    tight = model(slo=StageSlo(5.0, 0.0105))
    division = Division(Arrangement.EP_D, (2, 2))
    found = goodput(tight, division, samples(), bound_rps(stage_work(tight, TRAFFIC), division))
    assert found.binding is Binding.TPOT


def test_the_search_finds_a_division_of_each_arrangement() -> None:
    work = stage_work(model(), TRAFFIC)
    found = search(model(), 4, samples(), work)
    assert [one.division.arrangement for one in found] == list(DISAGGREGATED)
    assert all(sum(one.division.counts) == 4 and one.rate_rps > 0 for one in found)
    # Two instances cannot run three groups.
    assert [str(one.division) for one in search(model(), 2, samples(), work)] == ["1EP1D", "1ED1P"]
    assert best_division(model(), [], samples(), work) is None


def test_room_for_kvcache_bounds_decodes() -> None:
    roomy = stage_work(model(), TRAFFIC)
    small = stage_work(model(sizes=sizes(kv_room_bytes=1.3e6)), TRAFFIC)
    assert small.decode_s > roomy.decode_s


def test_the_same_requests_come_at_every_rate() -> None:
    drawn = draw(TRAFFIC, 50, 3)
    slow, fast = drawn.at_rate(1.0, 50), drawn.at_rate(2.0, 50)
    assert [one.media for one in slow] == [one.media for one in fast]
    assert slow[-1].arrival_s == pytest.approx(2 * fast[-1].arrival_s)
    assert drawn == draw(TRAFFIC, 50, 3)


def test_traffic_has_the_wanted_shares() -> None:
    traffic = MediaTraffic(
        text=EmpiricalLengths.of([100]),
        output_tokens=10,
        output_sigma=0.5,
        share=0.5,
        media_per_request=1.5,
        repeats=0.3,
    )
    requests = draw(traffic, 4000, 1, elsewhere=[(1000, 2000)]).requests
    media = [one.identifier for request in requests for one in request.media]
    assert len(media) / 4000 == pytest.approx(0.75, rel=0.05)
    assert 1 - len(set(media)) / len(media) == pytest.approx(0.3, abs=0.03)
    assert {one.is_prefilled for one in requests if one.prompt_tokens == 1252} == {True}
    assert {one.is_prefilled for one in requests if one.prompt_tokens == 676} == {False}
    with pytest.raises(ValueError, match="must be shares"):
        MediaTraffic(text=traffic.text, output_tokens=10, share=2)
    with pytest.raises(ValueError, match="at least 1"):
        MediaTraffic(text=traffic.text, output_tokens=10, media_per_request=0.5)
