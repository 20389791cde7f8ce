"""A directory that says what it is told to say, and agents that move cached prefixes at once."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from report_cases import agent_status

from kvmanager.agent.cache.move_messages import CacheMoveStatusReply, ReserveCacheMoveReply
from kvmanager.agent.client import AgentClient, CacheMoveOrder
from kvmanager.agent.messages import CacheModel, EngineStatus, StatusReply
from kvmanager.directory.messages import Hit, NodeCoverage, NodeName, NodeState, ResumeRule
from transport.rpc import RpcError


def coverage(name: NodeName, num_blocks: int) -> NodeCoverage:
    """A node that has so many blocks of a prompt, in memory."""
    hit = Hit(num_blocks, num_blocks)
    return NodeCoverage(*name, hit, hit, hit, Hit(), Hit(), 0.5)


class FakeDirectory:
    """Says of every prompt how many blocks `held` says; remembers what it was asked."""

    def __init__(self, held: Mapping[NodeName, int] = {}) -> None:
        self.held = held
        self.states: list[NodeState] = []
        self.embeddings: dict[bytes, list[NodeName]] = {}
        self.embeddings_asked: list[list[bytes]] = []
        self.asked: list[tuple[ResumeRule, list[bytes]]] = []
        self.followed: Mapping[NodeName, str] = {}
        self.is_closed = False

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        self.asked.append((rule, list(keys)))
        return [coverage(name, num_blocks) for name, num_blocks in self.held.items()]

    async def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        self.embeddings_asked.append(list(keys))
        return [self.embeddings.get(key, []) for key in keys]

    async def nodes(self) -> list[NodeState]:
        return self.states

    async def close(self) -> None:
        self.is_closed = True

    async def follow(self, agents: Mapping[NodeName, str]) -> None:
        self.followed = agents


class MovingAgents:
    """All agents of a region: what they answer, and what was asked of them.

    A move takes 10 ms, or does not end while `stalled`; `num_kept` blocks of it are kept. `sent`
    are the moves, each with its way "from -> to"; `dropped`: where how many blocks were to stay.
    """

    def __init__(self, model: CacheModel, nbytes: int, num_kept: int) -> None:
        self.model = model
        self.nbytes = nbytes
        self.num_kept = num_kept
        self.failing: RpcError | None = None
        self.stalled = False
        self.sent: list[tuple[str, CacheMoveOrder]] = []
        self.dropped: list[tuple[str, int]] = []

    def at(self, target: str) -> AgentClient:
        """The client of one of them."""
        return _MovingAgent(target, self)


class _MovingAgent(AgentClient):
    def __init__(self, target: str, agents: MovingAgents) -> None:
        self.target = target
        self._agents = agents

    async def status(self, timeout_s: float) -> StatusReply:
        engine = EngineStatus("engine", 1, 1, "layout", "f0" * 32, self._agents.model)
        return agent_status(engines=[engine])

    async def reserve_cache_move(
        self, order: CacheMoveOrder, lease_s: float
    ) -> ReserveCacheMoveReply:
        if self._agents.failing is not None:
            raise self._agents.failing
        nbytes = self._agents.nbytes
        return ReserveCacheMoveReply(list(order.parts), "id", "token", nbytes, self.target, 1)

    async def send_cache_move(
        self, order: CacheMoveOrder, landing: ReserveCacheMoveReply, lease_s: float
    ) -> None:
        self._agents.sent.append((f"{self.target} -> {landing.host}", order))

    async def cache_move_status(
        self, transfer_id: str, role: Any, *, lease_s: float, wait_s: float
    ) -> CacheMoveStatusReply:
        while self._agents.stalled and wait_s:
            await asyncio.sleep(0.01)
        nbytes, kept = self._agents.nbytes, self._agents.num_kept
        return CacheMoveStatusReply("complete", "", nbytes, nbytes, kept, 0.01, 0.001)

    async def end_cache_move(self, transfer_id: str, reason: str) -> bool:
        return True

    async def drop_cached(
        self, layout_fingerprint: str, block_keys: bytes, keep_blocks: int, namespace: str = ""
    ) -> int:
        self._agents.dropped.append((self.target, keep_blocks))
        return 3

    async def close(self) -> None:
        pass
