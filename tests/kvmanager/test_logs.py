"""Messages that repeat are left out of the log, and counted."""

import logging
import time

import pytest

from kvmanager.logs import MAX_A_PERIOD, MAX_TEXTS, PERIOD_S, Repeats, RepeatsFilter


def test_what_repeats_is_written_again_in_the_next_period_with_what_was_left_out() -> None:
    repeats = Repeats()
    assert [repeats.admit("a", 0.0) for _ in range(MAX_A_PERIOD)] == [0] * MAX_A_PERIOD
    assert [repeats.admit("a", PERIOD_S / 2) for _ in range(7)] == [None] * 7
    assert repeats.admit("b", PERIOD_S / 2) == 0
    assert repeats.admit("a", PERIOD_S) == 7
    assert repeats.admit("a", PERIOD_S) == 0
    assert repeats.admit("a", 9 * PERIOD_S) == 0


def test_many_texts_do_not_fill_the_memory() -> None:
    repeats = Repeats()
    for number in range(3 * MAX_TEXTS):
        assert repeats.admit(number, 0.0) == 0
    assert len(repeats) == MAX_TEXTS


def test_messages_that_differ_in_their_arguments_only_are_repeats(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("prfaas.test_logs")
    caplog.handler.addFilter(repeats := RepeatsFilter())
    try:
        with caplog.at_level(logging.INFO):
            for number in range(2 * MAX_A_PERIOD):
                logger.warning("peer %d sends garbage", number)
            logger.warning("something else")
    finally:
        caplog.handler.removeFilter(repeats)
    assert len(caplog.records) == MAX_A_PERIOD + 1
    assert caplog.messages[MAX_A_PERIOD - 1] == f"peer {MAX_A_PERIOD - 1} sends garbage"
    assert caplog.messages[-1] == "something else"


def test_a_clock_that_is_set_back_keeps_no_message_out(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats, record = RepeatsFilter(), logging.makeLogRecord({"name": "n", "msg": "again"})
    now_s = time.monotonic()
    assert all(repeats.filter(record) for _ in range(MAX_A_PERIOD))
    assert not repeats.filter(record)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 2 * PERIOD_S)
    record.created -= 24 * 3600.0
    assert repeats.filter(record)
