"""A hand-off inside one agent: an engine writes into the landing of another, and no byte is sent.

Everything that may end it does, and each time both engines hear of it and all memory comes back.
"""

import os
import random
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine, Victim
from eventually import wait_until

from kvmanager.agent.messages import Cancel, CancelReply, OpenOutboxReply, ReserveReply
from transport.rpc import RpcError

NUM_TOKENS = 1000
NBYTES = SMALL_LAYOUT.transfer_bytes(NUM_TOKENS)


@dataclass
class Node:
    """One agent with a prefill engine and a decode engine."""

    agent: AgentProcess
    prefill: DrivenEngine
    decode: DrivenEngine

    def begin(self, **changes: object) -> tuple[ReserveReply, OpenOutboxReply]:
        """A landing that the decode engine waits for and the prefill engine has begun to fill."""
        landing, outbox = self.open(**changes)
        self.prefill.send(landing, outbox, b"x" * 100)
        wait_until(lambda: self.agent.wait(landing.transfer_id, 0.0).ready_bytes == 100)
        return landing, outbox

    def open(
        self, *, landing_lease_s: float = 30.0, **changes: object
    ) -> tuple[ReserveReply, OpenOutboxReply]:
        landing = self.agent.reserve(NUM_TOKENS, lease_s=landing_lease_s)
        self.decode.client.watch(bytes.fromhex(landing.transfer_id))
        return landing, self.agent.open_outbox(landing, NUM_TOKENS, **changes)

    def fill(self, landing: ReserveReply, outbox: OpenOutboxReply, content: bytes) -> None:
        """In shuffled pieces, and then the end of the prefill."""
        transfer_id = bytes.fromhex(landing.transfer_id)
        self.prefill.write(outbox, content)
        cuts = sorted(random.Random(1).sample(range(1, len(content)), 20))
        pieces = list(zip([0, *cuts], [*cuts, len(content)], strict=True))
        random.Random(2).shuffle(pieces)
        for start, end in pieces:
            assert self.prefill.client.ready(transfer_id, outbox.attempt, [(start, end - start)])
        assert self.prefill.client.prefill_end(transfer_id, outbox.attempt)

    def lands(self, landing: ReserveReply, outbox: OpenOutboxReply, seed: int = 0) -> None:
        """Fill the landing, and read it as its owner."""
        content = random.Random(seed).randbytes(NBYTES)
        self.fill(landing, outbox, content)
        assert self.decode.next() == ("landed", landing.transfer_id)
        assert self.decode.read(landing, NBYTES) == content
        self.decode.client.release(bytes.fromhex(landing.transfer_id))

    def works(self) -> None:
        self.lands(*self.open())

    def everything_is_free(self) -> None:
        wait_until(lambda: self.agent.status().free_bytes == self.agent.status().arena_bytes)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path_factory.mktemp("a"), metrics_port=0) as agent:
        yield agent


@pytest.fixture
def node(agent: AgentProcess) -> Iterator[Node]:
    """Fresh engines on the agent; afterwards every byte of memory must have come back."""
    with DrivenEngine(agent, "prefill") as prefill, DrivenEngine(agent, "decode") as decode:
        node = Node(agent, prefill, decode)
        yield node
        agent.cancel_all()
        node.everything_is_free()


def metrics(agent: AgentProcess) -> str:
    with urllib.request.urlopen(f"http://{agent.ready['metrics']}/metrics") as page:
        return str(page.read().decode())


def test_the_engine_writes_into_the_landing_and_nothing_is_sent(node: Node) -> None:
    agent = node.agent
    for turn in range(3):
        landing, outbox = node.open()
        place = node.prefill.place(outbox)
        assert agent.status().outbox_bytes == 0
        node.lands(landing, outbox, turn)
        assert node.decode.place(landing) == place
        report = agent.wait(landing.transfer_id, kind="outbox")
        assert (report.state, report.error, report.hand_off) == ("complete", "", "arena")
        assert report.ready_bytes == report.acked_bytes == report.nbytes == NBYTES
        assert (report.wire_bytes, report.resent_bytes, report.codecs) == (0, 0, ())
        assert report.sent_bytes_at_prefill_end == NBYTES
        assert report.opened_to_complete_s >= report.first_sent_to_complete_s > 0
        landed = agent.wait(landing.transfer_id, kind="landing")
        assert (landed.state, landed.hand_off, landed.acked_bytes) == ("complete", "arena", NBYTES)
        node.everything_is_free()
    assert agent.status().num_received_connections == 0
    text = metrics(agent)
    for kind in ("landing", "outbox"):
        labels = f'{{hand_off="arena",kind="{kind}",outcome="complete"}}'
        assert f"prfaas_agent_transfers_total{labels}" in text


def test_the_caller_may_ask_for_the_transport(node: Node) -> None:
    landing, outbox = node.open(by_transport=True)
    place = node.prefill.place(outbox)
    node.lands(landing, outbox)
    assert node.decode.place(landing) != place
    report = node.agent.wait(landing.transfer_id, kind="outbox")
    assert (report.state, report.hand_off) == ("complete", "transport")
    assert report.wire_bytes == NBYTES
    assert node.agent.wait(landing.transfer_id, kind="landing").hand_off == "transport"


def test_two_at_once_keep_to_their_landings(node: Node) -> None:
    first, second = node.open(), node.open()
    content = [random.Random(seed).randbytes(NBYTES) for seed in (5, 6)]
    half = NBYTES // 2
    for (landing, outbox), data in zip((first, second), content, strict=True):
        node.prefill.write(outbox, data)
        node.prefill.client.ready(bytes.fromhex(landing.transfer_id), outbox.attempt, [(0, half)])
    for landing, outbox in (second, first):
        rest = [(half, NBYTES - half)]
        node.prefill.client.ready(bytes.fromhex(landing.transfer_id), outbox.attempt, rest)
        assert node.decode.next() == ("landed", landing.transfer_id)
    for (landing, _), data in zip((first, second), content, strict=True):
        assert node.decode.read(landing, NBYTES) == data
        node.decode.client.release(bytes.fromhex(landing.transfer_id))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": "ab" * 32}, "bad_token"),
        ({"layout_fingerprint": "ab" * 32}, "no connected engine"),
        ({"num_tokens": 500, "nbytes": SMALL_LAYOUT.transfer_bytes(500)}, "bad_size"),
    ],
)
def test_the_wrong_caller_is_refused_and_the_landing_waits_for_the_right_one(
    node: Node, changes: dict[str, object], reason: str
) -> None:
    landing = node.agent.reserve(NUM_TOKENS)
    node.decode.client.watch(bytes.fromhex(landing.transfer_id))
    with pytest.raises(RpcError, match=reason):
        node.agent.open_outbox(landing, **{"num_tokens": NUM_TOKENS, **changes})
    assert node.agent.wait(landing.transfer_id, 0.0).state == "open"
    node.lands(landing, node.agent.open_outbox(landing, NUM_TOKENS))


def test_a_landing_has_one_sender(node: Node, tmp_path: Path) -> None:
    """Whoever comes second has the token, too, and is refused all the same."""
    landing, outbox = node.open()
    with pytest.raises(RpcError, match="exists"):
        node.agent.open_outbox(landing, NUM_TOKENS)
    with AgentProcess(tmp_path / "other") as other, DrivenEngine(other):
        other.open_outbox(landing, NUM_TOKENS)
        report = other.wait(landing.transfer_id)
        assert report.state == "failed"
        assert "no landing" in report.error
        node.lands(landing, outbox)
        landing = node.agent.reserve(NUM_TOKENS)
        other.open_outbox(landing, NUM_TOKENS)
        wait_until(lambda: node.agent.status().num_landings.get("receiving") == 1)
        with pytest.raises(RpcError, match="fills this landing already"):
            node.agent.open_outbox(landing, NUM_TOKENS)
        assert node.agent.wait(landing.transfer_id, 0.0).state == "open"


def test_an_engine_cannot_fill_a_landing_that_no_outbox_was_opened_for(node: Node) -> None:
    """It may know the id, but only a caller with the token opens the outbox."""
    landing = node.agent.reserve(NUM_TOKENS)
    transfer_id = bytes.fromhex(landing.transfer_id)
    node.decode.client.watch(transfer_id)
    for attempt in (1, 1 << 60):
        node.prefill.client.attach(transfer_id, attempt)
        assert node.prefill.next()[0] == "failed"
        node.prefill.client.ready(transfer_id, attempt, [(0, NBYTES)])
        assert node.prefill.next()[0] == "failed"
        node.prefill.client.prefill_end(transfer_id, attempt)
    report = node.agent.wait(landing.transfer_id, 0.0)
    assert (report.kind, report.state, report.acked_bytes) == ("landing", "open", 0)
    outbox = node.agent.open_outbox(landing, NUM_TOKENS)
    node.prefill.client.ready(transfer_id, outbox.attempt - 1, [(0, NBYTES)])
    assert node.prefill.next()[0] == "failed"
    assert node.agent.wait(landing.transfer_id, 0.0).ready_bytes == 0
    node.lands(landing, outbox)


def test_cancel_reaches_both_engines(node: Node) -> None:
    landing, _ = node.begin()
    cancel = Cancel(landing.transfer_id, "client gone")
    assert node.agent.call("Cancel", cancel, CancelReply).cancelled
    assert not node.agent.call("Cancel", cancel, CancelReply).cancelled
    assert node.decode.next() == ("failed", landing.transfer_id, "client gone")
    assert node.prefill.next() == ("failed", landing.transfer_id, "client gone")
    for kind in ("landing", "outbox"):
        assert node.agent.wait(landing.transfer_id, kind=kind).state == "cancelled"
    node.everything_is_free()
    node.works()


def test_the_landings_lease_ends_both_ends(node: Node) -> None:
    landing, _ = node.begin(landing_lease_s=1.0)
    assert node.decode.next() == ("failed", landing.transfer_id, "its lease ended")
    event, _, reason = node.prefill.next()
    assert (event, "its lease ended" in reason) == ("failed", True)
    assert node.agent.wait(landing.transfer_id, kind="landing").state == "expired"
    assert node.agent.wait(landing.transfer_id, kind="outbox").state == "failed"
    node.everything_is_free()


def test_the_outboxs_lease_ends_both_ends(node: Node) -> None:
    landing, _ = node.begin(lease_s=1.0)
    assert node.prefill.next() == ("failed", landing.transfer_id, "its lease ended")
    assert node.decode.next() == ("failed", landing.transfer_id, "its lease ended")
    assert node.agent.wait(landing.transfer_id, kind="landing").state == "failed"
    assert node.agent.wait(landing.transfer_id, kind="outbox").state == "expired"
    node.everything_is_free()


def test_a_decode_engine_that_gives_up_stops_the_prefill(node: Node) -> None:
    landing, _ = node.begin()
    node.decode.client.release(bytes.fromhex(landing.transfer_id))
    event, _, reason = node.prefill.next()
    assert (event, "given up" in reason) == ("failed", True)
    node.everything_is_free()


def test_a_range_outside_fails_that_hand_off_only(node: Node) -> None:
    landing, outbox = node.begin()
    wrong = [(NBYTES - 1, 2)]
    node.prefill.client.ready(bytes.fromhex(landing.transfer_id), outbox.attempt, wrong)
    assert node.prefill.next()[0] == "failed"
    event, _, reason = node.decode.next()
    assert (event, "ready range" in reason) == ("failed", True)
    node.works()


def test_memory_waits_for_an_engine_that_may_still_write(tmp_path: Path) -> None:
    with (
        AgentProcess(tmp_path, drain_s=600) as agent,
        DrivenEngine(agent, "prefill") as prefill,
        DrivenEngine(agent, "decode") as decode,
    ):
        prefill.releases_failed = False
        node = Node(agent, prefill, decode)
        landing, outbox = node.begin()
        agent.call("Cancel", Cancel(landing.transfer_id, "x"), CancelReply)
        assert prefill.next()[0] == decode.next()[0] == "failed"
        decode.client.release(bytes.fromhex(landing.transfer_id))
        assert agent.wait(landing.transfer_id, kind="landing").state == "cancelled"
        assert agent.status().landing_bytes > 0
        prefill.client.release(bytes.fromhex(landing.transfer_id), outbox.attempt)
        node.everything_is_free()


def test_an_engine_killed_while_it_fills(agent: AgentProcess) -> None:
    with DrivenEngine(agent, "decode") as decode, DrivenEngine(agent, "prefill") as prefill:
        node = Node(agent, prefill, decode)
        landing = agent.reserve(NUM_TOKENS)
        decode.client.watch(bytes.fromhex(landing.transfer_id))
        victim = Victim(agent, "fill", landing)
        victim.act(agent.open_outbox(landing, NUM_TOKENS).attempt)
        wait_until(lambda: agent.wait(landing.transfer_id, 0.0).acked_bytes == 1000)
        victim.kill()
        event, _, reason = decode.next()
        assert (event, "its engine is lost" in reason) == ("failed", True)
        assert agent.wait(landing.transfer_id, kind="outbox").state == "failed"
        assert agent.wait(landing.transfer_id, kind="landing").state == "failed"
        node.everything_is_free()
        node.works()


def test_an_agent_killed_in_the_middle(tmp_path: Path) -> None:
    with (
        AgentProcess(tmp_path) as agent,
        DrivenEngine(agent, "prefill") as prefill,
        DrivenEngine(agent, "decode") as decode,
    ):
        node = Node(agent, prefill, decode)
        landing, outbox = node.begin()
        agent.end(signal.SIGKILL)
        assert prefill.next() == decode.next() == ("disconnected",)
        agent.start()
        assert prefill.next()[0] == decode.next()[0] == "connected"
        transfer_id = bytes.fromhex(landing.transfer_id)
        decode.client.watch(transfer_id)
        prefill.client.ready(transfer_id, outbox.attempt, [(100, NBYTES - 100)])
        for engine in (decode, prefill):
            event, _, reason = engine.next()
            assert (event, "no such transfer" in reason) == ("failed", True)
        node.works()
        node.everything_is_free()


def test_a_stopping_agent_tells_both_engines(tmp_path: Path) -> None:
    with (
        AgentProcess(tmp_path) as agent,
        DrivenEngine(agent, "prefill") as prefill,
        DrivenEngine(agent, "decode") as decode,
    ):
        Node(agent, prefill, decode).begin()
        assert agent.end(signal.SIGTERM) == 0
        for engine in (prefill, decode):
            event, _, reason = engine.next()
            assert (event, "stopping" in reason) == ("failed", True)
        assert agent.arenas() == []


def test_ids_are_never_guessed(node: Node) -> None:
    """An outbox for a landing that does not exist is sent, and refused where it arrives."""
    landing = node.agent.reserve(NUM_TOKENS)
    other_id = os.urandom(16).hex()
    node.agent.open_outbox(landing, NUM_TOKENS, transfer_id=other_id)
    report = node.agent.wait(other_id)
    assert (report.state, "no landing" in report.error) == ("failed", True)
