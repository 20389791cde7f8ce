"""The arithmetic of the emulated link: rate, delay, order, memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.lab.emulator.core import ByteQueue, ChunkPool, DelayLine, LinkShape, RateClock


class TestRateClock:
    def test_bytes_leave_at_the_rate(self) -> None:
        clock = RateClock(1000.0, read_ahead_s=1.0)
        assert clock.admit(10.0, 500) == pytest.approx(10.5)
        assert clock.admit(10.1, 100) == pytest.approx(10.6)

    def test_an_idle_link_starts_from_now(self) -> None:
        clock = RateClock(1000.0, read_ahead_s=1.0)
        clock.admit(0.0, 100)
        assert clock.admit(5.0, 100) == pytest.approx(5.1)

    def test_room_is_the_read_ahead_less_what_is_queued(self) -> None:
        clock = RateClock(1024.0, read_ahead_s=0.5)
        assert clock.room_bytes(0.0) == 512
        clock.admit(0.0, 384)
        assert clock.room_bytes(0.0) == 128
        assert clock.room_bytes(0.25) == 384
        clock.admit(0.25, 384)
        assert clock.room_bytes(0.25) == 0
        assert clock.room_at_s(0.25, 128) == pytest.approx(0.375)

    def test_no_rate_means_no_wait(self) -> None:
        clock = RateClock(0.0)
        assert clock.admit(3.0, 1 << 30) == 3.0
        assert clock.room_bytes(3.0) > 1 << 40
        assert clock.room_at_s(3.0, 100) == 3.0

    def test_a_change_of_rate_serves_the_backlog_at_the_new_one(self) -> None:
        clock = RateClock(1000.0, read_ahead_s=10.0)
        clock.admit(0.0, 1000)
        clock.change_rate(0.0, 100.0)
        assert clock.admit(0.0, 100) == pytest.approx(11.0)
        clock.change_rate(0.0, 0.0)
        assert clock.admit(0.0, 100) == 0.0

    def test_coming_back_late_does_not_cost_a_busy_link_its_capacity(self) -> None:
        clock = RateClock(1024.0, read_ahead_s=0.25, catch_up_s=0.5)
        clock.admit(0.0, 256)
        clock.turn_over(starved=True)
        assert clock.room_bytes(0.5) == 512
        assert clock.admit(0.5, 256) == pytest.approx(0.5)
        assert clock.room_bytes(2.0) == 768
        clock.turn_over(starved=False)
        assert clock.room_bytes(2.0) == 256

    @given(
        st.lists(
            st.tuples(st.floats(0, 0.01), st.integers(1, 3000)),
            min_size=1,
            max_size=200,
        )
    )
    def test_never_faster_than_the_rate(self, offers: list[tuple[float, int]]) -> None:
        rate = 1e6
        clock = RateClock(rate, read_ahead_s=0.008)
        now_s = 0.0
        taken = 0
        for pause_s, nbytes in offers:
            now_s += pause_s
            nbytes = min(nbytes, clock.room_bytes(now_s))
            if nbytes == 0:
                continue
            taken += nbytes
            last_s = clock.admit(now_s, nbytes)
            assert last_s * rate >= taken - 1
            assert last_s <= now_s + 0.008 + 1e-6


class TestDelayLine:
    def test_bytes_arrive_when_due(self) -> None:
        line = DelayLine()
        line.push(1.0, 10)
        line.push(2.0, 20)
        assert line.due(0.5) == 0
        assert line.due(1.0) == 10
        assert line.next_arrival_s() == 2.0
        line.take(4)
        assert line.held_bytes == 26
        assert line.due(2.0) == 26
        line.take(26)
        assert line.held_bytes == 0
        assert line.next_arrival_s() is None

    def test_jitter_does_not_reorder(self) -> None:
        line = DelayLine()
        line.push(2.0, 10)
        line.push(1.0, 20)
        assert line.due(1.5) == 0
        assert line.due(2.0) == 30

    def test_nothing_is_taken_before_it_arrived(self) -> None:
        line = DelayLine()
        line.push(2.0, 10)
        with pytest.raises(ValueError, match="have arrived"):
            line.take(1)


class TestByteQueue:
    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), max_size=100))
    def test_is_a_queue(self, steps: list[tuple[int, int]]) -> None:
        pool = ChunkPool(chunk_bytes=32, max_spare=4)
        queue = ByteQueue(pool)
        expected = bytearray()
        counter = 0
        for put, take in steps:
            space = queue.free_space(8)
            assert len(space) >= 8
            put = min(put, len(space))
            data = bytes((counter + i) % 251 for i in range(put))
            counter += put
            space[:put] = data
            queue.filled(put)
            expected += data
            take = min(take, len(expected))
            views = queue.front(take)
            assert b"".join(views) == expected[:take]
            queue.drop_front(take)
            del expected[:take]
            assert queue.num_bytes == len(expected)

    def test_chunks_come_back_to_the_pool(self) -> None:
        pool = ChunkPool(chunk_bytes=16, max_spare=1)
        queue = ByteQueue(pool)
        first = queue.free_space(1)
        queue.filled(16)
        queue.free_space(1)
        queue.filled(3)
        queue.drop_front(19)
        assert pool.take().obj is first.obj

    def test_dropping_too_much_is_an_error(self) -> None:
        queue = ByteQueue(ChunkPool())
        with pytest.raises(ValueError, match="are held"):
            queue.drop_front(1)

    def test_an_empty_read_keeps_no_chunk(self) -> None:
        pool = ChunkPool(chunk_bytes=16)
        queue = ByteQueue(pool)
        space = queue.free_space(1)
        queue.filled(0)
        assert pool.take().obj is space.obj


def test_a_link_shape_is_checked() -> None:
    assert LinkShape(rtt_s=0.02).one_way_s == 0.01
    with pytest.raises(ValueError, match="negative"):
        LinkShape(rtt_s=-1)
