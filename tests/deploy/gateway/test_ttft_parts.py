"""How the parts of a TTFT are made of what each process measured."""

import pytest
from msgspec import structs

from deploy.gateway.serving.ttft_parts import LegTimes, TtftParts, spread
from kvmanager.load_times import LoadTimes

LEG = LegTimes(queue_s=0.1, open_s=0.05, prefill_s=1.0, engine_queue_s=0.25, transfer_tail_s=0.125)
TIMES = LoadTimes(wait_s=0.01, load_s=0.02, first_step_s=0.03)
BEFORE_S = 0.2
"""Reading, rendering and so on."""


def parts_of(
    ttft_s: float,
    *,
    leg: LegTimes | None = LEG,
    landing_wait_s: float | None = LEG.total_s,
    times: LoadTimes | None = TIMES,
    is_stream: bool = True,
) -> dict[str, float]:
    parts = TtftParts(read_s=BEFORE_S)
    spread(
        parts,
        ttft_s,
        is_stream=is_stream,
        leg=leg,
        landing_wait_s=landing_wait_s,
        decode_posted_s=BEFORE_S + (landing_wait_s or 0.0),
        load_times=times,
    )
    known = parts.known()
    assert sum(known.values()) == pytest.approx(ttft_s)
    return known


def test_every_part_has_its_own_measure() -> None:
    found = parts_of(2.0)
    assert found == pytest.approx(
        {
            "read": BEFORE_S,
            "queue": 0.1,
            "open": 0.05,
            "engine_queue": 0.25,
            "prefill": 0.75,
            "transfer_tail": 0.125,
            "news": 0.0,
            "load_wait": 0.01,
            "load": 0.02,
            "first_step": 0.03,
            "relay": 2.0 - BEFORE_S - LEG.total_s - TIMES.total_s,
            "other": 0.0,
        }
    )


def test_the_wait_for_media_is_a_part_of_the_leg() -> None:
    leg = structs.replace(LEG, encode_s=0.3)
    assert leg.total_s == pytest.approx(LEG.total_s + 0.3)
    found = parts_of(2.0, leg=leg, landing_wait_s=leg.total_s)
    assert (found["encode"], found["queue"]) == (0.3, 0.1)
    assert list(found)[1:3] == ["encode", "queue"]
    assert "encode" not in parts_of(2.0)


def test_a_later_decode_request_waited_for_news() -> None:
    found = parts_of(2.0, landing_wait_s=LEG.total_s + 0.04)
    assert found["news"] == pytest.approx(0.04)
    assert found["transfer_tail"] == 0.125


def test_the_landing_is_whole_before_the_sender_knows() -> None:
    """Half a round trip in the tail, and as much until the front knows."""
    found = parts_of(2.0, landing_wait_s=LEG.total_s - 0.05)
    assert found["transfer_tail"] == pytest.approx(0.1)
    assert found["engine_queue"] == pytest.approx(0.225)
    assert (found["news"], found["prefill"]) == (0.0, 0.75)


def test_news_that_come_very_late_are_no_part() -> None:
    """More of them than tail and queue: then the prefill ended before the front says."""
    late_s = 0.5
    found = parts_of(2.0, landing_wait_s=LEG.total_s - late_s)
    assert (found["transfer_tail"], found["engine_queue"]) == (0.0, 0.0)
    assert found["prefill"] == pytest.approx(0.75 - (late_s - 0.125 - 0.25))
    assert found["load_wait"] == TIMES.wait_s


def test_a_decode_engine_that_is_asked_early_waits_beside_the_prefill() -> None:
    """Its wait for the landing is no part beside queue and prefill."""
    early = LoadTimes(wait_s=1.5, load_s=0.02, first_step_s=0.03)
    found = parts_of(2.0, landing_wait_s=0.0, times=early)
    assert (found["transfer_tail"], found["engine_queue"]) == (0.0, 0.0)
    cut_s = LEG.transfer_tail_s + 0.25
    assert found["load_wait"] == pytest.approx(1.5 - (LEG.total_s - cut_s))


def test_without_the_decode_engines_word_the_rest_is_one_part() -> None:
    found = parts_of(2.0, times=None)
    assert found["load_and_first_step"] == pytest.approx(2.0 - BEFORE_S - LEG.total_s)
    assert not found.keys() & {"load", "first_step", "relay", "other"}
    whole = parts_of(2.0, times=None, is_stream=False)
    assert whole["load_and_decode"] == found["load_and_first_step"]


def test_without_the_prefill_engines_word_its_queue_is_in_the_prefill() -> None:
    leg = LegTimes(queue_s=0.1, open_s=0.0, prefill_s=1.0, engine_queue_s=None, transfer_tail_s=0.1)
    found = parts_of(2.0, leg=leg, landing_wait_s=leg.total_s)
    assert (found["prefill"], "engine_queue" in found) == (1.0, False)


def test_what_an_answer_in_one_piece_took_behind_its_first_step() -> None:
    found = parts_of(2.0, is_stream=False)
    assert found["decode"] == pytest.approx(2.0 - BEFORE_S - LEG.total_s - TIMES.total_s)
    assert "relay" not in found


def test_time_that_nobody_measured_is_told_apart() -> None:
    parts = TtftParts(read_s=0.1)
    spread(
        parts,
        3.0,
        is_stream=True,
        leg=LEG,
        landing_wait_s=LEG.total_s,
        decode_posted_s=2.0,
        load_times=TIMES,
    )
    assert parts.other_s == pytest.approx(2.0 - 0.1 - LEG.total_s)


def test_news_that_come_later_replace_the_coarse_parts() -> None:
    parts = TtftParts()
    times: LoadTimes | None
    for times in (None, TIMES):
        spread(
            parts,
            2.0,
            is_stream=True,
            leg=LEG,
            landing_wait_s=LEG.total_s,
            decode_posted_s=LEG.total_s,
            load_times=times,
        )
    assert parts.load_and_first_step_s is None
    assert sum(parts.known().values()) == pytest.approx(2.0)
