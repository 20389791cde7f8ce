"""What followers of a node's prefix cache are told, and when they begin anew."""

import random
import struct
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.agent import messages
from kvmanager.agent.cache.feed import MAX_KEYS_PER_REPLY, FeedLog
from kvmanager.pool.records import PoolChange, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape

SHAPE = CacheShape(
    64,
    (
        PartShape(PartKind.KV, 100),
        PartShape(PartKind.WINDOW, 100, 128),
        PartShape(PartKind.WINDOW, 100, 512),
        PartShape(PartKind.STATE, 100),
    ),
)
ARENA_KV, ARENA_WINDOW, ARENA_STATE, SSD_KV, ENGINE_KV = 1, 2, 4, 8, 64


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


def change(
    number: int, part: int = 0, *, stored: bool = True, tier: Tier = Tier.ARENA
) -> PoolChange:
    return PoolChange(stored, tier, key(number), bytes(16), 0, part, SHAPE, ())


class Follower:
    """Applies replies as a directory would."""

    def __init__(self) -> None:
        self.epoch, self.seq = "", 0
        self.held: dict[bytes, int] = {}
        self.embeddings: set[bytes] = set()
        self.num_snapshots = 0

    def apply(self, reply: messages.CacheFeed) -> None:
        if reply.is_snapshot:
            self.held.clear()
            self.embeddings.clear()
            self.num_snapshots += 1
        self.epoch, self.seq = reply.epoch, reply.seq
        keys = [reply.keys[i : i + 8] for i in range(0, len(reply.keys), 8)]
        for name, flags in zip(keys, struct.unpack(f"<{len(keys)}H", reply.flags), strict=True):
            if flags:
                self.held[name] = flags
            else:
                self.held.pop(name, None)
                self.embeddings.discard(name)
        self.embeddings |= {reply.embeddings[i : i + 8] for i in range(0, len(reply.embeddings), 8)}

    def catch_up(self, feed: FeedLog, max_keys: int = 1000) -> None:
        for _ in range(1000):
            if not feed.has_news(self.epoch, self.seq):
                return
            self.apply(feed.read(self.epoch, self.seq, 0.0, max_keys))
        raise AssertionError("no end of news")


def test_flags_say_which_kinds_a_tier_holds_whole() -> None:
    feed = FeedLog()
    feed.part_changed(change(1, 0), 0.0)
    assert feed.flags(key(1)) == ARENA_KV
    feed.part_changed(change(1, 1), 0.0)
    assert feed.flags(key(1)) == ARENA_KV, "one of two windows is none"
    feed.part_changed(change(1, 2), 0.0)
    feed.part_changed(change(1, 3), 0.0)
    feed.part_changed(change(1, 0, tier=Tier.SSD), 0.0)
    feed.engine_changed([(key(1), 1)], 0.0)
    every = ARENA_KV | ARENA_WINDOW | ARENA_STATE | SSD_KV | ENGINE_KV
    assert feed.flags(key(1)) == every
    feed.part_changed(change(1, 2, stored=False), 0.0)
    feed.engine_changed([(key(1)[:8], 0)], 0.0)
    assert feed.flags(key(1)) == ARENA_KV | ARENA_STATE | SSD_KV
    assert feed.flags(key(2)) == 0


def test_a_follower_gets_what_changed_and_how_old_it_is() -> None:
    feed, follower = FeedLog(), Follower()
    feed.part_changed(change(1), 1.0)
    first = feed.read("", 0, 5.0)
    assert first.is_snapshot
    assert not first.more
    follower.apply(first)
    assert not feed.has_news(follower.epoch, follower.seq)
    feed.part_changed(change(2), 6.0)
    feed.part_changed(change(1, stored=False), 7.0)
    reply = feed.read(follower.epoch, follower.seq, 9.0)
    assert (reply.is_snapshot, reply.age_s) == (False, 3.0)
    follower.apply(reply)
    assert follower.held == {key(2)[:8]: ARENA_KV}
    nothing = feed.read(follower.epoch, follower.seq, 9.0)
    assert (nothing.keys, nothing.seq) == (b"", follower.seq)


def test_embeddings_come_and_go_among_the_blocks() -> None:
    feed, follower = FeedLog(), Follower()
    feed.part_changed(change(1), 1.0)
    feed.embedding_changed(key(2), True, 2.0)
    feed.embedding_changed(key(3), True, 2.0)
    first = feed.read("", 0, 5.0)
    # A directory of the release before knows no more flags than these.
    assert (first.keys, first.flags) == (key(1)[:8], struct.pack("<H", ARENA_KV))
    follower.apply(first)
    assert follower.embeddings == {key(2)[:8], key(3)[:8]}
    seq = feed.seq
    feed.embedding_changed(key(2), True, 6.0)
    assert feed.seq == seq
    feed.embedding_changed(key(2), False, 6.0)
    reply = feed.read(follower.epoch, follower.seq, 7.0)
    assert (reply.keys, reply.flags, reply.embeddings) == (key(2)[:8], b"\0\0", b"")
    follower.apply(reply)
    assert (follower.embeddings, follower.held) == ({key(3)[:8]}, {key(1)[:8]: ARENA_KV})
    assert feed.flags(key(3)) == 0


def test_what_does_not_change_the_flags_is_no_news() -> None:
    feed = FeedLog()
    feed.part_changed(change(1, 1), 0.0)
    feed.engine_changed([(key(3), 0)], 0.0)
    assert feed.seq == 0


def test_another_epoch_or_a_number_to_come_begins_anew() -> None:
    feed = FeedLog()
    feed.part_changed(change(1), 0.0)
    assert feed.read("another", 1, 0.0).is_snapshot
    assert feed.read(feed.epoch, 99, 0.0).is_snapshot
    assert not feed.read(feed.epoch, 0, 0.0).is_snapshot
    assert FeedLog().epoch != feed.epoch


def test_who_may_have_missed_what_is_forgotten_begins_anew() -> None:
    feed, follower = FeedLog(keep_gone=3), Follower()
    for number in range(10):
        feed.part_changed(change(number), 0.0)
    follower.catch_up(feed)
    seq = follower.seq
    for number in range(3):
        feed.part_changed(change(number, stored=False), 0.0)
    assert not feed.read(feed.epoch, seq, 0.0).is_snapshot
    feed.part_changed(change(3, stored=False), 0.0)
    assert feed.read(feed.epoch, seq, 0.0).is_snapshot
    follower.catch_up(feed)
    assert set(follower.held) == {key(number)[:8] for number in range(4, 10)}


def test_what_a_small_cache_remembers_does_not_grow_with_what_has_gone() -> None:
    feed = FeedLog()
    for number in range(10):
        feed.part_changed(change(number), 0.0)
    seqs = []
    for number in range(10, 10 + 2 * MAX_KEYS_PER_REPLY):
        seqs.append(feed.seq)
        feed.engine_changed([(key(number), 1)], 0.0)
        feed.engine_changed([(key(number), 0)], 0.0)
    assert not feed.read(feed.epoch, seqs[-MAX_KEYS_PER_REPLY], 0.0).is_snapshot
    assert feed.read(feed.epoch, seqs[-MAX_KEYS_PER_REPLY - 1], 0.0).is_snapshot


def test_a_large_cache_remembers_as_many_gone_blocks_as_it_holds() -> None:
    feed = FeedLog()
    num_held = 2 * MAX_KEYS_PER_REPLY
    feed.engine_changed([(key(number), 1) for number in range(2 * num_held)], 0.0)
    seq = feed.seq
    feed.engine_changed([(key(number), 0) for number in range(num_held)], 0.0)
    assert not feed.read(feed.epoch, seq, 0.0).is_snapshot
    feed.engine_changed([(key(num_held), 0)], 0.0)
    assert feed.read(feed.epoch, seq, 0.0).is_snapshot


def test_a_long_snapshot_ends_though_much_was_forgotten_before_it() -> None:
    feed, follower = FeedLog(keep_gone=2), Follower()
    for number in range(50):
        feed.part_changed(change(number), 0.0)
    for number in range(100, 200):
        feed.part_changed(change(number), 0.0)
        feed.part_changed(change(number, stored=False), 0.0)
    follower.catch_up(feed, max_keys=7)
    assert follower.num_snapshots == 1
    assert len(follower.held) == 50


def test_a_page_costs_the_same_wherever_it_begins() -> None:
    """Going through all held blocks for each page, this takes seven seconds."""
    feed, follower = FeedLog(), Follower()
    feed.engine_changed([(key(number), 1) for number in range(200_000)], 0.0)
    begin_s = time.thread_time()
    follower.catch_up(feed, max_keys=250)
    assert time.thread_time() - begin_s < 3.0
    assert len(follower.held) == 200_000


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), keep_gone=st.integers(1, 30), page=st.integers(1, 20))
def test_followers_end_up_with_what_is_held(seed: int, keep_gone: int, page: int) -> None:
    """Whatever happens between two pages."""
    rng = random.Random(seed)
    feed, followers = FeedLog(keep_gone), [Follower() for _ in range(3)]
    here: set[int] = set()
    for _ in range(300):
        number, part = rng.randrange(40), rng.choice((0, 3))
        if rng.random() < 0.2:
            is_here = rng.random() < 0.5
            feed.embedding_changed(key(40 + number), is_here, 0.0)
            (here.add if is_here else here.discard)(40 + number)
        elif rng.random() < 0.2:
            feed.engine_changed([(key(number), rng.randrange(8))], 0.0)
        else:
            feed.part_changed(change(number, part, stored=rng.random() < 0.5), 0.0)
        follower = rng.choice(followers)
        if rng.random() < 0.3:
            follower.apply(feed.read(follower.epoch, follower.seq, 0.0, page))
    wanted = {key(n)[:8]: flags for n in range(40) if (flags := feed.flags(key(n)))}
    for follower in followers:
        follower.catch_up(feed, page)
        assert follower.held == wanted
        assert follower.embeddings == {key(number)[:8] for number in here}
