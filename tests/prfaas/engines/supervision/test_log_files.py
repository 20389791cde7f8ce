"""Logs of child processes are rotated while the child writes, and are for this user alone."""

import os
from pathlib import Path

from prfaas.engines.supervision.log_files import NUM_OLD_LOGS, open_log, rotate


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
