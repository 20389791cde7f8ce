"""Replays with media: the encode stage in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.plan.solve.case_study import case_study_region
from scheduler.encoding.line import EncodeLine
from scheduler.encoding.values import EncodeConfig, Medium
from scheduler.replay.driver import replay
from scheduler.replay.jobs import Fate
from scheduler.replay.model import EncodingModel, Policy, ReplayModel, Routing
from scheduler.replay.results import Outcome
from scheduler.replay.workload import Phase, Workload, drawn, with_media
from scheduler.stages.traffic import MediaTraffic

LINE = EncodeLine(0.5, 0.01)
REGION = case_study_region(4, 8)
HOME, FAR = REGION.pd_clusters[0].name, REGION.prefill_clusters[0].name
TRAFFIC = MediaTraffic(
    text=REGION.traffic.lengths, output_tokens=100, share=0.7, media_per_request=1.5, repeats=0.2
)


def model(num: int, **config: float) -> ReplayModel:
    """Clusters with `num` encode instances each."""
    names = [cluster.name for cluster in REGION.clusters]
    encoding = EncodingModel(
        lines=dict.fromkeys(names, LINE),
        prefills={cluster.name: cluster.prefill for cluster in REGION.clusters},
        num_instances=dict.fromkeys(names, num) if num else {},
        config=EncodeConfig(**config),  # type: ignore[arg-type]
    )
    return ReplayModel(region=REGION, encoding=encoding)


def text(duration_s: float = 120.0, rate_rps: float = 2.0) -> Workload:
    phase = Phase(duration_s=duration_s, rate_rps=rate_rps, lengths=TRAFFIC.text, output_tokens=100)
    return drawn([phase], 1)


def images(duration_s: float = 120.0, rate_rps: float = 2.0) -> Workload:
    return with_media(text(duration_s, rate_rps), TRAFFIC, 1)


def times(outcome: Outcome) -> list[tuple[float, ...]]:
    return [(job.start_s, job.prefill_end_s, job.done_s, job.place) for job in outcome.jobs]


def one(*requests: tuple[float, tuple[Medium, ...]]) -> Workload:
    """Short prompts, which the PD cluster prefills."""
    return Workload(
        arrivals_s=[at_s for at_s, _ in requests],
        prompt_tokens=[100 + sum(medium.num_tokens for medium in media) for _, media in requests],
        output_tokens=[1] * len(requests),
        media=[media for _, media in requests],
    )


def test_text_is_as_without_encoding() -> None:
    plain = replay(ReplayModel(region=REGION), text(), Policy())
    assert times(replay(model(2), text(), Policy())) == times(plain)
    no_media = replace(text(), media=[()] * len(text()))
    assert times(replay(model(2), no_media, Policy())) == times(plain)
    assert images().arrivals_s == text().arrivals_s
    assert images().output_tokens == text().output_tokens


@pytest.mark.parametrize("routing", list(Routing))
@pytest.mark.parametrize("num", [0, 2])
def test_it_is_deterministic_and_whole(num: int, routing: Routing) -> None:
    first = replay(model(num), images(), Policy(routing=routing))
    assert times(first) == times(replay(model(num), images(), Policy(routing=routing)))
    assert all(job.fate is Fate.DONE for job in first.jobs)
    for job in first.jobs:
        assert job.media_apart + job.media_left <= len(job.media)
        assert job.encode_s >= 0


def test_what_decides_sees_reports_with_the_stage() -> None:
    outcome = replay(model(2), images(), Policy(report_every_s=1.0))
    assert sum(job.media_apart for job in outcome.jobs) > 0
    assert all(job.fate is Fate.DONE for job in outcome.jobs)


HANDED_OFF = Policy(hand_off_tokens=1)
"""Prompts of these tests are short."""


def test_encoding_takes_its_time_once() -> None:
    medium = Medium("a", 100)
    work = one((0.0, (medium,)), (20.0, (medium,)), (40.0, ()))
    for num in (0, 1):
        first, again, plain = replay(model(num), work, HANDED_OFF).jobs
        assert first.encode_s == pytest.approx(LINE.seconds(100))
        assert (first.media_apart, first.media_left) == ((1, 0) if num else (0, 1))
        assert (again.media_apart, again.media_left, again.encode_s) == (0, 0, 0.0)
        assert plain.encode_s == 0.0
        took_s = first.prefill_end_s - first.arrival_s
        assert took_s == pytest.approx(again.prefill_end_s - 20.0 + LINE.seconds(100))


def test_the_prefill_encodes_what_comes_too_late() -> None:
    work = one((0.0, (Medium("a", 100),)))
    (job,) = replay(model(1, timeout_s=1.0), work, HANDED_OFF).jobs
    assert (job.media_apart, job.media_left) == (0, 1)
    assert job.encode_s == pytest.approx(1.0 + LINE.seconds(100))
    # More at once than the stage takes: the queue refuses, and nothing waits for it.
    crowd = one(*((0.001 * at, (Medium(f"m{at}", 100),)) for at in range(9)))
    left = [job.media_left for job in replay(model(1, max_waiting=0), crowd, HANDED_OFF).jobs]
    assert left == [1] * 9


def test_equal_media_are_encoded_once() -> None:
    work = one((0.0, (Medium("a", 100),)), (0.5, (Medium("a", 100),)))
    first, second = replay(model(1), work, HANDED_OFF).jobs
    assert (first.media_apart, second.media_apart) == (1, 1)
    assert second.encode_s == pytest.approx(LINE.seconds(100) - 0.5)


@pytest.mark.parametrize("cluster", [HOME, FAR])
def test_a_lost_cluster(cluster: str) -> None:
    lost = replace(model(1), lost={cluster: (30.0, 60.0)})
    outcome = replay(lost, images(), Policy(report_every_s=1.0))
    assert not any(job.fate is Fate.OPEN for job in outcome.jobs)
    assert (cluster == HOME) == any(job.fate is Fate.LOST for job in outcome.jobs)
    # Embeddings are lost with their cluster.
    work = one((0.0, (Medium("a", 100),)), (90.0, (Medium("a", 100),)))
    again = replay(lost, work, HANDED_OFF).jobs[1]
    assert again.media_apart == (cluster == HOME)


def test_media_need_encode_times() -> None:
    with pytest.raises(ValueError, match="no encode times"):
        replay(ReplayModel(region=REGION), images(), HANDED_OFF)
