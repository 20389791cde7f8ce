"""Cached parts on SSD: what was written comes back, and what is not whole never does."""

import errno
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.pool.index_records import part_checksum
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.pool.ssd import (
    DATA_OFFSET,
    SsdEntry,
    SsdError,
    SsdStore,
    decode_header,
    encode_header,
)

SHAPE = CacheShape(64, (PartShape(PartKind.KV, 10_000, groups=(0, 1)),))
WAIT_S = 30.0


def data_of(index: int, nbytes: int = 10_000) -> memoryview:
    return memoryview(random.Random(index).randbytes(nbytes))


def entry_of(index: int, part: int = 0, nbytes: int = 10_000) -> SsdEntry:
    key, parent = (bytes([number]) * 16 for number in (index, index - 1 if index else 255))
    checksum = part_checksum([data_of(index, nbytes)])
    return SsdEntry(key, parent, index, part, nbytes, checksum, SHAPE)


def pieces(view: memoryview, *ends: int) -> list[memoryview]:
    return [view[start:end] for start, end in zip((0, *ends), (*ends, len(view)), strict=True)]


def put(store: SsdStore, entry: SsdEntry) -> bool:
    future = store.write(entry, [data_of(entry.index, entry.nbytes)])
    assert future is not None
    return future.result(WAIT_S)


def loaded(store: SsdStore, entry: SsdEntry) -> bytes | None:
    """The part's bytes, read into several pieces; None when the store has them not."""
    memory = memoryview(bytearray(entry.nbytes))
    ok = store.read(entry, pieces(memory, 1, 1, entry.nbytes // 2)).result(WAIT_S)
    return bytes(memory) if ok else None


def path_of(store: SsdStore, entry: SsdEntry) -> Path:
    return store.directory / f"{entry.key[0]:02x}" / f"{entry.key.hex()}.{entry.part}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SsdStore]:
    store = SsdStore(tmp_path / "ssd")
    yield store
    store.close()


class Gate:
    """A system call that waits until it is let through."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self._call: Callable[..., int] = getattr(os, name)
        self.entered = threading.Event()
        self.open = threading.Event()
        patch.setattr(os, name, self)

    def __call__(self, *arguments: object) -> int:
        self.entered.set()
        assert self.open.wait(WAIT_S)
        return self._call(*arguments)


def test_what_is_written_is_read_back(store: SsdStore) -> None:
    entry = entry_of(7, part=2)
    view = data_of(7)
    future = store.write(entry, pieces(view, 0, 100, 9_999))
    assert future is not None
    assert future.result(WAIT_S) is True
    assert loaded(store, entry) == view
    path = path_of(store, entry)
    assert path.stat().st_size == DATA_OFFSET + 10_000
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert [file for file in store.directory.rglob("*.*") if file.name != ".lock"] == [path]


def test_what_has_been_carried_out_is_not_held_in_memory(store: SsdStore) -> None:
    memory = memoryview(bytearray(10_000))
    is_freed = threading.Event()
    weakref.finalize(memory, is_freed.set)
    assert not store.read(entry_of(1), [memory]).result(WAIT_S)
    del memory
    assert is_freed.wait(WAIT_S)


@pytest.mark.parametrize(("nbytes", "num_calls"), [(1, 1), (1024, 1), (1025, 2), (2500, 3)])
def test_a_system_call_takes_as_many_pieces_as_the_kernel_allows(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch, nbytes: int, num_calls: int
) -> None:
    preadv = os.preadv
    lengths: list[int] = []

    def counting(fd: int, views: list[memoryview], offset: int) -> int:
        lengths.append(len(views))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", counting)
    entry = entry_of(1, nbytes=nbytes)
    single = pieces(data_of(1, nbytes), *range(1, nbytes))
    future = store.write(entry, single)
    assert future is not None
    assert future.result(WAIT_S)
    memory = memoryview(bytearray(nbytes))
    assert store.read(entry, pieces(memory, *range(1, nbytes))).result(WAIT_S)
    assert memory == data_of(1, nbytes)
    assert len(lengths) == num_calls


def test_system_calls_that_do_only_a_part(store: SsdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)

        def short(
            fd: int, views: list[memoryview], offset: int, whole: Callable[..., int] = whole
        ) -> int:
            return whole(fd, [views[0][:777]], offset)

        monkeypatch.setattr(os, name, short)
    entry = entry_of(3)
    assert put(store, entry)
    assert loaded(store, entry) == data_of(3)


def test_a_part_that_is_not_there(store: SsdStore, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded(store, entry_of(1)) is None
    assert store.remove(entry_of(1).key, 0).result(WAIT_S) is False
    assert caplog.text == ""


def test_what_is_removed_is_gone_and_can_be_written_again(store: SsdStore) -> None:
    entry = entry_of(1)
    assert put(store, entry)
    assert store.remove(entry.key, 0).result(WAIT_S) is True
    assert loaded(store, entry) is None
    assert put(store, entry)
    assert loaded(store, entry) == data_of(1)


def test_a_part_written_again_counts_with_its_new_bytes(store: SsdStore) -> None:
    entry = entry_of(1)
    assert put(store, entry)
    newer = data_of(99)
    rewritten = msgspec.structs.replace(entry, checksum=part_checksum([newer]))
    future = store.write(rewritten, [newer])
    assert future is not None
    assert future.result(WAIT_S)
    assert loaded(store, entry) == newer


@pytest.mark.parametrize("place", [0, 5, 20, 90, DATA_OFFSET, DATA_OFFSET + 9_999])
def test_a_damaged_file_is_removed_and_told_once(
    store: SsdStore, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    entry = entry_of(1)
    for _ in range(2):
        assert put(store, entry)
        path = path_of(store, entry)
        damaged = bytearray(path.read_bytes())
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert loaded(store, entry) is None
        assert not path.exists()
    assert caplog.text.count(": removed") == 1


def test_a_file_cut_short_is_removed(store: SsdStore) -> None:
    entry = entry_of(1)
    for size in (0, 10, DATA_OFFSET, DATA_OFFSET + 9_999):
        assert put(store, entry)
        os.truncate(path_of(store, entry), size)
        assert loaded(store, entry) is None
        assert not path_of(store, entry).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"parent": b"other parent key"},
        {"index": 9},
        {"shape": CacheShape(32, SHAPE.parts)},
        {"nbytes": 9_999},
    ],
)
def test_a_part_of_another_kind_is_not_taken(store: SsdStore, change: dict[str, object]) -> None:
    assert put(store, entry_of(1))
    assert loaded(store, msgspec.structs.replace(entry_of(1), **change)) is None


def test_views_of_another_size_are_the_callers_mistake(store: SsdStore) -> None:
    for call in (store.write, store.read):
        with pytest.raises(ValueError, match="views of 9999 bytes for a part of 10000"):
            call(entry_of(1), [memoryview(bytearray(9_999))])


def test_a_shape_too_large_for_the_header_is_refused(store: SsdStore) -> None:
    groups = PartShape(PartKind.KV, 10_000, groups=tuple(range(10_000)))
    entry = msgspec.structs.replace(entry_of(1), shape=CacheShape(64, (groups,)))
    with pytest.raises(ValueError, match="at most 4096"):
        store.write(entry, [data_of(1)])


# ---- headers


@given(st.integers(0, 119), st.integers(1, 255))
def test_no_damaged_header_is_read(place: int, flip: int) -> None:
    header = bytearray(encode_header(entry_of(1)))
    assert decode_header(bytes(header)) == entry_of(1)
    used = len(bytes(header).rstrip(b"\0"))
    header[place % used] ^= flip
    assert decode_header(bytes(header)) is None


def test_a_header_of_version_1_is_what_it_always_was() -> None:
    """Files of an earlier release are read after an update."""
    header = bytes.fromhex(
        "74000000238109d68ac8404198c410" + "01" * 16 + "c410" + "00" * 16 + "0100cd2710"
        "cfa451f860efdd4c1782ac626c6f636b5f746f6b656e7340a570617274739184a46b696e6400"
        "a66e6279746573cd2710ad77696e646f775f746f6b656e7300a667726f75707392000101"
    ).ljust(4096, b"\0")
    assert encode_header(entry_of(1)) == header
    assert decode_header(header) == entry_of(1)


def test_a_header_may_be_as_long_as_the_place_that_is_kept_for_it() -> None:
    groups = PartShape(PartKind.KV, 10_000, groups=tuple(range(1450)))
    entry = msgspec.structs.replace(entry_of(1), index=300, shape=CacheShape(64, (groups,)))
    header = encode_header(entry)
    assert header[-1] != 0, "no padding is left"
    assert decode_header(header) == entry
    with pytest.raises(ValueError, match="a header of 4098 bytes"):
        encode_header(msgspec.structs.replace(entry, index=1 << 16))


def test_headers_of_another_version_or_size() -> None:
    other = msgspec.structs.replace(entry_of(1), version=99)
    assert decode_header(encode_header(other)) is None
    assert decode_header(encode_header(entry_of(1))[:-1]) is None
    assert decode_header(b"") is None


# ---- restarts


def test_a_next_store_finds_parents_first(tmp_path: Path) -> None:
    first = SsdStore(tmp_path)
    entries = [entry_of(index, part) for index in range(5) for part in (0, 1)]
    for entry in reversed(entries):
        assert put(first, entry)
    first.close()
    second = SsdStore(tmp_path)
    found = second.scan()
    assert found == sorted(entries, key=lambda entry: (entry.part, entry.index))
    assert len({id(entry.shape) for entry in found}) == 1
    assert loaded(second, found[0]) == data_of(0)
    second.close()


def test_a_scan_removes_what_is_not_whole_and_leaves_what_is_not_ours(
    store: SsdStore, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(5):
        assert put(store, entry_of(index))
    good, torn, garbage, misplaced, unfinished = (
        path_of(store, entry_of(index)) for index in range(5)
    )
    os.truncate(torn, DATA_OFFSET + 5)
    garbage.write_bytes(b"x" * 20_000)
    misplaced.rename(misplaced.with_suffix(".1"))
    unfinished.rename(unfinished.with_name(unfinished.name + ".new"))
    stranger = store.directory / "lost+found" / good.name
    stranger.parent.mkdir()
    readme = good.with_name("README")
    no_folder = store.directory / "ff"
    for path in (stranger, readme, no_folder):
        path.touch()
    assert store.scan() == [entry_of(0)]
    files = {path for path in store.directory.rglob("*") if path.is_file()}
    assert files == {good, stranger, readme, no_folder, store.directory / ".lock"}
    assert caplog.text.count(": removed") == 1


def test_a_file_that_cannot_be_read_is_left_alone(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(store, entry_of(1))

    def refuse(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        assert store.scan() == []
        assert loaded(store, entry_of(1)) is None
    assert store.scan() == [entry_of(1)]


def test_a_directory_has_one_store(tmp_path: Path) -> None:
    first = SsdStore(tmp_path)
    with pytest.raises(SsdError, match=f"{tmp_path} is in use"):
        SsdStore(tmp_path)
    first.close()
    SsdStore(tmp_path).close()


def test_a_store_that_is_refused_leaves_no_file_open(tmp_path: Path) -> None:
    first = SsdStore(tmp_path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SsdError):
        SsdStore(tmp_path)
    assert os.listdir("/proc/self/fd") == before
    first.close()


def test_directories_above_are_made_and_all_is_the_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "host" / "ssd"
    SsdStore(directory).close()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / ".lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("num_threads", "max_queued"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_a_store_needs_a_thread_and_a_place_in_its_queue(
    tmp_path: Path, num_threads: int, max_queued: int
) -> None:
    with pytest.raises(ValueError, match="at least 1 each"):
        SsdStore(tmp_path / "none", num_threads, max_queued)
    assert not (tmp_path / "none").exists()


def test_one_thread_and_one_place_are_enough(tmp_path: Path) -> None:
    before = threading.active_count()
    store = SsdStore(tmp_path / "one", 1, 1)
    assert threading.active_count() == before + 1
    store.close()
    assert threading.active_count() == before, "it has waited for its thread"


def test_an_agents_store_has_two_threads_that_do_not_keep_the_process(tmp_path: Path) -> None:
    store = SsdStore(tmp_path)
    threads = [each for each in threading.enumerate() if each.name.startswith("prfaas-ssd-")]
    assert [thread.daemon for thread in threads] == [True, True]
    store.close()


def test_an_agents_store_takes_64_writes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SsdStore(tmp_path)
    gate = Gate(monkeypatch, "pwritev")
    futures = [store.write(entry_of(index), [data_of(index)]) for index in range(65)]
    gate.open.set()
    assert [index for index, future in enumerate(futures) if future is None] == [64]
    store.close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SsdError, match=f"cannot keep cached parts in {tmp_path}/file/ssd"):
        SsdStore(tmp_path / "file" / "ssd")


# ---- trouble and load


def test_a_full_disk_costs_the_write_and_is_told_once(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert [put(store, entry_of(index)) for index in range(3)] == [False] * 3
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
    assert "No space left" in caplog.text
    assert not [path for path in store.directory.rglob("*.0*") if path.is_file()]
    assert put(store, entry_of(1))
    assert loaded(store, entry_of(1)) == data_of(1)


def test_a_disk_that_takes_nothing_costs_the_write(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    assert not put(store, entry_of(1))
    assert "Input/output error" in caplog.text
    assert not [path for path in store.directory.rglob("*.0*") if path.is_file()]


def test_a_full_queue_takes_no_more_until_something_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SsdStore(tmp_path, num_threads=1, max_queued=2)
    gate = Gate(monkeypatch, "pwritev")
    first, second, third = (store.write(entry_of(index), [data_of(index)]) for index in range(1, 4))
    assert first is not None
    assert second is not None
    assert third is None
    gate.open.set()
    assert first.result(WAIT_S)
    assert second.result(WAIT_S)
    assert put(store, entry_of(3))
    store.close()


def test_reads_overtake_writes_and_changes_of_a_file_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SsdStore(tmp_path, num_threads=1)
    assert put(store, entry_of(9))
    gate = Gate(monkeypatch, "pwritev")
    done: list[str] = []
    memory = memoryview(bytearray(10_000))
    futures: list[Future[bool]] = []

    def follow(name: str, future: Future[bool] | None) -> None:
        assert future is not None
        future.add_done_callback(lambda _: done.append(name))
        futures.append(future)

    follow("write", store.write(entry_of(1), [data_of(1)]))
    assert gate.entered.wait(WAIT_S)
    follow("remove", store.remove(entry_of(1).key, 0))
    follow("write again", store.write(entry_of(1), [data_of(1)]))
    follow("read", store.read(entry_of(9), [memory]))
    gate.open.set()
    assert all(future.result(WAIT_S) for future in futures)
    store.close()
    assert done == ["write", "read", "remove", "write again"]
    assert memory == data_of(9)


def test_a_cancelled_read_never_touches_its_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SsdStore(tmp_path, num_threads=1)
    assert put(store, entry_of(1))
    gate = Gate(monkeypatch, "preadv")
    memory = [memoryview(bytearray(10_000)) for _ in range(2)]
    running = store.read(entry_of(1), [memory[0]])
    assert gate.entered.wait(WAIT_S)
    waiting = store.read(entry_of(1), [memory[1]])
    assert not running.cancel()
    assert waiting.cancel()
    gate.open.set()
    assert running.result(WAIT_S)
    store.close()
    assert memory[1] == bytes(10_000)


def test_closing_ends_what_runs_and_answers_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SsdStore(tmp_path, num_threads=1)
    gate = Gate(monkeypatch, "pwritev")
    running = store.write(entry_of(1), [data_of(1)])
    assert gate.entered.wait(WAIT_S)
    waiting = store.write(entry_of(2), [data_of(2)])
    closer = threading.Thread(target=store.close)
    closer.start()
    while not store.remove(entry_of(3).key, 0).done():  # until it is closing
        time.sleep(0)
    gate.open.set()
    closer.join(WAIT_S)
    assert running is not None
    assert waiting is not None
    assert (running.result(0), waiting.result(0)) == (True, None)
    assert store.write(entry_of(4), [data_of(4)]) is None
    assert store.read(entry_of(1), [memoryview(bytearray(10_000))]).result(0) is None
    assert store.remove(entry_of(1).key, 0).result(0) is None
    store.close()
    assert [path.name[:2] for path in tmp_path.rglob("*.0")] == ["01"]


def test_many_threads_may_call_at_once(store: SsdStore) -> None:
    wrong: list[int] = []

    def use(index: int) -> None:
        for _ in range(10):
            if not put(store, entry_of(index)) or loaded(store, entry_of(index)) != data_of(index):
                wrong.append(index)
            store.remove(entry_of(index).key, 0).result(WAIT_S)

    callers = [threading.Thread(target=use, args=(index,)) for index in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT_S)
    assert wrong == []
