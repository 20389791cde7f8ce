"""A soak's worker process as its parent sees it: started, spoken to, listened to, killed."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from transport import TlsFiles

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
QUIT_S = 15.0
SCALE = 8
OPTIONS: dict[str, Any] = {
    "connect_timeout_s": 5.0 / SCALE,
    "handshake_timeout_s": 5.0 / SCALE,
    "ack_timeout_s": 10.0 / SCALE,
    "idle_timeout_s": 30.0 / SCALE,
    "link_idle_timeout_s": 300.0 / SCALE,
    "drop_grace_s": 0.25 / SCALE,
    "tombstone_s": 120.0 / SCALE,
    "reconnect_first_s": 0.05 / SCALE,
    "reconnect_max_s": 2.0 / SCALE,
    "keepalive_idle_s": 2,
    "keepalive_interval_s": 1,
}
"""The transport's defaults with every timeout SCALE times shorter."""

Event = tuple[str, int, dict[str, Any]]
"""(role, life of that process, what it said)"""


class Worker:
    """A sender or a receiver; `life` counts its processes from 1."""

    def __init__(
        self, role: str, events: queue.Queue[Event], log: Path, tls: TlsFiles | None = None
    ) -> None:
        self.role = role
        self.life = 0
        self.port = 0
        """Where the receiver listens, always the same, or where the sender connects."""
        self.starved_until_s = 0.0
        self._events = events
        self._log = log
        self._options = OPTIONS | {"tls": [str(path) for path in tls.paths] if tls else []}
        self._process: subprocess.Popen[str] | None = None
        self._listener = threading.Thread()

    @property
    def is_alive(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """RuntimeError when it does not say that it runs."""
        assert self._process is None
        self.life += 1
        argv = [sys.executable, "-m", "tests.soak.soak_worker", self.role]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*argv, json.dumps(self._options), str(self.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                # Freed memory goes back to the kernel, so that growth means a leak.
                env={**os.environ, "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"},
            )
        self._process = process
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise RuntimeError(f"the {self.role} does not start; see {self._log}")
        self.port = json.loads(line)["port"] or self.port
        self._listener = threading.Thread(target=self._listen, args=(process, self.life))
        self._listener.start()

    def tell(self, op: str, **fields: Any) -> None:
        """Ignored while there is no process."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
                self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._reap(process)

    def quit(self) -> bool:
        """Ask it to close everything and end; False when it failed or had to be killed."""
        process = self._process
        if process is None:
            return True
        self.tell("quit")
        self._process = None
        watchdog = threading.Timer(QUIT_S, process.kill)
        watchdog.start()
        self._reap(process)
        watchdog.cancel()
        return process.returncode == 0

    def _reap(self, process: subprocess.Popen[str]) -> None:
        """Wait for its end; all it said is among the events then."""
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
        self._listener.join()

    def _listen(self, process: subprocess.Popen[str], life: int) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with suppress(json.JSONDecodeError):  # the last line of a killed process
                    self._events.put((self.role, life, json.loads(line)))
        self._events.put((self.role, life, {"event": "gone"}))
