"""Recordings: what was written down is decided the same again, or it is said where it is not."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import report_cases
from report_cases import cluster

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.core import Event, LiveScheduler
from scheduler.live.events import (
    AdmissionOver,
    AdmitAsked,
    LinkHeard,
    ReportHeard,
    RequestTaken,
    RouteAsked,
    RouteEarly,
    ThresholdPlanned,
    ThresholdsAsked,
)
from scheduler.live.feedback import (
    AnswerDecoded,
    CacheMoveBegun,
    CacheMoveOver,
    DirectAnswered,
    DirectBegun,
    DirectOver,
    DirectTook,
    FirstToken,
    InstanceGiven,
    InstanceOver,
    LegAnswered,
    LegBegun,
    LegOver,
    Prefilled,
    PromptCounted,
    RequestArrived,
    TtftMeasured,
)
from scheduler.live.learning.prompt_length import Media, PromptContent
from scheduler.live.long_term.conversion import Conversion, ConversionPhase, ConversionWish
from scheduler.live.long_term.events import (
    ConversionAnswered,
    ConversionEnded,
    PeriodLook,
    PeriodOver,
    PlansAsked,
)
from scheduler.live.settings import LiveSettings, PdSettings, RoutingPolicy
from scheduler.live.tenants import TenantLimit
from scheduler.replay.recording import (
    Gap,
    Played,
    RecordingError,
    entry_frame,
    frame_of,
    frames_in,
    header_of,
    play,
    scheduler_of,
)
from scheduler.routing.decision import RequestShape
from scheduler.routing.prediction import Prediction

MODEL = "tiny"
SETTINGS = LiveSettings(
    pd_clusters=(PdSettings("home", ("far",)),),
    threshold_tokens=1000,
    hand_off_tokens=256,
    default_tenant=TenantLimit(max_requests=2),
    models=(MODEL,),
)


instance = partial(report_cases.instance, model=MODEL, max_concurrent=2)
HOME = cluster("home", instance("d0", "both", decode_slots=4, kv_usage=0.1, kv_total_bytes=10**9))
FAR = cluster("far", instance("p0", "prefill"))
LINK = LinkView(available_bytes_per_s=1e9, rtt_s=0.02)


def asked(num_tokens: int, **fields: Any) -> RouteAsked:
    return RouteAsked(MODEL, RequestShape(num_prompt_tokens=num_tokens, **fields))


def a_day() -> list[Event[Any]]:
    """Every kind of event, in an order that can be."""
    content = PromptContent(4000, 3, {Media.IMAGE: 2})
    wish = ConversionWish("home", "decode", "prefill", MODEL)
    events: list[Event[Any]] = [
        ReportHeard("home", HOME, 99.0),
        ReportHeard("far", FAR, 99.0),
        LinkHeard("far", "home", LINK),
        PromptCounted(MODEL, content, 1000),
        RouteEarly(MODEL, RequestShape(num_prompt_tokens=9, is_exact=False, bound_tokens=100)),
        RouteEarly(MODEL, RequestShape(num_prompt_tokens=900, is_exact=False, bound_tokens=4000)),
    ]
    for number in range(1, 9):
        transfer, tokens = f"t{number}", number * 500
        events += [
            asked(tokens, prefill_cached_tokens={"far": 100}),
            AdmitAsked(number, "acme", MODEL, tokens, Prediction(queue_s=1.0)),
            RequestTaken(number, MODEL, "far", tokens, tokens, 2.0, 0, "home"),
            RequestArrived(MODEL, tokens, 0),
            asked(tokens),
            InstanceGiven("d0", number),
            LegBegun(transfer, MODEL, "far", tokens, tokens, 0, tokens * 512, 2.0),
            Prefilled(MODEL, "far", "p0", tokens, 0, 0.1, tokens * 1e-3),
            LegOver(transfer),
            FirstToken(MODEL, "far", Prediction(prefill_s=1.0), 1.25),
            TtftMeasured(MODEL, "far", tokens, 1.25, {"prefill": 1.0, "load": 0.25}, "home"),
            AnswerDecoded(MODEL, 30, 2.0),
            LegAnswered(transfer),
            InstanceOver("d0"),
            AdmissionOver(number),
            DirectBegun("d0", tokens, tokens),
            DirectOver(number),
            DirectAnswered("d0", 100.0),
            DirectTook(MODEL, RequestShape(num_prompt_tokens=tokens), tokens * 2e-3),
            asked(tokens),
        ]
    return [
        *events,
        CacheMoveBegun("home", "far"),
        CacheMoveOver(1, False, 10**6, 0.1, 0.01),
        asked(4000, sendable_tokens={"home": 3000}),
        LinkHeard("far", "home", msgspec.structs.replace(LINK, state=LinkCondition.CONGESTED)),
        ThresholdsAsked(),
        asked(4000),
        ThresholdPlanned("far", 3000.0, 1e6),
        ReportHeard("far", None, 99.0),
        ThresholdsAsked(),
        asked(9000),
        PeriodLook(),
        PeriodOver(Conversion("d0", wish, 1, ConversionPhase.DRAINING, 99.0), True),
        PlansAsked(),
        ConversionAnswered(wish, "d0"),
        ConversionEnded(wish, "d0", True),
    ]


def recorded(live: LiveScheduler, events: list[Event[Any]], began_s: float = 100.0) -> bytes:
    """What a recorder would write of these events, one every 50 ms."""
    written = frame_of(header_of(live, "1.0", 0.0).packed())
    for number, event in enumerate(events):
        now_s = began_s + 0.05 * number
        written += entry_frame(event, live.take(event, now_s), now_s)
    return written


def played(written: bytes, other: LiveSettings | None = None) -> Played:
    frames = frames_in(io.BytesIO(written))
    live = scheduler_of(next(frames))  # type: ignore[arg-type]
    if other is not None:
        live.reconfigure(other)
    found = Played()
    play(live, frames, found)
    return found


def test_every_kind_of_event_is_decided_the_same_again() -> None:
    events = a_day()
    found = played(recorded(LiveScheduler(SETTINGS), events))
    assert found.differences == []
    assert found.num_events == len(events)
    assert found.num_decisions == 42
    assert found.outcomes["PlansAsked"] == {("tiny (not_known)", "tiny (not_known)"): 1}


def test_a_file_that_begins_in_the_middle_holds_what_was_learnt() -> None:
    live = LiveScheduler(SETTINGS)
    recorded(live, a_day())
    later = recorded(live, a_day(), began_s=200.0)
    assert played(later).differences == []
    fresh = recorded(LiveScheduler(SETTINGS), a_day(), began_s=200.0)
    assert fresh[-1000:] != later[-1000:]


def test_a_difference_is_said_with_both_values() -> None:
    live = LiveScheduler(SETTINGS)
    events = a_day()
    written = recorded(live, events)
    frames = list(frames_in(io.BytesIO(written)))
    entry = frames[7]
    answer = msgspec.msgpack.decode(entry.answer)  # type: ignore[union-attr]
    answer["reason"] = "above_threshold"
    answer["numbers"]["prompt_tokens"] = 501
    forged = msgspec.structs.replace(entry, answer=msgspec.Raw(msgspec.msgpack.encode(answer)))  # type: ignore[type-var]
    found = Played()
    replayed = scheduler_of(frames[0])  # type: ignore[arg-type]
    play(replayed, [*frames[1:7], forged, *frames[8:]], found)  # type: ignore[list-item]
    told = [(item.number, item.event, item.field, item.recorded) for item in found.differences]
    assert told == [
        (7, "RouteAsked", "numbers.prompt_tokens", 501),
        (7, "RouteAsked", "reason", "above_threshold"),
    ]
    assert [item.replayed for item in found.differences] == [500, "below_threshold"]


def test_other_settings_decide_otherwise() -> None:
    written = recorded(LiveScheduler(SETTINGS), a_day())
    routing = RoutingPolicy(policy="threshold")
    found = played(written, replace(SETTINGS, threshold_tokens=10**6, routing=routing))
    assert sum(num for (a, b), num in found.outcomes["RouteAsked"].items() if a != b) > 5
    refusing = replace(SETTINGS, default_tenant=TenantLimit(max_tokens=1, max_requests=1))
    assert played(written, refusing).num_events == len(a_day())


def test_other_settings_keep_what_plans_send_over_links() -> None:
    written = recorded(LiveScheduler(SETTINGS), [ThresholdPlanned("far", 3000.0, 1e6)])
    frames = frames_in(io.BytesIO(written))
    live = scheduler_of(next(frames))  # type: ignore[arg-type]
    play(live, frames, Played())
    live.reconfigure(replace(SETTINGS, refuses_load=True))
    assert list(live.thresholds.planned()) == [("far", "home", 3000.0, 1e6)]


def test_lost_events_are_counted_and_a_cut_end_is_left_out() -> None:
    written = recorded(LiveScheduler(SETTINGS), a_day()) + frame_of(Gap(7))
    assert played(written).num_lost == 7
    assert played(written[:-1]).num_lost == 0
    assert played(written[:-1]).num_events == len(a_day())


@pytest.mark.alone
def test_a_look_at_two_hours_of_traffic_and_a_new_file_hold_up_the_loop_for_little() -> None:
    live = LiveScheduler(SETTINGS)
    for number in range(20_000):
        now_s = number * 0.36
        live.take(RequestArrived(MODEL, 200 + number * 7919 % 90_000, 0), now_s)
        live.take(AnswerDecoded(MODEL, 1 + number * 104_729 % 3000, 2.0), now_s)
    traffic = live.traffic(MODEL, "home")
    looks = [
        lambda: traffic.measured(now_s),
        lambda: traffic.forget_before_change(now_s),
        lambda: traffic.state(now_s),
        lambda: header_of(live, "1.0", 0.0),
    ]
    assert [min(_cpu_s(look) for _ in range(5)) < 0.004 for look in looks] == [True] * 4
    assert len(header_of(live, "1.0", 0.0).state) < 1_000_000


def _cpu_s(work: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    work()
    return time.thread_time() - begun_s


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b"\xff\xff\xff\xff" + bytes(9), "this is no recording"),
        (b"\x03\x00\x00\x00abc", "a frame that cannot be read"),
    ],
)
def test_what_nobody_recorded_is_refused(written: bytes, told: str) -> None:
    with pytest.raises(RecordingError, match=told):
        list(frames_in(io.BytesIO(written)))


def test_a_recording_of_another_release_names_the_release_that_plays_it() -> None:
    header = ["Header", 2, "0.1.0", 0.0, {"pd": "home"}, b""]
    body = msgspec.msgpack.encode(header)
    with pytest.raises(RecordingError, match=r"format 2, written by prfaas 0\.1\.0: play it with"):
        list(frames_in(io.BytesIO(len(body).to_bytes(4, "little") + body)))
