"""Clients of node agents that share channels.

It does not know what they are used for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import SERVICE
from transport import Credentials
from transport.grants import Granter
from transport.rpc import RpcClient


class AgentClients:
    """Opens clients that share one channel to each agent. The channel closes with the last one."""

    def __init__(
        self, credentials: Credentials | None = None, granter: Granter | None = None
    ) -> None:
        self._credentials = credentials
        self._granter = granter
        self._shared: dict[str, tuple[RpcClient, set[AgentClient]]] = {}

    def open(self, target: str) -> AgentClient:
        """A client of the agent with this control address, to be closed by the caller."""
        if target not in self._shared:
            self._shared[target] = RpcClient(target, SERVICE, self._credentials), set()
        channel, users = self._shared[target]
        client = _SharingClient(target, channel, self._left, self._granter)
        users.add(client)
        return client

    async def _left(self, client: AgentClient) -> None:
        channel, users = self._shared.get(client.target, (None, set()))
        users.discard(client)
        # A client that is closed twice must not close a channel that later clients have opened.
        if channel is not None and not users:
            del self._shared[client.target]
            await channel.close()


class _SharingClient(AgentClient):
    """A client whose channel others use as well."""

    def __init__(
        self,
        target: str,
        channel: RpcClient,
        left: Callable[[AgentClient], Awaitable[None]],
        granter: Granter | None,
    ) -> None:
        super().__init__(target, granter=granter)
        self._rpc = channel
        self._left = left

    async def close(self) -> None:
        await self._left(self)
