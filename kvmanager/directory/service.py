"""The gRPC side of a directory: service `prfaas.Directory`. Does not know how it is fed."""

from __future__ import annotations

from typing import Any

from kvmanager.directory.embedded import EmbeddedDirectory
from kvmanager.directory.messages import (
    FindEmbeddings,
    FindEmbeddingsReply,
    Match,
    MatchReply,
    Nodes,
    NodesReply,
    short_keys_of,
)
from kvmanager.directory.table import Keys
from transport.rpc import Method, RpcError


class DirectoryService:
    """Answers from the directory of this process."""

    def __init__(self, directory: EmbeddedDirectory) -> None:
        self._directory = directory

    def methods(self) -> dict[str, Method[Any, Any]]:
        return {
            "Match": Method(Match, MatchReply, self.match),
            "Nodes": Method(Nodes, NodesReply, self.nodes),
            "FindEmbeddings": Method(FindEmbeddings, FindEmbeddingsReply, self.find_embeddings),
        }

    async def match(self, request: Match) -> MatchReply:
        keys = _keys(request.keys)
        return MatchReply(await self._directory.match_short(request.rule, keys))

    async def find_embeddings(self, request: FindEmbeddings) -> FindEmbeddingsReply:
        core = self._directory.core
        return FindEmbeddingsReply(core.embedding_holders_short(_keys(request.keys)))

    async def nodes(self, _: Nodes) -> NodesReply:
        return NodesReply(await self._directory.nodes())


def _keys(joined: bytes) -> Keys:
    try:
        return short_keys_of(joined)
    except ValueError as error:
        raise RpcError("INVALID", str(error)) from error
