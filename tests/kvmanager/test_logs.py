"""Messages that repeat are left out of the log, and counted; no caller waits for a write."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from agent_process import CHILD_ENV

from kvmanager.logs import (
    MAX_A_PERIOD,
    MAX_TEXTS,
    PERIOD_S,
    LogFormat,
    LogWriter,
    Repeats,
    RepeatsFilter,
    set_up_logging,
)


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


class SlowDisk(logging.Handler):
    """Takes a line when it is let, and keeps its text."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.may_write = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        assert self.may_write.wait(20)
        self.lines.append(self.format(record))


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("prfaas.test_logs", logging.INFO)  # in no tree
    yield logger
    logger.handlers.clear()


def test_a_caller_does_not_wait_for_a_write_and_lines_keep_their_order(
    disk: SlowDisk, logger: logging.Logger
) -> None:
    writer = LogWriter(disk)
    logger.addHandler(writer.front)
    logger.info("number %d", 0)
    assert disk.begun.wait(20)
    for number in range(1, 50):
        logger.info("number %d", number)
    try:
        raise ValueError("of a request")
    except ValueError:
        logger.exception("it failed")
    assert disk.lines == []
    disk.may_write.set()
    writer.close()
    assert disk.lines[:-1] == [f"number {number}" for number in range(50)]
    assert disk.lines[-1].startswith("it failed\nTraceback")
    assert disk.lines[-1].endswith("ValueError: of a request")


def test_lines_that_find_no_room_are_lost_and_counted(
    disk: SlowDisk, logger: logging.Logger
) -> None:
    writer = LogWriter(disk, max_waiting=2)
    logger.addHandler(writer.front)
    logger.info("written")
    assert disk.begun.wait(20)
    for number in range(5):
        logger.info("number %d", number)
    disk.may_write.set()
    while len(disk.lines) < 3:
        time.sleep(0.001)
    logger.info("later")
    writer.close()
    told = "later (3 lines before this one were lost)"
    assert disk.lines == ["written", "number 0", "number 1", told]


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise ValueError('wrong')"])
def test_what_was_logged_last_is_written_before_the_process_ends(end: str) -> None:
    code = f"""
import json
import logging
from kvmanager.logs import set_up_logging
set_up_logging()
set_up_logging()  # once is enough
for number in range(99):
    logging.getLogger("prfaas.test").warning("number %d", number)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=CHILD_ENV, capture_output=True, text=True, timeout=60
    )
    lines = [line for line in done.stderr.splitlines() if "prfaas.test" in line]
    assert [line.partition("prfaas.test: ")[2] for line in lines] == [
        f"number {number}" for number in range(99)
    ]
    assert all("WARNING" in line for line in lines)


def test_a_process_whose_log_nobody_reads_ends_all_the_same() -> None:
    code = """
import logging, sys
from kvmanager.logs import set_up_logging
set_up_logging()
for number in range(12_000):
    logging.getLogger().warning(f"{number}".ljust(100))
sys.exit(3)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 3


def test_a_process_that_logs_already_is_left_alone() -> None:
    before = threading.active_count(), list(logging.getLogger().handlers)
    set_up_logging()
    assert (threading.active_count(), logging.getLogger().handlers) == before


def logged(form: LogFormat) -> list[str]:
    """What a process logs of a request, of none and of an exception."""
    code = f"""
import asyncio, logging
from kvmanager.logs import about_request, set_up_logging
set_up_logging("debug", {form!r})
logger = logging.getLogger("prfaas.test")
async def work():
    logger.info("of %d", 1)
async def main():
    with about_request("r-1", "ab" * 16):
        task = asyncio.create_task(work())
    await task
    logger.debug("of\\nnone")
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
asyncio.run(main(), debug=False)
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=CHILD_ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "selector" not in line]


def test_lines_for_people_end_with_their_request() -> None:
    first, second, *_ = logged("text")
    assert first.endswith(f"INFO prfaas.test: of 1 [request_id=r-1 trace_id={'ab' * 16}]")
    assert second.endswith("DEBUG prfaas.test: of")


def test_every_line_is_a_json_object_if_asked_for() -> None:
    first, second, third = map(json.loads, logged("json"))
    time.strptime(first.pop("time")[:19], "%Y-%m-%dT%H:%M:%S")
    assert first.pop("pid") > 0
    assert first == {
        "level": "INFO",
        "logger": "prfaas.test",
        "message": "of 1",
        "request_id": "r-1",
        "trace_id": "ab" * 16,
    }
    assert second["message"] == "of\nnone"
    assert "request_id" not in second
    assert third["exc_info"].endswith("ValueError: wrong")
