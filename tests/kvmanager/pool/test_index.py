"""The index of what an arena caches: what a next agent reads back after any end of the former."""

import errno
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_cases import BLOCK, HEADER, SHAPE, encoded, key, opened, read_now, stored

from kvmanager.arena import Arena
from kvmanager.pool.index_records import (
    MAX_RECORD_BYTES,
    Dropped,
    IndexDistrusted,
    Record,
    Shape,
    decode_frame,
    decode_records,
    encode_frame,
    encode_record,
    part_checksum,
    read_index,
)
from kvmanager.pool.records import Tier
from kvmanager.transfers.blocks import Run


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena.create(tmp_path, 1000, BLOCK, name="node", prefault=False)
    yield arena
    arena.close()


# ---- records


def test_records_survive_their_encoding() -> None:
    split = stored(3, 0, (900, 1), (2, 1), checksum=2**64 - 1)
    on_ssd = msgspec.structs.replace(stored(4), runs=(), tier=Tier.SSD)
    records = [HEADER, Shape(0, SHAPE), split, on_ssd, Dropped(key(3), 0)]
    data = b"".join(map(encode_record, records))
    assert decode_records(data) == (records, len(data))
    assert isinstance(split.runs[0], Run)


def test_parents_come_first_and_windows_after_all_kv() -> None:
    parts = [stored(index, part) for index in range(4) for part in range(3)]
    shuffled = random.Random(1).sample(parts, len(parts))
    places = [
        (record.part, record.index) for record in read_index(encoded(*shuffled), HEADER).stored
    ]
    assert places == [(part, index) for part in range(3) for index in range(4)]


def test_the_later_record_of_a_part_is_valid() -> None:
    moved = stored(1, 0, (500, 2))
    contents = read_index(
        encoded(stored(0), stored(1), stored(2), moved, Dropped(key(2), 0), Dropped(key(9), 0)),
        HEADER,
    )
    assert contents.stored == [stored(0), moved]
    assert contents.num_records == 8
    again = read_index(encoded(stored(0), Dropped(key(0), 0), stored(0)), HEADER)
    assert again.stored == [stored(0)]


def test_a_part_may_lie_in_the_arenas_last_block() -> None:
    last = stored(0, 0, (998, 2))
    assert read_index(encoded(last), HEADER).stored == [last]


def test_tiers_are_apart() -> None:
    on_ssd = msgspec.structs.replace(stored(0), runs=(), tier=Tier.SSD)
    data = encoded(stored(0), on_ssd, Dropped(key(0), 0))
    assert read_index(data, HEADER).stored == [on_ssd]


def test_memory_of_a_dropped_part_is_given_to_another() -> None:
    contents = read_index(
        encoded(stored(0), Dropped(key(0), 0), stored(1, 0, *stored(0).runs)), HEADER
    )
    assert [record.index for record in contents.stored] == [1]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([stored(0), stored(1, 0, (1, 2))], "two parts in block 1"),
        ([stored(0, 0, (5, 1), (5, 1))], "two parts in block 5"),
        ([stored(0, 0, (999, 2))], "of an arena of 1000"),
        ([stored(0, 0, (5, 1))], "5000 bytes in blocks that hold 4096"),
        ([stored(0, 0, (-1, 2))], "not a block table"),
        ([msgspec.structs.replace(stored(0), runs=())], "not a block table"),
        ([msgspec.structs.replace(stored(0), nbytes=5001)], "5001 bytes"),
        ([msgspec.structs.replace(stored(0), shape_id=1)], "no part 0 of shape 1"),
        ([msgspec.structs.replace(stored(0), part=3)], "no part 3 of shape 0"),
        ([msgspec.structs.replace(stored(0), tier=Tier.SSD)], "on SSD"),
        ([HEADER], "second header"),
    ],
)
def test_an_index_that_contradicts_itself_or_the_arena_is_distrusted(
    records: list[Record], reason: str
) -> None:
    with pytest.raises(IndexDistrusted, match=reason):
        read_index(encoded(*records), HEADER)


@pytest.mark.parametrize(
    "change",
    [{"inode": 3}, {"device": 3}, {"num_blocks": 3}, {"block_bytes": 8192}, {"version": 99}],
)
def test_an_index_of_another_arena_is_distrusted(change: dict[str, int]) -> None:
    with pytest.raises(IndexDistrusted, match="another arena"):
        read_index(encoded(stored(0)), msgspec.structs.replace(HEADER, **change))


def test_no_index_at_all_is_distrusted() -> None:
    for data in (b"", b"something else", encoded(stored(0))[1:], encode_record(stored(0))):
        with pytest.raises(IndexDistrusted, match="no header"):
            read_index(data, HEADER)


FIVE: list[Record] = [stored(0), stored(1), Dropped(key(1), 0), stored(2), stored(0, 1)]
ENDS = [len(encoded(*FIVE[:count])) for count in range(len(FIVE) + 1)]


@given(st.integers(ENDS[0], ENDS[-1]))
def test_a_torn_tail_costs_only_the_torn_record(cut: int) -> None:
    contents = read_index(encoded(*FIVE)[:cut], HEADER)
    num_whole = max(count for count, end in enumerate(ENDS) if end <= cut)
    assert contents.nbytes == ENDS[num_whole]
    assert contents.stored == read_index(encoded(*FIVE[:num_whole]), HEADER).stored


@given(st.integers(0, ENDS[-1] - 1), st.integers(1, 255))
def test_a_damaged_byte_ends_the_index_before_it(place: int, flip: int) -> None:
    data = bytearray(encoded(*FIVE))
    data[place] ^= flip
    records, end = decode_records(bytes(data))
    assert end <= place
    assert encoded(*FIVE).startswith(b"".join(map(encode_record, records)))
    assert len(records) == sum(stop <= place for stop in [len(encode_record(HEADER)), *ENDS])


@given(st.binary(max_size=200), st.binary(max_size=60))
def test_anything_may_follow(tail: bytes, payload: bytes) -> None:
    whole = encoded(stored(0))
    assert read_index(whole + tail, HEADER).stored == [stored(0)]
    assert decode_records(whole + encode_frame(payload) + tail)[1] >= len(whole)


def test_a_record_of_impossible_size_is_neither_written_nor_waited_for() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode_frame(bytes(MAX_RECORD_BYTES + 1))
    nothing = decode_frame(memoryview(encode_frame(b"")))
    assert nothing is not None
    assert (nothing[0].nbytes, nothing[1]) == (0, 12)
    largest = encode_frame(bytes(MAX_RECORD_BYTES))
    found = decode_frame(memoryview(largest))
    assert found is not None
    assert (found[0].nbytes, found[1]) == (MAX_RECORD_BYTES, len(largest))
    payload = bytes(MAX_RECORD_BYTES + 1)
    forged = struct.pack("<IQ", len(payload), part_checksum([memoryview(payload)])) + payload
    assert decode_frame(memoryview(forged)) is None
    assert decode_records(b"\xff" * 100) == ([], 0)


def test_records_of_version_1_are_these_bytes() -> None:
    """What an older agent wrote has to mean the same for ever, or the version has to rise."""
    assert MAX_RECORD_BYTES == 1 << 20
    assert encode_record(HEADER).hex() == "0b000000d0896fa839cf08879600010102cd03e8cd1000"
    dropped = encode_record(Dropped(bytes(16), 3, Tier.SSD)).hex()
    assert dropped == "160000006357a14a76037ed49403c410" + 32 * "0" + "0301"


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({"index": (1 << 62) - 1}, True),
        ({"index": 1 << 62}, False),
        ({"index": -1}, False),
        ({"part": 255}, True),
        ({"part": 256}, False),
        ({"part": -1}, False),
        ({"key": bytes(15)}, False),
        ({"key": bytes(17)}, False),
        ({"parent": bytes(17)}, False),
        ({"tier": 2}, False),
    ],
)
def test_a_record_with_what_cannot_be_ends_the_index(
    change: dict[str, object], is_valid: bool
) -> None:
    record = msgspec.structs.replace(stored(3), **change)
    records, end = decode_records(encoded(record, stored(4)))
    assert len(records) == (4 if is_valid else 2)
    assert (end == len(encoded())) is not is_valid


def test_a_checksum_is_of_the_bytes_and_not_of_their_pieces() -> None:
    data = memoryview(random.Random(2).randbytes(1000))
    assert part_checksum([data]) == part_checksum([data[:1], data[1:700], data[700:]])
    assert part_checksum([data]) != part_checksum([data[1:], data[:1]])
    assert part_checksum([]) == part_checksum([data[:0]])


# ---- the file


def test_what_was_appended_is_there_after_a_restart(arena: Arena) -> None:
    index, found = opened(arena)
    assert found == []
    assert index.shape_id(SHAPE) == 0
    other = replace(SHAPE, block_tokens=128)
    assert (index.shape_id(other), index.shape_id(SHAPE)) == (1, 0)
    for record in (stored(0), stored(1), Dropped(key(1), 0), Dropped(key(7), 0)):
        index.append(record)
    index.close()
    index.close()
    assert arena.index_path is not None
    assert arena.index_path.stat().st_mode & 0o777 == 0o600
    again, found = opened(arena)
    assert found == [stored(0)]
    assert again.shape(0) == SHAPE
    assert again.shape_id(other) == 1
    again.append(stored(2))
    again.close()
    last, found = opened(arena)
    assert found == [stored(0), stored(2)]
    last.close()


def test_a_shape_without_a_number_is_the_callers_mistake(arena: Arena) -> None:
    index, _ = opened(arena)
    with pytest.raises(KeyError):
        index.append(stored(0))
    index.close()


def test_a_killed_agent_loses_nothing_flushed_and_no_drop(arena: Arena) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))
    index.append(stored(1))
    index.flush()
    assert read_now(arena) == [stored(0), stored(1)]
    index.append(stored(2))
    assert read_now(arena) == [stored(0), stored(1)]
    index.append(Dropped(key(0), 0))
    assert read_now(arena) == [stored(1), stored(2)]
    index.close()


def test_a_damaged_tail_is_cut_off_and_told(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))
    index.close()
    assert arena.index_path is not None
    whole = arena.index_path.read_bytes()
    arena.index_path.write_bytes(whole + encode_record(stored(1))[:-1])
    index, found = opened(arena)
    assert found == [stored(0)]
    assert "damaged bytes" in caplog.text
    assert arena.index_path.read_bytes() == whole
    index.append(stored(2))
    index.flush()
    assert read_now(arena) == [stored(0), stored(2)]
    index.close()


def test_a_distrusted_index_is_begun_anew_and_told(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    assert arena.index_path is not None
    arena.index_path.touch(mode=0o600)
    arena.index_path.write_bytes(encoded(stored(0)))
    index, found = opened(arena)
    assert found == []
    assert "another arena" in caplog.text
    index.shape_id(SHAPE)
    index.append(stored(3))
    index.close()
    assert read_now(arena) == [stored(3)]


def test_an_arena_made_anew_does_not_get_the_old_index(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 1000, BLOCK, name="node", prefault=False)
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))
    index.close()
    assert arena.index_path is not None
    old_index = arena.index_path.read_bytes()
    hold = arena.path.open()  # keeps the inode's number from being used again
    arena.close(keep=True)
    arena.path.unlink()
    arena = Arena.create(tmp_path, 1000, BLOCK, name="node", prefault=False)
    assert arena.index_path is not None
    assert not arena.index_path.exists()
    arena.index_path.write_bytes(old_index)
    index, found = opened(arena)
    assert found == []
    index.close()
    hold.close()
    arena.close()


def test_a_next_agent_may_drop_what_the_former_stored(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    index, _ = opened(arena)
    assert read_now(arena) == [], "the header is there from the beginning"
    index.shape_id(SHAPE)
    index.append(stored(0))
    index.append(stored(1))
    index.close()
    index, found = opened(arena)
    assert found == [stored(0), stored(1)]
    assert index.num_live == 2
    index.append(Dropped(key(0), 0))
    assert read_now(arena) == [stored(1)]
    index.close()
    assert not caplog.records, "nothing was damaged"


def test_the_damaged_end_of_an_index_is_counted(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    index, _ = opened(arena)
    index.close()
    assert arena.index_path is not None
    with open(arena.index_path, "ab") as file:
        file.write(b"torn")
    index, _ = opened(arena)
    assert "ends in 4 damaged bytes" in caplog.text
    index.close()


def test_much_that_is_stored_does_not_wait_for_a_flush(arena: Arena) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    for number in range(100):
        index.append(stored(number))
    assert read_now(arena) == []
    for _ in range(60):
        for number in range(100):
            index.append(stored(number))
    assert len(read_now(arena)) == 100
    index.close()


def test_an_index_that_cannot_be_written_is_given_up_whole(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index, _ = opened(arena)
    index.shape_id(SHAPE)
    index.append(stored(0))
    index.flush()

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        index.append(Dropped(key(0), 0))
    assert not index.is_open
    assert "will not outlive" in caplog.text
    assert arena.index_path is not None
    assert not arena.index_path.exists()
    index.append(stored(1))
    index.flush()
    index.compact()
    index.close()
    assert not arena.index_path.exists()


def test_an_index_that_cannot_be_opened_costs_only_the_memory_of_it(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    assert arena.index_path is not None
    target = arena.path.with_name("somebody's file")
    target.touch()
    arena.index_path.symlink_to(target)
    index, found = opened(arena)
    assert (index.is_open, found) == (False, [])
    assert "cannot keep the index" in caplog.text
    index.append(msgspec.structs.replace(stored(0), shape_id=index.shape_id(SHAPE)))
    index.close()
    assert target.read_bytes() == b""
