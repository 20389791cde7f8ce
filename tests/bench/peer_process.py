"""One end of a peer seen from the bench: a worker process and the conversation with it.

Commands and answers are JSON lines (see `peer_worker`). Knows no peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

START_TIMEOUT_S = 60.0


class PeerFailure(Exception):
    """An end died, hung or reported an error; its session is over."""


class EndProcess:
    """Started with the object; `name` begins its failures. The caller must `kill` it."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self._read = b""
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **env},
            start_new_session=True,
        )

    def ask(self, command: str, timeout_s: float = START_TIMEOUT_S, **arguments: Any) -> Any:
        """The command's result; PeerFailure."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure(f"{command}: {error}") from error
        answer = json.loads(self._line(command, timeout_s))
        if "error" in answer:
            raise self._failure(f"{command}: {answer['error']}")
        return answer["result"]

    def _line(self, command: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([pipe], [], [], left_s)[0]:
                raise self._failure(f"{command}: no answer in {timeout_s:.0f} s")
            more = os.read(pipe, 65536)
            if not more:
                raise self._failure(f"{command}: ended with {self._process.wait()}")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _failure(self, reason: str) -> PeerFailure:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = f" ({lines[-1][:200]})" if lines else ""
        return PeerFailure(f"{self.name}: {reason}{said}")

    def kill(self) -> None:
        """End it with everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # an unwritten command
                pipe.close()
        self._log.close()
