"""The directory: what it answers against brute force, and how it follows nodes through gaps."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.agent.messages import CacheFeed, CacheModel
from kvmanager.directory.coverage import EMBEDDING_FLAG
from kvmanager.directory.directory import FROM_THE_BEGINNING, Directory
from kvmanager.directory.errors import FeedError
from kvmanager.directory.messages import Hit, NodeName, ResumeRule
from kvmanager.hashing import block_keys, root_key
from kvmanager.pool.shape import CacheShape, PartKind, PartShape

NODES = [NodeName("near", "n0"), NodeName("near", "n1"), NodeName("far", "n0")]
KEYS = block_keys(range(40), 1, root_key(b"model"))
VIEWS = {"every": (0, 1, 2), "pool": (0, 1), "arena": (0,), "ssd": (1,), "engine": (2,)}

KV, WINDOW, STATE = 1, 2, 4
SSD_KV = KV << 3
ENGINE_KV = KV << 6


def shape(*parts: tuple[PartKind, int], block_tokens: int = 4) -> CacheShape:
    return CacheShape(block_tokens, tuple(PartShape(kind, 100, window) for kind, window in parts))


FULL = shape((PartKind.KV, 0))
HYBRID = shape((PartKind.KV, 0), (PartKind.STATE, 0))
SHAPES = [
    FULL,
    HYBRID,
    shape((PartKind.STATE, 0)),
    shape((PartKind.WINDOW, 9)),
    shape((PartKind.KV, 0), (PartKind.WINDOW, 1)),
    shape((PartKind.KV, 0), (PartKind.WINDOW, 2), (PartKind.WINDOW, 14)),
    shape((PartKind.KV, 0), (PartKind.WINDOW, 6), (PartKind.STATE, 0)),
]
RULE = ResumeRule.of(FULL)


def feed(
    holds: Mapping[bytes, int],
    seq: int = 1,
    *,
    epoch: str = "e",
    snapshot: bool = False,
    more: bool = False,
) -> CacheFeed:
    return CacheFeed(
        epoch=epoch,
        seq=seq,
        keys=b"".join(key[:8] for key, flags in holds.items() if flags != EMBEDDING_FLAG),
        flags=b"".join(
            flags.to_bytes(2, "little") for flags in holds.values() if flags != EMBEDDING_FLAG
        ),
        is_snapshot=snapshot,
        more=more,
        embeddings=b"".join(key[:8] for key, flags in holds.items() if flags == EMBEDDING_FLAG),
    )


def holding(holds: Mapping[NodeName, Mapping[bytes, int]]) -> Directory:
    directory = Directory()
    for node, blocks in holds.items():
        assert directory.apply(node, feed(blocks, snapshot=True), now_s=10.0)
    return directory


def brute_force(cache: CacheShape, flags: list[int], tiers: tuple[int, ...]) -> Hit:
    """By the rules of `CacheShape`, from what one node holds of each block."""

    def has(block: int, part: PartShape) -> bool:
        return any(block >> (3 * tier + part.kind) & 1 for tier in tiers)

    present = [[has(block, part) for part in cache.parts] for block in flags]
    usable = cache.num_usable_blocks(present)
    return Hit(cache.num_kv_blocks(present) if cache.has_kv else usable, usable)


def test_coverage_by_node_tier_and_age() -> None:
    directory = holding(
        {
            NODES[0]: dict.fromkeys(KEYS[:4], KV) | {KEYS[4]: SSD_KV} | {KEYS[5]: ENGINE_KV},
            NODES[1]: dict.fromkeys(KEYS[:2], KV | SSD_KV),
            NODES[2]: dict.fromkeys(KEYS[1:], KV),
        }
    )
    best, second = directory.match(RULE, KEYS[:8], now_s=12.5)
    assert (best.cluster, best.node, best.age_s) == ("near", "n0", 2.5)
    assert (best.every, best.pool, best.arena) == (Hit(6, 6), Hit(5, 5), Hit(4, 4))
    assert (best.ssd, best.engine) == (Hit(), Hit())
    assert (second.node, second.arena, second.ssd) == ("n1", Hit(2, 2), Hit(2, 2))


def test_a_state_is_needed_at_the_end_of_what_is_resumed() -> None:
    directory = holding({NODES[0]: dict.fromkeys(KEYS[:9], KV) | {KEYS[3]: KV | STATE}})
    (found,) = directory.match(ResumeRule.of(HYBRID), KEYS, now_s=10.0)
    assert (found.kv_blocks, found.usable_blocks) == (9, 4)


def test_rules_of_shapes_and_models() -> None:
    assert ResumeRule.of(SHAPES[5]) == ResumeRule(has_kv=True, window_reach=4, has_state=False)
    assert ResumeRule.of(SHAPES[2]) == ResumeRule(has_kv=False, window_reach=0, has_state=True)
    model = CacheModel("00", 4, [(0, 100, 0), (1, 100, 6), (2, 100, 0)])
    assert ResumeRule.of_model(model) == ResumeRule.of(SHAPES[6])
    with pytest.raises(ValueError, match="7 is not a valid PartKind"):
        ResumeRule.of_model(CacheModel("00", 4, [(7, 1, 0)]))


def test_nothing_is_known_of_strange_prompts_and_of_none() -> None:
    directory = holding({NODES[0]: dict.fromkeys(KEYS[1:], KV)})
    assert directory.match(RULE, KEYS, now_s=0) == []
    assert directory.match(RULE, [], now_s=0) == []
    assert Directory().match(RULE, KEYS, now_s=0) == []


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 511)), max_size=8),
        min_size=1,
        max_size=3,
    ),
)
def test_match_equals_brute_force(cache: CacheShape, runs: list[list[tuple[int, int]]]) -> None:
    held = {}
    for node, parts in zip(NODES, runs, strict=False):
        flags = [flags for length, flags in parts for _ in range(length)]
        held[node] = dict(zip(KEYS, flags, strict=False))
    answer = {
        (found.cluster, found.node): found
        for found in holding(held).match(ResumeRule.of(cache), KEYS, now_s=10.0)
    }
    for node, blocks in held.items():
        flags = [blocks.get(key, 0) for key in KEYS]
        wanted = {view: brute_force(cache, flags, tiers) for view, tiers in VIEWS.items()}
        if wanted["every"].kv_blocks == 0:
            assert node not in answer
        else:
            assert {view: getattr(answer[node], view) for view in VIEWS} == wanted


class Agent:
    """A node that changes at random and numbers its changes."""

    def __init__(self, rng: random.Random, epoch: str) -> None:
        self.rng = rng
        self.epoch = epoch
        self.seq = 0
        self.holds: dict[bytes, int] = {}

    def change(self, num_blocks: int) -> CacheFeed:
        chosen = self.rng.choices(KEYS, k=num_blocks)
        news = {key: self.rng.choice([0, 0, 1, 5, 8, 64, 73, EMBEDDING_FLAG]) for key in chosen}
        self.seq += num_blocks
        self.holds = {key: flags for key, flags in (self.holds | news).items() if flags}
        return feed(news, self.seq, epoch=self.epoch)

    def pages(self, size: int) -> list[CacheFeed]:
        """A snapshot in pieces."""
        items = sorted(self.holds.items())
        starts = range(0, max(1, len(items)), size)
        return [
            feed(
                dict(items[start : start + size]),
                self.seq,
                epoch=self.epoch,
                snapshot=start == 0,
                more=start != starts[-1],
            )
            for start in starts
        ]


@pytest.mark.parametrize("seed", range(5))
def test_a_rebuilt_directory_equals_one_that_lived_through_all_events(seed: int) -> None:
    rng = random.Random(seed)
    agents = {node: Agent(rng, f"{node}") for node in NODES}
    lived = Directory()
    for node, agent in agents.items():
        assert lived.apply(node, agent.pages(5)[0], 0.0)
    for step in range(300):
        node = rng.choice(NODES)
        if step == 150:
            lived.forget(node)
            for page in agents[node].pages(5):
                assert lived.apply(node, page, float(step))
        assert lived.apply(node, agents[node].change(rng.randrange(30)), float(step))
    rebuilt = Directory()
    for node, agent in agents.items():
        for page in agent.pages(7):
            assert rebuilt.apply(node, page, 300.0)
    assert all(rebuilt.holders(key) == lived.holders(key) for key in KEYS)
    for state in lived.nodes(0.0):
        held = list(agents[NodeName(state.cluster, state.node)].holds.values())
        num_embeddings = held.count(EMBEDDING_FLAG)
        assert (state.num_blocks, state.num_embeddings) == (
            len(held) - num_embeddings,
            num_embeddings,
        )
    assert {node: lived.position(node) for node in NODES} == {
        node: rebuilt.position(node) for node in NODES
    }


def test_the_later_statement_of_one_message_counts() -> None:
    directory = Directory()
    twice = CacheFeed("e", 2, KEYS[0][:8] * 2, b"\x01\x00\x00\x00", is_snapshot=True)
    assert directory.apply(NODES[0], twice, 0.0)
    assert directory.num_blocks == 0


def test_a_message_of_many_blocks_is_applied_in_steps() -> None:
    directory = Directory()
    keys = block_keys(range(30_000), 1, root_key(b""))
    large = feed(dict.fromkeys(keys, KV), snapshot=True)
    steps = directory.applying(NODES[0], large, 0.0)
    next(steps)
    assert 0 < directory.num_blocks < 30_000
    assert directory.position(NODES[0]) == FROM_THE_BEGINNING
    assert len(list(steps)) > 1
    assert directory.num_blocks == 30_000
    assert directory.position(NODES[0]) == ("e", 1)
    assert len(directory.match(RULE, keys, 0.0)) == 1


@pytest.mark.parametrize(
    "strange",
    [
        feed({KEYS[0]: KV}, 9, epoch="another"),
        feed({KEYS[0]: KV}, 2),
    ],
    ids=["another epoch", "a number from before"],
)
def test_what_does_not_continue_is_refused_and_asked_for_anew(strange: CacheFeed) -> None:
    directory = holding({NODES[0]: {KEYS[0]: KV}})
    assert directory.apply(NODES[0], feed({KEYS[1]: KV}, 5), 0.0)
    assert not directory.apply(NODES[0], strange, 0.0)
    assert directory.position(NODES[0]) == FROM_THE_BEGINNING
    assert directory.match(RULE, KEYS, 0.0)[0].kv_blocks == 2
    assert not directory.apply(NODES[0], feed({}, 6), 0.0)
    assert directory.apply(NODES[0], feed({KEYS[0]: KV}, 7, epoch="f", snapshot=True), 0.0)
    assert directory.match(RULE, KEYS, 0.0)[0].kv_blocks == 1


def test_a_node_never_heard_of_begins_with_a_snapshot() -> None:
    directory = Directory()
    assert not directory.apply(NODES[0], feed({KEYS[0]: KV}), 0.0)
    assert directory.nodes(0.0) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (CacheFeed("e", 2, KEYS[0][:8], b"\x01"), "8 bytes of keys and 1 bytes of flags"),
        (CacheFeed("e", 2, KEYS[0][:7], b"\x01\x00"), "7 bytes of keys"),
        (CacheFeed("e", 2, KEYS[0][:8], b"\x00\x02"), "0x200 have bits beyond 0x1ff"),
        (CacheFeed("", 2, b"", b""), "epoch ''"),
        (CacheFeed("e", 2, b"", b"", embeddings=b"a"), "1 bytes are no keys of embeddings"),
        (CacheFeed("e", -1, b"", b""), "seq -1"),
    ],
)
def test_a_bad_message_is_an_error_and_the_node_is_asked_for_everything(
    bad: CacheFeed, words: str
) -> None:
    directory = holding({NODES[0]: {KEYS[0]: KV}})
    with pytest.raises(FeedError, match=words) as caught:
        directory.apply(NODES[0], bad, 0.0)
    assert "near/n0" in str(caught.value)
    assert directory.position(NODES[0]) == FROM_THE_BEGINNING
    assert directory.match(RULE, KEYS, 0.0)[0].kv_blocks == 1


def test_who_has_an_embedding_is_known_until_it_or_its_node_goes() -> None:
    directory = holding(
        {
            NODES[0]: {KEYS[0]: EMBEDDING_FLAG, KEYS[1]: KV},
            NODES[1]: {KEYS[0]: EMBEDDING_FLAG, KEYS[2]: EMBEDDING_FLAG},
        }
    )
    assert directory.embedding_holders(KEYS[:4]) == [
        [NODES[0], NODES[1]],
        [],  # a block is no embedding
        [NODES[1]],
        [],
    ]
    assert directory.embedding_holders([]) == []
    assert directory.match(RULE, KEYS[:1], 0.0) == []  # nor is an embedding a block
    assert directory.apply(NODES[1], feed({KEYS[0]: 0}, 2), 0.0)
    assert directory.embedding_holders(KEYS[:1]) == [[NODES[0]]]
    # The node has started anew, with nothing.
    assert directory.apply(NODES[0], feed({}, epoch="f", snapshot=True), 0.0)
    assert directory.embedding_holders(KEYS[:1]) == [[]]
    directory.forget(NODES[1])
    assert directory.embedding_holders(KEYS[2:3]) == [[]]


def test_a_forgotten_node_holds_nothing_and_its_column_serves_another() -> None:
    directory = holding({NODES[0]: dict.fromkeys(KEYS, KV), NODES[1]: {KEYS[0]: KV}})
    directory.forget(NODES[0])
    directory.forget(NODES[0])
    assert [found.node for found in directory.match(RULE, KEYS, 0.0)] == ["n1"]
    assert directory.num_blocks == 1
    assert directory.apply(NODES[2], feed({KEYS[0]: STATE}, snapshot=True), 0.0)
    assert directory.holders(KEYS[0]) == {NODES[1]: KV, NODES[2]: STATE}


def test_pages_of_a_snapshot_are_complete_with_the_last() -> None:
    directory = Directory()
    assert directory.apply(NODES[0], feed({KEYS[0]: KV}, 3, snapshot=True, more=True), 0.0)
    assert [state.complete for state in directory.nodes(0.0)] == [False]
    assert directory.position(NODES[0]) == ("e", 3)
    assert directory.apply(NODES[0], feed({KEYS[1]: KV}, 7), 1.0)
    (state,) = directory.nodes(4.0)
    assert (state.complete, state.num_blocks, state.seq, state.age_s) == (True, 2, 7, 3.0)


def test_what_a_node_is_known_to_hold_stays_until_its_new_snapshot_is_whole() -> None:
    """That of a large node takes many feeds, and prompts would miss it meanwhile."""
    directory = holding({NODES[0]: {KEYS[0]: KV}})

    def held() -> list[bytes]:
        by_key = [key for key in KEYS[:3] if directory.holders(key)]
        assert [bool(found) for found in directory.embedding_holders(KEYS[2:3])] == [
            len(by_key) > 1
        ]
        assert [state.num_blocks for state in directory.nodes(0.0)] == [1]
        return by_key

    for _ in range(2):  # the first time the node is lost in between
        assert directory.apply(
            NODES[0], feed({KEYS[1]: KV}, 3, epoch="f", snapshot=True, more=True), 0.0
        )
        assert held() == KEYS[:1]
        assert [one.usable_blocks for one in directory.match(RULE, KEYS[:2], 0.0)] == [1]
    assert directory.apply(NODES[0], feed({KEYS[2]: EMBEDDING_FLAG}, 7, epoch="f"), 1.0)
    assert held() == KEYS[1:3]
    directory.forget(NODES[0])
    assert directory.num_blocks == 0


def test_nodes_that_begin_anew_again_and_again_leave_nothing_behind() -> None:
    """Each time with other tiers for the same blocks, so that all sets are new ones."""
    directory = Directory()
    rng = random.Random(4)
    keys = block_keys(range(300), 1, root_key(b"model"))
    nodes = [NodeName("c", f"n{i}") for i in range(3)]
    held: dict[NodeName, dict[bytes, int]] = {node: {} for node in nodes}
    sizes = []
    for seq in range(120):
        node = nodes[seq % 3]
        held[node] = {key: rng.randrange(1, 512) for key in rng.sample(keys, 200)}
        assert directory.apply(node, feed(held[node], seq + 1, snapshot=True), 0.0)
        sizes.append(directory.nbytes)
    assert max(sizes) < 2_000_000
    for key in keys:
        assert directory.holders(key) == {
            n: blocks[key] for n, blocks in held.items() if key in blocks
        }
    counts = {state.node: state.num_blocks for state in directory.nodes(0.0)}
    assert counts == {"n0": 200, "n1": 200, "n2": 200}


def test_blocks_are_rewritten_when_most_sets_of_a_node_that_left_have_become_equal() -> None:
    directory = Directory()
    rng = random.Random(3)
    keys = block_keys(range(4000), 1, root_key(b"model"))
    held = [{key: rng.randrange(1, 512) for key in keys} for _ in range(2)]
    for node, blocks in zip(NODES, held, strict=False):
        assert directory.apply(node, feed(blocks, snapshot=True), 0.0)
    directory.forget(NODES[1])
    assert directory._sets.has_many_equals
    for seq in range(20):
        some = {key: rng.randrange(1, 512) for key in rng.sample(keys, 400)}
        assert directory.apply(NODES[2], feed(some, seq + 1, snapshot=not seq), 0.0)
    assert not directory._sets.has_many_equals
    assert {key: directory.holders(key)[NODES[0]] for key in keys} == held[0]


def test_sets_nobody_needs_any_more_are_dropped() -> None:
    directory = Directory()
    rng = random.Random(2)
    nodes = [NodeName("c", f"n{i}") for i in range(12)]
    for node in nodes:
        assert directory.apply(node, feed({}, snapshot=True), 0.0)
    held: dict[bytes, dict[NodeName, int]] = {}
    for seq in range(1200):
        node = rng.choice(nodes)
        news = {key: rng.randrange(512) for key in rng.choices(KEYS, k=10)}
        assert directory.apply(node, feed(news, seq + 1), 0.0)
        for key, flags in news.items():
            held.setdefault(key, {})[node] = flags
    assert directory.nbytes < 4_000_000
    for key, blocks in held.items():
        assert directory.holders(key) == {node: flags for node, flags in blocks.items() if flags}
