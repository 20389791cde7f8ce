"""The run directory: one owner, a state that can be read, nothing left but logs."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from deploy.region.rundir import (
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
