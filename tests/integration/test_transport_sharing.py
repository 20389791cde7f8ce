"""How transfers share a link between a real sender and a real receiver: priorities, tenants,
budgets, the pace, and the number of connections.

What is judged is the order in which the sender reads the memory of its transfers, which one
connection makes exact. Time decides only where time is the promise.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from shared_link import PLENTY, WatchedLink
from transport_loopback import LoopbackPair, eventually
from transport_network import Network

from transport import Elements, Priority, TransportConfig
from transport.config import KIB, MIB

FRAME = 1000
CONFIG = TransportConfig(
    num_connections=1,
    autotune=False,
    frame_bytes=FRAME,
    max_autotuned_frame_bytes=MIB,
    codec="none",
)
REQUEST, REPLICATION = Priority.REQUEST, Priority.REPLICATION
NOTICED_S = 0.2
"""So long a test waits for what shall not happen. What delays it lasts far longer."""


def make_link(**settings: Any) -> closing[WatchedLink]:
    return closing(WatchedLink(LoopbackPair(replace(CONFIG, **settings))))


@pytest.fixture
def link() -> Iterator[WatchedLink]:
    with make_link() as link:
        yield link


# Shares.


@pytest.mark.parametrize(
    ("requests", "copies"), [(1, 1), (50, 1), (1, 50)], ids=["one each", "requests", "copies"]
)
def test_requests_leave_replication_a_thirty_second_part(
    link: WatchedLink, requests: int, copies: int
) -> None:
    for number in range(copies):
        link.open("copy", priority=REPLICATION, tenant=f"tenant {number % 3}")
    for number in range(requests):
        link.open("request", priority=REQUEST, tenant=f"tenant {number % 3}")
    sent = link.bytes_of(1600)
    assert sent["copy"] / sent.total() == pytest.approx(1 / 32, rel=0.05)


def test_replication_has_the_link_to_itself_until_a_request_wants_it(link: WatchedLink) -> None:
    link.open("copy", priority=REPLICATION)
    request = link.open("request", ready=0)
    link.on_read = lambda: request.ready(0, FRAME) if len(link.reads) == 100 else None
    assert link.bytes_of(100) == {"copy": 100 * FRAME}
    assert link.bytes_of(1, after=100) == {"request": FRAME}
    assert link.bytes_of(100, after=101) == {"copy": 100 * FRAME}


def test_tenants_share_equally_whatever_number_of_transfers_they_have(link: WatchedLink) -> None:
    for number in range(5):
        link.open(f"many {number}", tenant="many")
    link.open("one", tenant="one")
    sent = link.bytes_of(1000)
    assert sent.pop("one") == pytest.approx(500 * FRAME, abs=2 * FRAME)
    assert list(sent.values()) == pytest.approx([100 * FRAME] * 5, abs=2 * FRAME)


def test_transfers_share_equally_in_bytes_whatever_their_frames(link: WatchedLink) -> None:
    link.open("large")
    small = link.open("small", ready=0)
    small.ready_ranges([(start, 70) for start in range(0, len(PLENTY) // 4, 140)])
    sent = link.bytes_of(3000)
    assert sent["large"] == pytest.approx(sent["small"], abs=2 * FRAME)


@pytest.mark.parametrize(
    ("spec", "share"),
    [
        ({"tenant": "steady"}, 1 / 2),
        ({"tenant": "other"}, 1 / 2),
        ({"tenant": "steady", "priority": REPLICATION}, 1 / 32),
    ],
    ids=["transfer", "tenant", "copy"],
)
def test_what_becomes_ready_in_small_pieces_gets_no_more_than_its_share(
    link: WatchedLink, spec: dict[str, Any], share: float
) -> None:
    link.open("steady", tenant="steady")
    pieces = link.open("pieces", ready=0, **spec)
    given = itertools.count()

    def give_the_next() -> None:
        """Once the last one is on its way."""
        if link.reads.count(("pieces", FRAME)) == pieces.progress().ready_bytes // FRAME:
            pieces.ready(next(given) * FRAME, FRAME)

    link.on_read = give_the_next
    sent = link.bytes_of(1600)
    assert sent["pieces"] / sent.total() == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("num_before", [0, 5])
def test_one_that_comes_neither_catches_up_nor_waits(link: WatchedLink, num_before: int) -> None:
    link.open("steady")
    late = link.open("late", ready=num_before * FRAME)
    link.on_read = lambda: late.ready(0, len(PLENTY)) if len(link.reads) == 1000 else None
    assert link.bytes_of(1000)["late"] == num_before * FRAME
    assert link.bytes_of(3, after=1000)["late"] > 0
    sent = link.bytes_of(200, after=1000)
    assert sent["late"] == pytest.approx(sent["steady"], abs=2 * FRAME)


def test_many_small_copies_do_not_pass_a_request_by(link: WatchedLink) -> None:
    link.open("request")

    def open_copies() -> None:
        if len(link.reads) == 100:
            for _ in range(20):
                link.open("copy", bytearray(100), priority=REPLICATION)

    link.on_read = open_copies
    sent = link.bytes_of(50, after=100)
    assert sent["copy"] <= sent["request"] / 31 + 200
    assert link.bytes_of(1000, after=100)["copy"] == 20 * 100


# Budgets and the pace.


def test_a_tenant_over_its_budget_waits_and_others_go_on() -> None:
    with make_link(tenant_bytes_per_s=10.0) as link:
        first = link.open("a", bytearray(FRAME), tenant="a")
        link.let_go()
        assert link.pair.listener.wait(first.transfer_id) is None
        for _ in range(20):
            link.open("a", bytearray(100), tenant="a")
        link.open("a", tenant="a", priority=REPLICATION)
        link.open("b", tenant="b", priority=REPLICATION)
        link.bytes_of(2)
        time.sleep(NOTICED_S)
        assert link.reads == [("a", FRAME), ("b", FRAME)]


def test_waiting_for_a_budget_ends_and_is_no_lack_of_progress() -> None:
    limits = {"handshake_timeout_s": 0.4, "ack_timeout_s": 0.4, "idle_timeout_s": 0.6}
    with make_link(tenant_bytes_per_s=1000.0, **limits) as link:
        link.let_go()
        began_s = time.monotonic()
        handles = [link.open(name, bytearray(FRAME), tenant="a") for name in ("one", "two")]
        for handle in handles:
            assert link.pair.listener.wait(handle.transfer_id) is None
        assert time.monotonic() - began_s > 0.9


@pytest.mark.parametrize("setting", ["pace_bytes_per_s", "tenant_bytes_per_s"])
def test_a_rate_holds_over_time_and_connections(setting: str) -> None:
    rate, num_frames = 200_000.0, 120
    with make_link(num_connections=3, **{setting: rate}) as link:
        for number in range(3):
            link.open(f"transfer {number}", tenant="a")
        began_s = time.monotonic()
        link.bytes_of(num_frames)
        took_s = time.monotonic() - began_s
        # 10 ms may come at once; each connection may have begun a frame.
        assert took_s > (num_frames - 4) * FRAME / rate - 0.01
        assert took_s < 5 * num_frames * FRAME / rate


@pytest.mark.parametrize("coded_part", [0.5, 0.01])
def test_coded_bytes_cost_the_pace_what_they_take_on_the_wire(coded_part: float) -> None:
    """`coded_part` of each frame is random, so that this is what coding leaves of it."""
    rate, frame, num_frames = 400_000.0, 20_000, 40
    noise = random.Random(0).randbytes(int(frame * coded_part))
    with make_link(pace_bytes_per_s=rate, frame_bytes=frame, codec="lz4") as link:
        data = bytearray(num_frames * noise.ljust(frame, b"\0"))
        handle = link.open("coded", data, elements=Elements.BYTES)
        began_s = time.monotonic()
        link.let_go()
        assert link.pair.listener.wait(handle.transfer_id) is None
        took_s = time.monotonic() - began_s
        wire_bytes = handle.progress().wire_bytes
        assert wire_bytes < 2 * coded_part * len(data)
        assert took_s > 0.9 * (wire_bytes - frame) / rate - 0.01
        assert took_s < 0.75 * len(data) / rate


def test_control_is_not_paced() -> None:
    with make_link(pace_bytes_per_s=10.0) as link:
        link.open("first")
        link.bytes_of(1)
        second = link.open("second")
        eventually(lambda: link.pair.receiver.progress(second.transfer_id) is not None, 5)
        second.cancel("not wanted")
        error = link.pair.listener.wait(second.transfer_id, 5)
        assert error is not None
        assert error.code == "cancelled"
        assert link.reads == [("first", FRAME)]


# The number of connections, and the size of frames.


def test_a_standby_opens_and_cancels_and_steps_in_for_a_lost_connection() -> None:
    """On a near path the tuner lets one connection carry data."""
    patient = replace(CONFIG, num_connections=3, reconnect_first_s=60.0, reconnect_max_s=60.0)
    network = Network(replace(patient, autotune=True))
    with closing(WatchedLink(network, network.proxy.endpoint)) as link:
        first = link.open("first", bytearray(4 * MIB), ready=0)
        eventually(lambda: link.pair.sender.num_connections(link.endpoint) == 3)
        eventually(lambda: link.num_carrying() == link.state().width == 1)
        first.ready(0, MIB)
        second = link.open("second")
        eventually(lambda: link.pair.receiver.progress(second.transfer_id) is not None)
        second.cancel("not wanted")
        assert link.pair.listener.wait(second.transfer_id) is not None
        assert [name for name, _ in link.reads] == ["first"]
        link.let_go()
        for number in network.proxy.open_connections[1:]:
            network.proxy.strike("cut", "forward", connection=number)
            before = first.progress().ready_bytes
            first.ready(before, MIB // 2)
            assert first.wait_acked(before + MIB // 2, 20)
            assert link.num_carrying() == 1
        assert link.state().backlog.queued_bytes == 0


def test_without_autotune_nothing_changes() -> None:
    with make_link(num_connections=3, pace_bytes_per_s=5e6) as link:
        link.open("transfer")
        link.bytes_of(1500)
        eventually(lambda: link.num_carrying() == 3)
        state = link.state()
        assert (state.width, state.frame_bytes) == (3, FRAME)
        assert state.measured.rate_bytes_per_s == 0.0


def test_a_link_has_as_many_connections_as_help_and_no_more_than_its_limit() -> None:
    """One connection carries 3.5 MB/s here, and all together 5 MB/s: two are best."""
    frame, pace = 16 * KIB, 5e6
    settings = {"frame_bytes": frame, "max_autotuned_frame_bytes": frame}
    with make_link(
        autotune=True, max_link_connections=3, pace_bytes_per_s=pace, **settings
    ) as link:
        link.pause_s = frame / 3.5e6
        link.open("transfer", bytearray(32 * MIB))
        link.let_go()
        widths = [1]

        def is_steady() -> bool:
            state = link.state()
            if state.width != widths[-1]:
                widths.append(state.width)
            return state.phase == "steady"

        eventually(is_steady)
        assert widths == [1, 2, 3, 1, 2]
        eventually(lambda: link.state().measured.rate_bytes_per_s == pytest.approx(pace, rel=0.15))
        assert link.num_carrying() == 2
        assert len(link.state().connections) <= 3


def test_frames_are_small_while_transfers_share_and_towards_the_end() -> None:
    with make_link(autotune=True) as link:
        large = link.open("large", bytearray(9 * MIB), ready=0)
        small = link.open("small", bytearray(200 * FRAME), ready=0)
        eventually(lambda: link.state().frame_bytes == MIB)
        for handle in (small, large):
            handle.ready(0, handle.progress().nbytes)
        link.let_go()
        for handle in (small, large):
            assert link.pair.listener.wait(handle.transfer_id) is None
        shared = max(place for place, (name, _) in enumerate(link.reads) if name == "small")
        sizes = [num_bytes for _, num_bytes in link.reads]
        assert set(sizes[1:shared]) == {FRAME}
        alone = sizes[shared + 1 :]
        assert alone[:6] == [MIB] * 6
        assert alone == sorted(alone, reverse=True)
        assert all(size % FRAME == 0 for size in alone[:-1] if size < MIB)
        assert alone[-1] <= FRAME
