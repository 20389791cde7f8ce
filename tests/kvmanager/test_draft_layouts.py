"""A drafter's layers come last, and are no part of what makes two layouts the same."""

import pytest
from msgspec.structs import replace
from simple_layouts import attention, delta_net, layout

from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, LayoutError

TARGET = attention("layers.1")
DRAFT = replace(attention("a.layers.0", 4), is_draft=True)


def model(*layers: KVLayer, digest: str = "") -> KVLayout:
    full = KVGroup(KVKind.FULL, 16, layers)
    made = layout(full, KVGroup(KVKind.RECURRENT, 1, (delta_net("layers.0"),)))
    return replace(made, draft_digest=digest)


PLAIN = model(TARGET)
DRAFTED = model(DRAFT, TARGET, digest="mtp")


def test_a_drafter_does_not_change_the_fingerprint_of_the_model() -> None:
    assert DRAFTED.fingerprint() == PLAIN.fingerprint()
    assert PLAIN.draft_fingerprint == b""
    others = [
        model(DRAFT, TARGET, digest="eagle"),
        model(replace(attention("a.layers.0", 8), is_draft=True), TARGET, digest="mtp"),
        replace(DRAFTED, weights="files:1"),
    ]
    assert len({one.draft_fingerprint for one in (DRAFTED, *others)}) == 4
    assert replace(DRAFTED, model_id="n", tp_size=2).draft_fingerprint == DRAFTED.draft_fingerprint
    assert KVLayout.decode(DRAFTED.encode()) == DRAFTED
    assert "1 of them a drafter's" in DRAFTED.describe()


@pytest.mark.parametrize(("num_tokens", "cached_tokens"), [(1, 0), (100, 0), (100, 32)])
def test_a_transfer_without_the_drafter_is_the_beginning_of_one_with_it(
    num_tokens: int, cached_tokens: int
) -> None:
    with_draft = list(DRAFTED.extents(num_tokens, cached_tokens))
    without = list(DRAFTED.extents(num_tokens, cached_tokens, with_draft=False))
    assert [extent.layer for extent in with_draft] == [delta_net("layers.0"), TARGET, DRAFT]
    assert with_draft[:2] == without
    plain = PLAIN.transfer_bytes(num_tokens, cached_tokens)
    assert DRAFTED.transfer_bytes(num_tokens, cached_tokens, with_draft=False) == plain
    assert with_draft[-1].parts[0].offset == plain
    assert DRAFTED.transfer_bytes(num_tokens, cached_tokens) == plain + with_draft[-1].nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        model(TARGET, digest="mtp"),
        model(DRAFT, TARGET),
        replace(layout(KVGroup(KVKind.FULL, 16, (DRAFT,))), draft_digest="mtp"),
    ],
)
def test_a_drafter_has_layers_and_a_digest_and_is_not_the_whole_model(wrong: KVLayout) -> None:
    with pytest.raises(LayoutError, match="layers are a drafter's, with the digest"):
        wrong.validate()
