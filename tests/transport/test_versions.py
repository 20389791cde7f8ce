"""The version that two sides use is the newest that both speak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.rpc_versions import VERSIONS, announced, check_versions
from transport.versions import NoCommonVersion, Versions

RANGES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(
    lambda ends: Versions(min(ends), max(ends))
)


@given(RANGES, RANGES)
def test_both_sides_come_to_the_same_version(ours: Versions, theirs: Versions) -> None:
    both = set(range(ours.oldest, ours.newest + 1)) & set(range(theirs.oldest, theirs.newest + 1))
    if both:
        assert ours.common(theirs, "peer") == theirs.common(ours, "peer") == max(both)
        return
    for one, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(NoCommonVersion, match=f"speaks version {other}, this .* {one};"):
            one.common(other, "peer")


def test_ranges_read_well() -> None:
    assert (str(Versions(2, 2)), str(Versions(2, 3))) == ("2", "2 to 3")


def test_a_peer_that_names_no_versions_is_of_the_first_release() -> None:
    check_versions({}, "server")
    check_versions(dict([announced(VERSIONS)]), "server")
    check_versions(dict([announced(Versions(1, 7))]), "server")


@pytest.mark.parametrize("text", ["", "2", "1-", "-1", "a-b", "1-1-1", "1" * 30 + "-2"])
def test_a_peer_that_names_nonsense_is_refused(text: str) -> None:
    with pytest.raises(NoCommonVersion, match="the other side names no versions"):
        check_versions({announced()[0]: text}, "caller")


def test_a_peer_without_a_common_version_is_told_both_ranges() -> None:
    words = f"the server speaks version 8 to 9, this side speaks {VERSIONS};"
    with pytest.raises(NoCommonVersion, match=words):
        check_versions(dict([announced(Versions(8, 9))]), "server")
