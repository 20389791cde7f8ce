"""Attacks that would make an agent connect to a port of the caller's choice."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine

from kvmanager.agent.links.messages import SendLinkProbe, SendLinkProbeReply
from kvmanager.agent.messages import OpenOutbox, OpenOutboxReply
from kvmanager.agent.probe_messages import ProbeSend, ProbeSendReply
from transport import Endpoint
from transport.rpc import RpcError

NUM_TOKENS = 10
ID, SECRET = "11" * 16, "22" * 32


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """Where the attacker would like to see the agent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        yield listener


def test_an_agent_connects_to_its_own_destinations_only(
    tmp_path: Path, trap: socket.socket
) -> None:
    victim = ("127.0.0.1", trap.getsockname()[1])
    with (
        AgentProcess(tmp_path / "known") as known,
        AgentProcess(tmp_path / "sender", send_to=[known.ready["data"]]) as sender,
        DrivenEngine(known),
        DrivenEngine(sender),
    ):
        fingerprint = SMALL_LAYOUT.fingerprint().hex()
        outbox = OpenOutbox(
            ID,
            SECRET,
            SMALL_LAYOUT.transfer_bytes(NUM_TOKENS),
            NUM_TOKENS,
            fingerprint,
            *victim,
            lease_s=5.0,
        )
        attacks: list[tuple[msgspec.Struct, type[msgspec.Struct]]] = [
            (outbox, OpenOutboxReply),
            (ProbeSend(ID, SECRET, fingerprint, 1000, *victim, lease_s=5.0), ProbeSendReply),
            (
                SendLinkProbe(ID, SECRET, fingerprint, 1000, *victim, lease_s=5.0),
                SendLinkProbeReply,
            ),
        ]
        for request, reply_type in attacks:
            with pytest.raises(RpcError, match=r"sends to 127\.0\.0\.1:\d+ \(send_to\)") as caught:
                sender.call(type(request).__name__, request, reply_type)
            assert caught.value.code == "INVALID"
        with pytest.raises(TimeoutError):
            trap.accept()
        status = sender.status()
        assert (status.outbox_bytes, status.links) == (0, [])
        # What it is told of stays open to it.
        landing = known.reserve(NUM_TOKENS)
        assert Endpoint(landing.host, landing.port) == Endpoint.parse(known.ready["data"])
        sender.open_outbox(landing, NUM_TOKENS)
