"""Attacks on embeddings: reading and planting them with a role that is allowed and without a grant.

The attacker calls as a front, which may move embeddings, and has an agent of its own in the region.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from attacked_agents import AttackedRegion
from embedding_ends import DATA, ENCODER, embeddings_of, finding, found, put, saving
from eventually import wait_until

from kvmanager.agent.between_agents import EmbeddingOrder, EmbeddingsPulled, pull_embeddings
from kvmanager.agent.client import AgentClient
from kvmanager.agent.grants import embedding_pull
from kvmanager.embedding_keys import embedding_key
from transport.grants import Granted
from transport.rpc import RpcError

CAT, DOG = (embedding_key(ENCODER, name) for name in ("cat", "dog"))


@pytest.fixture(params=["tls", "key"])
def region(request: pytest.FixtureRequest, tmp_path: Path) -> AttackedRegion:
    return AttackedRegion(tmp_path, request.param)


class Attack:
    """The victim, which asks for grants, and the attacker."""

    def __init__(self, region: AttackedRegion, stack: ExitStack) -> None:
        self.region = region
        settings: dict[str, Any] = {"embedding_gib": 1 / 1024}
        self.attacker = stack.enter_context(region.agent("attacker", grants=False, **settings))
        reachable = {"send_to": [self.attacker.ready["data"]]}
        self.victim = stack.enter_context(
            region.agent("victim", grants=True, **settings, **reachable)
        )
        self.other = stack.enter_context(region.agent("other", grants=True, **settings))
        for agent in (self.attacker, self.victim, self.other):
            agent.caller = region.shown("prefill-front")

    def pull(
        self, source: AgentProcess, destination: AgentProcess, grant: bytes = b"", **order: Any
    ) -> EmbeddingsPulled:
        what = EmbeddingOrder({CAT: len(DATA)}, grant=grant, **order)

        async def run() -> EmbeddingsPulled:
            ends = [AgentClient(end.ready["control"], end.caller) for end in (source, destination)]
            try:
                return await pull_embeddings(ends[0], ends[1], what)
            finally:
                for end in ends:
                    await end.close()

        return asyncio.run(run())


@pytest.fixture
def attacked(region: AttackedRegion) -> Iterator[Attack]:
    with ExitStack() as stack:
        yield Attack(region, stack)


def test_embeddings_are_read_and_planted_with_a_grant_for_them_only(attacked: Attack) -> None:
    victim, attacker, granter = attacked.victim, attacked.attacker, attacked.region.granter
    refused = {
        "needs a grant": {},
        "for other embeddings than the call": {
            "grant": granter.grant(embedding_pull([DOG])),
            "granted": [DOG],
        },
        "for content": {"grant": granter.grant(embedding_pull([DOG])), "granted": [CAT, DOG]},
        "for method OpenOutbox": {"grant": granter.grant(Granted(method="OpenOutbox"))},
    }
    with saving(victim) as saver:
        assert put(saver, "cat")
    for message, shown in refused.items():
        with pytest.raises(RpcError, match=message) as caught:
            attacked.pull(victim, attacker, **shown)  # type: ignore[arg-type]
        assert caught.value.code == "REFUSED"
        wait_until(lambda: embeddings_of(attacker).held_bytes == 0)
    with saving(attacker) as saver:
        assert put(saver, "cat", DATA[::-1])
    for message, shown in refused.items():
        with pytest.raises(RpcError, match=message) as caught:
            attacked.pull(attacker, attacked.other, **shown)  # type: ignore[arg-type]
        assert caught.value.code == "REFUSED"
    assert embeddings_of(attacked.other).held_bytes == 0
    # A front that was given the pictures of a job may move their embeddings, and again.
    grant = granter.grant(embedding_pull([CAT, DOG]))
    for _ in range(2):
        pulled = attacked.pull(attacker, attacked.other, grant, granted=[DOG, CAT])
        assert pulled.num_missing == 0
    with finding(attacked.other) as finder:
        assert found(finder, "cat") == DATA[::-1]


def test_a_grant_leads_to_no_address_that_the_agent_was_not_told(attacked: Attack) -> None:
    granter = attacked.region.granter
    grant = granter.grant(embedding_pull([CAT]))
    for source in (attacked.victim, attacked.other):
        with saving(source) as saver:
            assert put(saver, "cat")
    # Its configuration names the attacker's agent, and no other.
    assert attacked.pull(attacked.victim, attacked.attacker, grant).num_pulled == 1
    # The configuration of the other names nobody, and nor does the grant.
    third = attacked.region.agent("third", grants=False, embedding_gib=1 / 1024)
    third.caller = attacked.region.shown("pd-front")
    with third:
        for source, code, message in (
            (attacked.victim, "INVALID", r"sends to 127\.0\.0\.1:\d+ \(send_to\)"),
            (attacked.other, "REFUSED", "could be named in send_to of this agent"),
        ):
            with pytest.raises(RpcError, match=message) as caught:
                attacked.pull(source, third, grant)
            assert caught.value.code == code
            wait_until(lambda: embeddings_of(third).held_bytes == 0)
