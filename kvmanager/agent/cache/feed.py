"""The feed that tells followers what a node holds of each block and which embeddings it has.

Pure: no waiting, no clock. It knows neither where parts lie nor who follows.

An embedding is a block with a flag of its own here, which no message shows. Every change of a block
gets the next even sequence number. The log keeps only the latest change of each block, and keeps
held blocks and gone blocks apart. A follower that names a number gets the changes after it. A
follower that starts from nothing gets the held blocks in the order of their latest change, page by
page. An odd number identifies such a reading: how far it has come and when it began. No more gone
blocks are remembered than blocks are held, or a reply takes; a follower that may have missed one
starts from nothing again.
"""

from __future__ import annotations

import secrets
import struct
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from kvmanager.agent import messages
from kvmanager.agent.cache.change_log import ChangeLog, Latest
from kvmanager.pool.records import PoolChange, Tier
from kvmanager.pool.shape import CacheShape, PartKind

SHORT_KEY_BYTES: Final = 8
MAX_KEYS_PER_REPLY: Final = 8192
"""The event loop puts a reply of this many keys together in one turn of about 5 ms."""
MAX_GONE: Final = 1 << 17
"""Most gone blocks that are remembered, however many are held."""

MAX_CURSORS: Final = 256
"""Most unfinished readings from nothing that are remembered."""

_BITS_PER_TIER: Final = len(PartKind)
_ENGINE_SHIFT: Final = _BITS_PER_TIER * len(Tier)
_ENGINE_FLAGS: Final = ((1 << _BITS_PER_TIER) - 1) << _ENGINE_SHIFT
_EMBEDDING: Final = 1 << _BITS_PER_TIER + _ENGINE_SHIFT
_MAX_PARTS: Final = 256


class FeedLog:
    """The feed of one agent's cache. Single-threaded.

    `keep_gone`: most gone blocks that are remembered, however many are held.
    """

    def __init__(self, keep_gone: int = MAX_GONE) -> None:
        self.epoch = secrets.token_hex(8)
        self._keep_gone = keep_gone
        self._seq = 0
        self._last_change = 0
        self._forgotten_seq = 0
        self._flags: dict[bytes, int] = {}
        self._parts: dict[bytes, int] = {}  # bit 256 * tier + part
        self._seqs: dict[bytes, int] = {}  # of the latest change
        self._held = ChangeLog()
        self._gone = ChangeLog()
        self._cursors: OrderedDict[int, tuple[int, int]] = OrderedDict()  # (has come to, began at)

    @property
    def seq(self) -> int:
        """The number of the latest change."""
        return self._seq

    def part_changed(self, change: PoolChange, now_s: float) -> None:
        """Note that a part was stored in a tier or dropped from it."""
        key = change.key[:SHORT_KEY_BYTES]
        bit = 1 << (_MAX_PARTS * change.tier + change.part)
        before = self._parts.get(key, 0)
        after = before | bit if change.stored else before & ~bit
        if after:
            self._parts[key] = after
        else:
            self._parts.pop(key, None)
        ours = (1 << _ENGINE_SHIFT) - 1
        flags = self._flags.get(key, 0) & ~ours | _flags(change.shape, after)
        self._set(key, flags, now_s)

    def engine_changed(self, blocks: Iterable[tuple[bytes, int]], now_s: float) -> None:
        """Note what engines hold of these blocks now: each is a key (or its first 8 bytes) and a
        bit for each `PartKind`.
        """
        for key, kinds in blocks:
            short = key[:SHORT_KEY_BYTES]
            others = self._flags.get(short, 0) & ~_ENGINE_FLAGS
            self._set(short, others | kinds << _ENGINE_SHIFT, now_s)

    def embedding_changed(self, key: bytes, is_here: bool, now_s: float) -> None:
        """Note that an embedding has come or gone."""
        short = key[:SHORT_KEY_BYTES]
        others = self._flags.get(short, 0) & ~_EMBEDDING
        self._set(short, others | (_EMBEDDING if is_here else 0), now_s)

    def flags(self, key: bytes) -> int:
        """The flags of a block now, as in `messages.CacheFeed`."""
        return self._flags.get(key[:SHORT_KEY_BYTES], 0) & ~_EMBEDDING

    def has_news(self, epoch: str, after_seq: int) -> bool:
        """Whether `read` would answer with anything new."""
        is_reading = after_seq % 2 == 1
        is_past = not self._last_change <= after_seq <= self._seq
        return epoch != self.epoch or is_reading or is_past

    def read(
        self, epoch: str, after_seq: int, now_s: float, max_keys: int = MAX_KEYS_PER_REPLY
    ) -> messages.CacheFeed:
        """The changes after `after_seq` of `epoch`, oldest first. A follower with another epoch or
        a forgotten number gets a snapshot.
        """
        position, begun = self._cursors.get(after_seq, (after_seq, after_seq))
        known = epoch == self.epoch and self._forgotten_seq <= begun <= self._seq
        if not known or position % 2:
            known, position, begun = False, 0, self._seq
        # One more than a page, to see whether another page follows.
        news = self._held.after(position, max_keys + 1)
        if known:
            news += self._gone.after(position, max_keys + 1)
        news.sort(key=lambda item: item[1].seq)
        page = news[:max_keys]
        more = len(news) > len(page)
        is_reading = not known or after_seq in self._cursors
        if not more:
            seq = self._seq
        elif is_reading:
            seq = self._cursor(page[-1][1].seq, begun)
        else:
            seq = page[-1][1].seq
        flags = {key: self._flags.get(key, 0) for key, _ in page}
        # What is gone was one or the other, and is among the blocks.
        blocks = {key: held & ~_EMBEDDING for key, held in flags.items() if held != _EMBEDDING}
        return messages.CacheFeed(
            epoch=self.epoch,
            seq=seq,
            keys=b"".join(blocks),
            flags=struct.pack(f"<{len(blocks)}H", *blocks.values()),
            is_snapshot=not known,
            more=more,
            age_s=max(0.0, now_s - page[0][1].at_s) if known and page else 0.0,
            embeddings=b"".join(key for key, held in flags.items() if held & _EMBEDDING),
        )

    def _cursor(self, position: int, begun: int) -> int:
        """A number for a reading from nothing that began at `begun` and has come to `position`."""
        # Odd, and so never the number of a change.
        number = self._seq + 1
        self._seq += 2
        self._cursors[number] = position, begun
        if len(self._cursors) > MAX_CURSORS:
            self._cursors.popitem(last=False)
        return number

    def _set(self, key: bytes, flags: int, now_s: float) -> None:
        if flags == self._flags.get(key, 0):
            return
        self._seq += 2
        self._last_change = self._seq
        latest = Latest(self._seq, now_s)
        seq_before = self._seqs.get(key)
        if seq_before is not None:
            (self._held if key in self._flags else self._gone).remove(key, seq_before)
        self._seqs[key] = self._seq
        if flags:
            self._flags[key] = flags
            self._held.add(key, latest)
            return
        del self._flags[key]
        self._gone.add(key, latest)
        # Whoever has missed more than is held reads what is held in less time. Without this bound a
        # small cache would remember a hundred times more blocks than it has room for.
        most = min(self._keep_gone, max(MAX_KEYS_PER_REPLY, len(self._held)))
        while len(self._gone) > most:
            forgotten, last = self._gone.pop_first()
            del self._seqs[forgotten]
            self._forgotten_seq = last.seq


def _flags(shape: CacheShape, parts: int) -> int:
    """The flags for these parts: a tier holds a kind when it holds every part of that kind."""
    flags = 0
    for tier in Tier:
        held = parts >> (_MAX_PARTS * tier)
        missing = {p.kind for number, p in enumerate(shape.parts) if not held >> number & 1}
        for kind in {p.kind for p in shape.parts} - missing:
            flags |= 1 << (_BITS_PER_TIER * tier + kind)
    return flags
