"""Looking at links: what is read of the sender, how often, what is told. No sockets."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from transfer_io_double import FakeIo

from kvmanager.agent.config import AgentConfig
from kvmanager.agent.grants import AgentGrants
from kvmanager.agent.links.control import MAX_PROBE_BYTES, MAX_PROBES, LinkControl
from kvmanager.agent.links.messages import SendLinkProbe, WatchLinks
from kvmanager.agent.links.watch import (
    GIVE_UP_S,
    KEEP_S,
    RETRY_S,
    LinkWatch,
    WatchSettings,
    link_sample,
)
from kvmanager.agent.transfer_io import TransferIo
from kvmanager.transfers.records import BadRequest, NoArenaRoom
from netmon.detector import DetectorConfig
from netmon.estimate import LinkCondition, PathReport
from netmon.tcp_info import TcpInfo
from transport import (
    Backlog,
    ConnectionState,
    Endpoint,
    LinkState,
    TransferProgress,
    TransferState,
    TuningWindow,
)

FAR = Endpoint("far", 7100)
MB = 1_000_000
SETTINGS = WatchSettings(detector=DetectorConfig(dwell_s=0.5, calm_s=0.5), interval_s=0.2)


def info(acked_bytes: int, busy_s: float, notsent_bytes: int) -> TcpInfo:
    return TcpInfo(
        rtt_s=0.021,
        min_rtt_s=0.02,
        mss_bytes=1000,
        unacked_segments=20,
        acked_bytes=acked_bytes,
        sent_bytes=acked_bytes,
        retransmitted_bytes=0,
        notsent_bytes=notsent_bytes,
        busy_s=busy_s,
        rwnd_limited_s=0.0,
        sndbuf_limited_s=0.0,
    )


class FakeSender:
    """One link of which a test says what it does."""

    def __init__(self) -> None:
        self.is_known = True
        self.acked_bytes = 0
        self.busy_s = 0.0
        self.queued_bytes = 0
        self.is_up = True
        self.num_looks = 0
        self.warmed: list[Endpoint] = []

    def link_activity(self) -> dict[Endpoint, bool]:
        return {FAR: self.queued_bytes > 0} if self.is_known else {}

    def link_state(self, endpoint: Endpoint) -> LinkState | None:
        assert endpoint == FAR
        self.num_looks += 1
        if not self.is_known:
            return None
        notsent = 100 if self.queued_bytes else 0
        connection = ConnectionState(1, True, info(self.acked_bytes, self.busy_s, notsent))
        ended = ConnectionState(0, True, info(5, 1.0, 10**9), is_open=False)
        return LinkState(
            endpoint=str(endpoint),
            width=1,
            frame_bytes=1,
            phase="",
            measured=TuningWindow(),
            codec="raw",
            codec_reason="",
            acked_bytes=self.acked_bytes,
            connections=[connection, ended] if self.is_up else [ended],
            backlog=Backlog(self.queued_bytes, int(self.queued_bytes > 0), 1.5),
            trouble="" if self.is_up else "connection refused",
        )

    def warm(self, endpoint: Endpoint) -> None:
        self.warmed.append(endpoint)


class Rig:
    """A watch with time in the test's hands."""

    def __init__(self, settings: WatchSettings = SETTINGS) -> None:
        self.now_s = 100.0
        self.sender = FakeSender()
        self.registry = CollectorRegistry()
        self.watch = LinkWatch(
            self.sender, settings, self.registry, data_endpoint="me:1", clock_s=lambda: self.now_s
        )

    def run(self, duration_s: float, bytes_per_s: float = 0.0) -> None:
        """Look as often as the shell would, while so much is carried."""
        for _ in range(round(duration_s / 0.2)):
            self.now_s += 0.2
            self.sender.acked_bytes += int(bytes_per_s * 0.2)
            self.sender.busy_s += 0.2 if bytes_per_s else 0.0
            self.watch.look(self.now_s)

    async def view(self, **request: Any) -> PathReport:
        feed = await self.watch.watch(WatchLinks(**request))
        (view,) = feed.links
        return view


def test_a_sample_is_what_the_sender_knows() -> None:
    sender = FakeSender()
    sender.acked_bytes, sender.queued_bytes = 70, 500
    sample = link_sample(sender.link_state(FAR), 30)
    # The one that has ended counts no more.
    assert list(sample.connections) == [1]
    assert sample.connections[1].unacked_segments == 20
    assert (sample.backlog_bytes, sample.acked_bytes) == (600, 100)
    assert sample.is_up


def test_a_link_is_up_while_nothing_has_failed() -> None:
    sender = FakeSender()
    sender.is_up = False
    assert not link_sample(sender.link_state(FAR)).is_up
    sender.is_known = False
    gone = link_sample(sender.link_state(FAR), 7)
    assert (gone.is_up, gone.acked_bytes, gone.connections) == (True, 7, {})


async def test_a_fall_of_the_rate_is_told_at_once() -> None:
    rig = Rig()
    rig.sender.queued_bytes = 500 * MB
    rig.run(4.0, 50 * MB)
    clear = await rig.view()
    assert clear.condition == "clear"
    assert clear.estimate.available_bytes_per_s == pytest.approx(50 * MB, rel=0.05)
    assert (clear.num_connections, clear.num_transfers, clear.oldest_queued_s) == (1, 1, 1.5)
    rig.run(1.0, 5 * MB)
    congested = await rig.view()
    assert congested.condition == "congested"
    assert "Mbit/s" in congested.reason
    assert congested.num_changes[LinkCondition.CONGESTED] == 1
    rig.run(5.0, 50 * MB)
    assert (await rig.view()).condition == "clear"


async def test_idle_links_are_looked_at_less_often() -> None:
    rig = Rig()
    rig.sender.queued_bytes = MB
    rig.run(2.0, 50 * MB)
    assert rig.sender.num_looks == 10
    rig.sender.queued_bytes = 0
    rig.run(10.0)
    rig.sender.num_looks = 0
    rig.run(10.0)
    assert 9 <= rig.sender.num_looks <= 12
    assert (await rig.view()).estimate.sample_age_s < 1.1  # type: ignore[operator]


async def test_the_end_of_the_last_transfer_is_told_with_the_backlog_gone() -> None:
    rig = Rig()
    rig.sender.queued_bytes = 500 * MB
    rig.run(2.0, 50 * MB)
    busy = await rig.watch.watch(WatchLinks())
    assert busy.links[0].estimate.backlog_bytes > 0
    waiting = asyncio.create_task(rig.watch.watch(WatchLinks(after_seq=busy.seq, timeout_s=60.0)))
    await asyncio.sleep(0)
    rig.sender.queued_bytes = 0
    rig.run(0.2)
    idle = await waiting
    assert idle.links[0].estimate.backlog_bytes == 0
    # Once is enough.
    rig.run(2.0)
    assert (await rig.watch.watch(WatchLinks())).seq == idle.seq


async def test_a_link_that_is_down_and_idle_is_asked_to_connect() -> None:
    rig = Rig()
    rig.run(1.0)
    rig.sender.is_up = False
    rig.run(3 * RETRY_S)
    assert (await rig.view()).condition == "down"
    assert len(rig.sender.warmed) in (2, 3)
    rig.sender.is_up = True
    rig.run(3.0)
    assert (await rig.view()).condition == "clear"
    rig.sender.warmed.clear()
    rig.run(2 * RETRY_S)
    assert rig.sender.warmed == []


async def test_nobody_is_called_for_ever() -> None:
    rig = Rig()
    rig.sender.is_up = False
    rig.run(1.0)
    rig.now_s += GIVE_UP_S
    rig.run(1.0)
    rig.sender.warmed.clear()
    rig.run(3 * RETRY_S)
    assert rig.sender.warmed == []


async def test_a_link_that_the_sender_closed_is_idle_and_forgotten_in_the_end() -> None:
    rig = Rig()
    rig.sender.queued_bytes = 500 * MB
    rig.run(2.0, 50 * MB)
    carried = (await rig.view()).estimate.acked_bytes
    rig.sender.is_known, rig.sender.queued_bytes, rig.sender.acked_bytes = False, 0, 0
    rig.run(4.0)
    view = await rig.view()
    assert (view.condition, view.num_connections, view.num_transfers) == ("clear", 0, 0)
    assert view.estimate.available_bytes_per_s > 40 * MB
    rig.sender.is_known, rig.sender.queued_bytes = True, 500 * MB
    rig.run(2.0, 50 * MB)
    assert (await rig.view()).estimate.acked_bytes >= carried + 80 * MB
    rig.sender.is_known = False
    rig.now_s += KEEP_S + 1
    rig.run(0.4)
    assert (await rig.watch.watch(WatchLinks())).links == []


async def test_watching_waits_for_news_and_ends_with_its_time() -> None:
    rig = Rig()
    rig.run(0.4)
    feed = await rig.watch.watch(WatchLinks())
    assert feed.data_endpoint == "me:1"
    again = await rig.watch.watch(WatchLinks(after_seq=feed.seq, timeout_s=0.01))
    assert again.seq == feed.seq
    waiting = asyncio.create_task(rig.watch.watch(WatchLinks(after_seq=feed.seq, timeout_s=60.0)))
    await asyncio.sleep(0)
    rig.sender.queued_bytes = MB
    rig.run(0.4, MB)
    assert (await asyncio.wait_for(waiting, 5.0)).seq > feed.seq
    for wrong in ({"timeout_s": -1.0}, {"timeout_s": math.inf}):
        with pytest.raises(BadRequest):
            await rig.watch.watch(WatchLinks(**wrong))  # type: ignore[arg-type]


async def test_probes_are_asked_for_only_of_those_who_send_them() -> None:
    rig = Rig(WatchSettings(interval_s=0.2, probes=True))
    rig.run(20.0)
    assert (await rig.view()).probe_bytes == 0
    assert (await rig.view(sends_probes=True)).probe_bytes == 0
    rig.run(5.0)
    assert (await rig.view()).probe_bytes == 0
    asked = (await rig.view(sends_probes=True)).probe_bytes
    assert asked > 0
    assert (await rig.view(sends_probes=True)).probe_bytes == 0
    rig.watch.probed(FAR, asked, 0.25)
    assert (await rig.view()).estimate.available_bytes_per_s == pytest.approx(4 * asked)


def test_prometheus_sees_the_links() -> None:
    rig = Rig()
    rig.sender.queued_bytes = 500 * MB
    rig.run(3.0, 50 * MB)
    text = generate_latest(rig.registry).decode()
    assert 'prfaas_link_condition{condition="clear",link="far:7100"} 1.0' in text
    assert 'prfaas_link_backlog_bytes{link="far:7100"}' in text


def test_the_detector_is_configured_by_name() -> None:
    config = AgentConfig(link_detector={"dwell_s": 1, "loss": (0.1, 0.5)})
    assert config.link_detector == DetectorConfig(dwell_s=1, loss=(0.1, 0.5))
    for wrong in ({"dwel_s": 1}, {"loss": 0.1}, {"dwell_s": -1}, {"dwell_s": (1, 2)}):
        with pytest.raises(ValueError, match="link_detector"):
            AgentConfig(link_detector=wrong)


def control(rig: Rig, io: FakeIo, *, probes: bool = True) -> LinkControl:
    grants = AgentGrants(None, agent="here:7100", send_to=None)
    return LinkControl(rig.watch, cast(TransferIo, io), grants, lambda: rig.now_s, probes=probes)


def request(**changes: Any) -> SendLinkProbe:
    fields: dict[str, Any] = {
        "transfer_id": "00" * 16,
        "token": "00" * 32,
        "fingerprint": "00" * 32,
        "nbytes": 1000,
        "host": "far",
        "port": 7100,
        "lease_s": 5.0,
    }
    return SendLinkProbe(**(fields | changes))


def progress(first_sent_s: float | None, completed_s: float | None, acked: int) -> TransferProgress:
    state = TransferState.COMPLETE if completed_s else TransferState.OPEN
    return TransferProgress(state, 1000, 1000, 1000, acked, 0, 0.0, first_sent_s, completed_s, 1)


async def test_a_probe_says_how_it_went() -> None:
    rig = Rig()
    rig.run(1.0)
    io = FakeIo(progress(1.0, 1.5, 1000), ends=True)
    reply = await control(rig, io).probe(request())
    assert (reply.acked_bytes, reply.duration_s, reply.error) == (1000, 0.5, "")
    assert (await rig.view()).estimate.available_bytes_per_s == 2000
    assert sum(map(len, io.opened[0][1].views(0, 1000))) == 1000


async def test_a_probe_that_takes_too_long_is_given_up() -> None:
    rig = Rig()
    rig.run(1.0)
    io = FakeIo(progress(rig.now_s - 2.0, None, 100), ends=False)
    reply = await control(rig, io).probe(request(lease_s=0.01))
    assert (reply.acked_bytes, reply.duration_s) == (100, 2.0)
    assert "not over within" in reply.error
    assert io.outgoing.cancelled
    io = FakeIo(progress(None, None, 0), ends=False)
    reply = await control(rig, io).probe(request(lease_s=0.01))
    assert (reply.acked_bytes, reply.duration_s) == (0, 0.0)


async def test_wrong_probes_are_refused() -> None:
    rig = Rig()
    io = FakeIo(progress(1.0, 1.5, 1000), ends=True)
    with pytest.raises(BadRequest, match="link_probes"):
        await control(rig, io, probes=False).probe(request())
    handler = control(rig, io)
    for wrong in (
        {"nbytes": 0},
        {"nbytes": MAX_PROBE_BYTES + 1},
        {"lease_s": math.nan},
        {"port": 0},
        {"token": "00"},
        {"transfer_id": "x" * 32},
    ):
        with pytest.raises(BadRequest):
            await handler.probe(request(**wrong))
    handler = control(rig, FakeIo(progress(1.0, None, 0), ends=False))
    running = [asyncio.create_task(handler.probe(request())) for _ in range(MAX_PROBES)]
    await asyncio.sleep(0)
    with pytest.raises(NoArenaRoom):
        await handler.probe(request())
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
