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
from deploy.region.client import find_gateway
from deploy.region.launch.rundir import (
    RegionState,
    RunDirectoryError,
    RunLock,
    WhichRun,
    default_base,
    find_run,
    open_run_directory,
    read_state,
    remove_leftovers,
)


def state(pid: int, started_s: float, region: str = "r") -> RegionState:
    return RegionState(
        region=region,
        phase="running",
        launcher_pid=pid,
        launcher_started_s=started_s,
        started_s=0.0,
        gateway_url=f"http://{region}",
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
    assert find_run(base=tmp_path) == (root, written)
    directory.socket("a").touch()
    remove_leftovers(root)
    assert read_state(root) is None
    assert not directory.sockets.exists()
    assert os.listdir(root) == ["logs"]


def test_a_reused_pid_is_not_the_launcher() -> None:
    own = psutil.Process()
    assert not state(own.pid, own.create_time() - 100).launcher_lives()


def run_of(base: Path, region: str, *, lives: bool = True) -> Path:
    """The directory of a run whose launcher is this process, or was killed."""
    root = base / region
    root.mkdir(parents=True)
    own = psutil.Process()
    started_s = own.create_time() - (0 if lives else 100)
    open_run_directory(root).write_state(state(own.pid, started_s, region))
    return root


def test_the_only_region_that_runs_is_meant(tmp_path: Path) -> None:
    with pytest.raises(WhichRun, match=f"no region runs under {tmp_path}; ask another") as none:
        find_run(base=tmp_path, hint="ask another")
    assert none.value.exit_status == 1
    dead = run_of(tmp_path, "dead", lives=False)
    with pytest.raises(WhichRun, match="no region runs under"):
        find_run(base=tmp_path)
    assert find_run(base=tmp_path, or_left_behind=True)[0] == dead
    one = run_of(tmp_path, "one")
    for or_left_behind in (False, True):
        assert find_run(base=tmp_path, or_left_behind=or_left_behind)[0] == one


def test_of_several_regions_one_is_named_or_chosen_by_its_directory(tmp_path: Path) -> None:
    one, two = run_of(tmp_path, "one"), run_of(tmp_path, "two")
    with pytest.raises(WhichRun, match="several regions run; choose one with --run-dir") as several:
        find_run(base=tmp_path)
    assert several.value.exit_status == 2
    assert str(several.value).endswith(f"one at http://one in {one}, two at http://two in {two}")
    assert find_run(name="two", base=tmp_path)[1].region == "two"
    assert find_run(one, base=tmp_path)[1].region == "one"
    for choice in ({"name": "three"}, {"run_dir": tmp_path / "three"}):
        with pytest.raises(WhichRun, match=f"no region runs in {tmp_path / 'three'}"):
            find_run(**choice, base=tmp_path)


def test_a_gateway_is_the_one_given_or_that_of_the_region_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(WhichRun, match="--gateway URL"):
        find_gateway()
    root = run_of(tmp_path / "prfaas", "one")
    assert find_gateway() == find_gateway(run_dir=root) == "http://one"
    assert find_gateway("http://other", root) == "http://other"


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
