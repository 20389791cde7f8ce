"""Who sends next: shares in bytes, budgets, and that nobody starves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import Priority
from transport.sending.fair_queue import FairQueue, TokenBucket

REQUEST, REPLICATION = Priority.REQUEST, Priority.REPLICATION
Member = tuple[str, Priority, str]


def next_member(queue: FairQueue[str], now_s: float = 0.0) -> Member | None:
    return next(queue.in_order(now_s), None)


def serve(
    queue: FairQueue[str], num_frames: int, size: Callable[[str], int] = lambda _: 100
) -> Counter[str]:
    """Bytes of each transfer after so many frames, all of them backlogged."""
    served: Counter[str] = Counter()
    for _ in range(num_frames):
        member = next_member(queue)
        assert member is not None
        queue.served(*member, size(member[0]), 0.0)
        served[member[0]] += size(member[0])
    return served


def make_queue(*members: Member) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for member in members:
        queue.join(*member)
    return queue


# TokenBucket.


@pytest.mark.parametrize("frame_bytes", [16_000, 256_000])
@pytest.mark.parametrize("late_s", [0.0, 0.002])
def test_the_rate_holds_over_a_long_run(frame_bytes: int, late_s: float) -> None:
    bucket = TokenBucket(50e6)
    now_s, sent_bytes = 1000.0, 0
    while now_s < 1020:
        bucket.spend(frame_bytes, now_s)
        sent_bytes += frame_bytes
        ready_at_s = bucket.ready_at(now_s)
        now_s = ready_at_s + late_s if ready_at_s > now_s else now_s
    assert sent_bytes == pytest.approx(20 * 50e6, rel=0.01)


def test_a_burst_is_allowed_and_no_more() -> None:
    bucket = TokenBucket(1000.0, burst_s=0.1)
    for _ in range(11):
        assert bucket.ready_at(5.0) == 5.0
        bucket.spend(10, 5.0)
    assert bucket.ready_at(5.0) == pytest.approx(5.01)
    assert bucket.ready_at(500.0) == 500.0
    bucket.spend(100, 500.0)  # an idle minute has not saved up more than the burst
    bucket.spend(1, 500.0)
    assert bucket.ready_at(500.0) == pytest.approx(500.001)


def test_one_send_may_overdraw_and_the_debt_is_waited_for() -> None:
    bucket = TokenBucket(1000.0, burst_s=0.0)
    bucket.spend(5000, 1.0)
    assert bucket.ready_at(1.0) == pytest.approx(6.0)
    assert bucket.ready_at(4.0) == pytest.approx(6.0)
    assert bucket.ready_at(6.5) == 6.5


def test_a_clock_read_a_little_late_gains_nothing_twice() -> None:
    bucket = TokenBucket(1000.0, burst_s=0.0)
    bucket.spend(1000, 2.0)
    bucket.spend(1000, 1.5)  # another thread read its clock before
    assert bucket.ready_at(2.0) == pytest.approx(4.0)


def test_no_rate_means_no_limit() -> None:
    bucket = TokenBucket(0.0)
    bucket.spend(1 << 60, 0.0)
    assert bucket.ready_at(0.0) == 0.0


# Shares.


def test_transfers_share_equally_in_bytes_whatever_their_frame_sizes() -> None:
    queue = make_queue(("large", REQUEST, ""), ("small", REQUEST, ""))
    served = serve(queue, 4000, lambda key: 2000 if key == "large" else 70)
    assert served["large"] == pytest.approx(served["small"], abs=2000)


def test_requests_take_all_but_a_thirty_second_part() -> None:
    queue = make_queue(("request", REQUEST, ""), ("copy", REPLICATION, ""))
    served = serve(queue, 3200)
    assert served["copy"] / served.total() == pytest.approx(1 / 32, rel=0.02)


def test_many_requests_do_not_starve_one_copy_nor_many_copies_one_request() -> None:
    crowd = [(f"request {n}", REQUEST, f"tenant {n % 3}") for n in range(50)]
    served = serve(make_queue(*crowd, ("copy", REPLICATION, "")), 3200)
    assert served["copy"] / served.total() == pytest.approx(1 / 32, rel=0.02)
    crowd = [(f"copy {n}", REPLICATION, f"tenant {n % 3}") for n in range(50)]
    served = serve(make_queue(*crowd, ("request", REQUEST, "")), 3200)
    assert served["request"] / served.total() == pytest.approx(31 / 32, rel=0.02)


def test_tenants_share_equally_however_many_transfers_they_have() -> None:
    crowd: list[Member] = [(f"many {n}", REQUEST, "many") for n in range(10)]
    served = serve(make_queue(*crowd, ("one", REQUEST, "one")), 2000)
    assert served["one"] == pytest.approx(served.total() / 2, abs=100)
    assert {served[key] for key, _, _ in crowd} <= {9_900, 10_000, 10_100}


def test_a_newcomer_neither_catches_up_nor_waits() -> None:
    queue = make_queue(("old", REQUEST, ""))
    serve(queue, 1000)
    queue.join("new", REQUEST, "")
    assert serve(queue, 3)["new"] >= 100
    served = serve(queue, 200)
    assert served["new"] == pytest.approx(served["old"], abs=200)


def test_one_that_comes_back_is_a_newcomer() -> None:
    queue = make_queue(("steady", REQUEST, ""), ("restless", REQUEST, ""))
    serve(queue, 10)
    queue.leave("restless", REQUEST, "")
    serve(queue, 1000)
    queue.join("restless", REQUEST, "")
    served = serve(queue, 100)
    assert served["restless"] == pytest.approx(served["steady"], abs=200)


@pytest.mark.parametrize(
    ("restless", "share"),
    [
        (("restless", REQUEST, "a"), 1 / 2),
        (("restless", REQUEST, "b"), 1 / 2),
        (("restless", REPLICATION, "a"), 1 / 32),
    ],
)
def test_what_is_ready_one_frame_at_a_time_has_no_advantage(restless: Member, share: float) -> None:
    """A transfer whose bytes become ready just before they are sent leaves after every frame."""
    queue = make_queue(("steady", REQUEST, "a"))
    served: Counter[str] = Counter()
    for _ in range(3200):
        queue.join(*restless)
        member = next_member(queue)
        assert member is not None
        queue.served(*member, 100, 0.0)
        served[member[0]] += 100
        if member == restless:
            queue.leave(*member)
    assert served["restless"] / served.total() == pytest.approx(share, rel=0.05)


def test_nothing_is_kept_for_those_that_left() -> None:
    queue = make_queue()
    for number in range(100):
        member = (f"transfer {number}", Priority(number % 2), f"tenant {number % 7}")
        queue.join(*member)
        queue.served(*member, 100, 0.0)
        queue.leave(*member)
        queue.leave(*member)
    assert len(queue) == 0
    assert queue.ready_at(0.0) is None
    assert next_member(queue) is None


# Budgets.


def test_a_tenant_in_debt_is_passed_over_until_it_has_paid() -> None:
    queue: FairQueue[str] = FairQueue(tenant_bytes_per_s=1000.0)
    for member in (("a1", REQUEST, "a"), ("a2", REPLICATION, "a"), ("b", REPLICATION, "b")):
        queue.join(*member)
    queue.served("a1", REQUEST, "a", 1010, 10.0)
    assert [key for key, _, _ in queue.in_order(10.0)] == ["b"]
    assert queue.ready_at(10.0) == 10.0
    queue.served("b", REPLICATION, "b", 2010, 10.0)
    assert next_member(queue, 10.0) is None
    ready_at_s = queue.ready_at(10.0)
    assert ready_at_s == pytest.approx(11.0)
    assert ready_at_s is not None
    assert {key for key, _, _ in queue.in_order(ready_at_s)} == {"a1", "a2"}


def test_debts_outlive_the_transfers_that_made_them() -> None:
    queue: FairQueue[str] = FairQueue(tenant_bytes_per_s=1000.0)
    queue.join("first", REQUEST, "a")
    queue.leave("first", REQUEST, "a")
    queue.served("first", REQUEST, "a", 1010, 10.0)  # its last bytes were taken
    queue.join("second", REQUEST, "a")
    assert next_member(queue, 10.0) is None
    assert next_member(queue, 11.1) == ("second", REQUEST, "a")


# Whatever happens.


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 12))
def test_nobody_is_far_behind(seed: int, num_members: int) -> None:
    """Two that stay keep their shares, and are served soon, whoever else comes and goes."""
    rng = random.Random(seed)
    queue: FairQueue[str] = FairQueue()
    restless = [
        (f"member {n}", rng.choice(list(Priority)), rng.choice("abc")) for n in range(num_members)
    ]
    steady: list[Member] = [("one", REQUEST, "steady"), ("two", REQUEST, "steady")]
    for member in steady:
        queue.join(*member)
    sizes = {key: rng.choice([10, 100, 1000]) for key, _, _ in (*restless, *steady)}
    served: Counter[str] = Counter()
    waited_bytes = 0
    for _ in range(400):
        move = rng.choice(restless)
        rng.choice([queue.join, queue.leave])(*move)
        turn = next_member(queue)
        assert turn is not None
        queue.served(*turn, sizes[turn[0]], 0.0)
        served[turn[0]] += sizes[turn[0]]
        waited_bytes = 0 if turn in steady else waited_bytes + sizes[turn[0]]
        assert abs(served["one"] - served["two"]) <= 2 * 1000
        # At most two frames of each of three other tenants, and one of the other class.
        assert waited_bytes <= 7 * 1000


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.0, 1000.0]))
def test_in_order_names_exactly_those_whose_tenant_may_send(seed: int, budget: float) -> None:
    rng = random.Random(seed)
    queue: FairQueue[str] = FairQueue(tenant_bytes_per_s=budget)
    members: set[Member] = set()
    buckets = {tenant: TokenBucket(budget) for tenant in "abc"}
    now_s = 0.0
    for _ in range(150):
        now_s += rng.choice([0.0, 0.01, 0.3])
        member = (f"member {rng.randrange(6)}", rng.choice(list(Priority)), rng.choice("abc"))
        move = rng.choice(["join", "leave", "serve"])
        if move == "join":
            queue.join(*member)
            members.add(member)
        elif move == "leave":
            queue.leave(*member)
            members.discard(member)
        elif member in members:
            queue.served(*member, 50, now_s)
            buckets[member[2]].spend(50, now_s)
        listed = list(queue.in_order(now_s))
        assert len(listed) == len(set(listed))
        may_send = {tenant for tenant in "abc" if buckets[tenant].ready_at(now_s) <= now_s}
        assert set(listed) == {item for item in members if item[2] in may_send}
        assert len(queue) == len(members)
        ready_at_s = queue.ready_at(now_s)
        assert (ready_at_s is None) == (not members)
        assert bool(listed) == (ready_at_s is not None and ready_at_s <= now_s)


def test_budgets_of_tenants_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.sending.fair_queue.MAX_BUDGETS", 3)
    queue: FairQueue[int] = FairQueue(tenant_bytes_per_s=100.0)
    for number in range(10):
        tenant = f"tenant {number}"
        queue.join(number, Priority.REQUEST, tenant)
        queue.served(number, Priority.REQUEST, tenant, 10, 0.0)
        queue.leave(number, Priority.REQUEST, tenant)
    assert len(queue._budgets) == 3
