"""24 virtual hours of nodes, tenants, requests and links that come and go leave nothing behind.

Each case drives one core for an hour with names that it has never seen before. What its tables hold
after any later hour may not be more than what they held at some time of the first two hours.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from eventually import wait_until
from transport_doubles import MemorySpace, make_spec
from transport_loopback import LoopbackPair

from kvmanager.agent.messages import CacheFeed
from kvmanager.directory.directory import Directory
from kvmanager.directory.messages import NodeName
from kvmanager.logs import Repeats
from kvmanager.transfers.blocks import BlockAllocator
from kvmanager.transfers.records import EnginePeer, LandingSpec, NoArenaRoom, OutboxSpec
from kvmanager.transfers.shared import TableLimits
from kvmanager.transfers.table import TransferTable
from netmon.monitor import LinkMonitor
from netmon.samples import LinkSample
from prfaas.queue import PrefillQueue
from prfaas.queue_values import QueueConfig, QueuedJob, QueueInstance, StartJob
from scheduler.live.ledger import DirectPrompt, Ledger, PrefillLeg
from scheduler.live.tenants import TenantLedger, TenantLimit
from scheduler.routing.front_placement import Room
from scheduler.routing.prefix_demand import CachedPrefix, DemandTracker
from transport import Sender, TransportConfig

HOURS = 24
STEPS_AN_HOUR = 12
STEP_S = 3600 / STEPS_AN_HOUR

Steps = Iterator[object]
"""Drives a core; what it yields once a step is the core."""


def table_sizes(thing: object) -> dict[str, int]:
    """Entries of every container that can be reached from `thing`, by the path of attributes."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def visit(item: object, path: str) -> None:
        if id(item) in seen or isinstance(item, str | bytes | bytearray | memoryview | int | float):
            return
        seen.add(id(item))
        if isinstance(item, Mapping):
            sizes[path] = sizes.get(path, 0) + len(item)
            for value in item.values():
                visit(value, f"{path}[]")
        elif isinstance(item, Set) or hasattr(item, "popleft") or isinstance(item, list | tuple):
            sizes[path] = sizes.get(path, 0) + len(item)  # type: ignore[arg-type]
            for value in item:  # type: ignore[attr-defined]
                visit(value, f"{path}[]")
        elif type(item).__module__.split(".")[0] in OURS:
            for name in attributes(item):
                visit(getattr(item, name, None), f"{path}.{name}")

    visit(thing, type(thing).__name__)
    return sizes


def sizes_at_once(sender: Sender) -> dict[str, int] | None:
    """None if the sender's threads have changed a table while it was looked at."""
    with suppress(RuntimeError):
        return table_sizes(sender)
    return None


OURS = {"kvmanager", "netmon", "prfaas", "scheduler", "transport"}


def attributes(item: object) -> list[str]:
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(item, "__dict__", {}), *slots]


def ledger(draw: random.Random) -> Steps:
    core = Ledger()
    for step in count():
        now_s = step * STEP_S
        for number in range(20):
            name, instance = f"{step}-{number}", f"instance-{step}-{number % 4}"
            leg = PrefillLeg("a", 100, 100, now_s, now_s + 1, 1e6, "m", 0, instance)
            core.begun(instance, now_s)
            core.leg_begun(name, leg)
            core.legs_reported("a", {name})
            core.direct_over(core.direct_begun(DirectPrompt(instance, 9, 9, now_s)))
            core.prefill_ended("a", instance, now_s + draw.random())
            core.leg_over(name, now_s + 2)
            core.answer_over(name, now_s + 3)
            core.ended(instance, now_s + 4)
        yield core


def tenants(draw: random.Random) -> Steps:
    core = TenantLedger(TenantLimit(tokens_per_s=100.0, burst_tokens=1000.0))
    for step in count():
        for number in range(100):
            tenant = f"tenant-{step}-{number}"
            core.started(tenant, draw.randint(1, 900), step * STEP_S)
            core.ended(tenant, core.in_flight(tenant)[1])
        yield core


def transfers(draw: random.Random) -> Steps:
    limits = TableLimits(drain_s=30.0, report_keep_s=60.0, max_lease_s=300.0)
    core = TransferTable(BlockAllocator(64), 10, limits)
    fingerprint = b"f" * 32
    for step in count():
        now_s = step * STEP_S
        core.connect(EnginePeer(step, f"engine-{step}", "worker", 0, 1, fingerprint))
        for number in range(4):
            transfer_id = (step * 8 + number).to_bytes(16, "big")
            landing = LandingSpec(transfer_id, b"t" * 32, 25, 3, fingerprint, b"d" * 32, 90.0)
            outbox_id = (step * 8 + number + 4).to_bytes(16, "big")
            try:
                core.landings.reserve(landing, now_s)
                core.outboxes.open(OutboxSpec(outbox_id, 25, 3, fingerprint, 90.0), now_s)
            except NoArenaRoom:
                continue
            core.outboxes.attach(step, outbox_id, core.outboxes.last_attempt)
            match draw.randrange(4):
                case 0:
                    core.landings.complete(transfer_id, now_s)
                case 1:
                    core.cancel(transfer_id, "the client has gone", now_s)
                case 2:
                    core.landings.failed(transfer_id, "the link is down", now_s)
                case _:
                    continue  # nobody says anything any more
            core.landings.dropped(transfer_id)
        core.disconnected(step, now_s)
        for passed_s in (1, 31):
            core.expire(now_s + passed_s)
        yield core


def demand(draw: random.Random) -> Steps:
    core = DemandTracker()
    for step in count():
        for _ in range(50):
            core.observe(CachedPrefix("m", bytes(16), draw.randbytes(64)), step * STEP_S)
        yield core


def prefills(draw: random.Random) -> Steps:
    core = PrefillQueue("a", QueueConfig())
    core.instance_changed(QueueInstance("p0", model="m", healthy=True, room=Room(4)), 0.0)
    for step in count():
        now_s = step * STEP_S
        running: list[str] = []
        for number in range(20):
            job = QueuedJob(f"{step}-{number}", "m", draw.randint(-2, 2), draw.randint(1, 9000))
            running += [e.key for e in core.submit(job, now_s) if isinstance(e, StartJob)]
        while running:
            effects = core.finished(running.pop(0), now_s + 1)
            running += [effect.key for effect in effects if isinstance(effect, StartJob)]
        yield core


def directory(draw: random.Random) -> Steps:
    core = Directory()
    for step in count():
        node = NodeName("a", f"node-{step}")
        keys, flags = draw.randbytes(8 * 20), (1).to_bytes(2, "little") * 20
        feed = CacheFeed(
            epoch=f"e{step}", seq=1, keys=keys, flags=flags, is_snapshot=True, more=False
        )
        assert core.apply(node, feed, step * STEP_S)
        core.forget(node)
        yield core


def log_texts(draw: random.Random) -> Steps:
    core = Repeats()
    for step in count():
        for _ in range(50):
            core.admit(draw.randbytes(8), step * STEP_S)
        yield core


def link(draw: random.Random) -> Steps:
    core = LinkMonitor("a/n0")
    acked_bytes = 0
    for step in count():
        for second in range(0, int(STEP_S), 20):
            acked_bytes += draw.randint(0, 10**9)
            sample = LinkSample(acked_bytes=acked_bytes, queued_bytes=draw.randint(0, 9))
            core.observe(sample, step * STEP_S + second)
        yield core


CASES = [ledger, tenants, transfers, demand, prefills, directory, log_texts, link]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_no_table_grows_for_a_day(case: Callable[[random.Random], Steps]) -> None:
    steps = case(random.Random(24))
    most: dict[str, int] = {}
    for hour in range(HOURS):
        for _ in range(STEPS_AN_HOUR):
            core: Any = next(steps)
            if hour < 2:
                for path, size in table_sizes(core).items():
                    most[path] = max(size, most.get(path, 0))
        assert most
        grown = {
            path: (size, most.get(path, 0))
            for path, size in table_sizes(core).items()
            if size > 1.5 * most.get(path, 0) + 8
        }
        assert grown == {}, f"after {hour + 1} hours, of at most so many in the first two"


def test_a_sender_forgets_the_budgets_of_tenants_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It remembers some, because debts outlive the transfers that made them."""
    monkeypatch.setattr("transport.sending.fair_queue.MAX_BUDGETS", 8)
    most: dict[str, int] = {}
    with closing(LoopbackPair(TransportConfig(tenant_bytes_per_s=1e9))) as pair:
        for half in range(2):
            specs = [make_spec(half * 100 + number, pair.endpoint) for number in range(100)]
            for spec in specs:
                pair.registry.expect(spec, MemorySpace(bytearray(1)))
                spec = replace(spec, tenant=spec.transfer_id.hex())
                pair.sender.open(spec, MemorySpace(bytearray(1)), pair.listener).ready(0, 1)
            for spec in specs:
                assert pair.listener.wait(spec.transfer_id) is None
            most = most or wait_until(lambda: sizes_at_once(pair.sender))
        # Its threads are still busy with the last transfers.
        wait_until(lambda: not grown(sizes_at_once(pair.sender), most))


def grown(sizes: dict[str, int] | None, most: dict[str, int]) -> object:
    """The containers that are larger than they may be; all of them if there are no sizes."""
    if sizes is None:
        return most
    return {path: size for path, size in sizes.items() if size > 1.5 * most.get(path, 0) + 8}
