"""The directory of a running region: logs, sockets, the resolved specification, the state file.

One launcher at a time owns it. `prfaas status` and `prfaas down` read the state file. Nothing that
a run did not write there is changed or removed. It does not know how processes are started.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

import msgspec

from deploy.command_line import CommandFailed
from kvmanager.private_files import (
    make_new_directory,
    make_private_directory,
    open_private,
    read_secret,
    write_private,
)

REGION_KEY: Final = "region.key"
"""Name of the file with the key that a run makes for itself."""
ENGINE_KEY: Final = "engine.key"
"""Name of the file with the key that the engines of a run demand."""
OPERATOR_KEY: Final = "operator.key"
"""Name of the file with the key of the user of a run to the pages of its gateway."""
GRANTING_KEY: Final = "granting.key"
GRANTING_KEYS: Final = "granting.pub"
"""Names of the files with the gateway's key of grants and what agents know of it."""
LOCK: Final = "prfaas.lock"
"""Name of the file that a launcher locks. It stays: it marks a directory as one of runs, and has
the names of the files that a run wrote there, which are those that may be removed.
"""
Phase = Literal["starting", "running", "stopping"]

# The kernel's limit for a unix socket's path is 107 bytes.
_MAX_SOCKET_PATH_BYTES = 107
# The longest names that sockets of a run have.
_SOCKET_NAME_BYTES = 40
# For so long somebody who only looks may have the lock, on a busy machine.
_LOOK_S = 0.2


class RunDirectoryError(CommandFailed):
    """The run directory cannot be used: another launcher has it, or it cannot be written."""


class WhichRun(CommandFailed):
    """It is not clear which region is meant: none runs (exit status 1), or several do (2)."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class ProcessRecord(msgspec.Struct, frozen=True):
    """One process of a region as its launcher sees it. `pid` leads the session of all its
    processes.
    """

    name: str
    kind: str
    state: str
    reason: str
    pid: int | None
    address: str
    log: str
    num_restarts: int


class RegionState(msgspec.Struct, frozen=True):
    """A launcher's description of its region."""

    region: str
    phase: Phase
    launcher_pid: int
    started_s: float
    gateway_url: str
    region_file: str
    processes: tuple[ProcessRecord, ...]
    relays: dict[str, str]
    agents: dict[str, str]
    admin_url: str = ""
    """Where the gateway's pages for operators are; like `gateway_url` "" if it runs elsewhere."""
    part: str = ""
    """The part of the region that runs here; "" if all of it does."""
    gateways: dict[str, str] = {}
    """Where the pages for operators of each gateway are that runs here, by its process."""

    @property
    def title(self) -> str:
        """The name of the region, or of its part, for people."""
        return f"{self.region}, part {self.part}" if self.part else self.region

    def launcher_lives(self) -> bool:
        """Whether the process that wrote this still runs: it holds the lock until its end."""
        return is_locked(Path(self.region_file).parent)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run. `sockets` is elsewhere if `root` is too long for socket paths."""

    root: Path
    sockets: Path

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def pace(self) -> Path:
        """What paced engines log of their passes: a file of JSON lines for each."""
        return self.logs / "pace"

    @property
    def state_file(self) -> Path:
        return self.root / "state.json"

    @property
    def region_file(self) -> Path:
        return self.root / "region.json"

    @property
    def wanted_file(self) -> Path:
        """The region as its user wrote it, with ports that are still to be chosen."""
        return self.root / "wanted.json"

    @property
    def gateway_file(self) -> Path:
        """The file of a region's only gateway."""
        return self.gateway_file_of("gateway")

    def gateway_file_of(self, process: str) -> Path:
        """The file of a gateway, by the name of its process."""
        return self.root / f"{process}.json"

    def learned_file_of(self, process: str) -> Path:
        """The file in which that gateway keeps what it has learnt. It outlives the run."""
        return self.root / f"{process}.learned"

    @property
    def region_key(self) -> Path:
        """The key that this run's processes share, where the region names no other file."""
        return self.root / REGION_KEY

    @property
    def granting_key(self) -> Path:
        """The private key with which this run's gateway signs grants."""
        return self.root / GRANTING_KEY

    @property
    def granting_keys(self) -> Path:
        """The public key with which this run's agents check them."""
        return self.root / GRANTING_KEYS

    @property
    def engine_key(self) -> Path:
        """The key that this run's engines demand."""
        return self.root / ENGINE_KEY

    @property
    def operator_key(self) -> Path:
        """The key of this run's user to the gateway's pages."""
        return self.root / OPERATOR_KEY

    def socket(self, name: str) -> Path:
        """The path of a socket. RunDirectoryError if it is too long for the kernel."""
        path = self.sockets / f"{name}.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise RunDirectoryError(f"{path} is too long for a unix socket; use shorter names")
        return path

    def write(self, path: Path, data: bytes) -> None:
        """Put a file of this run at `path`, in one step. RunDirectoryError if a file is there that
        no run wrote.
        """
        with open(
            open_private(self.root / LOCK, os.O_RDWR | os.O_APPEND | os.O_CREAT), "r+"
        ) as own:
            if path.name not in own.read().splitlines():
                if path.exists():
                    message = f"{path} is there and no run wrote it; move it, or give --run-dir"
                    raise RunDirectoryError(message)
                # Before the file itself: whatever ends this process, the next one may remove it.
                own.write(f"{path.name}\n")
        write_private(path, data)

    def write_state(self, state: RegionState) -> None:
        """Replace the state file atomically, so that no reader sees half of it."""
        self.write(self.state_file, msgspec.json.format(msgspec.json.encode(state), indent=1))


class RunLock:
    """Ownership of a run directory until `release`. The kernel ends it with the process."""

    def __init__(self, root: Path) -> None:
        """Create `root` for this user alone and lock it. RunDirectoryError if another launcher or
        user has it, or if it holds anything and is no directory of a run.
        """
        try:
            _make_run_directory(root)
            self._file = os.fdopen(open_private(root / LOCK, os.O_RDWR | os.O_CREAT), "rb")
        except FileExistsError as error:
            message = (
                f"{root} is not empty, and no region ran there: its files stay as they are; give a "
                "new or empty directory with --run-dir"
            )
            raise RunDirectoryError(message) from error
        except OSError as error:
            raise RunDirectoryError(f"cannot use {root}: {error.strerror or error}") from error
        deadline_s = time.monotonic() + _LOOK_S
        while not _locked(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline_s:
                self._file.close()
                message = f"a region already runs in {root}; `prfaas down` it or give --run-dir"
                raise RunDirectoryError(message)
            time.sleep(0.01)

    def release(self) -> None:
        self._file.close()


def _make_run_directory(root: Path) -> None:
    """Make `root`, or take the directory of an earlier run. FileExistsError for others that are not
    empty, other OSErrors.
    """
    try:
        make_new_directory(root)
    except FileExistsError:
        if not (root / LOCK).exists():
            raise
        make_private_directory(root)


def _locked(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(root: Path) -> bool:
    """Whether a launcher owns `root`."""
    try:
        with (root / LOCK).open("rb") as file:
            # A lock of its own kind, so that several who look do not see each other.
            return not _locked(file, fcntl.LOCK_SH)
    except OSError:
        return False


def open_run_directory(root: Path) -> RunDirectory:
    """Empty directories for a new run in `root`, which the caller has locked. Old logs are
    removed.
    """
    root = root.resolve()
    remove_leftovers(root)
    sockets = root / "sockets"
    if not _has_room(sockets):
        # A batch system's TMPDIR may be as long as its scratch folders.
        base = Path(tempfile.gettempdir())
        base = base if _has_room(base / "prfaas-12345678") else Path("/tmp")
        sockets = Path(tempfile.mkdtemp(prefix="prfaas-", dir=base))
    directory = RunDirectory(root, sockets)
    shutil.rmtree(directory.logs, ignore_errors=True)
    make_private_directory(directory.logs)
    # Who can open an agent's socket can use its memory, so only this user may enter.
    make_private_directory(sockets)
    directory.write(root / "sockets.path", os.fsencode(sockets))
    return directory


def _has_room(sockets: Path) -> bool:
    return len(os.fsencode(sockets)) <= _MAX_SOCKET_PATH_BYTES - _SOCKET_NAME_BYTES


def remove_leftovers(root: Path) -> None:
    """Remove what a run that is over wrote in `root`, which the caller has locked, and its sockets.
    Its logs stay, and what the gateway has learnt.
    """
    lock = root / LOCK
    written = lock.read_text().splitlines() if lock.exists() else []
    if "sockets.path" in written and (root / "sockets.path").exists():
        shutil.rmtree((root / "sockets.path").read_text(), ignore_errors=True)
    for name in written:
        (root / name).unlink(missing_ok=True)
    if written:
        os.truncate(lock, 0)


def read_state(root: Path) -> RegionState | None:
    """The state in `root`; None if no region was started there or it ended well."""
    try:
        return msgspec.json.decode((root / "state.json").read_bytes(), type=RegionState)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise RunDirectoryError(f"{root / 'state.json'} is of another version: {error}") from error


def operator_key(root: Path) -> str:
    """The key of the run in `root` to its gateway's pages, "" if it has none that can be read."""
    try:
        return read_secret(root / OPERATOR_KEY)
    except (OSError, ValueError):
        return ""


def default_base(environment: Mapping[str, str]) -> Path:
    """The directory of all runs, unless told otherwise. It has one directory for each name."""
    state_home = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state_home).expanduser() / "prfaas"


def find_run(
    run_dir: Path | None = None,
    name: str | None = None,
    *,
    base: Path | None = None,
    or_left_behind: bool = False,
    hint: str = "",
) -> tuple[Path, RegionState]:
    """The run that is meant, and its directory.

    It is the run in `run_dir`, the run of region `name`, or the only run under `base` (by default
    where regions run). With `or_left_behind`, a run whose launcher was killed counts if no other
    runs. `hint` says what the user may give instead of a run. Raises WhichRun, RunDirectoryError.
    """
    base = base or default_base(os.environ)
    roots = [run_dir] if run_dir else [base / name] if name else _known_runs(base)
    states = {root: state for root in roots if (state := read_state(root)) is not None}
    runs = {root: state for root, state in states.items() if state.launcher_lives()}
    if not runs and or_left_behind:
        runs = states
    if len(runs) == 1:
        return next(iter(runs.items()))
    if not runs:
        where = f"in {roots[0]}" if run_dir or name else f"under {base}"
        raise WhichRun(f"no region runs {where}" + (f"; {hint}" if hint else ""), 1)
    choice = "choose one with --run-dir" + (f", or {hint}" if hint else "")
    names = (
        f"{state.title}{' at ' if state.gateway_url else ''}{state.gateway_url} in {root}"
        for root, state in runs.items()
    )
    raise WhichRun(f"several regions run; {choice}: {', '.join(names)}", 2)


def _known_runs(base: Path) -> list[Path]:
    """Directories under `base` with the state of a region, running or left behind."""
    return sorted(path.parent for path in base.glob("*/state.json"))
