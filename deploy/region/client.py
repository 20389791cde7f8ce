"""The admin client: finds the gateway that is meant and asks it.

Knows where regions run on this machine, and no endpoint. Light until it asks, so that the commands
that use it show their help at once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from deploy.command_line import CommandFailed, print_json

_TIMEOUT_S = 60.0

T = TypeVar("T")


class CannotAsk(CommandFailed):
    """There is no gateway, or it did not give the answer that was asked for; the message says what
    helps. `status` is the HTTP status if a gateway answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def find_gateway(
    gateway: str = "", run_dir: Path | None = None, environ: Mapping[str, str] = os.environ
) -> str:
    """The gateway's URL: the one given, that of the region in `run_dir`, or that of the only
    region on this machine. Raises `CannotAsk`, `RunDirectoryError`.
    """
    from deploy.region.launch.rundir import default_base, known_runs, read_state

    if gateway:
        return gateway
    roots = [run_dir] if run_dir else known_runs(default_base(environ))
    states = [read_state(root) for root in roots]
    # A run directory outlives a launcher that was killed.
    found = {
        state.region: state.gateway_url for state in states if state and state.launcher_lives()
    }
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        where = f"in {run_dir}" if run_dir else "on this machine"
        raise CannotAsk(f"no region runs {where}; give its gateway with --gateway URL")
    names = ", ".join(f"{name} at {url}" for name, url in found.items())
    raise CannotAsk(f"several regions run; name a gateway with --gateway URL: {names}")


def ask(url: str, path: str, kind: type[T], *, key: str = "", body: bytes | None = None) -> T:
    """The answer to a GET, or with `body` to a POST. Raises `CannotAsk`."""
    import msgspec

    status, answer = asyncio.run(_fetch(url.rstrip("/") + path, key, body))
    if status // 100 != 2:
        raise CannotAsk(f"{url} answered {status}: {_message(answer)}", status)
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise CannotAsk(f"{url} is no gateway of this version: {error}") from error


def show(answer: T, as_json: bool, view: Callable[[Console, T], None]) -> None:
    """The answer as JSON, or as its view prints it."""
    if as_json:
        print_json(answer)
    else:
        view(Console(), answer)


async def _fetch(url: str, key: str, body: bytes | None) -> tuple[int, bytes]:
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    method = "GET" if body is None else "POST"
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.request(method, url, data=body, headers=headers) as response:
                return response.status, await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise CannotAsk(f"{url}: {error or type(error).__name__}") from error


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode("utf-8", "replace")
