"""The run directory: one owner, a state that can be read, nothing left but logs."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import IO

import psutil
import pytest

from deploy.region.cli import clean_up
from deploy.region.launch.rundir import (
    RegionState,
    RunDirectoryError,
    RunLock,
    default_base,
    known_runs,
    open_run_directory,
    read_state,
    remove_leftovers,
)


def state(pid: int, started_s: float) -> RegionState:
    return RegionState(
        region="r",
        phase="running",
        launcher_pid=pid,
        launcher_started_s=started_s,
        started_s=0.0,
        gateway_url="http://127.0.0.1:1",
        region_file="region.json",
        processes=(),
        relays={},
        agents={},
    )


def test_state_is_written_read_and_removed(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    directory = open_run_directory(root)
    own = psutil.Process()
    written = state(own.pid, own.create_time())
    directory.write_state(written)
    assert read_state(root) == written
    assert written.launcher_lives()
    assert known_runs(tmp_path) == [root]
    directory.socket("a").touch()
    remove_leftovers(root)
    assert read_state(root) is None
    assert not directory.sockets.exists()
    assert os.listdir(root) == ["logs"]


def test_a_reused_pid_is_not_the_launcher() -> None:
    own = psutil.Process()
    assert not state(own.pid, own.create_time() - 100).launcher_lives()


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(RunDirectoryError, match="already runs"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_who_opened_a_lock_that_was_then_removed_has_the_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunLock(tmp_path)
    flock = fcntl.flock

    def flock_late(file: IO[str], operation: int) -> None:
        # Between the second owner's open and its lock the first one is done.
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    second = RunLock(tmp_path)
    with pytest.raises(RunDirectoryError, match="already runs"):
        RunLock(tmp_path)
    second.release()
    assert not list(tmp_path.iterdir())


def test_of_many_at_once_one_owns_it(tmp_path: Path) -> None:
    num_owners, num_won, both = [0], [0], threading.Event()

    def contend() -> None:
        for _ in range(300):
            try:
                lock = RunLock(tmp_path)
            except RunDirectoryError:
                continue
            num_owners[0] += 1
            num_won[0] += 1
            if num_owners[0] != 1:
                both.set()
            os.sched_yield()
            num_owners[0] -= 1
            lock.release()

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_won[0] > 0
    assert not both.is_set()


def test_down_leaves_alone_what_was_started_meanwhile(tmp_path: Path) -> None:
    left = state(1, 0.0)
    directory = open_run_directory(tmp_path)
    directory.write_state(left)
    lock = RunLock(tmp_path)
    clean_up(left, tmp_path)
    assert read_state(tmp_path) == left
    lock.release()
    clean_up(left, tmp_path)
    assert os.listdir(tmp_path) == ["logs"]


def test_long_directories_keep_their_sockets_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 90)
    root.mkdir()
    directory = open_run_directory(root)
    assert directory.sockets.parent != root
    assert len(str(directory.socket("agent"))) < 108
    with pytest.raises(RunDirectoryError, match="use shorter names"):
        directory.socket("y" * 100)
    remove_leftovers(root)
    assert not directory.sockets.exists()


def test_states_of_other_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"version": 0}')
    with pytest.raises(RunDirectoryError, match="another version"):
        read_state(tmp_path)


def test_the_default_place_follows_xdg() -> None:
    assert default_base({"XDG_STATE_HOME": "/s"}) == Path("/s/prfaas")
    assert default_base({}).name == "prfaas"
