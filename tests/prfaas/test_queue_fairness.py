"""The job queue under load: who waits for whom, that nobody starves, and what a decision costs."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.queue import PrefillQueue, _Instance, _takes
from prfaas.queue_values import FailJob, QueueConfig, QueuedJob, QueueInstance, StartJob
from scheduler.routing.front_placement import Room
from scheduler.routing.order_config import OrderConfig

TOKENS_PER_S = 30_000.0
BUCKETS = OrderConfig().buckets


def busy_queue(**config: int) -> PrefillQueue:
    """A cluster of one instance, which has something to do."""
    q = PrefillQueue("prefill-a", QueueConfig(**config))
    q.instance_changed(QueueInstance("p0", "m", healthy=True, room=Room(1)), 0.0)
    q.submit(QueuedJob("running", "m", 0, 10), 0.0)
    return q


def drained(q: PrefillQueue, now_s: float) -> list[str]:
    keys, running = [], "running"
    while effects := q.finished(running, now_s):
        (start,) = effects
        assert isinstance(start, StartJob)
        keys.append(running := start.key)
        q.check_invariants()
    return keys


@given(st.lists(st.integers(1, 450_000), max_size=30))
@settings(max_examples=60, deadline=None)
def test_within_a_bucket_shorter_jobs_go_first(lengths: list[int]) -> None:
    q = busy_queue()
    for i, num_tokens in enumerate(lengths):
        q.submit(QueuedJob(f"{i}", "m", 0, num_tokens), 1.0)
    keys = drained(q, 1.0)
    assert sorted(keys) == sorted(f"{i}" for i in range(len(lengths)))
    order = OrderConfig()
    for bucket in range(len(BUCKETS)):
        started = [lengths[int(key)] for key in keys]
        inside = [tokens for tokens in started if order.bucket_of(tokens) == bucket]
        assert inside == sorted(inside)


def test_buckets_share_what_is_started() -> None:
    q = busy_queue(max_queued=400)
    for i in range(300):
        q.submit(QueuedJob(f"short {i}", "m", 0, 10_000), 1.0)
        if i < 15:
            q.submit(QueuedJob(f"long {i}", "m", 0, 100_000), 1.0)
    at = [i for i, key in enumerate(drained(q, 1.0)) if key.startswith("long")]
    # 100,000 tokens of a share of 0.25 are 240,000 of one of 0.6.
    assert {b - a - 1 for a, b in pairwise(at[:10])} == {24}


@given(seed=st.integers(0, 2**32 - 1), load=st.sampled_from([0.7, 0.95, 1.5]))
@settings(max_examples=10, deadline=None)
def test_nobody_starves(seed: int, load: float) -> None:
    """A cluster given up to half more than it can do: what was accepted starts, and in time."""
    rng = random.Random(seed)
    q = busy_queue(max_queued=24)
    lengths = {"running": 10}
    busy, free_s, now_s = "running", 0.1, 0.0
    longest_s: dict[int, float] = {}
    for i in range(200):
        num_tokens = rng.choice([2_000, 20_000, 50_000, 100_000])
        arrival_s = now_s + rng.expovariate(load * TOKENS_PER_S / 43_000)
        while busy and free_s <= arrival_s:
            now_s = free_s
            effects = q.finished(busy, now_s)
            busy = ""
            for effect in effects:
                assert isinstance(effect, StartJob)  # nothing is given up
                priority = int(effect.key.split()[1])
                longest_s[priority] = max(longest_s.get(priority, 0.0), effect.queue_s)
                busy, free_s = effect.key, now_s + lengths[effect.key] / TOKENS_PER_S
        now_s = arrival_s
        priority = rng.choice([-5, -5, -5, 0, 7])
        key = f"{i} {priority}"
        lengths[key] = num_tokens
        for effect in q.submit(QueuedJob(key, "m", priority, num_tokens), now_s):
            if isinstance(effect, StartJob):
                busy, free_s = effect.key, now_s + num_tokens / TOKENS_PER_S
            else:
                assert isinstance(effect, FailJob)
                assert effect.code == "queue_full"
    q.check_invariants()
    assert all(waited_s < QueueConfig().max_wait_s for waited_s in longest_s.values())


def test_hundreds_of_waiting_jobs_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them wait for an instance that is full, and are passed over each time."""
    q = PrefillQueue("prefill-a", QueueConfig(max_queued=500))
    for name in ("m", "n"):
        q.instance_changed(QueueInstance(name, name, healthy=True, room=Room(1)), 0.0)
    num_asked = 0

    def takes(instance: _Instance, model: str, tried: tuple[str, ...]) -> bool:
        nonlocal num_asked
        num_asked += 1
        return _takes(instance, model, tried)

    monkeypatch.setattr("prfaas.queue._takes", takes)
    rng = random.Random(1)
    running: list[str] = []
    for i in range(500):
        job = QueuedJob(f"{i}", "mn"[i % 2], rng.choice([0, 1]), rng.randrange(500_000))
        running += [effect.key for effect in q.submit(job, 0.0)]
    key = running[0]
    for _ in range(249):
        (start,) = q.finished(key, 1.0)
        key = start.key
    assert (len(running), q.depth) == (2, 249)
    assert num_asked < 750 * 8  # a few for each event, however many wait
