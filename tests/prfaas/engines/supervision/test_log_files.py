"""Logs are rotated while somebody writes them, and are for this user alone."""

import logging
import os
from pathlib import Path

import pytest

from prfaas.engines.supervision.log_files import NUM_OLD_LOGS, OwnLog, open_log, rotate


def test_a_log_in_use_is_rotated_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    before = os.umask(0)
    try:
        child = open_log(path)
        for number in range(NUM_OLD_LOGS + 2):
            os.write(child, b"%d" % number * 100)
            assert rotate(path, 99)
            assert path.stat().st_size == 0
        os.write(child, b"newest")
        assert not rotate(path, 99)
    finally:
        os.close(child)
        os.umask(before)
    assert path.read_bytes() == b"newest"
    kept = {item.name: item.read_bytes()[:1] for item in tmp_path.iterdir()}
    assert kept == {"engine.log": b"n", "engine.log.1": b"4", "engine.log.2": b"3"} | {
        "engine.log.3": b"2"
    }
    assert all(item.stat().st_mode & 0o777 == 0o600 for item in tmp_path.iterdir())


def test_the_log_of_this_process_is_private_before_and_after_it_is_rotated(tmp_path: Path) -> None:
    before = os.umask(0)
    log = OwnLog(tmp_path / "launcher.log")
    try:
        log.maxBytes = 100
        for number in range(NUM_OLD_LOGS + 3):
            log.emit(logging.makeLogRecord({"msg": f"{number}" * 60}))
    finally:
        log.close()
        os.umask(before)
    kept = {item.name: item.read_text()[:1] for item in tmp_path.iterdir()}
    assert kept == {"launcher.log": "5", "launcher.log.1": "4"} | {
        "launcher.log.2": "3",
        "launcher.log.3": "2",
    }
    assert all(item.stat().st_mode & 0o777 == 0o600 for item in tmp_path.iterdir())


def test_the_log_of_this_process_follows_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launcher.log").symlink_to(tmp_path / "elsewhere")
    log = OwnLog(tmp_path / "launcher.log")
    log.emit(logging.makeLogRecord({"msg": "a line"}))
    assert "symbolic links" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
