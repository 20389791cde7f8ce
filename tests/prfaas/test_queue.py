"""The job queue of a prefill cluster: events in, effects out."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.queue import PrefillQueue
from prfaas.queue_values import Effect, FailJob, QueueConfig, QueuedJob, QueueInstance, StartJob
from scheduler.reports import JobReport
from scheduler.routing.front_placement import Room
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.queue_order import QueueOrder, WaitingJob, priority_class


def view(name: str, **changes: object) -> QueueInstance:
    fields: dict[str, object] = {"model": "m", "healthy": True, "room": Room(1)}
    return QueueInstance(name, **(fields | changes))  # type: ignore[arg-type]


def job(key: str, *, num_tokens: int = 100, priority: int = 0, model: str = "m") -> QueuedJob:
    return QueuedJob(key, model, priority, num_tokens)


def queue(*views: QueueInstance, **config: object) -> PrefillQueue:
    made = PrefillQueue("prefill-a", QueueConfig(**config))  # type: ignore[arg-type]
    for item in views:
        made.instance_changed(item, 0.0)
    return made


def test_a_job_starts_on_a_free_instance_at_once() -> None:
    q = queue(view("p0"))
    assert q.submit(job("a"), 1.0) == [StartJob("a", "p0", 0.0, 1)]
    assert (q.depth, q.num_running, q.running_on("p0")) == (0, 1, 1)


def test_an_instance_that_left_is_forgotten_and_what_only_it_could_take_fails() -> None:
    q = queue(view("p0"), view("p1", model="other", draining=True))
    q.submit(job("a"), 0.0)
    assert q.submit(job("b"), 0.0) == []
    assert q.instance_left("p1", 1.0) == []
    q.instance_changed(view("p2", model="other"), 1.0)
    assert q.submit(job("c", model="other"), 1.0) == [StartJob("c", "p2", 0.0, 1)]
    assert q.submit(job("d", model="other"), 1.0) == []
    q.instance_changed(view("p2", model="other", draining=True), 1.0)
    assert q.finished("c", 2.0) == []
    assert q.instance_left("p2", 3.0) == []
    assert (q.depth, q.num_running) == (1, 1)
    q.check_invariants()


def test_a_job_runs_where_kvcache_is_laid_out_as_in_its_landing() -> None:
    old, new = view("p0", layout_fingerprint="a", layout="GQA"), view("p1", layout_fingerprint="b")
    q = queue(old, new, view("p2"))

    def submit(key: str, fingerprint: str) -> list[Effect]:
        return q.submit(QueuedJob(key, "m", 0, 100, layout_fingerprint=fingerprint), 0.0)

    assert submit("new", "b") == [StartJob("new", "p1", 0.0, 1)]
    # An instance that has not said what it has, and a landing of which nobody knows, fit all.
    assert submit("also new", "b") == [StartJob("also new", "p2", 0.0, 1)]
    assert submit("any", "") == [StartJob("any", "p0", 0.0, 1)]
    assert submit("waits", "b") == []
    q.finished("any", 1.0)
    assert (q.running_on("p0"), q.depth) == (0, 1)
    assert q.finished("new", 1.0) == [StartJob("waits", "p1", 1.0, 1)]
    q.check_invariants()


def test_a_held_job_lets_others_pass_and_keeps_its_place() -> None:
    q = queue(view("p0"))
    assert q.submit(job("a"), 0.0, held=True) == []
    assert q.submit(job("b"), 1.0) == [StartJob("b", "p0", 0.0, 1)]
    assert q.submit(job("c"), 2.0) == []
    assert q.let_go("a", 3.0) == []
    # Its turn had come when it was submitted, and it was held for 3 s.
    assert q.finished("b", 5.0) == [StartJob("a", "p0", 2.0, 1, held_s=3.0)]
    assert q.finished("a", 6.0) == [StartJob("c", "p0", 4.0, 1)]
    assert q.let_go("gone", 6.0) == []


def test_what_a_job_would_have_waited_anyway_is_no_delay_by_what_held_it() -> None:
    q = queue(view("p0"))
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 0.0, held=True)
    q.submit(job("c"), 0.0, held=True)
    assert q.let_go("b", 1.0) == []
    assert q.finished("a", 2.0) == [StartJob("b", "p0", 2.0, 1)]
    assert q.finished("b", 4.0) == []
    assert q.let_go("c", 5.0) == [StartJob("c", "p0", 4.0, 1, held_s=1.0)]


def test_a_held_job_waits_no_longer_than_any_other() -> None:
    q = queue(view("p0"), max_wait_s=10.0)
    q.submit(job("a"), 0.0, held=True)
    (failed,) = q.tick(10.0)
    assert isinstance(failed, FailJob)
    assert failed.code == "queue_timeout"
    assert q.let_go("a", 11.0) == []
    q.check_invariants()


def test_a_job_whose_landing_no_instance_can_fill_fails_at_once() -> None:
    q = queue(view("p0", layout_fingerprint="a", layout="GQA"))
    wanted = QueuedJob("b", "m", 0, 100, layout_fingerprint="b")
    (failed,) = q.submit(wanted, 0.0)
    assert isinstance(failed, FailJob)
    assert failed.code == "no_instance"
    said = "p0 lays KVCache out otherwise than the landing: GQA"
    assert failed.message == f"no usable instance in prefill-a: {said}"
    # One that waits fails when the only instance that could fill its landing changes.
    q.instance_changed(view("p0", layout_fingerprint="b"), 1.0)
    assert q.submit(QueuedJob("x", "m", 0, 100, layout_fingerprint="b"), 1.0)
    assert q.submit(wanted, 1.0) == []
    (failed,) = q.instance_changed(view("p0", layout_fingerprint="a"), 2.0)
    assert isinstance(failed, FailJob)
    assert (failed.key, failed.code) == ("b", "no_instance")
    assert q.running_on("p0") == 1
    q.check_invariants()


def test_the_instance_with_fewest_tokens_under_way_wins() -> None:
    q = queue(view("p0", room=Room(4)), view("p1", room=Room(4)))
    assert q.submit(job("long", num_tokens=9000), 0.0) == [StartJob("long", "p0", 0.0, 1)]
    assert q.submit(job("b", num_tokens=100), 0.0) == [StartJob("b", "p1", 0.0, 1)]
    assert q.submit(job("c", num_tokens=100), 0.0) == [StartJob("c", "p1", 0.0, 1)]


def test_short_jobs_share_an_instance_until_they_fill_a_pass_and_a_long_one_has_it_alone() -> None:
    q = queue(view("p0", room=Room(4, pass_tokens=250)))
    assert q.submit(job("long", num_tokens=9000), 0.0) == [StartJob("long", "p0", 0.0, 1)]
    for key in "abcde":
        assert q.submit(job(key, num_tokens=100), 0.0) == []
    started = q.finished("long", 1.0)
    assert [item.key for item in started if isinstance(item, StartJob)] == ["a", "b", "c"]


def test_a_job_goes_where_part_of_its_prompt_is_cached_if_there_is_room() -> None:
    q = queue(view("p0", node="n0"), view("p1", node="n1"), view("p2", node="n2"))

    def start(key: str, **cached_tokens: int) -> tuple[str, str]:
        (effect,) = q.submit(QueuedJob(key, "m", 0, 100, cached_tokens), 0.0)
        assert isinstance(effect, StartJob)
        return effect.instance, effect.reason.partition(";")[0]

    assert start("by node", n9=80, n2=60, n1=40) == ("p2", "cached")
    assert start("no room there", n2=60, p1=40) == ("p1", "cached")
    assert start("no room at all", n2=60, n1=40) == ("p0", "least_loaded")
    q.check_invariants()


def test_work_is_counted_in_tokens_that_are_not_cached_where_it_runs() -> None:
    q = queue(view("p0", node="n0"), view("p1", node="n1", healthy=False))
    cached = {"n0": 60, "n1": 90}
    for key in ("a", "b"):
        q.submit(QueuedJob(key, "m", -3, 100, cached), 1.0)
    assert (q.running_tokens, q.queued_tokens) == (40, 10)
    assert q.jobs(3.0) == (
        JobReport(
            transfer_id="a", num_tokens=100, uncached_tokens=40, for_s=2.0, instance="p0",
            priority=-3, model="m",
        ),
        JobReport(
            transfer_id="b", num_tokens=100, uncached_tokens=10, for_s=2.0, priority=-3, model="m"
        ),
    )  # fmt: skip
    q.instance_changed(view("p1", node="n1"), 4.0)
    assert (q.running_tokens, q.queued_tokens) == (50, 0)
    q.failed("a", "engine_failed", "died", retryable=True, now_s=5.0)
    assert [job.uncached_tokens for job in q.jobs(6.0)] == [10, 10]
    assert [job.for_s for job in q.jobs(6.0)] == [2.0, 5.0]
    q.check_invariants()


def test_equal_instances_take_turns() -> None:
    q = queue(view("p0"), view("p1"))
    used = []
    for key in "abcd":
        (start,) = q.submit(job(key), 0.0)
        assert isinstance(start, StartJob)
        used.append(start.instance)
        q.finished(key, 0.0)
    assert used == ["p0", "p1", "p0", "p1"]


def drained(q: PrefillQueue, running: str, now_s: float) -> list[StartJob]:
    """What starts, one after the other, on a cluster of one instance."""
    starts = []
    while effects := q.finished(running, now_s):
        (start,) = effects
        assert isinstance(start, StartJob)
        running = start.key
        starts.append(start)
    return starts


def test_waiting_jobs_start_in_order_of_priority_and_then_of_arrival() -> None:
    q = queue(view("p0"))
    q.submit(job("running"), 0.0)
    for key, priority in [("a", 1), ("b", 0), ("c", 2**31 - 1), ("d", -5)]:
        assert q.submit(job(key, priority=priority), 1.0) == []
    starts = drained(q, "running", 3.0)
    assert [start.key for start in starts] == ["d", "b", "a", "c"]
    assert {start.queue_s for start in starts} == {2.0}


def test_any_priority_has_a_class_and_the_default_is_in_the_middle() -> None:
    assert [priority_class(p) for p in (-(2**63), -1, 0, 1, 2**63)] == [0, 0, 1, 2, 2]


def test_shorter_jobs_go_first_by_what_is_not_cached() -> None:
    q = queue(view("p0"))
    q.submit(job("running"), 0.0)
    q.submit(job("long", num_tokens=900), 1.0)
    q.submit(QueuedJob("cached", "m", 0, 1000, {"p0": 800}), 1.0)
    q.submit(job("short", num_tokens=100), 1.0)
    assert [start.key for start in drained(q, "running", 1.0)] == ["short", "cached", "long"]


def test_a_job_that_is_tried_again_goes_before_those_that_came_after_it() -> None:
    q = queue(view("p0"), view("p1"))
    for key, at_s in [("a", 0.0), ("b", 1.0), ("c", 2.0)]:
        q.submit(job(key), at_s)
    q.instance_changed(view("p0", draining=True), 3.0)
    q.failed("a", "engine_failed", "died", retryable=True, now_s=3.0)
    assert [start.key for start in drained(q, "b", 4.0)] == ["a", "c"]


def test_jobs_of_all_classes_are_due_before_they_are_given_up() -> None:
    assert QueueConfig().bounded_order == OrderConfig(max_length_s=15.0)
    config = QueueConfig(max_wait_s=8.0)
    assert config.bounded_order == OrderConfig(patience_s=2.0, max_length_s=1.0)
    q = queue(view("p0"), max_wait_s=8.0)
    q.submit(job("running"), 0.0)
    q.submit(job("background", priority=7), 0.0)
    running = "running"
    for second in range(1, 8):
        q.submit(job(f"urgent {second}", priority=-7), float(second))
        (start,) = q.finished(running, float(second))
        assert isinstance(start, StartJob)
        running = start.key
        if running == "background":
            break
    assert (running, second) == ("background", 7)


def test_a_job_over_the_bound_is_refused_with_the_bound() -> None:
    q = queue(view("p0"), max_queued=2)
    for key in "abc":
        q.submit(job(key), 0.0)
    (refused,) = q.submit(job("d"), 0.0)
    assert isinstance(refused, FailJob)
    assert refused.code == "queue_full"
    assert "2 jobs wait" in refused.message
    assert q.depth == 2
    assert not q.holds("d")


def test_a_bound_of_zero_still_lets_jobs_run() -> None:
    q = queue(view("p0"), max_queued=0)
    assert q.submit(job("a"), 0.0) == [StartJob("a", "p0", 0.0, 1)]
    (refused,) = q.submit(job("b"), 0.0)
    assert isinstance(refused, FailJob)


def test_without_a_usable_instance_a_job_fails_at_once_and_says_why() -> None:
    q = queue(view("p0", healthy=False), view("p1", draining=True), view("p2", model="other"))
    (refused,) = q.submit(job("a"), 0.0)
    assert isinstance(refused, FailJob)
    assert refused.code == "no_instance"
    for part in ("p0 is not healthy", "p1 is draining", "p2 serves other, not m"):
        assert part in refused.message


def test_waiting_jobs_fail_when_the_last_instance_goes() -> None:
    q = queue(view("p0"))
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 0.0)
    (failed,) = q.instance_changed(view("p0", healthy=False), 1.0)
    assert isinstance(failed, FailJob)
    assert (failed.key, failed.code) == ("b", "no_instance")
    assert q.num_running == 1


def test_an_instance_that_comes_back_takes_waiting_jobs() -> None:
    q = queue(view("p0"), view("p1", healthy=False))
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 0.0)
    assert q.instance_changed(view("p1"), 2.0) == [StartJob("b", "p1", 2.0, 1)]


def test_a_failed_job_is_tried_once_elsewhere_keeping_its_place() -> None:
    q = queue(view("p0"), view("p1"))
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 0.0)
    q.submit(job("c"), 0.0)
    effects = q.failed("a", "engine_failed", "died", retryable=True, now_s=1.0)
    assert effects == [StartJob("c", "p0", 1.0, 1)]  # p0 failed a, so a waits for p1
    assert q.finished("b", 2.0) == [StartJob("a", "p1", 2.0, 2)]
    (failed,) = q.failed("a", "engine_failed", "died again", retryable=True, now_s=3.0)
    assert failed == FailJob("a", "engine_failed", "died again")


def test_a_failure_without_another_instance_is_final() -> None:
    q = queue(view("p0"))
    q.submit(job("a"), 0.0)
    effects = q.failed("a", "engine_failed", "died", retryable=True, now_s=1.0)
    assert effects == [FailJob("a", "engine_failed", "died")]


def test_a_job_waiting_for_its_second_try_fails_with_its_first_error() -> None:
    q = queue(view("p0"), view("p1"))
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 0.0)
    assert q.failed("a", "agent_failed", "agent gone", retryable=True, now_s=1.0) == []
    effects = q.instance_changed(view("p1", healthy=False), 2.0)
    assert effects == [FailJob("a", "agent_failed", "agent gone")]


def test_a_failure_that_is_the_requests_own_is_not_tried_again() -> None:
    q = queue(view("p0"), view("p1"))
    q.submit(job("a"), 0.0)
    effects = q.failed("a", "rejected", "too long", retryable=False, now_s=1.0)
    assert effects == [FailJob("a", "rejected", "too long")]


def test_a_withdrawn_job_leaves_the_queue_and_is_not_tried_again() -> None:
    q = queue(view("p0"), view("p1", healthy=False))
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 0.0)
    assert q.withdraw("b", 0.0) == []
    assert q.depth == 0
    q.withdraw("a", 0.0)
    q.instance_changed(view("p1"), 0.0)
    effects = q.failed("a", "engine_failed", "aborted", retryable=True, now_s=1.0)
    assert effects == [FailJob("a", "engine_failed", "aborted")]
    assert q.withdraw("a", 1.0) == []


def test_a_job_waits_only_so_long() -> None:
    q = queue(view("p0"), max_wait_s=10.0)
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 5.0)
    assert q.tick(14.9) == []
    (failed,) = q.tick(15.0)
    assert isinstance(failed, FailJob)
    assert failed.code == "queue_timeout"


def test_a_job_that_waits_for_its_second_try_too_long_fails_with_its_first_error() -> None:
    q = queue(view("p0"), view("p1"), max_wait_s=10.0)
    q.submit(job("a"), 0.0)
    q.submit(job("b"), 0.0)
    assert q.failed("a", "agent_failed", "agent gone", retryable=True, now_s=1.0) == []
    assert q.tick(10.0) == [FailJob("a", "agent_failed", "agent gone")]


@given(
    num_tokens=st.integers(0, 10**8),
    max_wait_s=st.floats(0.1, 1000),
    patience_s=st.floats(0.1, 1000),
)
@settings(max_examples=60, deadline=None)
def test_jobs_of_all_lengths_are_due_before_they_are_given_up(
    num_tokens: int, max_wait_s: float, patience_s: float
) -> None:
    order = OrderConfig(patience_s=patience_s)
    bounded = QueueConfig(max_wait_s=max_wait_s, order=order).bounded_order
    last = WaitingJob("a", priority_class(1), num_tokens, 5.0)
    assert QueueOrder(bounded).due_s(last) < 5.0 + max_wait_s


def test_a_repeated_key_is_a_mistake_of_the_caller() -> None:
    q = queue(view("p0"))
    q.submit(job("a"), 0.0)
    with pytest.raises(ValueError, match="already"):
        q.submit(job("a"), 0.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_operations_lose_no_job_and_break_no_bound(seed: int) -> None:
    rng = random.Random(seed)
    q = queue(max_queued=3, max_wait_s=20.0)
    alive: dict[str, str] = {}  # key -> queued | running
    held: set[str] = set()
    views: dict[str, QueueInstance] = {}
    num_jobs = 0
    for step in range(120):
        now_s = float(step)
        kind = rng.choice(
            ["submit", "submit", "instance", "finish", "fail", "withdraw", "tick", "let_go"]
        )
        running = [key for key, state in alive.items() if state == "running"]
        effects = []
        if kind == "submit":
            num_jobs += 1
            key = f"j{num_jobs}"
            alive[key] = "queued"
            held |= {key} if (is_held := rng.random() < 0.3) else set()
            effects = q.submit(
                QueuedJob(
                    key,
                    rng.choice(["m", "n", ""]),
                    priority=rng.choice([0, 0, 1, -1, 10**9, -(10**9)]),
                    num_tokens=rng.choice([1, 5000, 100_000, 500_000]),
                    cached_tokens={f"p{rng.randrange(4)}": rng.randrange(200_000)},
                ),
                now_s,
                held=is_held,
            )
        elif kind == "let_go" and held:
            key = rng.choice(sorted(held))
            held.remove(key)
            effects = q.let_go(key, now_s)
        elif kind == "instance":
            name = f"p{rng.randrange(3)}"
            views[name] = view(
                name,
                model=rng.choice(["m", "n", ""]),
                healthy=rng.random() < 0.7,
                draining=rng.random() < 0.2,
                room=Room(rng.randrange(1, 4)),
            )
            effects = q.instance_changed(views[name], now_s)
        elif kind == "tick":
            effects = q.tick(now_s)
        elif kind == "withdraw" and alive:
            key = rng.choice(sorted(alive))
            if alive[key] == "queued":
                del alive[key]
            effects = q.withdraw(key, now_s)
        elif running:
            key = rng.choice(running)
            if kind == "finish":
                del alive[key]
                effects = q.finished(key, now_s)
            else:
                alive[key] = "queued"
                effects = q.failed(
                    key, "engine_failed", "x", retryable=rng.random() < 0.7, now_s=now_s
                )
        for effect in effects:
            assert alive[effect.key] == "queued"
            if isinstance(effect, StartJob):
                chosen = views[effect.instance]
                assert chosen.healthy
                assert effect.key not in held
                assert effect.queue_s >= 0 <= effect.held_s
                assert not chosen.draining
                assert effect.attempt <= 2
                alive[effect.key] = "running"
            else:
                del alive[effect.key]
        q.check_invariants()
        assert {key for key in alive if not q.holds(key)} == set()
        assert q.depth + q.num_running == len(alive)
        jobs = q.jobs(now_s)
        assert {report.transfer_id for report in jobs} == set(alive)
        waiting = sum(report.uncached_tokens for report in jobs if not report.instance)
        running_tokens = sum(report.uncached_tokens for report in jobs if report.instance)
        assert (q.queued_tokens, q.running_tokens) == (waiting, running_tokens)


def test_a_job_with_media_runs_where_there_is_an_encoder() -> None:
    q = queue(view("p0", text_only=True), view("p1"))

    def submit(key: str, *, has_media: bool) -> list[Effect]:
        return q.submit(QueuedJob(key, "m", 0, 100, has_media=has_media), 0.0)

    assert submit("picture", has_media=True) == [StartJob("picture", "p1", 0.0, 1)]
    assert submit("waits", has_media=True) == []
    assert submit("text", has_media=False) == [StartJob("text", "p0", 0.0, 1)]
    assert q.finished("picture", 1.0) == [StartJob("waits", "p1", 1.0, 1)]
    (failed,) = q.instance_changed(view("p1", text_only=True), 1.0) or submit(
        "late", has_media=True
    )
    assert isinstance(failed, FailJob)
    assert (failed.key, failed.code) == ("late", "no_instance")
    assert "p0 has no encoder of media" in failed.message
    q.check_invariants()
