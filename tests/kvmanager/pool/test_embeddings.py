import random

import pytest

from kvmanager.pool.embeddings import EmbeddingCache, NotHeld
from kvmanager.transfers.blocks import BlockAllocator, Run

ALICE, BOB = 1, 2


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def cache(num_blocks: int = 8, max_blocks: int = 4) -> EmbeddingCache:
    made = EmbeddingCache(BlockAllocator(num_blocks), 100, max_blocks)
    made.connect(ALICE)
    made.connect(BOB)
    return made


def fill(made: EmbeddingCache, number: int, nbytes: int = 100) -> bool:
    runs = made.put(ALICE, key(number), nbytes)
    if runs:
        made.written(ALICE, key(number))
    return bool(runs)


def test_an_embedding_is_found_when_it_is_whole_and_by_nobody_before() -> None:
    made = cache()
    runs = made.put(ALICE, key(1), 250)
    assert sum(run.length for run in runs) == 3
    assert made.find(BOB, 0, key(1)) is None
    assert made.put(BOB, key(1), 250) == ()  # somebody fills it
    made.written(ALICE, key(1))
    found = made.find(BOB, 1, key(1))
    assert found is not None
    assert (found.runs, found.nbytes) == (runs, 250)
    assert (made.num_queries, made.num_hits, len(made)) == (2, 1, 1)


def test_the_least_recently_used_goes_first_and_none_that_is_held() -> None:
    made = cache(max_blocks=3)
    assert all(fill(made, number) for number in (1, 2, 3))
    assert made.find(BOB, 0, key(1))
    assert fill(made, 4)  # in place of 2
    assert [made.find(BOB, number, key(number)) is None for number in (2, 3)] == [True, False]
    assert made.find(BOB, 4, key(4))
    assert not fill(made, 5)
    made.free(BOB, 3)
    assert fill(made, 5)
    made.check_invariants()


def test_a_move_takes_and_gives_as_a_connection_does() -> None:
    told: list[tuple[bytes, bool]] = []
    made = EmbeddingCache(
        BlockAllocator(8), 100, 3, listener=lambda one, is_here: told.append((one, is_here))
    )
    made.connect(ALICE)
    made.connect(-1)
    assert made.put(-1, key(1), 100)
    assert made.put(-1, key(2), 100)
    assert made.is_being_filled(key(1))
    assert not made.is_being_filled(key(3))
    made.written(-1, key(1))
    assert not made.is_being_filled(key(1))
    made.leave(-1)  # before the second one was whole
    assert (made.use(key(1)), made.use(key(2)), made.num_held_blocks) == (100, 0, 1)
    assert told == [(key(1), True), (key(2), False)]
    made.connect(-2)
    assert made.hold(-2, 0, key(1)) is not None
    assert made.hold(-2, 1, key(2)) is None
    assert fill(made, 3)
    assert fill(made, 4)
    assert fill(made, 5)  # in place of 3, since 1 is being sent
    assert told[-2:] == [(key(3), False), (key(5), True)]
    made.leave(-2)
    assert fill(made, 6)
    assert fill(made, 7)
    assert made.use(key(1)) == 0
    assert made.num_queries == made.num_hits == 0
    made.check_invariants()


def test_what_is_asked_for_counts_as_used() -> None:
    made = cache(max_blocks=2)
    assert made.put(ALICE, key(1), 150)
    assert made.use(key(1)) == 0  # it is not whole
    made.written(ALICE, key(1))
    assert (made.use(key(1)), made.use(key(2))) == (150, 0)
    made = cache(max_blocks=2)
    assert fill(made, 1)
    assert fill(made, 2)
    assert made.use(key(1)) == 100
    assert fill(made, 3)  # in place of 2
    assert (made.use(key(1)), made.use(key(2)), made.use(key(3))) == (100, 0, 100)
    assert (made.num_queries, made.num_hits) == (0, 0)


@pytest.mark.parametrize(
    ("num_blocks", "max_blocks", "held"),
    [
        pytest.param(8, 2, 0, id="more than embeddings may hold"),
        pytest.param(8, 4, 2, id="more than they may beside what is held"),
        pytest.param(2, 4, 0, id="more than the arena has"),
    ],
)
def test_what_cannot_have_room_evicts_nothing(num_blocks: int, max_blocks: int, held: int) -> None:
    made = cache(num_blocks, max_blocks)
    if held:
        assert made.put(BOB, key(9), 100 * held)
    assert fill(made, 1)
    assert not fill(made, 2, nbytes=300)
    assert made.find(BOB, 0, key(1))
    made.check_invariants()


def test_embeddings_and_another_cache_give_way_together() -> None:
    allocator = BlockAllocator(4)
    others = allocator.allocate(2)

    def make_room(num_blocks: int) -> bool:
        """As the prefix cache does it: nothing is evicted for what is impossible."""
        if allocator.num_free + len(others) < num_blocks:
            return False
        while allocator.num_free < num_blocks:
            allocator.free([others.pop()])
        return True

    others = [Run(run.first + n, 1) for run in others for n in range(run.length)]
    made = EmbeddingCache(allocator, 100, 5, make_room)
    made.connect(ALICE)
    assert fill(made, 1)
    assert fill(made, 2)
    assert fill(made, 3, nbytes=300)
    assert len(others) == 1
    made.check_invariants()


def test_another_cache_gives_way_where_the_arena_is_full() -> None:
    allocator = BlockAllocator(2)
    others = allocator.allocate(2)
    asked: list[int] = []

    def make_room(num_blocks: int) -> bool:
        asked.append(num_blocks)
        allocator.free(others)
        return True

    made = EmbeddingCache(allocator, 100, 2, make_room)
    made.connect(ALICE)
    assert fill(made, 1)
    assert asked == [1]


def test_a_lost_connection_keeps_its_memory_until_its_process_has_ended() -> None:
    made = cache(max_blocks=2)
    assert made.put(ALICE, key(1), 100)
    made.lost(ALICE, over_s=5.0)
    assert made.find(BOB, 0, key(1)) is None
    assert made.put(BOB, key(1), 100)  # another may encode the image
    assert not made.put(BOB, key(2), 100)
    made.tick(4.9)
    assert not made.put(BOB, key(2), 100)
    made.check_invariants()
    made.tick(5.0)
    made.process_gone(ALICE)  # forgotten already
    assert made.put(BOB, key(2), 100)
    made.check_invariants()


def test_a_connection_speaks_of_its_own_only() -> None:
    made = cache()
    assert made.put(ALICE, key(1), 100)
    with pytest.raises(NotHeld, match="not given to this connection"):
        made.written(BOB, key(1))
    made.written(ALICE, key(1))
    with pytest.raises(NotHeld, match="not given to this connection"):
        made.written(ALICE, key(1))
    assert made.find(BOB, 7, key(1))
    with pytest.raises(NotHeld, match="handle 7 is in use"):
        made.find(BOB, 7, key(1))
    with pytest.raises(NotHeld, match="nothing is held under handle 7"):
        made.free(ALICE, 7)


def test_the_books_add_up_whatever_happens() -> None:
    rng = random.Random(20)
    allocator = BlockAllocator(12)
    told: dict[bytes, bool] = {}
    made = EmbeddingCache(allocator, 100, 9, listener=told.__setitem__)
    live: dict[int, tuple[set[bytes], set[int]]] = {}
    for step in range(6000):
        if len(live) < 4:
            # Engines have numbers from 0 on, moves below.
            conn_id = step if rng.randrange(2) else -1 - step
            made.connect(conn_id)
            live[conn_id] = set(), set()
        conn_id = rng.choice(list(live))
        fills, finds = live[conn_id]
        one = key(rng.randrange(10))
        match rng.randrange(8):
            case 0 | 1:
                if made.put(conn_id, one, rng.randrange(1, 500)):
                    fills.add(one)
            case 2 if fills:
                made.written(conn_id, fills.pop())
            case 6 if fills:
                made.cancel(conn_id, fills.pop())
            case 3:
                if made.find(conn_id, step, one):
                    finds.add(step)
            case 4 if finds:
                made.free(conn_id, finds.pop())
            case 5 if not rng.randrange(10):
                del live[conn_id]
                made.lost(conn_id, float(step + 50))
            case 7 if conn_id < 0:
                # A move of several embeddings is over, whole or not.
                for filled in fills if rng.randrange(2) else ():
                    made.written(conn_id, filled)
                del live[conn_id]
                made.leave(conn_id)
        made.tick(float(step))
        made.check_invariants()
        assert allocator.num_used == made.num_held_blocks
        # Whoever was told of every change knows what is here.
        assert len(made) == sum(told.values())
    assert made.num_hits
    here = {one for one in map(key, range(10)) if made.use(one)}
    assert here == {one for one, is_here in told.items() if is_here}
    for conn_id in live:
        made.leave(conn_id)
    made.tick(float("inf"))
    made.check_invariants()
    assert made.num_held_blocks == sum(-(-made.use(key(number)) // 100) for number in range(10))
