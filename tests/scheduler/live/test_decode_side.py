"""What decoding has left, from reports: slots, KV memory, room for landings. No clock."""

from __future__ import annotations

from typing import Any

import pytest
from live_region_cases import MODEL, Region, instance, report, snapshot, teach

from deploy.gateway.scheduling.scheduler import RegionScheduler
from scheduler.live.decode_side import UNTOLD_SLOTS
from scheduler.live.events import AdmitAsked
from scheduler.live.ledger import PrefillLeg
from scheduler.routing.decision import Reason, RequestShape
from scheduler.routing.profiles import KvProfile
from scheduler.routing.views import DecodeView

GB = 10**9
FULL: dict[str, Any] = {
    "decode_slots": 256,
    "running": 220,
    "num_running": 20,
    "num_waiting": 200,
    "kv_usage": 0.999,
}
"""An engine that holds 20 requests in all of its memory while 200 wait for some of it."""


def region_of(*decoding: dict[str, Any]) -> Region:
    """Decode instances with these reports, and a prefill instance that never counts."""
    region = Region()
    instances = [instance(f"d{n}", "decode", **fields) for n, fields in enumerate(decoding)]
    region.home = report("home", *instances, instance("p9", "prefill", **FULL))
    return region


def taught(region: Region) -> RegionScheduler:
    scheduler = region.scheduler()
    teach(scheduler, "far", 1e-4)
    scheduler.knowledge(MODEL).decoded(300, 30.0, region.now_s)
    return scheduler


def decode_of(*decoding: dict[str, Any]) -> DecodeView:
    return snapshot(taught(region_of(*decoding))).decode


def admitted(scheduler: RegionScheduler, *, kv_bytes: float = 0.0) -> str:
    """ "admitted", or the code of the refusal, of a prompt of 3,000 tokens that comes now."""
    predicted = scheduler.route(MODEL, RequestShape(num_prompt_tokens=3000)).predicted
    assert predicted is not None
    scheduler.knowledge(MODEL)._kv.profile = KvProfile(kv_bytes, 0.0)
    verdict = scheduler.ask(AdmitAsked(1, "", MODEL, 3000, predicted)).verdict
    return "admitted" if verdict.admitted else verdict.reason.value


def leg(number: int, **fields: Any) -> PrefillLeg:
    values: dict[str, Any] = {"begun_s": 90.0, "lands_at_s": 95.0, "model": MODEL, "pd": "home"}
    return PrefillLeg(
        place="far",
        num_tokens=1000,
        uncached_tokens=1000,
        kv_bytes=10.0**number,
        **(values | fields),
    )


def test_of_an_idle_pool_that_nothing_is_known_of_only_the_slots_count() -> None:
    scheduler = region_of({"decode_slots": 4}).scheduler()
    known = scheduler.knowledge(MODEL)
    assert (known.decode_s, known.step_s) == (None, None)
    assert snapshot(scheduler, MODEL).decode == DecodeView(slots_total=4)


def test_a_landing_that_is_late_may_come_at_any_moment_and_takes_no_slot_yet() -> None:
    scheduler = region_of({"decode_slots": 4, "running": 1}).scheduler()
    for number in range(2):  # the report is older than the second
        scheduler.live.ledger.leg_begun(str(number), leg(number))
    decode = snapshot(scheduler, MODEL).decode
    assert (decode.slots_used, decode.landing_s) == (0, (0.0, 0.0))
    assert (decode.landing_kv_bytes, decode.kv_bytes) == (11, 0)


def test_an_engine_without_memory_has_the_slots_that_it_uses() -> None:
    decode = decode_of(FULL)
    assert (decode.slots_total, decode.slots_used, decode.num_waiting) == (20, 20, 200)


def test_who_comes_to_an_engine_without_memory_is_refused() -> None:
    scheduler = taught(region_of(FULL))
    predicted = scheduler.route(MODEL, RequestShape(num_prompt_tokens=3000)).predicted
    assert predicted is not None
    # 201 of 20 slots must fall free, one each 1.5 s.
    assert predicted.slot_s == pytest.approx(201 * 1.5, rel=0.01)
    assert admitted(scheduler) == "decode_load"


def test_an_engine_with_memory_elsewhere_takes_what_the_full_one_does_not() -> None:
    free: dict[str, Any] = {"decode_slots": 256, "running": 10, "num_running": 10, "kv_usage": 0.1}
    scheduler = taught(region_of(FULL, free))
    decode = snapshot(scheduler, MODEL).decode
    assert (decode.slots_total, decode.slots_used, decode.num_waiting) == (276, 230, 0)
    assert admitted(scheduler) == "admitted"


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({"kv_usage": 0.9}, 20),
        ({"kv_usage": 0.89}, 256),  # they wait for their turn to prefill
        ({"num_waiting": 0}, 256),
        ({"num_waiting": 1}, 20),
        ({"kv_usage": None}, 256),
        ({"num_running": 0}, 1),
        ({"num_running": 1}, 1),
        ({"decode_slots": 16}, 16),
        ({"decode_slots": 0}, 20),
        ({"decode_slots": 0, "num_waiting": 0}, UNTOLD_SLOTS),
    ],
)
def test_only_waiting_at_a_full_memory_takes_slots_away(fields: Any, slots: int) -> None:
    assert decode_of(FULL | fields).slots_total == slots


def test_kv_memory_is_that_of_all_instances_or_not_known() -> None:
    half: dict[str, Any] = {"kv_usage": 0.5, "kv_total_bytes": 8 * GB}
    full: dict[str, Any] = {"kv_usage": 1.0, "kv_total_bytes": 2 * GB}
    decode = decode_of(half, full)
    assert (decode.kv_bytes, decode.kv_total_bytes) == (6 * GB, 10 * GB)
    for missing in ("kv_usage", "kv_total_bytes"):
        decode = decode_of(half, full | {missing: None})
        assert (decode.kv_bytes, decode.kv_total_bytes) == (0, None)
    assert decode_of().kv_total_bytes is None


def test_memory_refuses_what_would_not_fit_and_nothing_smaller() -> None:
    decoding: dict[str, Any] = {
        "decode_slots": 256,
        "running": 20,
        "num_running": 20,
        "kv_usage": 0.9,
        "kv_total_bytes": 10 * GB,
    }
    scheduler = taught(region_of(decoding))
    # 0.97 of it may be filled.
    assert admitted(scheduler, kv_bytes=0.69 * GB) == "admitted"
    assert admitted(scheduler, kv_bytes=0.71 * GB) == "decode_memory"


def test_kvcache_that_landed_since_the_engines_were_looked_at_is_in_memory() -> None:
    looked: dict[str, Any] = {"kv_usage": 0.5, "kv_total_bytes": 8 * GB}
    region = region_of(looked | {"looked_s": 0.5}, looked | {"looked_s": 2.0})
    scheduler = taught(region)
    for number, (ended_s, model) in enumerate(
        [(97.9, MODEL), (98.1, MODEL), (99.9, "other"), (100.2, MODEL)]
    ):
        scheduler.live.ledger.leg_begun(str(number), leg(number, model=model))
        scheduler.live.ledger.leg_over(str(number), ended_s)
    region.now_s += 0.3
    assert snapshot(scheduler, MODEL).decode.kv_bytes == 8 * GB + 1010


def test_a_landing_must_fit_the_node_with_most_room() -> None:
    room = [{"landing_room_bytes": 1000}, {"landing_room_bytes": 3000 * 512}]
    scheduler = taught(region_of(*room))
    assert snapshot(scheduler, MODEL).landing_room_bytes == 3000 * 512
    assert scheduler.route(MODEL, RequestShape(num_prompt_tokens=3000)).target == "far"
    decision = scheduler.route(MODEL, RequestShape(num_prompt_tokens=3001))
    assert (decision.route, decision.reason) == ("local", Reason.NO_LANDING_ROOM)


@pytest.mark.parametrize("room", [(), ({},), ({"landing_room_bytes": 5}, {})])
def test_room_that_a_node_does_not_tell_is_not_known(room: Any) -> None:
    scheduler = taught(region_of(*room))
    assert snapshot(scheduler, MODEL).landing_room_bytes is None
    assert scheduler.route(MODEL, RequestShape(num_prompt_tokens=3000)).target == "far"


def test_a_front_that_tells_only_how_much_landings_may_take_has_it_all() -> None:
    scheduler = taught(region_of({"landing_cap_bytes": 3000 * 512}))
    assert snapshot(scheduler, MODEL).landing_room_bytes == 3000 * 512


def test_room_of_landings_answered_since_their_node_was_looked_at_is_back() -> None:
    told: dict[str, Any] = {"landing_room_bytes": 5000, "landing_cap_bytes": 7500}
    region = region_of(told | {"looked_s": 1.0})
    ledger = (scheduler := taught(region)).live.ledger
    for number, answered_s in enumerate((98.9, 99.5, 100.1)):
        ledger.leg_begun(str(number), leg(3, begun_s=98.0, instance="home/d0"))
        ledger.leg_over(str(number), 98.5)
        ledger.answer_over(str(number), answered_s)
    assert snapshot(scheduler, MODEL).landing_room_bytes == 7000
    # No more is free than there is: the node may have told of it already.
    ledger.leg_begun("3", leg(3, begun_s=98.0, instance="home/d0"))
    ledger.answer_over("3", 100.2)
    assert snapshot(scheduler, MODEL).landing_room_bytes == 7500


def test_landings_reserved_since_the_report_take_room_on_their_node() -> None:
    shared: dict[str, Any] = {"landing_room_bytes": 5000, "node": "n1"}
    other: dict[str, Any] = {"landing_room_bytes": 1000, "node": "n2"}
    region = region_of(shared, shared | {"model": "big"}, other)
    ledger = (scheduler := taught(region)).live.ledger
    ledger.leg_begun("before", leg(3, begun_s=99.9, instance="home/d0"))
    assert snapshot(scheduler, MODEL).landing_room_bytes == 5000
    # The instance of another model has its landings in the same memory.
    ledger.leg_begun("since", leg(3, begun_s=100.0, instance="home/d1", model="big"))
    assert snapshot(scheduler, MODEL).landing_room_bytes == 4000
    ledger.leg_over("since", 100.1)
    assert snapshot(scheduler, MODEL).landing_room_bytes == 4000
    for number in range(5):
        ledger.leg_begun(str(number), leg(3, begun_s=100.2, instance="home/d0"))
    # Now the other node has most, until it is taken, too.
    assert snapshot(scheduler, MODEL).landing_room_bytes == 1000
    ledger.leg_begun("last", leg(4, begun_s=100.2, instance="home/d2"))
    assert snapshot(scheduler, MODEL).landing_room_bytes == 0
    region.at_s = 100.3
    assert snapshot(scheduler, MODEL).landing_room_bytes == 5000


def test_an_instance_that_encodes_is_no_place_for_prompts() -> None:
    region = Region()
    eye = instance("e0", "encode", running=7, decode_slots=256)
    region.home = report("home", instance("d0", "decode", running=3, decode_slots=4), eye)
    region.far = report("far", instance("p0"), instance("e1", "encode"))
    seen = snapshot(taught(region))
    assert (seen.decode.slots_total, seen.decode.slots_used) == (4, 3)
    assert len(seen.prefill_clusters[0].free_s) == 1
    region.home, region.far = report("home", eye), report("far", instance("e1", "encode"))
    seen = snapshot(taught(region))
    assert seen.decode.slots_total == 0
    assert not seen.prefill_clusters[0].is_healthy
