"""The order of waiting jobs: classes, buckets, length with ageing, and that nobody starves."""

import math
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import untimed

from scheduler.routing.order_config import LengthBucket, OrderConfig
from scheduler.routing.queue_order import MAX_KNOWN_PDS, QueueOrder, WaitingJob

SMALL = OrderConfig(
    buckets=(LengthBucket(100, 0.5), LengthBucket(1000, 0.3), LengthBucket(math.inf, 0.2)),
    ageing_tokens_per_s=100.0,
    patience_s=30.0,
)


def order_of(*jobs: WaitingJob[str], config: OrderConfig = SMALL) -> QueueOrder[str]:
    order: QueueOrder[str] = QueueOrder(config)
    for job in jobs:
        order.add(job)
    return order


def drained(order: QueueOrder[str], now_s: float) -> list[str]:
    """Start everything at one moment; in which order."""
    keys = []
    while (job := order.next(now_s)) is not None:
        order.started(job.key)
        order.check_invariants()
        keys.append(job.key)
    return keys


def job(key: str, tokens: int, submitted_s: float = 0.0, priority: int = 0) -> WaitingJob[str]:
    return WaitingJob(key, priority, tokens, submitted_s)


def test_fewest_tokens_first_then_first_come() -> None:
    order = order_of(job("c", 30), job("a", 10), job("b", 20), job("a2", 10))
    assert (len(order), order.uncached_tokens, "a" in order) == (4, 70, True)
    assert drained(order, 1.0) == ["a", "a2", "b", "c"]
    assert order.next(1.0) is None


def test_waiting_makes_up_for_length() -> None:
    # 50 tokens more are worth half a second.
    assert drained(order_of(job("short", 10, 0.4), job("long", 60, 0.0)), 1.0)[0] == "short"
    assert drained(order_of(job("short", 10, 0.6), job("long", 60, 0.0)), 1.0)[0] == "long"


def test_the_more_urgent_class_goes_first_until_another_is_due() -> None:
    order = order_of(job("later", 10, 0.0, priority=1), job("urgent", 90, 50.0))
    late = job("later", 10, 0.0, priority=1)
    assert order.due_s(late) == pytest.approx(60.1)
    assert drained(order, 60.0) == ["urgent", "later"]
    order = order_of(late, job("urgent", 90, 50.0))
    assert drained(order, 61.0) == ["later", "urgent"]


def test_buckets_share_by_tokens_started() -> None:
    shorts = [job(f"s{i}", 100) for i in range(50)]
    longs = [job(f"m{i}", 1000) for i in range(10)]
    keys = drained(order_of(*shorts, *longs), 0.0)
    # 0.5 to 0.3: between two of 1000 tokens fit about 17 of 100.
    gaps = [i for i, key in enumerate(keys) if key.startswith("m")][:3]
    assert gaps[0] == 1
    assert [b - a for a, b in pairwise(gaps)] == [
        pytest.approx(17, abs=1),
        pytest.approx(17, abs=1),
    ]


def test_long_prompts_do_not_hold_up_short_ones() -> None:
    order = order_of(*(job(f"l{i}", 50_000) for i in range(5)))
    first = order.next(0.0)
    assert first is not None
    order.started(first.key)
    order.add(job("s1", 100))
    order.add(job("s2", 100))
    assert drained(order, 0.0)[:2] == ["s1", "s2"]


def test_a_bucket_that_was_empty_cannot_have_saved_up() -> None:
    order = order_of(*(job(f"s{i}", 100) for i in range(40)))
    for _ in range(20):
        first = order.next(0.0)
        assert first is not None
        order.started(first.key)
    for i in range(20):
        order.add(job(f"m{i}", 1000))
    keys = drained(order, 0.0)
    assert keys[:4].count("m0") + keys[:4].count("m1") <= 1


def test_what_may_not_start_is_passed_over() -> None:
    order = order_of(job("a", 10), job("b", 20))
    found = order.next(0.0, lambda key: key != "a")
    assert found is not None
    assert found.key == "b"
    assert order.next(0.0, lambda _: False) is None
    assert len(order) == 2


def test_jobs_leave_without_starting() -> None:
    order = order_of(job("a", 10), job("b", 20))
    assert order.remove("a")
    assert not order.remove("a")
    assert drained(order, 0.0) == ["b"]
    with pytest.raises(KeyError):
        order.started("a")
    order.add(job("a", 10))
    with pytest.raises(ValueError, match="job a waits already"):
        order.add(job("a", 10))


def test_default_buckets_are_those_of_64k_and_256k() -> None:
    config = OrderConfig()
    assert [config.bucket_of(n) for n in (0, 65_536, 65_537, 262_144, 262_145, 10**6)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buckets": ()}, "bucket edges"),
        ({"buckets": (LengthBucket(100, 1.0),)}, "to infinity"),
        ({"buckets": (LengthBucket(math.inf, 0.0),)}, "shares are"),
        ({"patience_s": 0.0}, r"patience_s 0\.0"),
        ({"max_length_s": -1.0}, r"max_length_s -1\.0"),
    ],
)
def test_settings_that_cannot_be_meant(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrderConfig(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be negative"):
        job("a", -1)


def test_what_is_ahead_of_a_job() -> None:
    order = order_of(
        job("urgent", 5000, priority=0),
        job("same", 20, priority=1),
        job("longer", 90, priority=1),
        job("other", 500, priority=1),
        job("later", 10, priority=2),
    )
    new = job("new", 50, priority=1)
    assert {waiting.key for waiting in order.ahead_of(new, 0.0)} == {"urgent", "same", "other"}
    # Due long ago: everybody is behind it but who was due before.
    assert {w.key for w in order.ahead_of(job("first", 1), 0.0)} == {"urgent"}


arrivals = st.lists(
    st.tuples(st.floats(0, 20), st.integers(0, 2), st.integers(0, 5000)), min_size=1, max_size=40
)


@untimed
@given(arrivals, st.floats(10, 2000))
def test_nobody_starves(steps: list[tuple[float, int, int]], tokens_per_s: float) -> None:
    """One server, overloaded or not. Once a job is due only jobs that were due before it start, so
    that it waits at most for what was submitted before its due time.
    """
    jobs, at_s = [], 0.0
    for i, (gap_s, priority, tokens) in enumerate(steps):
        at_s += gap_s
        jobs.append(WaitingJob(i, priority, tokens, at_s))
    order: QueueOrder[int] = QueueOrder(SMALL)
    started_s: dict[int, float] = {}
    coming, now_s = list(jobs), 0.0
    while coming or len(order):
        while coming and coming[0].submitted_s <= now_s:
            order.add(coming.pop(0))
        found = order.next(now_s)
        if found is None:
            now_s = coming[0].submitted_s
            continue
        waiting = [j for j in jobs if j.key in order]
        due = [j for j in waiting if order.due_s(j) <= now_s]
        if due:
            assert order.due_s(found) == min(order.due_s(j) for j in due)
        order.started(found.key)
        order.check_invariants()
        started_s[found.key] = now_s
        now_s += found.uncached_tokens / tokens_per_s
    for one in jobs:
        due_s = order.due_s(one)
        ahead = sum(j.uncached_tokens for j in jobs if j.submitted_s <= due_s and j is not one)
        assert started_s[one.key] <= max(one.submitted_s, due_s) + ahead / tokens_per_s + 1e-6


def test_a_long_job_starts_under_a_steady_stream_of_short_ones() -> None:
    draw = random.Random(1)
    order: QueueOrder[int] = QueueOrder(SMALL)
    order.add(WaitingJob(-1, 1, 5000, 0.0))
    now_s, number = 0.0, 0
    while -1 in order:
        for _ in range(2):
            order.add(WaitingJob(number, 0, draw.randrange(1, 100), now_s))
            number += 1
        found = order.next(now_s)
        assert found is not None
        order.started(found.key)
        now_s += 0.5
    # Due at 110 s. The urgent ones that came in the first 80 s are due before that, and twice as
    # many came as could start.
    assert now_s == pytest.approx(160, abs=3)


def of(pd: str, key: str, tokens: int, **fields: Any) -> WaitingJob[str]:
    return WaitingJob(
        key, **({"priority": 0, "submitted_s": 0.0} | fields), uncached_tokens=tokens, pd=pd
    )


def test_a_burst_of_one_pd_cluster_does_not_starve_another() -> None:
    order = order_of(*(of("a", f"a{i}", 100, priority=0) for i in range(50)))
    order.started("a0")
    for i in range(3):
        order.add(of("b", f"b{i}", 100, priority=1, submitted_s=40.0))
    # Every job of `a` is due, and none of `b`.
    keys = drained(order, 41.0)
    assert [keys.index(f"b{i}") for i in range(3)] == [0, 2, 4]


def test_pd_clusters_share_by_tokens_and_not_by_jobs() -> None:
    order = order_of(
        *(of("a", f"a{i}", 90) for i in range(30)), of("b", "b0", 900), of("b", "b1", 900)
    )
    keys = drained(order, 0.0)
    assert keys.index("b1") - keys.index("b0") == pytest.approx(10, abs=1)


def test_a_pd_cluster_cannot_save_up_its_share() -> None:
    order = order_of(*(of("a", f"a{i}", 100) for i in range(20)))
    for i in range(10):
        order.started(f"a{i}")
    for i in range(10):
        order.add(of("b", f"b{i}", 100))
    keys = drained(order, 0.0)
    assert [key[0] for key in keys[:6]].count("b") == pytest.approx(3, abs=1)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 2000)), min_size=1
    ),
    st.integers(0, 2),
)
def test_while_two_pd_clusters_wait_they_get_the_same(
    drawn: list[tuple[str, int, int]], num_before: int
) -> None:
    order: QueueOrder[int] = QueueOrder(SMALL)
    for key, (pd, priority, tokens) in enumerate(drawn):
        order.add(WaitingJob(key, priority, tokens, 0.0, pd))
    left = {pd: sum(name == pd for name, *_ in drawn) for pd in "abc"}
    got = dict.fromkeys("abc", 0)
    both = {"a", "b"} <= {pd for pd, *_ in drawn}
    while both and left["a"] and left["b"]:
        found = order.next(0.0)
        assert found is not None
        order.started(found.key)
        order.check_invariants()
        left[found.pd] -= 1
        got[found.pd] += max(1, found.uncached_tokens)
        assert abs(got["a"] - got["b"]) <= 2000


def test_pd_clusters_that_are_gone_do_not_pile_up() -> None:
    order = order_of(of("waiting", "w", 100))
    for number in range(3 * MAX_KNOWN_PDS):
        order.add(of(f"pd{number}", f"j{number}", 100))
        order.started(f"j{number}")
    assert len(order._orders) <= MAX_KNOWN_PDS
    assert drained(order, 0.0) == ["w"]


def test_what_waits_for_others_counts_until_the_turn_comes() -> None:
    order = order_of(
        *(of("a", f"a{i}", 100) for i in range(10)), *(of("b", f"b{i}", 50) for i in range(10))
    )
    new = of("b", "new", 90)
    ahead = [job.key for job in order.ahead_of(new, 0.0)]
    assert {key for key in ahead if key[0] == "b"} == {f"b{i}" for i in range(10)}
    # 500 tokens of its own PD cluster go first, and as many of the other one.
    assert sum(key[0] == "a" for key in ahead) == pytest.approx(5, abs=1)
    order.add(new)
    keys = drained(order, 0.0)
    assert set(keys[: keys.index("new")]) == set(ahead)
