"""The run directory: one owner, a state that can be read, nothing left but logs."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region.cli import clean_up
from deploy.region.client import find_gateway
from deploy.region.launch.rundir import (
    LOCK,
    ProcessRecord,
    RegionState,
    RunDirectoryError,
    RunLock,
    WhichRun,
    default_base,
    find_run,
    is_locked,
    open_run_directory,
    read_state,
    remove_leftovers,
)


def state(root: Path, region: str = "r", **changes: Any) -> RegionState:
    settings: dict[str, Any] = {
        "region": region,
        "phase": "running",
        "launcher_pid": os.getpid(),
        "started_s": 0.0,
        "gateway_url": f"http://{region}",
        "region_file": str(root / "region.json"),
        "processes": (),
        "relays": {},
        "agents": {},
    }
    return RegionState(**(settings | changes))


def test_state_is_written_read_and_removed(tmp_path: Path) -> None:
    root = tmp_path / "r"
    lock = RunLock(root)
    directory = open_run_directory(root)
    written = state(root)
    directory.write_state(written)
    assert read_state(root) == written
    assert written.launcher_lives()
    assert find_run(base=tmp_path) == (root, written)
    directory.socket("a").touch()
    remove_leftovers(root)
    assert read_state(root) is None
    assert not directory.sockets.exists()
    assert sorted(os.listdir(root)) == ["logs", LOCK]
    lock.release()
    assert not written.launcher_lives()


class Runs(list[RunLock]):
    """The locks of runs whose launcher is this process."""

    def add(self, base: Path, region: str, *, lives: bool = True, **changes: Any) -> Path:
        """The directory of one more, or of one whose launcher was killed."""
        root = base / region
        lock = RunLock(root)
        open_run_directory(root).write_state(state(root, region, **changes))
        if lives:
            self.append(lock)
        else:
            lock.release()
        return root


@pytest.fixture
def runs() -> Iterator[Runs]:
    found = Runs()
    yield found
    for lock in found:
        lock.release()


# -- what a user has in a folder ---------------------------------------------------------------


REGION = """
models: [{name: m, path: org/m}]
clusters: [{name: pd, kind: pd, nodes: [{name: n, instances: [{name: i}]}]}]
"""
OWN_FILES = ("package.json", "engine.key", "state.json", "sockets.path", "lock", "logs/mine.log")


@pytest.mark.parametrize("command", ["up", "down", "certs", "render"])
def test_a_folder_of_the_users_stays_as_it_is(tmp_path: Path, command: str) -> None:
    file, folder = tmp_path / "region.yaml", tmp_path / "mine"
    file.write_text(REGION)
    for name in OWN_FILES:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(name)
    folder.chmod(0o755)
    commands = {
        "up": ["up", str(file), "--run-dir", str(folder)],
        "down": ["down", "--run-dir", str(folder)],
        "certs": ["certs", "init", str(file), str(folder)],
        "render": ["region", "render", str(file), "--systemd", str(folder)],
    }
    result = CliRunner().invoke(app, commands[command])
    assert result.exit_code != 0
    if command == "up":
        assert "is not empty, and no region ran there" in result.output
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in found.items()} == {n: n for n in OWN_FILES}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_what_no_run_wrote_outlives_runs_in_its_directory(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    directory = open_run_directory(tmp_path)
    directory.write(tmp_path / "agent.a.json", b"1")
    (tmp_path / "engine.key").write_text("mine")
    with pytest.raises(RunDirectoryError, match="no run wrote it"):
        directory.write(directory.engine_key, b"the run's")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["engine.key", "logs", LOCK]
    assert (tmp_path / "engine.key").read_text() == "mine"
    lock.release()


# -- which run, and whether it runs --------------------------------------------------------------


def test_down_does_not_wait_for_a_program_that_got_the_id_of_a_process(
    tmp_path: Path, runs: Runs
) -> None:
    gone = ProcessRecord(
        "engine", "engine", "healthy", "", os.getpid(), "", str(tmp_path / "gone.log"), 0
    )
    root = runs.add(tmp_path, "r", lives=False, processes=(gone,))
    began_s = time.monotonic()
    result = CliRunner().invoke(app, ["down", "--run-dir", str(root), "--timeout", "20"])
    assert (result.exit_code, time.monotonic() - began_s < 10) == (0, True)


def test_the_only_region_that_runs_is_meant(tmp_path: Path, runs: Runs) -> None:
    with pytest.raises(WhichRun, match=f"no region runs under {tmp_path}; ask another") as none:
        find_run(base=tmp_path, hint="ask another")
    assert none.value.exit_status == 1
    dead = runs.add(tmp_path, "dead", lives=False)
    with pytest.raises(WhichRun, match="no region runs under"):
        find_run(base=tmp_path)
    assert find_run(base=tmp_path, or_left_behind=True)[0] == dead
    one = runs.add(tmp_path, "one")
    for or_left_behind in (False, True):
        assert find_run(base=tmp_path, or_left_behind=or_left_behind)[0] == one


def test_of_several_regions_one_is_named_or_chosen_by_its_directory(
    tmp_path: Path, runs: Runs
) -> None:
    one, two = runs.add(tmp_path, "one"), runs.add(tmp_path, "two")
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
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(WhichRun, match="--gateway URL"):
        find_gateway()
    root = runs.add(tmp_path / "prfaas", "one")
    assert find_gateway() == find_gateway(run_dir=root) == "http://one"
    assert find_gateway("http://other", root) == "http://other"


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(RunDirectoryError, match="already runs"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_who_looks_whether_a_region_runs_keeps_no_launcher_out(tmp_path: Path) -> None:
    RunLock(tmp_path).release()
    looks = threading.Event()

    def look() -> None:
        while not looks.is_set():
            is_locked(tmp_path)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            RunLock(tmp_path).release()
    finally:
        looks.set()
        thread.join()


def test_of_many_at_once_one_owns_it(tmp_path: Path) -> None:
    num_owners, num_won, both = [0], [0], threading.Event()

    def contend() -> None:
        for _ in range(30):
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
    left = state(tmp_path)
    lock = RunLock(tmp_path)
    directory = open_run_directory(tmp_path)
    directory.write_state(left)
    clean_up(left, tmp_path)
    assert read_state(tmp_path) == left
    lock.release()
    clean_up(left, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["logs", LOCK]


@pytest.mark.parametrize("is_temporary_long", [False, True])
def test_long_directories_keep_their_sockets_elsewhere(
    tmp_path: Path, is_temporary_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / ("x" * 90)
    # As on a cluster that gives each job a scratch folder.
    monkeypatch.setattr(tempfile, "tempdir", str(root) if is_temporary_long else "/var/tmp")
    lock = RunLock(root)
    directory = open_run_directory(root)
    assert directory.sockets.parent == Path("/tmp" if is_temporary_long else "/var/tmp")
    assert len(str(directory.socket("agent"))) < 108
    with pytest.raises(RunDirectoryError, match="use shorter names"):
        directory.socket("y" * 100)
    remove_leftovers(root)
    assert not directory.sockets.exists()
    lock.release()


def test_states_of_other_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"version": 0}')
    with pytest.raises(RunDirectoryError, match="another version"):
        read_state(tmp_path)


def test_the_default_place_follows_xdg() -> None:
    assert default_base({"XDG_STATE_HOME": "/s"}) == Path("/s/prfaas")
    assert default_base({}).name == "prfaas"
