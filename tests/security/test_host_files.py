"""Other users of a host put files, links and sockets where ours belong, or read what we keep."""

import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.processes import module_argv, module_environment
from deploy.region.launch.rundir import RunDirectoryError, RunLock, open_run_directory
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.engines.connection import AgentConnection
from kvmanager.agent.engines.protocol import EngineHello
from kvmanager.agent.engines.server import EngineServer
from kvmanager.agent.kept_arena import open_arena
from kvmanager.arena import Arena, ArenaError, remove_stale
from kvmanager.pool.index import PoolIndex
from kvmanager.pool.index_records import IndexHeader
from kvmanager.pool.ssd import SsdError, SsdStore
from kvmanager.private_files import NotPrivate, open_private, write_private

BLOCK = 4096
GIB = 1 << 30
HELLO = EngineHello(
    instance="d0", role="scheduler", pid=os.getpid(), layout=b"", tp_rank=0, tp_size=1
)


@pytest.fixture
def as_another_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on this process is another user than the owner of what it made."""

    def change() -> None:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)

    return change


def kept_path(directory: Path) -> Path:
    return directory / "prfaas-kept-node.arena"


def plant(path: Path) -> None:
    path.write_bytes(bytes(2 * BLOCK))
    path.chmod(0o600)


def link(path: Path) -> None:
    plant(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def hard_link(path: Path) -> None:
    plant(path.with_name("elsewhere"))
    path.hardlink_to(path.with_name("elsewhere"))


def world_readable(path: Path) -> None:
    plant(path)
    path.chmod(0o644)


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


PLANTED = {
    link: "symbolic link",
    hard_link: "2 names",
    world_readable: "other users may use",
    fifo: "not a regular file",
}


@pytest.mark.parametrize(("attack", "told"), PLANTED.items())
def test_a_planted_arena_is_neither_adopted_nor_replaced_nor_mapped(
    tmp_path: Path, attack: Callable[[Path], None], told: str
) -> None:
    path = kept_path(tmp_path)
    attack(path)
    for take in (Arena.adopt, Arena.create):
        with pytest.raises(ArenaError, match=told):
            take(tmp_path, num_blocks=2, block_bytes=BLOCK, name="node")
    with pytest.raises(ArenaError, match=told):
        Arena.attach(path, 2 * BLOCK, BLOCK, epoch="e")
    assert Arena.discard(tmp_path, "node") == []
    assert os.path.lexists(path)


def test_the_arena_of_another_user_is_not_adopted_nor_mapped(
    tmp_path: Path, as_another_user: Callable[[], None]
) -> None:
    Arena.create(tmp_path, 2, BLOCK, name="node").close(keep=True)
    stale = tmp_path / "prfaas-0123456789abcdef.arena"
    plant(stale)
    as_another_user()
    for take in (Arena.adopt, Arena.create):
        with pytest.raises(ArenaError, match="belongs to user"):
            take(tmp_path, num_blocks=2, block_bytes=BLOCK, name="node")
    with pytest.raises(ArenaError, match="belongs to user"):
        Arena.attach(kept_path(tmp_path), 2 * BLOCK, BLOCK, epoch="e")
    assert remove_stale(tmp_path) == []
    assert stale.exists()


@pytest.mark.parametrize("attack", PLANTED)
def test_what_lies_where_the_index_and_the_map_of_an_arena_belong_is_not_written(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    arena = Arena.create(tmp_path, 2, BLOCK, name="node")
    assert arena.index_path is not None
    attack(arena.index_path)
    index, stored = PoolIndex.open(arena.index_path, IndexHeader.of(arena))
    assert not index.is_open
    assert stored == []
    arena.close(keep=True)
    (tmp_path / "elsewhere").unlink(missing_ok=True)
    attack(arena.path.with_suffix(".used"))
    config = AgentConfig(
        arena_dir=tmp_path, arena_gib=2 * BLOCK / GIB, block_bytes=BLOCK, arena_name="node"
    )
    with pytest.raises(ArenaError, match=PLANTED[attack]):
        open_arena(config)
    if (tmp_path / "elsewhere").exists():
        assert (tmp_path / "elsewhere").read_bytes() == bytes(2 * BLOCK)


def test_an_arena_as_large_as_its_file_system_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AgentConfig(
        arena_dir=tmp_path, arena_gib=16 * BLOCK / GIB, block_bytes=BLOCK, arena_name="node"
    )
    really_allocate, left = os.posix_fallocate, [config.num_blocks * BLOCK]

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        """Room for the arena, and for nothing beside it."""
        left[0] -= nbytes
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really_allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(ArenaError, match=rf"65536 bytes.*{tmp_path}.*GiB\) free.*arena_gib"):
        open_arena(config)


def test_an_agent_says_what_does_not_fit_into_shared_memory() -> None:
    stats = os.statvfs("/dev/shm")
    gib = 2 * stats.f_blocks * stats.f_frsize / GIB
    ended = subprocess.run(
        [*module_argv("deploy.cli", "agent"), "--arena-gib", f"{gib:.3f}"],
        env=module_environment(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "does not fit into /dev/shm" in ended.stderr
    assert f"{gib:.2f} GiB" in ended.stderr


def test_cached_parts_lie_in_a_directory_of_this_user_alone(
    tmp_path: Path, as_another_user: Callable[[], None]
) -> None:
    directory = tmp_path / "ssd"
    directory.mkdir(mode=0o755)
    SsdStore(directory).close()
    assert directory.stat().st_mode & 0o777 == 0o700
    lock = directory / ".lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SsdError, match="symbolic link"):
        SsdStore(directory)
    assert not (tmp_path / "elsewhere").exists()
    lock.unlink()
    as_another_user()
    with pytest.raises(SsdError, match="belongs to user"):
        SsdStore(directory)


def test_what_a_region_writes_is_for_its_user_alone(
    tmp_path: Path, as_another_user: Callable[[], None]
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    root.chmod(0o777)
    before = os.umask(0)
    try:
        lock = RunLock(root)
        directory = open_run_directory(root)
        write_private(directory.gateway_file, b"{}")
    finally:
        os.umask(before)
    for path in (root, directory.logs, directory.sockets, *root.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    lock.release()
    as_another_user()
    with pytest.raises(RunDirectoryError, match="belongs to user"):
        RunLock(root)


def test_a_secret_is_never_written_into_a_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    link(path)
    (tmp_path / "gateway.json.new").symlink_to(tmp_path / "elsewhere")
    write_private(path, b"secret")
    assert not path.is_symlink()
    assert path.read_bytes() == b"secret"
    assert (tmp_path / "elsewhere").read_bytes() == bytes(2 * BLOCK)
    world_readable(tmp_path / "readable")
    with pytest.raises(NotPrivate, match="0644"):
        open_private(tmp_path / "readable", os.O_WRONLY)


async def test_an_agent_refuses_an_engine_of_another_user(
    tmp_path: Path, as_another_user: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    server = EngineServer(tmp_path / "agent.sock", UnusedHandler(), linger_s=0.0)
    server.claim()
    await server.start()
    as_another_user()
    reader, writer = await asyncio.open_unix_connection(server.path)
    assert await reader.read() == b""
    assert "belongs to user" in caplog.text
    writer.close()
    await server.stop()


def test_an_engine_tells_nothing_to_a_socket_of_another_user(
    tmp_path: Path, as_another_user: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        listener.settimeout(30)
        as_another_user()
        engine = AgentConnection(tmp_path / "agent.sock", HELLO)
        engine.start(UnusedEvents())
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(30)
                assert connection.recv(1) == b""
        finally:
            engine.close()
    assert "belongs to user" in caplog.text


class UnusedHandler:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: nobody gets this far")


class UnusedEvents:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: nobody gets this far")
