"""Packed token ids: the same ids in and out, in steps that are short."""

import asyncio
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import at_once

from kvmanager.hashing import block_keys, root_key, token_digest
from kvmanager.token_ids import STEP_TOKENS, TokenIds, in_turns, parsing, writing

LONG = list(range(150_000, 150_000 + 131_072))
ids = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(ids)
def test_ids_survive_packing_json_and_messages(token_ids: list[int]) -> None:
    packed = TokenIds.of(token_ids)
    assert len(packed) == len(token_ids)
    assert packed.tolist() == token_ids
    assert at_once(parsing(json.dumps(token_ids).encode())) == packed
    assert json.loads(at_once(writing(packed))) == token_ids
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=TokenIds) == packed


@given(ids, st.integers(-60, 60), st.integers(-60, 60))
def test_parts_are_those_of_a_list(token_ids: list[int], start: int, stop: int) -> None:
    packed = TokenIds.of(token_ids)
    assert packed[start:stop].tolist() == token_ids[start:stop]
    assert packed[:-1].tolist() == token_ids[:-1]
    with pytest.raises(ValueError, match="contiguous"):
        packed[::2]


@given(ids)
def test_digests_and_keys_are_those_of_a_list(token_ids: list[int]) -> None:
    packed, root = TokenIds.of(token_ids), root_key(b"model")
    assert token_digest(packed) == token_digest(token_ids)
    assert block_keys(packed, 4, root) == block_keys(token_ids, 4, root)
    assert block_keys(packed, 4, root, {1: b"x"}) == block_keys(token_ids, 4, root, {1: b"x"})


@pytest.mark.parametrize("token_ids", [[-1], [1 << 32], [3, 1 << 80]])
def test_what_fits_no_32_bits_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        TokenIds.of(token_ids)
    with pytest.raises(ValueError, match="token ids"):
        at_once(parsing(json.dumps(token_ids).encode()))


def test_half_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        TokenIds(b"12345")
    with pytest.raises(msgspec.ValidationError, match="5 bytes"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([b"12345"]), type=TokenIds)


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2], [3]],
        [1, 2.5],
        [1, "2"],
        [1, None],
        [1, True],
        ["1,2", "3"],
        {"1": 2},
        "1,2",
        7,
        None,
        [[1] * STEP_TOKENS, [2] * STEP_TOKENS, [3] * STEP_TOKENS],
        [[1] * 3 * STEP_TOKENS],
        [1] * 3 * STEP_TOKENS + ["x"],
        [",".join("1" * STEP_TOKENS)] * 3,
    ],
)
def test_other_json_is_no_list_of_ids(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":"))):
        with pytest.raises(ValueError, match="token ids"):
            at_once(parsing(text.encode()))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n\t", ": ")])
def test_long_lists_are_parsed_whatever_the_spaces(separators: tuple[str, str]) -> None:
    text = json.dumps(LONG, separators=separators).encode()
    assert at_once(parsing(text)).tolist() == LONG


async def test_long_lists_leave_the_event_loop_its_turns() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(others())
    packed = await in_turns(parsing(json.dumps(LONG).encode()))
    parsed = turns
    text = await in_turns(writing(packed))
    watching.cancel()
    assert json.loads(text) == LONG
    assert parsed >= len(LONG) / STEP_TOKENS - 1
    assert turns - parsed >= len(LONG) / STEP_TOKENS - 1
