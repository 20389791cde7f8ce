"""Media in block keys and digests: prompts with the same token ids and other pictures."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.hashing import block_keys, root_key, token_digest
from kvmanager.media_items import MediaItem, block_extras

ROOT = root_key(b"model")
PLACEHOLDER = 99
TOKENS = [1, 2, *[PLACEHOLDER] * 4, 3, *[PLACEHOLDER] * 4, 4, 5, 6, 7, 8]
CAT, DOG = MediaItem("cat", 2, 4), MediaItem("dog", 7, 4)
items = st.lists(
    st.builds(MediaItem, st.text(max_size=3), st.integers(0, 30), st.integers(0, 30)), max_size=4
)


def keys(*media: MediaItem) -> list[bytes]:
    return block_keys(TOKENS, 4, ROOT, block_extras(media, 4))


def test_the_same_token_ids_with_another_picture_share_no_block_from_it_on() -> None:
    one, other = keys(CAT), keys(MediaItem("cow", 2, 4))
    assert not set(one) & set(other)
    assert not set(one) & set(keys()), "placeholders that a client sent as text are no picture"


def test_prompts_share_what_lies_before_their_first_different_picture() -> None:
    one, other = keys(CAT, DOG), keys(CAT, MediaItem("cow", 7, 4))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False, False]
    late = keys(MediaItem("dog", 8, 3))
    assert [a == b for a, b in zip(late, keys(), strict=True)] == [True, True, False, False]


def test_pictures_in_another_order_are_another_prompt() -> None:
    swapped = (MediaItem("dog", 2, 4), MediaItem("cat", 7, 4))
    assert not set(keys(CAT, DOG)) & set(keys(*swapped))
    assert token_digest(TOKENS, [CAT, DOG]) != token_digest(TOKENS, swapped)


def test_an_item_that_moved_by_one_token_has_other_keys_and_another_digest() -> None:
    moved = MediaItem("cat", 3, 4)
    assert not set(keys(CAT)) & set(keys(moved))
    assert token_digest(TOKENS, [CAT]) != token_digest(TOKENS, [moved])


def test_the_order_in_which_items_are_told_does_not_matter() -> None:
    # vLLM's scheduler has them by position, its render endpoint by modality.
    media = [CAT, DOG, MediaItem("sound", 12, 2)]
    orders = list(permutations(media))
    assert len({tuple(keys(*order)) for order in orders}) == 1
    assert len({token_digest(TOKENS, order) for order in orders}) == 1


@given(items, items)
def test_digests_are_equal_exactly_if_the_items_are(
    one: list[MediaItem], other: list[MediaItem]
) -> None:
    def in_order(media: list[MediaItem]) -> list[MediaItem]:
        return sorted(media, key=lambda item: (item.offset, item.length, item.identifier))

    are_equal = token_digest([1, 2], one) == token_digest([1, 2], other)
    assert are_equal == (in_order(one) == in_order(other))


def test_a_digest_with_media_is_none_of_any_token_ids() -> None:
    assert token_digest(TOKENS, []) == token_digest(TOKENS)
    assert token_digest(TOKENS, [CAT]) != token_digest(TOKENS)
    assert token_digest(TOKENS, [CAT]) != token_digest(TOKENS[:-1], [CAT])
    with pytest.raises(ValueError, match="token ids must lie in"):
        token_digest([-1], [CAT])
