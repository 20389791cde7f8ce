"""What each step of a request's life teaches."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
from live_region_cases import FAST_LINK, MODEL, Region, instance, report, teach
from msgspec.structs import replace
from steps import at_once

from deploy.gateway.intake.inbound import InboundRequest, parsing_request
from deploy.gateway.scheduling.feedback import Feedback, Usage, usage_of
from deploy.gateway.serving.records import RequestRecord
from kvmanager.landing import ReservedLanding
from local_pd.messages import DecodeSlot
from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from prfaas.jobs import PrefillResult
from scheduler.live.events import AdmitAsked
from scheduler.live.feedback import Calibrated
from scheduler.live.learning.prompt_length import PromptContent
from scheduler.routing.decision import ONE_ENGINE, RequestShape
from scheduler.routing.media import MediaShape
from scheduler.routing.prediction import Prediction
from scheduler.routing.service import ALONE


class Case:
    """Feedback of a region whose clock is `region.now_s`."""

    def __init__(self, prefill_clusters: tuple[str, ...] = ("far",)) -> None:
        self.region = Region()
        self.region.prefill_clusters = prefill_clusters
        self.scheduler = self.region.scheduler()
        self.feedback = Feedback(self.scheduler)
        self.known = self.scheduler.knowledge(MODEL)

    def begin(self, transfer_id: str = "t", **shape: Any) -> ReservedLanding:
        landing = ReservedLanding(
            transfer_id=transfer_id,
            token="",
            nbytes=512_000,
            num_tokens=1000,
            host="h",
            port=1,
            layout_fingerprint="",
            token_digest="",
        )
        slot = DecodeSlot(landing=landing, instance="d0", engine_url="", lease_s=30.0)
        self.feedback.leg_begun(
            MODEL,
            slot,
            RequestShape(num_prompt_tokens=1001, **shape),
            "far",
            Prediction(queue_s=1.0, prefill_s=2.0, slot_s=9.0),
            pd="home",
        )
        return landing

    def prefilled(
        self, num_tokens: int = 1000, shape: RequestShape | None = None, **fields: Any
    ) -> None:
        values: dict[str, Any] = {
            "queue_s": 0.0,
            "prefill_s": 2.0,
            "transfer_tail_s": 0.5,
            "nbytes": 1,
            "sent_share_at_prefill_end": 1.0,
            "service_s": 2.0,
        }
        result = PrefillResult(instance="p0", **(values | fields))
        self.feedback.prefilled(MODEL, "far", num_tokens, result, shape=shape)

    def fill(self, **fields: Any) -> None:
        """Every slot of `d0` is taken, and 20 more requests wait inside of it."""
        values: dict[str, Any] = {"decode_slots": 32, "running": 52}
        self.region.home = report("home", instance("d0", "both", **(values | fields)))

    def computed_at_once(self, num: int) -> None:
        """Prompts of 1,000 to 8,000 tokens, one after the other, 0.1 ms for each token."""
        for number in range(num):
            self.region.now_s += 5.0
            self.answered(1000 * (number % 8 + 1), waits_s=0.0)

    def answered(self, num_tokens: int, *, waits_s: float) -> None:
        """One engine's first token, as the gateway lives through it."""
        shape = RequestShape(num_prompt_tokens=num_tokens)
        begun_s = self.region.now_s
        was_full = self.feedback.given("home", "d0")
        self.region.now_s += waits_s + num_tokens * 1e-4
        self.region.at_s = self.region.now_s
        seconds = self.feedback.direct_answered("home", "d0", begun_s)
        if not was_full:
            self.feedback.direct_took(MODEL, shape, seconds)


def record(**fields: Any) -> RequestRecord:
    values: dict[str, Any] = {"outcome": "ok", "output_tokens": 11, "total_s": 3.0}
    return RequestRecord(request_id="r", started_s=0.0, endpoint="chat", **(values | fields))


def test_a_leg_is_under_way_until_it_is_over() -> None:
    case = Case()
    landing = case.begin(prefill_cached_tokens={"far": 600}, local_cached_tokens=900)
    (leg,) = case.scheduler.live.ledger.landing(MODEL, "home")
    assert (leg.place, leg.num_tokens, leg.uncached_tokens) == ("far", 1000, 400)
    assert (leg.begun_s, leg.lands_at_s, leg.kv_bytes) == (100.0, 103.0, 512_000)
    assert leg.instance == "home/d0"
    assert case.known.kv is not None
    assert case.known.kv.token_bytes == pytest.approx(512)
    case.feedback.leg_over(landing)
    assert case.scheduler.live.ledger.landing(MODEL, "home") == []
    assert case.scheduler.live.ledger.over({"t"}) == {"t"}


def test_a_prefill_teaches_what_it_took_by_itself() -> None:
    case = Case()
    for _ in range(4):
        case.prefilled(prefill_s=9.0, service_s=1.0)
    assert case.known.prefill("far").prefill_s(1000) == pytest.approx(1.0, rel=0.01)
    # The instance was free again when the prefill ended, before the tail was sent.
    assert case.scheduler.live.ledger.alone_s("far", "far/p0", 0.0, 100.0) == pytest.approx(0.5)


def test_a_wrong_first_profile_is_not_learnt_as_how_the_place_serves() -> None:
    """Until long prompts were seen, their prefills are predicted far too slow."""
    case = Case()
    short = [(num_tokens, 0.5 + num_tokens * 1e-3) for num_tokens in (64, 128, 256)]
    case.scheduler.tell(Calibrated(MODEL, "far", "weights", tuple(short)))
    for number in range(24):
        num_tokens, case.region.now_s = 1000 * (number % 8 + 1), case.region.now_s + 5.0
        predicted = Prediction(prefill_s=case.known.prefill("far").prefill_s(num_tokens))
        took_s = 0.5 + num_tokens * 3e-4
        case.prefilled(num_tokens, prefill_s=took_s, service_s=took_s)
        prompt = (num_tokens, 0)
        case.feedback.first_token(MODEL, "far", predicted, took_s + 0.1, prompt=prompt)
    service = case.known.service("far", case.region.now_s)
    assert service.prefill == pytest.approx(1.0, abs=0.05)
    assert service.overhead_s == pytest.approx(0.1, abs=0.05)


def test_a_prefill_that_ended_together_with_another_teaches_no_time() -> None:
    case = Case()
    case.prefilled(prefill_s=2.0, service_s=0.0)
    assert case.known.profile("far").num_seen == 0
    assert case.scheduler.live.ledger.alone_s("far", "far/p0", 0.0, 100.0) == pytest.approx(0.5)


def test_one_engine_teaches_what_was_counted() -> None:
    case = Case()
    case.scheduler.live.ledger.prefill_ended(ONE_ENGINE, "d0", 98.0)
    exact = RequestShape(num_prompt_tokens=1000, local_cached_tokens=500)
    seconds = case.feedback.direct_answered("home", "d0", begun_s=90.0)
    case.feedback.direct_took(MODEL, exact, seconds)
    assert case.known.profile(ONE_ENGINE).num_seen == 1
    assert case.known.prefill(ONE_ENGINE).prefill_s(1000, 500) > 0
    bound = RequestShape(num_prompt_tokens=1000, is_exact=False)
    seconds = case.feedback.direct_answered("home", "d0", begun_s=99.0)
    case.feedback.direct_took(MODEL, bound, seconds)
    assert case.known.profile(ONE_ENGINE).num_seen == 1
    assert case.scheduler.live.ledger.alone_s(ONE_ENGINE, "home/d0", 0.0, 101.0) == 1.0


def test_the_wait_for_a_slot_is_no_prefill_time() -> None:
    case = Case()
    case.computed_at_once(40)
    case.fill()
    for number in range(60):
        # A slot falls free each second; twenty wait for one.
        case.answered(1000 * (number % 8 + 1), waits_s=20.0)
    assert case.known.prefill(ONE_ENGINE).prefill_s(1000) == pytest.approx(0.1, rel=0.05)
    assert case.known.prefill(ONE_ENGINE).prefill_s(8000) == pytest.approx(0.8, rel=0.05)


def test_an_engine_with_room_again_goes_on_teaching() -> None:
    case = Case()
    case.fill()
    case.answered(1000, waits_s=20.0)
    assert case.known.profile(ONE_ENGINE).num_seen == 0
    case.fill(running=31)
    case.answered(1000, waits_s=0.0)
    assert case.known.profile(ONE_ENGINE).num_seen == 1


@pytest.mark.parametrize(
    ("fields", "is_full"),
    [
        ({"running": 31}, False),
        ({"running": 32}, True),
        # Slots are left, and memory is not: those that wait inside wait for it.
        ({"running": 9, "num_running": 5, "num_waiting": 4, "kv_usage": 0.98}, True),
        ({"running": 9, "num_running": 5, "num_waiting": 4, "kv_usage": 0.2}, False),
        ({"decode_slots": 0, "running": 900}, False),
        ({"decode_slots": 0, "running": 900, "num_waiting": 1}, True),
    ],
)
def test_an_instance_is_full_when_one_more_would_wait_inside(
    fields: dict[str, Any], is_full: bool
) -> None:
    case = Case()
    case.fill(**fields)
    assert case.feedback.given("home", "d0") is is_full
    assert case.feedback.given("home", "nobody") is False


def test_what_was_given_since_the_report_fills_an_instance_too() -> None:
    case = Case()
    case.fill(running=30)
    assert [case.feedback.given("home", "d0") for _ in range(3)] == [False, False, True]
    case.region.home = None
    assert case.feedback.given("home", "d0") is False


def test_what_a_full_instance_cost_does_not_belong_to_its_place() -> None:
    case = Case()
    for _ in range(4):
        case.prefilled()
    waited = Prediction(prefill_s=1.0)
    for _ in range(3):
        case.feedback.first_token(MODEL, "far", waited, 31.0, was_full=True)
    assert case.known.service("far", 100.0) is ALONE
    for _ in range(3):
        case.feedback.first_token(MODEL, "far", Prediction(prefill_s=1.0), 1.25)
    assert case.known.service("far", 100.0) is not ALONE


def test_without_prefill_clusters_estimated_lengths_teach_too() -> None:
    case = Case()
    estimated = RequestShape(num_prompt_tokens=1000, is_exact=False, bound_tokens=4000)
    case.feedback.counted(MODEL, PromptContent(4000), 1000)
    # Beside prefill clusters the longer prompts are counted, and say more.
    case.feedback.direct_took(MODEL, estimated, 0.1)
    assert not case.known.profile(ONE_ENGINE).num_seen
    alone = Case(prefill_clusters=())
    alone.feedback.direct_took(MODEL, estimated, 0.1)
    assert not alone.known.profile(
        ONE_ENGINE
    ).num_seen  # not even the bytes of a token are known yet
    alone.feedback.counted(MODEL, PromptContent(4000), 1000)
    alone.feedback.direct_took(MODEL, replace(estimated, has_bound_media=True), 9.0)
    assert not alone.known.profile(ONE_ENGINE).num_seen
    alone.feedback.direct_took(MODEL, estimated, 0.1)
    assert alone.known.prefill(ONE_ENGINE).prefill_s(1000) == pytest.approx(0.1)


def test_nobody_is_refused_for_a_guess() -> None:
    case = Case()
    case.region.home = report("home", instance("d0", "both", decode_slots=4, running=1))

    def load(predicted: Prediction | None) -> float | None:
        """The load when the request would decode: none is known of a prefill without end."""
        return case.scheduler.ask(AdmitAsked(1, "", MODEL, 1000, predicted)).decode_load

    never = Prediction(queue_s=math.inf)
    assert load(never) == 0.5
    for _ in range(3):
        case.prefilled()
    assert load(never) is None
    assert load(None) == 0.5


def test_a_prompt_is_on_its_engine_until_that_answers() -> None:
    case = Case()
    shape = RequestShape(num_prompt_tokens=100, is_exact=False, local_cached_tokens=40)
    key = case.feedback.direct_begun("home", "d0", shape)
    (given,) = case.scheduler.live.ledger.direct()["home/d0"]
    assert (given.num_tokens, given.uncached_tokens, given.begun_s) == (100, 60, 100.0)
    case.feedback.direct_over(key)
    case.feedback.direct_over(key)
    assert not case.scheduler.live.ledger.direct()


def test_a_length_is_what_counted_prompts_teach_until_it_is_counted_itself() -> None:
    case = Case()
    not_counted = RequestShape(num_prompt_tokens=7, is_exact=False, bound_tokens=4000)

    def likely(text_bytes: int) -> int:
        content = PromptContent(text_bytes)
        return case.feedback.likely(MODEL, not_counted, content).num_prompt_tokens

    assert (likely(400), likely(400_000)) == (100, 4000)
    case.feedback.counted(MODEL, PromptContent(400), 200)
    assert likely(400) == 200
    counted = RequestShape(num_prompt_tokens=1000)
    assert case.feedback.likely(MODEL, counted, PromptContent(400)) is counted


def inbound_chat(*parts: dict[str, Any]) -> InboundRequest:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}]})
    return at_once(parsing_request("chat", body.encode(), template_tokens=256))


def test_bytes_of_images_are_no_tokens_of_the_regions_traffic() -> None:
    case = Case()
    picture = base64.b64encode(bytes(2_000_000)).decode()
    url = f"data:image/png;base64,{picture}"
    inbound = inbound_chat(
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    )
    shape = case.feedback.likely(MODEL, inbound.shape, inbound.content)
    assert inbound.content.has_media
    assert 1000 < shape.num_prompt_tokens < 1100
    assert shape.media is not None
    assert shape.media.spans == ((shape.num_prompt_tokens - 1024, 1024),)
    for _ in range(300):
        case.feedback.arrived(MODEL, RequestShape(num_prompt_tokens=1000))
    for _ in range(16):
        case.feedback.arrived(MODEL, shape)
    case.known.decoded(10, 1.0, 100.0)
    found = case.known.traffic.measured(100.0)
    assert found is not None
    assert found.uncached.mean_tokens == pytest.approx(1000, rel=0.01)


def test_a_prefill_with_media_teaches_how_long_they_are_encoded_and_no_more() -> None:
    case = Case()
    for _ in range(8):
        case.prefilled()
    before = case.known.prefill("far")
    media = MediaShape(((100, 400), (600, 200)))
    shape = RequestShape(num_prompt_tokens=1001, media=media)
    for _ in range(4):
        case.prefilled(shape=shape, service_s=2.6)
        # The first one is in the part that the engine found cached.
        computed_s = before.prefill_s(1000, 500)
        case.prefilled(shape=shape, service_s=computed_s + 0.2, cached_tokens=500)
    assert case.known.prefill("far") is before
    line = case.known.media.line("far")
    assert line is not None
    assert line.seconds(600) == pytest.approx(0.6, rel=0.01)
    assert line.seconds(200) == pytest.approx(0.2, rel=0.01)


def test_media_are_demand_until_they_are_cached() -> None:
    case = Case()
    shape = RequestShape(num_prompt_tokens=1000, media=MediaShape(((100, 400),)))
    case.feedback.arrived(MODEL, shape, home="home")
    case.feedback.arrived(MODEL, replace(shape, local_cached_tokens=500), home="home")
    case.feedback.arrived(MODEL, RequestShape(num_prompt_tokens=1000), home="home")
    case.known.decoded(10, 1.0, 100.0)
    found = case.known.traffic.measured(100.0)
    assert found is not None
    assert found.media is not None
    assert found.media.mean_tokens == pytest.approx(400 / 3)


def test_a_prompt_of_an_image_is_no_minute_of_work_ahead_of_others() -> None:
    case = Case()
    teach(case.scheduler, ONE_ENGINE, 1e-4)
    idle = case.scheduler.route(MODEL, RequestShape(num_prompt_tokens=900)).local
    inbound = inbound_chat({"type": "image_url", "image_url": {"url": "data:" + "A" * 2_000_000}})
    shape = case.feedback.likely(MODEL, inbound.shape, inbound.content)
    case.feedback.direct_begun("home", "d0", shape)
    behind = case.scheduler.route(MODEL, RequestShape(num_prompt_tokens=900)).local
    assert idle is not None
    assert behind is not None
    assert behind.ttft_s - idle.ttft_s == pytest.approx(0.1, abs=0.01)


def test_arrivals_and_answers_are_measured_traffic() -> None:
    case = Case()
    shape = RequestShape(num_prompt_tokens=1000, local_cached_tokens=750)
    case.feedback.arrived(MODEL, shape)
    case.feedback.ended(MODEL, record(is_stream=True, ttft_s=1.0))
    found = case.known.traffic.measured(101.0)
    assert found is not None
    assert (found.input_tokens, found.hit_ratio) == (1000, 0.75)
    assert found.output.mean_tokens == pytest.approx(11)
    assert (case.known.decode_s, case.known.step_s) == (2.0, pytest.approx(0.2))


@pytest.mark.parametrize(
    "fields",
    [{"outcome": "client_gone"}, {"outcome": "refused"}, {"total_s": None}, {"output_tokens": 0}],
)
def test_what_did_not_end_well_teaches_nothing(fields: dict[str, Any]) -> None:
    case = Case()
    case.feedback.ended(MODEL, record(is_stream=True, ttft_s=1.0, **fields))
    assert case.known.decode_s is None


def test_an_answer_in_one_piece_begins_when_it_was_predicted_to() -> None:
    case = Case()
    case.feedback.ended(MODEL, record(ttft_s=3.0, predicted_ttft_s=1.0))
    assert case.known.decode_s == 2.0
    other = Case()
    other.feedback.ended(MODEL, record(ttft_s=3.0))
    assert other.known.decode_s == 3.0


def test_first_tokens_teach_service_and_error() -> None:
    case = Case()
    for _ in range(4):
        case.prefilled()
    for _ in range(3):
        case.feedback.first_token(MODEL, "far", Prediction(prefill_s=1.0), 1.25)
    assert case.known.service("far", 100.0) is not ALONE
    assert case.known.error("far") == pytest.approx(0.2)


@pytest.mark.parametrize("state", [LinkCondition.RISING, LinkCondition.CONGESTED])
def test_what_a_link_costs_in_bad_times_teaches_no_service(state: LinkCondition) -> None:
    case = Case()
    for _ in range(4):
        case.prefilled()
    case.region.links["far", "home"] = LinkView(state=state, available_bytes_per_s=1e6)
    for _ in range(3):
        case.feedback.first_token(MODEL, "far", Prediction(prefill_s=1.0), 5.0)
    assert case.known.error("far") == pytest.approx(0.8)
    assert case.known.service("far", 100.0) is ALONE
    case.region.links["far", "home"] = FAST_LINK
    for _ in range(3):
        case.feedback.first_token(MODEL, "far", Prediction(prefill_s=1.0), 1.25)
    assert case.known.service("far", 100.0) is not ALONE


def test_first_tokens_out_of_one_forward_pass_teach_no_time() -> None:
    case = Case()
    shape = RequestShape(num_prompt_tokens=1000)
    assert case.feedback.direct_answered("home", "d0", begun_s=99.0) == 1.0
    case.region.now_s += 0.001
    assert case.feedback.direct_answered("home", "d0", begun_s=99.0) is None
    case.feedback.direct_took(MODEL, shape, None)
    assert case.known.profile(ONE_ENGINE).num_seen == 0
    # One that had the engine for itself all the time may well be that short.
    case.region.now_s += 10.0
    seconds = case.feedback.direct_answered("home", "d0", begun_s=case.region.now_s - 0.001)
    assert seconds == pytest.approx(0.001)


def test_a_first_token_says_that_earlier_prompts_are_computed() -> None:
    case = Case()
    shape = RequestShape(num_prompt_tokens=1000)
    for name in ("d0", "d1", "d0", "d0"):
        case.feedback.direct_begun("home", name, shape)
        case.region.now_s += 1.0
    case.feedback.direct_answered("home", "d0", begun_s=102.0)
    left = case.scheduler.live.ledger.direct()
    assert [prompt.begun_s for prompt in left["home/d0"]] == [102.0, 103.0]
    assert len(left["home/d1"]) == 1


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b'{"usage": {"completion_tokens": 7, "prompt_tokens": 3}}', Usage(3, 7)),
        (b'{"usage": {"completion_tokens": -7, "prompt_tokens": -1}}', Usage()),
        (b'{"usage": {"prompt_tokens": 3}}', Usage(3, 0)),
        (b'{"usage": null}', Usage()),
        (b"{}", Usage()),
        (b'{"usage": 7}', Usage()),
        (b"no json", Usage()),
        (b'{"a": "\xff"}', Usage()),
        (b"", Usage()),
    ],
)
def test_what_an_answer_says_of_its_lengths(body: bytes, usage: Usage) -> None:
    assert usage_of(body) == usage
