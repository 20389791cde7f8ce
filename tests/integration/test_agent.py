"""Two real agent processes over real sockets: transfers, refusals, room, leases, engines."""

import os
import random
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from documented_metrics import undocumented
from eventually import wait_until

from kvmanager.agent.messages import Cancel, CancelReply, Renew, RenewReply, ReserveReply
from kvmanager.load_times import LoadTimes
from transport.rpc import RpcError

NUM_TOKENS = 1000
NBYTES = SMALL_LAYOUT.transfer_bytes(NUM_TOKENS)


@dataclass
class Pair:
    """A sending and a receiving agent with one engine each."""

    sender: AgentProcess
    receiver: AgentProcess
    producer: DrivenEngine
    consumer: DrivenEngine


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AgentProcess]]:
    with (
        AgentProcess(tmp_path_factory.mktemp("s")) as sender,
        AgentProcess(tmp_path_factory.mktemp("r"), metrics_port=0) as receiver,
    ):
        yield [sender, receiver]


@pytest.fixture
def pair(agents: list[AgentProcess]) -> Iterator[Pair]:
    """Fresh engines on the agents; afterwards every byte of memory must have come back."""
    sender, receiver = agents
    with DrivenEngine(sender) as producer, DrivenEngine(receiver) as consumer:
        yield Pair(sender, receiver, producer, consumer)
    for agent in agents:
        agent.cancel_all()
        wait_until(lambda agent=agent: agent.status().free_bytes == agent.status().arena_bytes)


def send(agent: AgentProcess, engine: DrivenEngine, landing: ReserveReply, content: bytes) -> None:
    """Fill an outbox for the landing in shuffled pieces and end the prefill."""
    transfer_id = bytes.fromhex(landing.transfer_id)
    outbox = agent.open_outbox(landing, NUM_TOKENS)
    assert engine.client.attach(transfer_id, outbox.attempt)
    engine.write(outbox, content)
    cuts = sorted(random.Random(1).sample(range(1, len(content)), 20))
    pieces = list(zip([0, *cuts], [*cuts, len(content)], strict=True))
    random.Random(2).shuffle(pieces)
    for start, end in pieces:
        assert engine.client.ready(transfer_id, outbox.attempt, [(start, end - start)])
    assert engine.client.prefill_end(transfer_id, outbox.attempt)


def landing_bytes(agent: AgentProcess) -> int:
    return agent.status().landing_bytes


def test_bytes_arrive_and_all_memory_comes_back(pair: Pair) -> None:
    content = random.Random(3).randbytes(NBYTES)
    for turn in range(3):
        landing = pair.receiver.reserve(NUM_TOKENS)
        assert landing.nbytes == NBYTES
        transfer_id = bytes.fromhex(landing.transfer_id)
        if turn != 1:
            pair.consumer.client.watch(transfer_id)
        send(pair.sender, pair.producer, landing, content)
        report = pair.sender.wait(landing.transfer_id)
        assert (report.kind, report.state, report.error) == ("outbox", "complete", "")
        assert report.nbytes == report.ready_bytes == report.acked_bytes == NBYTES
        assert report.sent_bytes == NBYTES
        assert 0 <= report.sent_bytes_at_prefill_end <= NBYTES
        assert report.opened_to_complete_s >= report.first_sent_to_complete_s > 0
        if turn == 1:
            assert pair.receiver.wait(landing.transfer_id).state == "complete"
            pair.consumer.client.watch(transfer_id)
        assert pair.consumer.next() == ("landed", landing.transfer_id)
        assert pair.consumer.read(landing, NBYTES) == content
        assert landing_bytes(pair.receiver) >= NBYTES
        pair.consumer.client.release(transfer_id)
        wait_until(lambda: landing_bytes(pair.receiver) == 0)
        assert pair.sender.status().outbox_bytes == 0
        assert report.progress[-1][1] == NBYTES
        times = LoadTimes(0.25, 0.5, 0.75 + turn)
        assert pair.consumer.client.loaded(transfer_id, times)
        told = partial(pair.receiver.cancel, landing.transfer_id)
        wait_until(lambda told=told, times=times: told().times == times)
    with urllib.request.urlopen(f"http://{pair.receiver.ready['metrics']}/metrics") as page:
        text = page.read().decode()
    labels = '{hand_off="transport",kind="landing",outcome="complete"}'
    assert f"prfaas_agent_transfers_total{labels}" in text
    assert "prfaas_agent_landing_bytes 0.0" in text
    assert undocumented(text) == []


def test_every_core_of_an_engine_loads_the_landing_of_its_choices(pair: Pair) -> None:
    """With data parallelism vLLM gives choices of one request to several cores."""
    content = random.Random(4).randbytes(NBYTES)
    landing = pair.receiver.reserve(NUM_TOKENS)
    transfer_id = bytes.fromhex(landing.transfer_id)
    with (
        DrivenEngine(pair.receiver, "engine_dp1") as core,
        DrivenEngine(pair.receiver, "other") as other,
    ):
        for watching in (pair.consumer, core):
            watching.client.watch(transfer_id)
        send(pair.sender, pair.producer, landing, content)
        for watching in (pair.consumer, core):
            assert watching.next() == ("landed", landing.transfer_id)
        other.client.watch(transfer_id)
        assert "another engine" in other.next()[2]
        pair.consumer.client.release(transfer_id)
        assert core.read(landing, NBYTES) == content
        assert landing_bytes(pair.receiver) >= NBYTES
        core.client.release(transfer_id)
        wait_until(lambda: landing_bytes(pair.receiver) == 0)


def test_wrong_token_fails_the_sender_and_leaves_the_landing_to_the_right_one(
    pair: Pair,
) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS)
    pair.sender.open_outbox(landing, NUM_TOKENS, token=os.urandom(32).hex())
    report = pair.sender.wait(landing.transfer_id)
    assert report.state == "failed"
    assert "token" in report.error
    assert pair.receiver.wait(landing.transfer_id, 0.0).state == "open"
    wait_until(lambda: pair.sender.status().outbox_bytes == 0)
    pair.consumer.client.watch(bytes.fromhex(landing.transfer_id))
    send(pair.sender, pair.producer, landing, bytes(NBYTES))
    assert pair.consumer.next() == ("landed", landing.transfer_id)


def test_sender_without_a_landing_fails(pair: Pair) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS)
    other_id = os.urandom(16).hex()
    pair.sender.open_outbox(landing, NUM_TOKENS, transfer_id=other_id)
    report = pair.sender.wait(other_id)
    assert report.state == "failed"
    assert "no landing" in report.error


def refusal(
    agent: AgentProcess, landing: ReserveReply, num_tokens: int = NUM_TOKENS, **changes: object
) -> str:
    with pytest.raises(RpcError) as caught:
        agent.open_outbox(landing, num_tokens, **changes)
    assert agent.status().outbox_bytes == 0
    return f"{caught.value.code} {caught.value.message}"


def test_impossible_requests_are_refused_with_a_reason(pair: Pair) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS)
    sender = pair.sender
    assert "INVALID" in refusal(sender, landing, nbytes=NBYTES - 1)
    assert f"take {NBYTES} bytes" in refusal(sender, landing, nbytes=NBYTES - 1)
    assert "no connected engine" in refusal(sender, landing, layout_fingerprint="ab" * 32)
    assert "not hex" in refusal(sender, landing, token="zz")
    assert "has 1 bytes" in refusal(sender, landing, transfer_id="00")
    assert "endpoint" in refusal(sender, landing, port=70000)
    assert "lease" in refusal(sender, landing, lease_s=-1.0)
    assert "2000 tokens take" in refusal(sender, landing, num_tokens=2000)
    with pytest.raises(RpcError, match="tokens"):
        pair.receiver.reserve(0)
    with pytest.raises(RpcError, match="NOT_FOUND"):
        sender.wait("00" * 16)
    with pytest.raises(RpcError, match="NOT_FOUND"):
        sender.call("Renew", Renew("00" * 16, 5.0), RenewReply)
    assert not sender.call("Cancel", Cancel("00" * 16), CancelReply).cancelled


def test_full_landing_is_no_room_until_something_ends(tmp_path: Path) -> None:
    with (
        AgentProcess(tmp_path, landing_gib=2 * NBYTES / 2**30) as agent,
        DrivenEngine(agent),
    ):
        first = agent.reserve(NUM_TOKENS)
        with pytest.raises(RpcError) as caught:
            agent.reserve(NUM_TOKENS)
        assert caught.value.code == "NO_ROOM"
        assert agent.call("Cancel", Cancel(first.transfer_id, "x"), CancelReply).cancelled
        wait_until(lambda: landing_bytes(agent) == 0)
        agent.reserve(NUM_TOKENS)


def test_lease_ends_and_everybody_is_told(pair: Pair) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS, lease_s=0.6)
    pair.sender.open_outbox(landing, NUM_TOKENS)
    pair.consumer.client.watch(bytes.fromhex(landing.transfer_id))
    assert pair.consumer.next() == ("failed", landing.transfer_id, "its lease ended")
    wait_until(lambda: landing_bytes(pair.receiver) == 0)
    report = pair.sender.wait(landing.transfer_id)
    assert report.state == "failed"
    assert "lease" in report.error
    assert pair.receiver.wait(landing.transfer_id).state == "expired"
    wait_until(lambda: pair.sender.status().outbox_bytes == 0)


def test_renewed_lease_and_patient_wait(pair: Pair) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS, lease_s=0.6)
    granted = pair.receiver.call("Renew", Renew(landing.transfer_id, 1e9), RenewReply)
    assert granted.lease_s == 3600
    assert pair.receiver.wait(landing.transfer_id, timeout_s=1.0).state == "open"


def test_outbox_lease_ends_at_the_receiver_too(pair: Pair) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS)
    pair.consumer.client.watch(bytes.fromhex(landing.transfer_id))
    outbox = pair.sender.open_outbox(landing, NUM_TOKENS, lease_s=0.8)
    pair.producer.client.attach(bytes.fromhex(landing.transfer_id), outbox.attempt)
    pair.producer.write(outbox, b"x" * 100)
    pair.producer.client.ready(bytes.fromhex(landing.transfer_id), outbox.attempt, [(0, 100)])
    assert pair.producer.next() == ("failed", landing.transfer_id, "its lease ended")
    event, _, reason = pair.consumer.next()
    assert event == "failed"
    assert "its lease ended" in reason
    wait_until(lambda: pair.sender.status().outbox_bytes == 0)


def test_range_outside_fails_that_transfer_only(pair: Pair) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS)
    pair.consumer.client.watch(bytes.fromhex(landing.transfer_id))
    outbox = pair.sender.open_outbox(landing, NUM_TOKENS)
    wait_until(lambda: pair.receiver.status().num_landings.get("receiving") == 1)
    pair.producer.client.ready(
        bytes.fromhex(landing.transfer_id), outbox.attempt, [(NBYTES - 1, 2)]
    )
    event, _, reason = pair.producer.next()
    assert event == "failed"
    assert "ready range" in reason
    assert pair.consumer.next()[0] == "failed"
    again = pair.receiver.reserve(NUM_TOKENS)
    pair.consumer.client.watch(bytes.fromhex(again.transfer_id))
    send(pair.sender, pair.producer, again, bytes(NBYTES))
    assert pair.consumer.next() == ("landed", again.transfer_id)


def test_cancel_reaches_both_engines(pair: Pair) -> None:
    landing = pair.receiver.reserve(NUM_TOKENS)
    pair.consumer.client.watch(bytes.fromhex(landing.transfer_id))
    outbox = pair.sender.open_outbox(landing, NUM_TOKENS)
    pair.producer.client.attach(bytes.fromhex(landing.transfer_id), outbox.attempt)
    # A sender that opens its transfer only after the end hears of no landing, whatever ended it.
    wait_until(lambda: pair.receiver.status().num_landings.get("receiving") == 1)
    cancel = Cancel(landing.transfer_id, "client gone")
    assert pair.receiver.call("Cancel", cancel, CancelReply).cancelled
    assert not pair.receiver.call("Cancel", cancel, CancelReply).cancelled
    assert pair.consumer.next() == ("failed", landing.transfer_id, "client gone")
    event, _, reason = pair.producer.next()
    assert event == "failed"
    assert "client gone" in reason
    wait_until(lambda: pair.sender.status().outbox_bytes == 0)
    wait_until(lambda: landing_bytes(pair.receiver) == 0)


def test_several_models_on_one_agent(pair: Pair) -> None:
    other = msgspec.structs.replace(SMALL_LAYOUT, weights="files:1")
    with DrivenEngine(pair.receiver, "other", other) as stranger:
        with pytest.raises(RpcError, match="2 KV layouts"):
            pair.receiver.reserve(NUM_TOKENS)
        fingerprint = SMALL_LAYOUT.fingerprint().hex()
        landing = pair.receiver.reserve(NUM_TOKENS, fingerprint=fingerprint)
        stranger.client.watch(bytes.fromhex(landing.transfer_id))
        event, _, reason = stranger.next()
        assert event == "failed"
        assert "layout" in reason
        names = [engine.instance for engine in pair.receiver.status().engines]
        assert names == ["engine", "other"]
    wait_until(lambda: len(pair.receiver.status().engines) == 1)
    pair.receiver.reserve(NUM_TOKENS)


def test_engines_of_two_models_get_their_own_landings(pair: Pair) -> None:
    other = msgspec.structs.replace(SMALL_LAYOUT, weights="files:1")
    with (
        DrivenEngine(pair.sender, "other", other) as producer,
        DrivenEngine(pair.receiver, "other", other) as consumer,
    ):
        models = {
            SMALL_LAYOUT.fingerprint().hex(): (pair.producer, pair.consumer),
            other.fingerprint().hex(): (producer, consumer),
        }
        landings = {name: pair.receiver.reserve(NUM_TOKENS, fingerprint=name) for name in models}
        contents = {}
        for name, (sending, receiving) in models.items():
            landing = landings[name]
            assert landing.layout_fingerprint == name
            receiving.client.watch(bytes.fromhex(landing.transfer_id))
            contents[name] = random.Random(name).randbytes(landing.nbytes)
            send(pair.sender, sending, landing, contents[name])
        for name, (_, receiving) in models.items():
            landing = landings[name]
            assert receiving.next() == ("landed", landing.transfer_id)
            assert receiving.read(landing, landing.nbytes) == contents[name]
            receiving.client.release(bytes.fromhex(landing.transfer_id))


def test_sender_with_another_layout_is_refused(pair: Pair) -> None:
    other = msgspec.structs.replace(SMALL_LAYOUT, weights="files:1")
    with DrivenEngine(pair.sender, "other", other):
        landing = pair.receiver.reserve(NUM_TOKENS)
        pair.sender.open_outbox(landing, NUM_TOKENS, layout_fingerprint=other.fingerprint().hex())
        report = pair.sender.wait(landing.transfer_id)
    assert report.state == "failed"
    assert "KV layout" in report.error
