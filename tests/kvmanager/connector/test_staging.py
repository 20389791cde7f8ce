"""Staging memory: its ring never overlaps, and copies are cut into chunks that fit."""

import subprocess
import sys
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.layout import KVPart
from kvmanager.vllm_connector.slabs import BlockTable, PartView, Piece
from kvmanager.vllm_connector.staging import (
    ALIGNMENT_BYTES,
    Ring,
    Span,
    StagedView,
    cut,
    largest_row_bytes,
    wide,
)


def test_a_ring_wraps_around_when_its_oldest_ranges_are_free() -> None:
    ring = Ring(10)
    assert [ring.take(4), ring.take(4)] == [0, 4]
    assert ring.take(3) is None, "two bytes are left at the end"
    ring.give_back()
    assert ring.take(5) is None
    assert ring.take(3) == 0
    assert ring.take(2) is None, "one byte is left before the oldest"
    assert ring.take(1) == 3
    assert ring.take(1) is None, "it is full"
    ring.give_back()
    assert ring.take(6) == 4
    ring.clear()
    assert ring.take(10) == 0


@pytest.mark.parametrize("nbytes", [0, 11])
def test_more_than_a_ring_has_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="ring of 10"):
        Ring(10).take(nbytes)


@given(st.lists(st.integers(-3, 12)))
def test_ranges_of_a_ring_never_overlap(steps: list[int]) -> None:
    """Positive numbers are taken, others give back."""
    ring, taken = Ring(12), deque[range]()
    for step in steps:
        if step <= 0:
            if taken:
                ring.give_back()
                taken.popleft()
            continue
        start = ring.take(step)
        if start is None:
            assert taken, "an empty ring has room for everything"
            continue
        found = range(start, start + step)
        assert found.stop <= 12
        assert all(found.stop <= other.start or other.stop <= found.start for other in taken)
        taken.append(found)


def view_of(shape: tuple[int, ...], dtype: torch.dtype, num_pieces: int = 1) -> PartView:
    pieces = tuple(
        Piece(torch.zeros(shape, dtype=dtype), number * shape[-1] * dtype.itemsize)
        for number in range(num_pieces)
    )
    part = KVPart("kv", shape[1], num_pieces * shape[-1] * dtype.itemsize, "any")
    units = range(shape[1])
    return PartView(part, units, units, pieces, 1)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 90), st.integers(1, 2)), min_size=1),
    st.integers(ALIGNMENT_BYTES, 4096),
)
def test_chunks_tile_all_rows_and_keep_the_limit(
    sizes: list[tuple[int, int, int]], limit: int
) -> None:
    spans = []
    for units, size, num_pieces in sizes:
        view = view_of((20, units, 2, size), torch.int16, num_pieces)
        spans.append(Span(StagedView(view, view.units), BlockTable(range(20)), 3, 20))
    rows: dict[int, list[int]] = {id(span): [] for span in spans}
    for chunk, nbytes in cut(spans, limit):
        at = 0
        for some in chunk:
            assert some.at == at
            assert some.at % ALIGNMENT_BYTES == 0
            rows[id(some.span)] += range(some.first_row, some.stop_row)
            at += some.span.staged.nbytes(some.num_rows)
        assert at == nbytes
        assert nbytes <= limit or [some.num_rows for some in chunk] == [1]
    assert all(found == list(range(3, 20)) for found in rows.values())


def test_the_widest_integers_that_the_innermost_run_allows() -> None:
    cases = [
        (torch.zeros(4, 2, 16, 256, dtype=torch.bfloat16), torch.int64),
        (torch.zeros(4, 2, 16, 6, dtype=torch.bfloat16), torch.int32),
        (torch.zeros(4, 2, 16, 5, dtype=torch.bfloat16), torch.int16),
        (torch.zeros(4, 2, 16, 656, dtype=torch.uint8), torch.int64),
        # A padded row, a shifted beginning, and columns.
        (torch.zeros(4, 131, dtype=torch.bfloat16)[:, None, None, :128], torch.int16),
        (torch.zeros(4, 132, dtype=torch.bfloat16)[:, None, None, 2:130], torch.int32),
        (torch.zeros(4, 2, 256, 16, dtype=torch.bfloat16).transpose(2, 3), torch.int16),
        (torch.zeros(4, 2, 16, dtype=torch.uint8), torch.uint8),
    ]
    for memory, expected in cases:
        found = wide(memory)
        assert found.dtype is expected
        assert found.data_ptr() == memory.data_ptr()
        assert found.nbytes == memory.nbytes


def test_staging_memory_must_have_room_for_the_largest_page() -> None:
    views = [view_of((2, 1, 1, 100), torch.uint8), view_of((2, 3, 1, 100), torch.uint8, 2)]
    assert largest_row_bytes(views) == 2 * 512


def test_the_copier_needs_no_vllm() -> None:
    """Hosts with a GPU and PyTorch but without vLLM can measure it."""
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import kvmanager.vllm_connector.cuda_pages, kvmanager.vllm_connector.sends"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
