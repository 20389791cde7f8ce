from dataclasses import replace
from typing import cast

import pytest

from scheduler.encoding.line import EncodeLine
from scheduler.encoding.queue import EncodeQueue
from scheduler.encoding.times import KEPT_S
from scheduler.encoding.values import (
    Effect,
    EncodeConfig,
    EncodeInstance,
    EncodeReason,
    EncodeRequest,
    EndRequest,
    Medium,
    MediumEnd,
    StartPass,
    StopMedium,
)

ENCODED, SHARED, FAILED = EncodeReason.ENCODED, EncodeReason.SHARED, EncodeReason.FAILED


def queue_of(*instances: EncodeInstance, config: EncodeConfig | None = None) -> EncodeQueue:
    queue = EncodeQueue(config)
    for one in instances:
        assert queue.instance_changed(one, 0.0) == []
    return queue


def asking(key: str, *names: str, tokens: int = 100, **more: object) -> EncodeRequest:
    return EncodeRequest(key, tuple(Medium(name, tokens) for name in names), **more)  # type: ignore[arg-type]


def learn(
    queue: EncodeQueue, instance: EncodeInstance, line: EncodeLine, now_s: float = 0.0
) -> None:
    for tokens in (100, 200, 400):
        seconds = line.seconds(tokens)
        queue.times.observe(instance.name, instance.kind, tokens, seconds, now_s)


def started(effects: list[Effect]) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (one.instance, tuple(medium.identifier for medium in one.media))
        for one in effects
        if isinstance(one, StartPass)
    ]


def end(*ends: tuple[str, EncodeReason, str], key: str, seconds: float) -> EndRequest:
    return EndRequest(key, tuple(MediumEnd(*one) for one in ends), seconds)


E0 = EncodeInstance("e0", node="n0")
E1 = EncodeInstance("e1", node="n1")
D0 = EncodeInstance("d0", node="n0", decodes=True)


def test_media_are_encoded_one_by_one_until_times_are_known() -> None:
    queue = queue_of(E0)
    assert started(queue.submit(asking("r", "a", "b"), 0.0)) == [("e0", ("a",))]
    assert started(queue.ended(1, "a", ENCODED, 1.0)) == [("e0", ("b",))]
    effects = queue.ended(2, "b", ENCODED, 2.5)
    assert effects == [end(("a", ENCODED, "n0"), ("b", ENCODED, "n0"), key="r", seconds=2.5)]
    queue.check_invariants()


def test_a_pass_has_media_of_several_requests_within_the_objective() -> None:
    queue = queue_of(E0)
    learn(queue, E0, EncodeLine(0.2, 0.002))
    # 1 s of 4 s is the share of a pass: 400 tokens.
    assert started(queue.submit(asking("first", "0"), 0.0)) == [("e0", ("0",))]
    for number in range(1, 6):
        request = asking(f"r{number}", f"{number}", wait_s=9.0)
        assert queue.submit(request, 0.1) == []
    assert started(queue.ended(1, "0", ENCODED, 0.4)) == [("e0", ("1", "2", "3", "4"))]


def test_an_instance_that_decodes_keeps_within_the_tpot_objective() -> None:
    queue = queue_of(D0)
    learn(queue, D0, EncodeLine(0.04, 0.0008))
    media = asking("r", *"abcdef", wait_s=9.0)
    assert started(queue.submit(media, 0.0)) == [("d0", ("a", "b"))]


def test_a_medium_over_the_budget_is_encoded_alone() -> None:
    queue = queue_of(D0)
    learn(queue, D0, EncodeLine(0.5, 0.0008))
    assert started(queue.submit(asking("r", "a", "b", wait_s=9.0), 0.0)) == [("d0", ("a",))]


def test_the_same_medium_is_encoded_once_for_all() -> None:
    queue = queue_of(E0)
    assert started(queue.submit(asking("r", "a", "b"), 0.0)) == [("e0", ("a",))]
    assert queue.submit(asking("s", "a", "a"), 1.0) == []
    assert queue.submit(asking("t", "b"), 1.0) == []
    effects = queue.ended(1, "a", ENCODED, 2.0)
    twice = ("a", SHARED, "n0")
    assert effects[0] == end(twice, twice, key="s", seconds=1.0)
    assert started(effects) == [("e0", ("b",))]
    assert queue.ended(2, "b", ENCODED, 3.0) == [
        end(("a", ENCODED, "n0"), ("b", ENCODED, "n0"), key="r", seconds=3.0),
        end(("b", SHARED, "n0"), key="t", seconds=2.0),
    ]


def test_models_do_not_share() -> None:
    queue = queue_of(replace(E0, model="m"), replace(E1, model="n"))
    assert started(queue.submit(asking("r", "a", model="m"), 0.0)) == [("e0", ("a",))]
    assert started(queue.submit(asking("s", "a", model="n"), 0.0)) == [("e1", ("a",))]
    none = queue.submit(asking("t", "a", model="x"), 0.0)
    assert none == [end(("a", EncodeReason.NO_INSTANCE, ""), key="t", seconds=0.0)]


def test_instances_share_the_media_and_those_that_decode_come_last() -> None:
    queue = queue_of(D0, E0, E1)
    for one in (D0, E0):
        learn(queue, one, EncodeLine(0.0, 0.001))
    effects = queue.submit(asking("r", *"abcd"), 0.0)
    assert started(effects) == [("e0", ("a", "c")), ("e1", ("b", "d"))]
    assert started(queue.submit(asking("s", "x", wait_s=9.0), 0.0)) == [("d0", ("x",))]


def test_among_equals_the_node_of_the_prefill_is_chosen() -> None:
    queue = queue_of(E0, E1)
    assert started(queue.submit(asking("r", "a", nodes=frozenset({"n1"})), 0.0)) == [("e1", ("a",))]
    assert started(queue.submit(asking("s", "b", nodes=frozenset({"n1"})), 0.0)) == [("e0", ("b",))]


def test_media_are_left_where_the_prefill_encodes_them_sooner() -> None:
    queue = queue_of(E0, config=EncodeConfig(ttft_s=1.0))
    learn(queue, E0, EncodeLine(0.05, 0.001))
    queue.submit(asking("r", "a", "b", wait_s=9.0), 0.0)
    # 0.15 s each; two are ahead.
    late = queue.submit(asking("s", "c"), 0.0)
    assert late == [end(("c", EncodeReason.WAIT_TOO_LONG, ""), key="s", seconds=0.0)]
    # What runs already comes in time, and a prefill that waits anyway loses nothing.
    assert queue.submit(asking("t", "a"), 0.0) == []
    assert queue.submit(asking("u", "d", wait_s=0.5), 0.0) == []
    queue.check_invariants()


def test_a_slow_moment_does_not_close_the_stage_for_ever() -> None:
    queue = queue_of(E0, E1)
    learn(queue, E0, EncodeLine(9.0, 0.0))
    queue.submit(asking("r", "a", "b"), 0.0)
    assert queue.submit(asking("s", "x", "y"), 0.0) == []
    late = cast("EndRequest", queue.submit(asking("u", "c"), 0.0)[0])
    assert late.media[0].reason is EncodeReason.WAIT_TOO_LONG
    queue.tick(KEPT_S)
    assert queue.submit(asking("t", "c"), KEPT_S + 1.0) == []


def test_a_medium_is_tried_on_another_instance_and_no_more() -> None:
    queue = queue_of(E0, E1)
    queue.submit(asking("r", "a"), 0.0)
    assert started(queue.ended(1, "a", FAILED, 1.0)) == [("e1", ("a",))]
    effects = queue.ended(2, "a", FAILED, 2.0)
    assert effects == [end(("a", FAILED, ""), key="r", seconds=2.0)]
    queue.check_invariants()


def test_a_refused_medium_is_not_tried_again() -> None:
    queue = queue_of(E0, E1)
    queue.submit(asking("r", "a"), 0.0)
    effects = queue.ended(1, "a", EncodeReason.REFUSED, 1.0)
    assert effects == [end(("a", EncodeReason.REFUSED, ""), key="r", seconds=1.0)]


def test_media_of_a_lost_instance_go_to_another_one() -> None:
    queue = queue_of(E0, E1)
    queue.submit(asking("r", "a"), 0.0)
    queue.submit(asking("s", "b"), 0.0)
    assert queue.submit(asking("t", "c"), 0.0) == []
    # The passes that run there end by themselves; nothing else goes there.
    assert queue.instance_changed(replace(E0, healthy=False), 1.0) == []
    assert started(queue.ended(2, "b", ENCODED, 2.0)) == [("e1", ("c",))]
    assert queue.instance_left("e0", 2.0) == []
    assert started(queue.ended(3, "c", ENCODED, 3.0)) == [("e1", ("a",))]
    # The one that left answers after all, and is not heard.
    assert queue.ended(1, "a", ENCODED, 3.0) == []
    effects = queue.instance_changed(replace(E1, healthy=False), 4.0)
    effects += queue.ended(4, "a", FAILED, 4.0)
    assert effects == [end(("a", FAILED, ""), key="r", seconds=4.0)]
    queue.check_invariants()


def test_waiting_media_end_when_no_instance_is_left() -> None:
    queue = queue_of(E0)
    queue.submit(asking("r", "a", "b"), 0.0)
    assert queue.instance_changed(replace(E0, healthy=False), 1.0) == []
    effects = queue.ended(1, "a", FAILED, 1.0)
    ends = ("a", FAILED, ""), ("b", EncodeReason.NO_INSTANCE, "")
    assert effects == [] or effects == [end(*ends, key="r", seconds=1.0)]


def test_a_request_ends_after_its_timeout_with_what_it_has() -> None:
    queue = queue_of(E0, config=EncodeConfig(timeout_s=5.0))
    queue.submit(asking("r", "a", "b"), 0.0)
    queue.ended(1, "a", ENCODED, 1.0)
    assert queue.tick(4.9) == []
    assert queue.next_tick_s == 5.0
    ends = ("a", ENCODED, "n0"), ("b", EncodeReason.TIMEOUT, "")
    assert queue.tick(5.0) == [StopMedium(2, "b"), end(*ends, key="r", seconds=5.0)]
    # The instance is free when the shell has stopped it.
    assert queue.submit(asking("s", "c"), 5.0) == []
    assert started(queue.ended(2, "b", FAILED, 5.1)) == [("e0", ("c",))]


def test_what_nobody_waits_for_is_dropped_or_stopped() -> None:
    queue = queue_of(E0)
    queue.submit(asking("r", "a", "b"), 0.0)
    queue.submit(asking("s", "a"), 0.0)
    assert queue.withdraw("r", 1.0) == []
    assert queue.num_waiting == 0
    assert queue.withdraw("s", 1.0) == [StopMedium(1, "a")]
    assert queue.withdraw("s", 1.0) == []
    queue.check_invariants()
    # A newcomer does not rely on a pass that is being stopped.
    assert queue.submit(asking("t", "a"), 1.0) == []
    assert started(queue.ended(1, "a", FAILED, 1.1)) == [("e0", ("a",))]


def test_the_queue_is_bounded() -> None:
    queue = queue_of(E0, config=EncodeConfig(max_waiting=2))
    queue.submit(asking("r", "a", "b"), 0.0)
    full = queue.submit(asking("s", "c", "d"), 0.0)
    ends = ("c", EncodeReason.QUEUE_FULL, ""), ("d", EncodeReason.QUEUE_FULL, "")
    assert full == [end(*ends, key="s", seconds=0.0)]
    assert queue.submit(asking("t", "c"), 0.0) == []


def test_passes_behind_each_other_are_timed_one_by_one() -> None:
    instance = replace(E0, max_passes=2)
    queue = queue_of(instance)
    for number in range(3):
        begun_s = 10.0 * number
        assert queue.submit(asking(f"r{number}", f"{number}"), begun_s)
        assert queue.submit(asking(f"s{number}", f"x{number}", tokens=200), begun_s)
        queue.ended(2 * number + 1, f"{number}", ENCODED, begun_s + 1.0)
        # It took 1.5 s, of which the first pass had the instance for 1 s.
        queue.ended(2 * number + 2, f"x{number}", ENCODED, begun_s + 1.5)
    line = queue.times.line("e0", instance.kind, 30.0)
    assert line is not None
    assert line.seconds(100) + line.seconds(200) == pytest.approx(1.5)


def test_the_report_says_how_long_instances_are_busy() -> None:
    queue = queue_of(E0)
    learn(queue, E0, EncodeLine(0.2, 0.002))
    queue.submit(asking("r", *"abcdef", wait_s=99.0), 0.0)
    report = queue.report(0.5)
    assert (report.waiting_media, report.waiting_tokens) == (2, 200)
    (one,) = report.instances
    assert (one.running_media, one.running_tokens, one.budget_tokens) == (4, 400, 400)
    assert one.busy_s == pytest.approx(0.5)


def test_close_ends_all() -> None:
    queue = queue_of(E0)
    queue.submit(asking("r", "a"), 0.0)
    ended = end(("a", EncodeReason.CLOSED, ""), key="r", seconds=1.0)
    assert queue.close(1.0) == [StopMedium(1, "a"), ended]


def test_a_key_is_used_once_at_a_time() -> None:
    queue = queue_of(E0)
    queue.submit(asking("r", "a"), 0.0)
    with pytest.raises(ValueError, match="already here"):
        queue.submit(asking("r", "b"), 0.0)


def test_a_request_without_media_ends_at_once() -> None:
    assert queue_of(E0).submit(asking("r"), 0.0) == [EndRequest("r", (), 0.0)]
