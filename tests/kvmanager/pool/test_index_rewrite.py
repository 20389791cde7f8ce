"""How the index of cached parts is written anew: in steps, without losing or keeping anything."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_cases import BLOCK, SHAPE, encoded, key, opened, read_now, stored

from kvmanager.arena import Arena
from kvmanager.pool import index as index_module
from kvmanager.pool.index import PoolIndex
from kvmanager.pool.index_records import (
    Dropped,
    IndexHeader,
    Shape,
    encode_record,
)
from kvmanager.transfers.blocks import Run


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena.create(tmp_path, 1000, BLOCK, name="node", prefault=False)
    yield arena
    arena.close()


def rewrite(index: PoolIndex) -> None:
    """Go on with it to its end, if these are few records."""
    index.flush()
    index.flush()


def test_the_file_is_written_anew_in_steps(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes and goes between two steps is in the new file too."""
    monkeypatch.setattr(index_module, "FRAMES_PER_FLUSH", 16)
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    num_parts = 26
    for number in range(num_parts):
        index.append(stored(number, 1, (number, 1)))
    index.flush()
    index.compact()
    index.flush()
    index.append(Dropped(key(0), 1))
    index.append(stored(0, 1, (num_parts + 1, 1)))
    index.append(Dropped(key(1), 1))
    index.compact()  # goes on already
    index.flush()
    index.append(Dropped(key(2), 1))
    assert index.num_records == num_parts + 6, "the old file is in use"
    assert len(read_now(arena)) == num_parts - 2
    index.flush()
    assert index.num_records == num_parts + 6
    index.append(Dropped(key(3), 1))
    found = {record.key: record.runs for record in read_now(arena)}
    assert found.keys() == {key(0), *(key(number) for number in range(4, num_parts))}
    assert found[key(0)] == (Run(num_parts + 1, 1),)
    index.close()
    assert {path.suffix for path in arena.path.parent.iterdir()} == {".arena", ".index"}


@pytest.mark.parametrize(("num_records", "num_live"), [(1024, 2), (1200, 600)])
def test_the_file_is_written_anew_when_most_of_it_is_out_of_date(
    arena: Arena, num_records: int, num_live: int
) -> None:
    """When it has more than that many records, and more than twice those that live."""
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    for number in range(num_live):
        index.append(stored(number, 1, (number, 1)))
    while index.num_records < num_records:
        index.append(stored(0, 1, (0, 1)))
    index.flush()
    assert not [path for path in arena.path.parent.iterdir() if path.suffix == ".new"]
    index.append(stored(0, 1, (0, 1)))
    index.flush()
    assert [path for path in arena.path.parent.iterdir() if path.suffix == ".new"]
    index.close()


def test_a_rewrite_does_not_keep_what_a_former_one_left_behind(arena: Arena) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))
    assert arena.index_path is not None
    new_path = arena.index_path.with_name(arena.index_path.name + ".new")
    new_path.write_bytes(encoded(*(stored(number) for number in range(20))))
    index.compact()
    index.flush()
    index.append(stored(1))
    index.flush()
    index.close()
    assert arena.index_path.read_bytes() == (
        encode_record(IndexHeader.of(arena))
        + encode_record(Shape(0, SHAPE))
        + encode_record(stored(0))
        + encode_record(stored(1))
    )


def test_after_a_failed_rewrite_the_next_waits_until_the_file_has_doubled(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_MIN_RECORDS_TO_COMPACT", 8)
    index, _ = opened(arena)
    index.shape_id(SHAPE)

    def has_begun(num_records: int) -> bool:
        while index.num_records < num_records:
            index.append(stored(0))
        index.flush()
        return any(path.suffix == ".new" for path in arena.path.parent.iterdir())

    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        assert has_begun(9)
        assert not has_begun(9), "the second step has failed"
    assert not has_begun(18)
    assert has_begun(19)
    index.flush()
    assert index.num_records == 3
    assert arena.index_path is not None
    assert arena.index_path.stat().st_mode & 0o777 == 0o600
    assert not has_begun(8)
    assert has_begun(9), "as if nothing had failed"
    index.close()


def test_a_rewrite_that_cannot_begin_is_told(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index, _ = opened(arena)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        index.compact()
    assert "Too many open files" in caplog.text
    assert index.is_open
    index.close()


def test_an_index_holds_one_file_open_and_none_when_it_is_closed(arena: Arena) -> None:
    before = len(os.listdir("/proc/self/fd"))
    index, _ = opened(arena)
    for _ in range(3):
        index.compact()
        rewrite(index)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    index.compact()
    index.compact()  # goes on already
    index.close()
    index.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_index_that_is_given_up_during_a_rewrite_leaves_no_file(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))
    index.compact()
    close = os.close

    def refuse_to_write(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def close_and_complain(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse_to_write)
        patch.setattr(os, "close", close_and_complain)
        index.append(Dropped(key(0), 0))
    assert not index.is_open
    index.compact()  # does nothing any more
    assert [path.suffix for path in arena.path.parent.iterdir()] == [".arena"]
    assert len(os.listdir("/proc/self/fd")) == before
    index.close()


def test_a_rewrite_follows_no_link(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    target = arena.path.with_name("somebody's file")
    target.write_bytes(b"precious")
    assert arena.index_path is not None
    new_path = arena.index_path.with_name(arena.index_path.name + ".new")
    new_path.symlink_to(target)
    index.compact()
    assert not new_path.is_symlink()
    while new_path.exists():
        index.flush()
    index.append(stored(0))
    index.close()
    assert caplog.text == ""
    assert not arena.index_path.is_symlink()
    assert target.read_bytes() == b"precious"
    assert read_now(arena) == [stored(0)]


def test_a_rewrite_that_is_not_done_goes_with_its_index(arena: Arena) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))
    index.compact()
    index.close()
    assert read_now(arena) == [stored(0)]
    assert {path.suffix for path in arena.path.parent.iterdir()} == {".arena", ".index"}


def test_the_file_stays_in_proportion_to_what_lives(arena: Arena) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    for round_number in range(3000):
        index.append(stored(round_number % 50))
        index.append(Dropped(key(round_number % 50), 0))
        index.flush()
    for number in range(20):
        index.append(stored(number))
    index.flush()
    assert index.num_records < 1200 + 2 * 50
    assert index.num_live == 20
    index.compact()
    rewrite(index)
    assert index.num_records == 22
    assert [record.index for record in read_now(arena)] == list(range(20))
    index.append(stored(30))
    index.close()
    assert len(read_now(arena)) == 21
    assert {path.suffix for path in arena.path.parent.iterdir()} == {".arena", ".index"}


def test_a_rewrite_that_fails_leaves_the_old_file_in_use(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        index.compact()
        rewrite(index)
    assert "No space left" in caplog.text
    index.append(stored(1))
    index.close()
    assert read_now(arena) == [stored(0), stored(1)]
    assert {path.suffix for path in arena.path.parent.iterdir()} == {".arena", ".index"}
