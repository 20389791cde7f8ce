"""Probes inside one agent: the ring, limits, leases and ends. No sockets; time is literal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from transfer_io_double import FakeIo

from kvmanager.agent.links.host_load import agent_load, kernel_tcp, usable_cpus
from kvmanager.agent.links.probing import (
    KEEP_S,
    MAX_PROBE_BYTES,
    MAX_PROBES,
    AgentProbes,
    RingSpace,
    SinkSpace,
)
from kvmanager.agent.probe_messages import ProbeLanding
from kvmanager.agent.transfer_io import TransferIo
from kvmanager.transfers.records import BadRequest, NoArenaRoom, UnknownTransfer
from transport import (
    Endpoint,
    LocalError,
    Priority,
    TransferProgress,
    TransferState,
    TransportConfig,
)

TID, KEYS, B = bytes(16), (bytes(32), bytes(32)), Endpoint("b", 7100)


def progress(state: TransferState, acked_bytes: int = 7) -> TransferProgress:
    return TransferProgress(state, 10, 10, 10, acked_bytes, 0, 0.0, 0.0, None, 2)


@pytest.fixture
def io() -> FakeIo:
    return FakeIo(progress(TransferState.OPEN), ends=False)


@pytest.fixture
def prober(io: FakeIo) -> AgentProbes:
    return AgentProbes(cast(TransferIo, io), TransportConfig(), Endpoint("a", 1))


def land(prober: AgentProbes, now_s: float = 0.0, nbytes: int = 1000) -> bytes:
    return bytes.fromhex(prober.open_landing(ProbeLanding(nbytes, 5.0), now_s).transfer_id)


async def send(prober: AgentProbes, now_s: float = 0.0, transfer_id: bytes = TID) -> None:
    await prober.open_send(
        transfer_id, keys=KEYS, endpoint=B, nbytes=1000, lease_s=5.0, clock_s=lambda: now_s
    )


def test_a_ring_goes_round() -> None:
    memory = bytearray(range(10))
    ring = RingSpace(memoryview(memory), 35)
    assert [bytes(view) for view in ring.views(8, 15)] == [
        bytes([8, 9]),
        bytes(range(10)),
        bytes([0, 1, 2]),
    ]
    assert ring.views(20, 0) == []
    for offset, length in ((-1, 2), (30, 6), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            ring.views(offset, length)


def test_threads_do_not_write_over_each_other_in_a_sink() -> None:
    sink = SinkSpace(35)

    def write(content: bytes) -> list[memoryview]:
        views = sink.views(5, 10)
        views[0][:] = content
        return views

    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(write, b"y" * 10).result()
        ours = write(b"x" * 10)
        assert (bytes(theirs[0]), bytes(ours[0])) == (b"y" * 10, b"x" * 10)
    assert sink.views(20, 8)[0].obj is ours[0].obj  # what was there is of no more interest
    assert [len(view) for view in sink.views(0, 35)] == [35]
    for offset, length in ((-1, 2), (30, 6), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            sink.views(offset, length)


def test_a_landing_lives_on_its_lease(prober: AgentProbes, io: FakeIo) -> None:
    transfer_id = land(prober)
    assert io.admitted[transfer_id].nbytes == 1000
    prober.tick(4.9)
    assert prober.status(transfer_id, "landing", 5.0, 4.9).state == "open"
    prober.tick(9.0)
    assert prober.num_open("landing") == 1
    prober.tick(9.9)
    assert prober.num_open("landing") == 0
    assert "gone away" in io.dropped[transfer_id]
    assert prober.status(transfer_id, "landing", 1.0, 10.0).state == "cancelled"
    prober.tick(9.9 + KEEP_S)
    with pytest.raises(UnknownTransfer):
        prober.status(transfer_id, "landing", 1.0, 40.0)


def test_a_landing_that_the_sender_ends_frees_its_memory(prober: AgentProbes, io: FakeIo) -> None:
    transfer_id = land(prober)
    io.landing = progress(TransferState.OPEN)
    prober.tick(0.1)
    assert prober.num_open("landing") == 1
    io.landing = progress(TransferState.CANCELLED)
    prober.tick(0.2)
    assert prober.num_open("landing") == 0
    assert transfer_id in io.dropped  # nobody is let in any more
    status = prober.status(transfer_id, "landing", 5.0, 0.3)
    assert (status.state, status.done_bytes) == ("cancelled", 7)
    assert not prober.end(transfer_id, "late", 0.4)


@pytest.mark.parametrize("is_told_first", [True, False])
def test_why_a_landing_failed_is_told(prober: AgentProbes, io: FakeIo, is_told_first: bool) -> None:
    transfer_id = land(prober)
    io.landing = progress(TransferState.FAILED)
    if is_told_first:
        prober.landing_failed(transfer_id, "idle: no connection")
    prober.tick(0.1)
    prober.landing_failed(transfer_id, "idle: no connection")
    prober.landing_failed(b"z" * 16, "a landing of the table")
    status = prober.status(transfer_id, "landing", 5.0, 0.2)
    assert (status.state, status.error) == ("failed", "idle: no connection")


async def test_a_send_is_ready_at_once_and_behind_requests(prober: AgentProbes, io: FakeIo) -> None:
    await send(prober)
    spec, space, _ = io.opened[0]
    assert (spec.priority, spec.endpoint) == (Priority.REPLICATION, B)
    assert io.outgoing.ready_ranges == [(0, 1000)]
    assert len(set(bytes(space.views(0, 1000)[0]))) > 100  # no codec makes it smaller
    status = prober.status(TID, "send", 5.0, 1.0)
    assert (status.state, status.done_bytes, status.congestion) == ("open", 7, "bbr")
    with pytest.raises(BadRequest, match="already"):
        await send(prober)


async def test_the_memory_of_a_send_is_free_when_the_sender_has_let_go(
    prober: AgentProbes, io: FakeIo
) -> None:
    await send(prober)
    prober.tick(5.0)
    assert io.outgoing.cancelled == ["its caller has gone away"]
    assert prober.num_open("send") == 1
    io.opened[0][2].on_failed(TID, LocalError("cancelled", "x"))
    assert prober.num_open("send") == 0
    assert prober.status(TID, "send", 1.0, 5.1).state == "cancelled"


@pytest.mark.parametrize("succeeds", [True, False])
async def test_the_end_of_a_send(prober: AgentProbes, io: FakeIo, succeeds: bool) -> None:
    await send(prober)
    listener = io.opened[0][2]
    if succeeds:
        listener.on_complete(TID)
    else:
        listener.on_failed(TID, LocalError("unreachable", "no way"))
    status = prober.status(TID, "send", 1.0, 0.5)
    expected = ("complete", "") if succeeds else ("failed", "unreachable: no way")
    assert (status.state, status.error) == expected
    assert prober.num_open("send") == 0


async def test_a_send_that_cannot_begin_leaves_nothing(prober: AgentProbes, io: FakeIo) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the sender is closed")

    io.open_probe = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError):
        await send(prober)
    assert prober.num_open("send") == 0


async def test_limits(prober: AgentProbes) -> None:
    for nbytes in (0, -1, MAX_PROBE_BYTES + 1):
        with pytest.raises(BadRequest, match="a probe of"):
            land(prober, nbytes=nbytes)
    for lease_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadRequest, match="lease"):
            prober.open_landing(ProbeLanding(1000, lease_s), 0.0)
    first = [land(prober) for _ in range(MAX_PROBES)]
    with pytest.raises(NoArenaRoom, match="probes run here"):
        land(prober)
    assert prober.end(first[0], "done", 0.0)
    land(prober)
    for number in range(MAX_PROBES):
        await send(prober, transfer_id=bytes([number]) * 16)
    with pytest.raises(NoArenaRoom, match="probes run here"):
        await send(prober, transfer_id=b"z" * 16)


async def test_close_ends_everything(prober: AgentProbes, io: FakeIo) -> None:
    transfer_id = land(prober)
    await send(prober)
    prober.close(1.0)
    assert transfer_id in io.dropped
    assert io.outgoing.cancelled == ["the agent is stopping"]


def test_the_host_is_read() -> None:
    before, after = agent_load(1.0), agent_load(2.0)
    assert after.cpu_s >= before.cpu_s > 0
    assert after.host_busy_s >= before.host_busy_s > 0
    assert 0 < usable_cpus() <= before.host_cpus
    kernel = kernel_tcp()
    assert kernel.tcp_wmem_bytes > 0
    assert "reno" in kernel.available_congestion
    assert kernel.tcp_memory_pressure_bytes > 0
