"""A gateway as a process of its own, other children of a bench, and what is asked of them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def completion_request(
    port: int, prompt: str | Sequence[int], *, stream: bool = False, key: str = ""
) -> bytes:
    """A whole HTTP request for a completion; `prompt` is text or token ids."""
    body = {"model": "echo", "prompt": prompt, "max_tokens": 32, "stream": stream}
    raw = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
        b"%bContent-Length: %d\r\n\r\n" % (port, authorization, len(raw)) + raw
    )


@contextmanager
def child(
    argv: list[str], is_up: Callable[[], bool], env: dict[str, str] | None = None
) -> Iterator[int]:
    """A child process that is up; killed at the end. Raises RuntimeError with its output."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=ROOT)
        try:
            deadline_s = time.monotonic() + 30
            while not is_up():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    raise RuntimeError(log.read()[-2000:].decode("utf-8", "replace"))
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(port: int, request: bytes) -> Callable[[], bool]:
    """Whether `request` is answered with 200 at `port` of loopback."""

    def ask() -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1) as connection,
        ):
            connection.sendall(request)
            return connection.recv(4096).startswith(b"HTTP/1.1 200")
        return False

    return ask


def listens(port: int) -> bool:
    """Whether somebody listens at `port` of loopback."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def gateway_process(config: Mapping[str, Any], folder: Path, request: bytes) -> Iterator[int]:
    """`prfaas gateway` with this configuration, once it answers `request`: its process id."""
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(config))
    code = "import typer; from deploy.gateway.cli import gateway_command as c; typer.run(c)"
    argv = [sys.executable, "-c", code, "--config", str(file), "--log-level", "warning"]
    with child(argv, answers(config["gateway"]["port"], request)) as pid:
        yield pid
