"""The folder in which the processes of a gateway reach each other: a Unix socket for each of them.

Only this user can enter it, so who connects needs to show nothing. It does not know what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

OWN_METRICS: Final = "/own/metrics"
"""Where a process exposes its own metrics, and the parent those of all."""
PROCESSES: Final = "/processes"
"""Where the parent says how the processes are."""
ANSWER_S: Final = 2.0
"""How long an answer is waited for, seconds."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one gateway."""

    path: Path

    @property
    def parent(self) -> Path:
        """The socket of the parent."""
        return self.path / "parent.sock"

    @property
    def secret(self) -> Path:
        """The file with the secret by which all processes name the same things alike."""
        return self.path / "secret"

    def process(self, number: int) -> Path:
        """The socket of a process."""
        return self.path / f"{number}.sock"


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered."""

    status: int
    body: bytes
    content_type: str


async def ask(
    at: Path,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float = ANSWER_S,
) -> Answer:
    """The answer of whoever listens on the socket `at`. Raises OSError, TimeoutError."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.UnixConnector(str(at))
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        try:
            # The path of a request is passed on as it came.
            url = URL(f"http://process{path}", encoded=True)
            async with session.request(method, url, headers=headers, data=body) as response:
                return Answer(response.status, await response.read(), response.content_type)
        except aiohttp.ClientError as error:
            raise OSError(f"{at}: {error or type(error).__name__}") from error


async def listen(at: Path, app: web.Application) -> web.AppRunner:
    """Serve `app` on the socket until `cleanup`. Raises OSError."""
    await asyncio.to_thread(at.unlink, missing_ok=True)  # that of a process that was killed
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(at)).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner
