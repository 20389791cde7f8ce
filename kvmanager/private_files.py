"""Files, directories and unix sockets that only this user may use.

KVCache and keys lie in places that every user of a host can write to, such as /dev/shm and /tmp.
A user who makes a file or a link there first, under our name, could read or plant what we keep in
it. So each file is checked before it is used: owner, mode, number of names. It does not know what
the files hold.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

_PEER_CREDENTIALS: Final = struct.Struct("iII")


class NotPrivate(PermissionError):
    """Another user owns this, or may use it; the message names it and says what is wrong."""


class NoRoom(OSError):
    """The file system has not enough room; the message names what is wanted and what is free."""


def open_private(path: str | Path, flags: int) -> int:
    """Open a regular file of this user that has one name and that nobody else may use; a new one
    gets mode 0600. The descriptor. Raises NotPrivate, other OSErrors.

    `flags` must not hold O_TRUNC: what is not ours must not lose its bytes before we see that.
    """
    try:
        # O_NOFOLLOW: a symbolic link at this path could make us write into another file.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(f"{path} is a symbolic link: it may lead anywhere") from error
        raise
    try:
        check_private(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_private(fd: int, path: str | Path) -> None:
    """Raises NotPrivate unless the open file is what `open_private` says. One without a name, which
    somebody removed meanwhile, is as good.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivate(f"{path} is not a regular file")
    _check_owner(status, path)
    if status.st_nlink > 1:
        raise NotPrivate(f"{path} has {status.st_nlink} names: remove the other hard links")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise NotPrivate(f"other users may use {path}, its mode is {mode:04o}: chmod 600 it")


def read_secret(path: Path) -> str:
    """The one word in a file that only its owner, or its group, may read: containers get secrets
    for a group. Raises NotPrivate, other OSErrors, ValueError. No error shows what is in it.
    """
    with open(path, encoding="ascii") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o027:
            raise NotPrivate(f"others may read {path}, its mode is {mode:04o}: chmod 600 it")
        words = file.read(4096).split()
    if len(words) != 1:
        raise ValueError(f"{path} has {len(words)} words where one key should be")
    return words[0]


def make_private_directory(path: Path) -> None:
    """Make the directory with mode 0700; one that is there must belong to this user, and gets that
    mode. Raises NotPrivate, other OSErrors.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        _check_owner(status, path)
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def make_new_directory(path: Path) -> None:
    """As `make_private_directory`; one that is there must be empty, else FileExistsError."""
    # First: the mode of a directory that is somebody's own does not change.
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty: nothing there is overwritten")
    make_private_directory(path)


def write_private(path: Path, data: bytes) -> None:
    """Put a file with mode 0600 in the place of whatever is at `path`, in one step. OSError."""
    new_path = path.with_name(path.name + ".new")
    new_path.unlink(missing_ok=True)
    fd = open_private(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(fd, "wb") as file:
        file.write(data)
    new_path.replace(path)


def allocate(fd: int, nbytes: int, directory: Path, what: str) -> None:
    """Give the file `nbytes` bytes that are really there. Raises NoRoom, other OSErrors.

    tmpfs reserves no space for a sparse file: a mapped page that a full file system cannot supply
    ends a process with SIGBUS at its first use. So whatever is mapped is allocated before.
    """
    stats = os.statvfs(directory)
    free_bytes = stats.f_bavail * stats.f_frsize
    # A file that is taken over has its bytes already; st_blocks counts units of 512 (stat(2)).
    missing_bytes = nbytes - os.fstat(fd).st_blocks * 512
    if missing_bytes <= free_bytes:
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            return
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    raise NoRoom(
        f"{what} of {nbytes} bytes ({nbytes / (1 << 30):.2f} GiB) does not fit into {directory}, "
        f"which has {free_bytes} bytes ({free_bytes / (1 << 30):.2f} GiB) free: lower arena_gib, "
        "or enlarge the file system (containers: --shm-size)",
    )


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the other end of a unix socket, as of its connect or listen.

    The process id is 0 where it is in a namespace that this process cannot see. Raises OSError.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, user, _ = _PEER_CREDENTIALS.unpack(raw)
    return pid, user


def check_peer(connection: socket.socket) -> None:
    """Raises NotPrivate when another user is at the other end of a unix socket."""
    _, user = peer_process(connection)
    if user != os.geteuid():
        raise NotPrivate(
            f"the other end belongs to user {user}, this process to user {os.geteuid()}: agent and "
            "engines of a host run as one user"
        )


def _check_owner(status: os.stat_result, path: str | Path) -> None:
    if status.st_uid != os.geteuid():
        raise NotPrivate(
            f"{path} belongs to user {status.st_uid}, this process to user {os.geteuid()}"
        )
