"""A directory behind gRPC: the client of `prfaas directory`. Keeps nothing but a connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from kvmanager.directory.messages import (
    SERVICE,
    FindEmbeddings,
    FindEmbeddingsReply,
    Match,
    MatchReply,
    NodeCoverage,
    NodeName,
    Nodes,
    NodesReply,
    NodeState,
    ResumeRule,
    short_key_bytes,
)
from kvmanager.directory.reader import Outage
from transport import Credentials
from transport.rpc import RpcClient, RpcError

_NODES_TIMEOUT_S: Final = 5.0


class RemoteDirectory:
    """A `DirectoryReader` that asks the service at `target` ("host:port").

    `timeout_s`: longest wait of a request for an answer, before it goes on without one.
    """

    def __init__(
        self, target: str, credentials: Credentials | None = None, *, timeout_s: float = 0.25
    ) -> None:
        self._client = RpcClient(target, SERVICE, credentials)
        self._timeout_s = timeout_s
        self._outage = Outage(f"directory at {target}")

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        if self._outage.quiet(time.monotonic()):
            return []
        request = Match(rule, short_key_bytes(keys))
        try:
            reply = await self._client.call("Match", request, MatchReply, self._timeout_s)
        except RpcError as error:
            self._outage.failed(error, time.monotonic())
            return []
        self._outage.worked()
        return reply.nodes

    async def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        nobody: list[list[NodeName]] = [[] for _ in keys]
        if not keys or self._outage.quiet(time.monotonic()):
            return nobody
        request = FindEmbeddings(short_key_bytes(keys))
        try:
            reply = await self._client.call(
                "FindEmbeddings", request, FindEmbeddingsReply, self._timeout_s
            )
        except RpcError as error:
            # A directory of an older release does not know the question, or whom it may answer it.
            # It answers others.
            if error.code not in ("INVALID", "REFUSED"):
                self._outage.failed(error, time.monotonic())
            return nobody
        self._outage.worked()
        return reply.holders if len(reply.holders) == len(keys) else nobody

    async def nodes(self) -> list[NodeState]:
        try:
            reply = await self._client.call("Nodes", Nodes(), NodesReply, _NODES_TIMEOUT_S)
        except RpcError as error:
            self._outage.failed(error, time.monotonic())
            return []
        return reply.nodes

    async def close(self) -> None:
        await self._client.close()
