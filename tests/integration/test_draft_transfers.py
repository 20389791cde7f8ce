"""Transfers between agents of whose engines only one has a drafter, or both have."""

import os
from collections.abc import Iterator

import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from msgspec.structs import replace

from kvmanager.layout import KVLayout
from transport.rpc import RpcError

NUM_TOKENS = 40


def drafted(digest: str) -> KVLayout:
    """The small layout with a drafter."""
    first, *rest = SMALL_LAYOUT.groups
    draft = replace(first.layers[0], name="mtp.layers.0", is_draft=True)
    groups = (replace(first, layers=(*first.layers, draft)), *rest)
    return replace(SMALL_LAYOUT, groups=groups, draft_digest=digest)


PLAIN, DRAFTED, OTHER = SMALL_LAYOUT, drafted("mtp"), drafted("eagle")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    with (
        AgentProcess(tmp_path_factory.mktemp("s")) as sender,
        AgentProcess(tmp_path_factory.mktemp("r")) as receiver,
    ):
        yield sender, receiver


@pytest.mark.parametrize(
    ("sends", "loads", "draft_goes"),
    [
        (DRAFTED, DRAFTED, True),
        (PLAIN, DRAFTED, False),
        (OTHER, DRAFTED, False),
        (DRAFTED, PLAIN, False),
    ],
)
def test_the_drafters_bytes_go_where_both_sides_have_it(
    agents: tuple[AgentProcess, AgentProcess], sends: KVLayout, loads: KVLayout, draft_goes: bool
) -> None:
    sender, receiver = agents
    with DrivenEngine(sender, "p", sends) as producer, DrivenEngine(receiver, "d", loads):
        landing = receiver.reserve(NUM_TOKENS)
        assert landing.draft == loads.draft_fingerprint.hex()
        assert landing.nbytes == loads.transfer_bytes(NUM_TOKENS)
        outbox = sender.open_outbox(landing, NUM_TOKENS, draft=landing.draft, instance="p")
        assert outbox.draft == (landing.draft if draft_goes else "")
        nbytes = sends.transfer_bytes(NUM_TOKENS, with_draft=draft_goes)
        content = os.urandom(nbytes)
        producer.send(landing, outbox, content)
        assert sender.wait(landing.transfer_id, kind="outbox").state == "complete"
        assert receiver.wait(landing.transfer_id, kind="landing").state == "complete"
        with DrivenEngine(receiver, "reads", loads) as reader:
            landed = reader.read(landing, landing.nbytes)
        assert landed == content + bytes(landing.nbytes - nbytes)
        receiver.cancel_all()
        sender.cancel_all()


def test_a_wrong_size_is_refused_with_and_without_drafters(
    agents: tuple[AgentProcess, AgentProcess],
) -> None:
    sender, receiver = agents
    with DrivenEngine(sender, "p", PLAIN), DrivenEngine(receiver, "d", DRAFTED):
        landing = receiver.reserve(NUM_TOKENS)
        plain = PLAIN.transfer_bytes(NUM_TOKENS)
        for changes in ({"draft": ""}, {"draft": landing.draft, "nbytes": plain - 1}):
            with pytest.raises(RpcError, match=f"take {plain} bytes here"):
                sender.open_outbox(landing, NUM_TOKENS, **changes)
        receiver.cancel_all()


def test_of_engines_with_and_without_a_drafter_the_named_one_decides(
    agents: tuple[AgentProcess, AgentProcess],
) -> None:
    sender, receiver = agents
    with (
        DrivenEngine(sender, "plain", PLAIN),
        DrivenEngine(sender, "drafted", DRAFTED),
        DrivenEngine(receiver, "d", PLAIN),
        DrivenEngine(receiver, "e", DRAFTED),
    ):
        for instance, goes in (("plain", False), ("drafted", True)):
            landing = receiver.reserve(NUM_TOKENS)
            outbox = sender.open_outbox(landing, NUM_TOKENS, draft=landing.draft, instance=instance)
            assert landing.draft == DRAFTED.draft_fingerprint.hex()
            assert outbox.draft == (landing.draft if goes else "")
        receiver.cancel_all()
        sender.cancel_all()
