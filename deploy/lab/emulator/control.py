"""Drives a relay from another process: `RelayControl` talks to one, `RelayProcess` owns one."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import msgspec

from deploy.lab.emulator.faults import (
    Blackhole,
    Command,
    Configure,
    Cut,
    Direction,
    Flip,
    Heal,
    LinkReport,
    Quit,
    Reply,
    Report,
    Reset,
    Scope,
    Stall,
)
from deploy.processes import module_argv, module_environment
from kvmanager.config_files.units import parse_duration, parse_rate
from transport import Endpoint


class RelayError(Exception):
    """The relay could not be started, did not answer or refused a command."""


class RelayControl:
    """Sends commands to a running relay through its control socket.

    Each call is a round trip of well under a millisecond, and returns the state after it.
    `RelayError` if the relay is gone.
    """

    def __init__(self, socket_path: Path, timeout_s: float = 5.0) -> None:
        self.socket_path = socket_path
        self._timeout_s = timeout_s

    def send(self, command: Command) -> LinkReport:
        """Send any command of `deploy.lab.emulator.faults`."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(self._timeout_s)
                peer.connect(str(self.socket_path))
                peer.sendall(msgspec.json.encode(command) + b"\n")
                with peer.makefile("rb") as replies:
                    line = replies.readline()
        except OSError as error:
            raise RelayError(f"no relay answers at {self.socket_path}: {error}") from error
        if not line:
            raise RelayError(f"the relay at {self.socket_path} hung up")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.report is None:
            raise RelayError(reply.error)
        return reply.report

    def report(self) -> LinkReport:
        return self.send(Report())

    def heal(self) -> LinkReport:
        """End all faults and forget planned ones."""
        return self.send(Heal())

    def cut(self, *, after_bytes: int = 0, for_s: float = 0.0) -> LinkReport:
        """Close all connections and refuse new ones."""
        return self.send(Cut(after_bytes=after_bytes, for_s=for_s))

    def reset(self, *, after_bytes: int = 0) -> LinkReport:
        """Reset (TCP RST) every open connection once."""
        return self.send(Reset(after_bytes=after_bytes))

    def blackhole(
        self, direction: Scope = "both", *, after_bytes: int = 0, for_s: float = 0.0
    ) -> LinkReport:
        """Accept and swallow everything."""
        return self.send(Blackhole(direction=direction, after_bytes=after_bytes, for_s=for_s))

    def stall(
        self, direction: Scope = "both", *, after_bytes: int = 0, for_s: float = 0.0
    ) -> LinkReport:
        """Freeze without losing anything."""
        return self.send(Stall(direction=direction, after_bytes=after_bytes, for_s=for_s))

    def flip(self, direction: Direction = "forward", *, after_bytes: int = 0) -> LinkReport:
        """Invert the byte that comes after `after_bytes` more."""
        return self.send(Flip(direction=direction, after_bytes=after_bytes))

    def configure(
        self, *, rate: str | None = None, rtt: str | None = None, jitter: str | None = None
    ) -> LinkReport:
        """Change the shape: `configure(rate="200Mbit", rtt="40ms")`. ValueError for bad units."""
        return self.send(
            Configure(
                rate_bytes_per_s=None if rate is None else parse_rate(rate),
                rtt_s=None if rtt is None else parse_duration(rtt),
                jitter_s=None if jitter is None else parse_duration(jitter),
            )
        )

    def quit(self) -> None:
        """Ask the relay to exit."""
        self.send(Quit())


class RelayProcess(RelayControl):
    """A relay in a process of its own.

    `stop` or leaving the context ends it; it also ends with the process that started it.

    >>> with RelayProcess("127.0.0.1:7100", rate="1Gbit", rtt="20ms") as link:
    ...     connect_to(link.host, link.port)
    ...     link.cut(for_s=3)
    """

    def __init__(
        self,
        to: str,
        *,
        listen: str = "127.0.0.1:0",
        rate: str = "unlimited",
        rtt: str = "0",
        jitter: str = "0",
    ) -> None:
        super().__init__(Path())
        self._argv = relay_argv(to=to, listen=listen, rate=rate, rtt=rtt, jitter=jitter)
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.host = ""
        self.port = 0

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RelayError("the relay is not running")
        return self._process.pid

    def start(self, timeout_s: float = 30.0) -> Self:
        """Start, and wait until it listens. `RelayError` with the end of its log if it does not."""
        self._directory = Path(tempfile.mkdtemp(prefix="prfaas-link-"))
        self.socket_path = self._directory / "control.sock"
        argv = [*self._argv, "--control", str(self.socket_path), "--exit-with-parent"]
        log_path = self._directory / "relay.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, env=module_environment(os.environ)
            )
        line = _first_line(self._process, timeout_s)
        if not line:
            last_words = log_path.read_text()[-2000:] or f"it said nothing within {timeout_s:g} s"
            self.stop()
            raise RelayError(f"the relay did not start: {last_words}")
        self.host, self.port = Endpoint.parse(json.loads(line)["listen"])
        return self

    def stop(self) -> None:
        """Stop it and remove its files. May be called twice."""
        if self._process is not None:
            # On SIGTERM it closes its connections. If it hangs, it is killed.
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def relay_argv(*, to: str, listen: str, rate: str, rtt: str, jitter: str) -> list[str]:
    """The command line of a relay process, without its control socket. It needs
    `module_environment`.
    """
    options = {"--listen": listen, "--to": to, "--rate": rate, "--rtt": rtt, "--jitter": jitter}
    words = [word for pair in options.items() for word in pair]
    return module_argv("deploy.lab.emulator.relay", *words)


def _first_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """The first line of its output; empty if it exits or takes too long."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    line = b""
    deadline_s = time.monotonic() + timeout_s
    while not line.endswith(b"\n") and (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([fd], [], [], left_s)[0]:
            break
        data = os.read(fd, 4096)
        # It has exited, and its log says why.
        if not data:
            return b""
        line += data
    return line if line.endswith(b"\n") else b""
