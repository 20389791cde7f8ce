"""Serves a node's feed: waits for changes of its prefix cache and of its embeddings.

The order of the changes and what followers read are in `feed`. It does not know what has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvmanager.agent.cache.feed import FeedLog
from kvmanager.agent.messages import CacheFeed, WatchCache
from kvmanager.agent.transfer_io import now_s
from kvmanager.pool.records import PoolChange

FEED_BATCH_S: Final = 0.02
"""Time for which a follower's answer waits for changes that come together with the first one."""
MAX_WATCH_S: Final = 60.0


class NodeFeed:
    """The feed of one agent. Use it on the agent's event loop."""

    def __init__(self) -> None:
        self._log = FeedLog()
        self._news = asyncio.Event()
        self._closed = False

    def part_changed(self, change: PoolChange) -> None:
        """A part of a block was stored in a tier or dropped from it."""
        self._log.part_changed(change, now_s())
        self._news.set()

    def engine_changed(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Engines hold these kinds of these blocks now, as (short key, kind bits)."""
        self._log.engine_changed(blocks, now_s())
        self._news.set()

    def embedding_changed(self, key: bytes, is_here: bool) -> None:
        """An embedding has come or gone."""
        self._log.embedding_changed(key, is_here, now_s())
        self._news.set()

    def close(self) -> None:
        """Answer whoever waits."""
        self._closed = True
        self._news.set()

    async def watch(self, request: WatchCache) -> CacheFeed:
        """The changes after the request's number; waits for one if there is none yet."""
        log = self._log
        if not log.has_news(request.epoch, request.after_seq):
            try:
                async with asyncio.timeout(min(request.timeout_s, MAX_WATCH_S)):
                    while not log.has_news(request.epoch, request.after_seq):
                        self._news.clear()
                        await self._news.wait()
                        if self._closed:
                            break
                    await asyncio.sleep(FEED_BATCH_S)
            except TimeoutError:
                pass
        return log.read(request.epoch, request.after_seq, now_s())
