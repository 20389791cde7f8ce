"""Block keys: what they depend on, and nothing else."""

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.hashing import KEY_BYTES, block_keys, join_keys, root_key, split_keys

ROOT = root_key(b"model")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, tokens, st.integers(1, 9))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(
    one: list[int], other: list[int], block_tokens: int
) -> None:
    keys, others = block_keys(one, block_tokens, ROOT), block_keys(other, block_tokens, ROOT)
    assert len(keys) == len(one) // block_tokens
    for index, (key, other_key) in enumerate(zip(keys, others, strict=False)):
        end = (index + 1) * block_tokens
        assert (key == other_key) == (one[:end] == other[:end])


@given(tokens, st.integers(1, 9), st.data())
def test_a_prefix_goes_on_from_its_last_key(
    token_ids: list[int], block_tokens: int, data: st.DataObject
) -> None:
    keys = block_keys(token_ids, block_tokens, ROOT)
    done = data.draw(st.integers(0, len(keys)))
    before = keys[done - 1] if done else ROOT
    assert keys[done:] == block_keys(token_ids[done * block_tokens :], block_tokens, before)
    assert split_keys(join_keys(keys)) == keys


def test_a_key_is_blake3_of_the_key_before_and_the_tokens() -> None:
    [key] = block_keys([1, 2, 3], 2, ROOT)
    assert key == blake3(ROOT + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest(KEY_BYTES)
    assert len(key) == len(ROOT) == KEY_BYTES


def test_extras_change_their_block_and_all_after_it() -> None:
    plain = block_keys(range(8), 2, ROOT)
    with_image = block_keys(range(8), 2, ROOT, {1: b"image"})
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False, False]
    assert with_image != block_keys(range(8), 2, ROOT, {1: b"other"})


def test_roots_tell_namespace_tenant_and_adapter_apart() -> None:
    roots = [
        root_key(b"model"),
        root_key(b"other"),
        root_key(b"model", tenant="a"),
        root_key(b"model", lora="a"),
        root_key(b"modela"),
        root_key(b"model", tenant="ab"),
        root_key(b"model", tenant="a", lora="b"),
        root_key(b"model", tenant="b", lora="a"),
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_that_do_not_fit_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="token ids must lie in"):
        block_keys([bad], 1, ROOT)


def test_joined_keys_have_whole_keys() -> None:
    with pytest.raises(ValueError, match="17 bytes are no sequence"):
        split_keys(b"x" * 17)
