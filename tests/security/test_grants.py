"""Attacks with a role that is allowed and no grant of a gateway: reading and planting KVCache.

The attacker has an agent of its own in the region, and may call as any role: with a certificate of
a host it got hold of, or with the region's key, which every process has. What it lacks is the
private key of the gateway. Against agents that ask for no grants each attack works, byte for byte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_process import SMALL_LAYOUT, AgentProcess
from attacked_agents import AttackedRegion
from caching_engine import ROOT, SHAPE, B, CachingEngine, prompt
from eventually import wait_until
from granting import grant_files

from kvmanager.agent.between_agents import CacheMoveResult, move_cache, probe_link
from kvmanager.agent.cache.move_messages import (
    ReserveCacheMove,
    ReserveCacheMoveReply,
    SendCacheMove,
    SendCacheMoveReply,
)
from kvmanager.agent.client import AgentClient, CacheMoveOrder
from kvmanager.agent.grants import move_landing, move_send, outbox_send, reservation
from kvmanager.agent.messages import OpenOutbox, OpenOutboxReply, Reserve, ReserveReply
from kvmanager.hashing import join_keys
from transport import Endpoint
from transport.grants import (
    SKEW_S,
    Grant,
    Granted,
    Granter,
    load_private_key,
    sign_grant,
)
from transport.rpc import RpcError

FINGERPRINT = SMALL_LAYOUT.fingerprint().hex()
SECRET = prompt(4, seed=1)
"""The keys of a prompt of another tenant."""
KNOWN = join_keys([ROOT, *SECRET])
PARTS = list(SHAPE.resume_parts(len(SECRET)))
ORDER = CacheMoveOrder(FINGERPRINT, KNOWN, PARTS)
NUM_TOKENS = len(SECRET) * B
PLANTED = b"planted!"
LEASE_S = 120.0


@pytest.fixture(params=["tls", "key"])
def region(request: pytest.FixtureRequest, tmp_path: Path) -> AttackedRegion:
    return AttackedRegion(tmp_path, request.param)


class Attack:
    """The victim and the attacker, each an agent with an engine of one model."""

    def __init__(self, region: AttackedRegion, stack: ExitStack, *, grants: bool) -> None:
        self.region = region
        self.victim = stack.enter_context(region.agent("victim", grants=grants))
        self.attacker = stack.enter_context(region.agent("attacker", grants=False))
        self.victims = stack.enter_context(CachingEngine(self.victim))
        self.attackers = stack.enter_context(CachingEngine(self.attacker))

    def client(self, agent: AgentProcess, granter: Granter | None = None) -> AgentClient:
        return AgentClient(agent.ready["control"], agent.caller, granter)

    def move(
        self, source: AgentProcess, destination: AgentProcess, granter: Granter | None = None
    ) -> CacheMoveResult:
        async def run() -> CacheMoveResult:
            ends = [self.client(agent, granter) for agent in (source, destination)]
            try:
                return await move_cache(ends[0], ends[1], ORDER)
            finally:
                for end in ends:
                    await end.close()

        return asyncio.run(run())

    def send_landing(self, landing: ReserveReply) -> None:
        """Let the attacker's agent fill a landing with bytes of its choice."""
        worker = self.attackers.worker
        opened = self.attacker.open_outbox(landing, NUM_TOKENS)
        worker.send(landing, opened, PLANTED * (landing.nbytes // len(PLANTED)))
        assert self.attacker.wait(landing.transfer_id, kind="outbox").state == "complete"


@pytest.fixture
def attacked(region: AttackedRegion) -> Iterator[Attack]:
    """Against agents that ask for grants."""
    with ExitStack() as stack:
        yield Attack(region, stack, grants=True)


@pytest.fixture
def unguarded(tmp_path: Path) -> Iterator[Attack]:
    """Against agents that do not, on a trusted network."""
    with ExitStack() as stack:
        yield Attack(AttackedRegion(tmp_path, "nothing"), stack, grants=False)


def test_without_grants_cached_kvcache_is_read(unguarded: Attack) -> None:
    unguarded.victims.store(SECRET)
    assert unguarded.move(unguarded.victim, unguarded.attacker).kept_parts == len(PARTS)
    unguarded.attackers.check(SECRET, len(SECRET))


def test_cached_kvcache_is_sent_nowhere_without_a_grant(attacked: Attack) -> None:
    attacked.victims.store(SECRET)
    with pytest.raises(RpcError, match="SendCacheMove needs a grant") as caught:
        attacked.move(attacked.victim, attacked.attacker)
    assert caught.value.code == "REFUSED"
    assert attacked.attackers.hit(SECRET) == 0
    assert attacked.victim.status().links == []
    # The gateway may have the same moved, once the landing of the attack is given back.
    granter, ends = attacked.region.granter, (attacked.victim, attacked.attacker)
    wait_until(lambda: attacked.move(*ends, granter).kept_parts == len(PARTS))
    attacked.attackers.check(SECRET, len(SECRET))


def test_without_grants_kvcache_is_planted(unguarded: Attack) -> None:
    landing = unguarded.victim.reserve(NUM_TOKENS, block_keys=KNOWN)
    unguarded.send_landing(landing)
    wait_until(lambda: unguarded.victims.hit(SECRET) == len(SECRET), what="it is cached")
    found = unguarded.victims.find(SECRET)
    for _, part, runs in found.slots:
        nbytes = SHAPE.parts[part].nbytes
        planted = PLANTED * (nbytes // len(PLANTED))
        assert unguarded.victims.scheduler.read(runs, nbytes) == planted
    unguarded.victims.free(found)


def test_nothing_is_cached_without_a_grant(attacked: Attack) -> None:
    attacked.attackers.store(SECRET)
    attempts: list[Callable[[], object]] = [
        lambda: attacked.move(attacked.attacker, attacked.victim),
        lambda: attacked.victim.reserve(NUM_TOKENS, block_keys=KNOWN),
    ]
    for attempt in attempts:
        with pytest.raises(RpcError, match="needs a grant") as caught:
            attempt()
        assert caught.value.code == "REFUSED"
    status = attacked.victim.status()
    assert status.landing_bytes == 0
    assert status.cache is not None
    assert (status.cache.promotions, status.cache.num_blocks) == (0, 0)
    granter = attacked.region.granter
    assert attacked.move(attacked.attacker, attacked.victim, granter).kept_parts == len(PARTS)
    attacked.victims.check(SECRET, len(SECRET))


def test_a_grant_is_good_for_its_call_only(attacked: Attack, tmp_path: Path) -> None:
    attacked.victims.store(SECRET)
    here, there = attacked.attacker.ready["data"], attacked.victim.ready["data"]
    landing = attacked.attacker.call(
        "ReserveCacheMove",
        ReserveCacheMove(FINGERPRINT, KNOWN, PARTS, LEASE_S),
        ReserveCacheMoveReply,
    )
    request = SendCacheMove(
        transfer_id=landing.transfer_id,
        token=landing.token,
        nbytes=landing.nbytes,
        host=landing.host,
        port=landing.port,
        lease_s=LEASE_S,
        layout_fingerprint=FINGERPRINT,
        block_keys=KNOWN,
        parts=landing.parts,
    )
    asked = move_send(request, there)
    own, _ = grant_files(tmp_path, "own")
    key = load_private_key(attacked.region.granting_key)
    replace, now_s = msgspec.structs.replace, time.time()

    def signed(granted: Granted, **changes: Any) -> bytes:
        fields = {"begins_s": now_s, "ends_s": now_s + 60, "nonce": b"n", "region": "r"}
        return sign_grant(key, Grant(granted=granted, **(fields | changes)))

    late = {"begins_s": now_s - 1000, "ends_s": now_s - SKEW_S - 1}
    early = {"begins_s": now_s + SKEW_S + 600, "ends_s": now_s + 1000}
    refused = {
        "needs a grant": b"",
        "not signed with a key": Granter(own).grant(asked),
        "of region s, not r": signed(asked, region="s"),
        f"for agent {here}": signed(replace(asked, agent=here)),
        f"for endpoint {there}": signed(replace(asked, endpoint=there)),
        "for transfer_id 00": signed(replace(asked, transfer_id="00")),
        "for content": signed(move_send(replace(request, block_keys=ROOT), there)),
        "for 7 bytes at most": signed(replace(asked, nbytes=7)),
        "for method OpenOutbox": signed(replace(asked, method="OpenOutbox")),
        "the clocks of gateway and agent": signed(asked, **late),
        r"and it is \d+ here": signed(asked, **early),
        "not signed with a key that": signed(asked)[:-1] + b"\x00",
    }
    for message, grant in refused.items():
        with pytest.raises(RpcError, match=message) as caught:
            attacked.victim.call("SendCacheMove", replace(request, grant=grant), SendCacheMoveReply)
        assert caught.value.code == "REFUSED"
    assert attacked.attackers.hit(SECRET) == 0
    # Clocks that are a little apart are no obstacle.
    grant = signed(asked, begins_s=now_s + SKEW_S / 2, ends_s=now_s + SKEW_S)
    attacked.victim.call("SendCacheMove", replace(request, grant=grant), SendCacheMoveReply)


def test_a_grant_opens_one_landing(attacked: Attack) -> None:
    granter, own = attacked.region.granter, attacked.victim.ready["data"]
    move = ReserveCacheMove(FINGERPRINT, KNOWN, PARTS, LEASE_S)
    move = msgspec.structs.replace(move, grant=granter.grant(move_landing(move, own)))
    attacked.victim.call("ReserveCacheMove", move, ReserveCacheMoveReply)
    reserve = Reserve(NUM_TOKENS, LEASE_S, block_keys=KNOWN)
    grant = granter.grant(reservation(NUM_TOKENS, "", KNOWN))
    reserve = msgspec.structs.replace(reserve, grant=grant)
    attacked.victim.call("Reserve", reserve, ReserveReply)
    for request, reply_type in ((move, ReserveCacheMoveReply), (reserve, ReserveReply)):
        with pytest.raises(RpcError, match="this grant has been used before") as caught:
            attacked.victim.call(type(request).__name__, request, reply_type)
        assert caught.value.code == "REFUSED"


def test_a_reservation_is_made_at_the_agents_of_its_grant(attacked: Attack) -> None:
    """A PD front that somebody has got hold of takes it to another cluster's node."""
    granter, own = attacked.region.granter, attacked.victim.ready["data"]
    reserve = Reserve(NUM_TOKENS, LEASE_S, block_keys=KNOWN)
    for agents, is_granted in ((f"9.9.9.9:1 {own}", True), ("9.9.9.9:1 9.9.9.9:2", False)):
        grant = granter.grant(reservation(NUM_TOKENS, "", KNOWN, agents))
        request = msgspec.structs.replace(reserve, grant=grant)
        if is_granted:
            attacked.victim.call("Reserve", request, ReserveReply)
            continue
        with pytest.raises(RpcError, match=r"the grant is for agent 9\.9\.9\.9:1") as caught:
            attacked.victim.call("Reserve", request, ReserveReply)
        assert caught.value.code == "REFUSED"


def test_an_outbox_goes_to_the_landing_of_its_grant(attacked: Attack) -> None:
    """The calls that a prefill front may make which somebody else has taken over."""
    attacked.victim.caller = attacked.region.shown("prefill-front")
    landing = attacked.attacker.reserve(NUM_TOKENS)
    request = OpenOutbox(
        transfer_id=landing.transfer_id,
        token=landing.token,
        nbytes=landing.nbytes,
        num_tokens=NUM_TOKENS,
        layout_fingerprint=FINGERPRINT,
        host=landing.host,
        port=landing.port,
        lease_s=LEASE_S,
    )
    elsewhere = msgspec.structs.replace(request, port=1)
    granter = attacked.region.granter
    for grant in (b"", granter.grant(outbox_send(elsewhere))):
        asked = msgspec.structs.replace(request, grant=grant)
        with pytest.raises(RpcError, match=r"OpenOutbox.* grant") as caught:
            attacked.victim.call("OpenOutbox", asked, OpenOutboxReply)
        assert caught.value.code == "REFUSED"
    assert (attacked.victim.status().outbox_bytes, attacked.victim.status().links) == (0, [])
    asked = msgspec.structs.replace(request, grant=granter.grant(outbox_send(request)))
    attacked.victim.call("OpenOutbox", asked, OpenOutboxReply)


def test_a_probe_goes_where_a_grant_says(attacked: Attack) -> None:
    there = Endpoint.parse(attacked.attacker.ready["data"])

    async def probe(granter: Granter | None) -> str:
        ends = [attacked.client(agent, granter) for agent in (attacked.victim, attacked.attacker)]
        try:
            return (await probe_link(ends[0], ends[1], 1000, *there)).error
        finally:
            for end in ends:
                await end.close()

    with pytest.raises(RpcError, match="SendLinkProbe needs a grant") as caught:
        asyncio.run(probe(None))
    assert caught.value.code == "REFUSED"
    assert attacked.victim.status().links == []
    assert asyncio.run(probe(attacked.region.granter)) == ""


def test_a_new_key_is_used_without_a_restart(attacked: Attack, tmp_path: Path) -> None:
    attacked.attackers.store(SECRET)
    private, public = grant_files(tmp_path, "new")
    ends = attacked.attacker, attacked.victim
    with pytest.raises(RpcError, match="not signed with a key"):
        attacked.move(*ends, Granter(private))
    known = attacked.region.granting_keys.path
    both = known.with_name("both.pub")
    both.touch(mode=0o600)
    both.write_bytes(known.read_bytes() + public.path.read_bytes())
    both.replace(known)

    def is_taken() -> bool:
        try:
            return attacked.move(*ends, Granter(private)).kept_parts == len(PARTS)
        except RpcError:
            return False

    wait_until(is_taken, what="the agent has looked at its file again")
