"""The admin client: finds the gateway to ask, and asks it.

It knows where regions run on this machine, and no endpoint. It imports little until it asks, so
that the commands that use it show their help at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from deploy.command_line import CommandFailed, ExitCode, print_json

if TYPE_CHECKING:
    from deploy.region.launch.rundir import RegionState

_TIMEOUT_S = 60.0
_HINT = "give its gateway with --gateway URL"
_OTHER_KEY = "give a key that may do this with --api-key or PRFAAS_API_KEY"

T = TypeVar("T")


class CannotAsk(CommandFailed):
    """The gateway did not give the wanted answer; the message says why.

    `status` is the HTTP status, None if no gateway answered. It decides the exit status.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        if status is None:
            self.exit_status = ExitCode.UNREACHABLE
        elif status in (401, 403):
            self.exit_status = ExitCode.REFUSED


def find_gateway(gateway: str = "", run_dir: Path | None = None) -> str:
    """The gateway's URL: the given one, that of the region in `run_dir`, or that of the only region
    on this machine. Raises `WhichRun`, `RunDirectoryError`.
    """
    from deploy.region.launch.rundir import find_run

    if gateway:
        return gateway
    root, state = find_run(run_dir, hint=_HINT)
    return _with_gateway(root, state).gateway_url


def find_pages(gateway: str = "", run_dir: Path | None = None, key: str = "") -> tuple[str, str]:
    """Where the gateway's pages for operators are, and the key to show there: the one given, or
    that of the run. Raises `WhichRun`, `RunDirectoryError`.
    """
    from deploy.region.launch.rundir import find_run, operator_key

    if gateway:
        return gateway, key
    root, state = find_run(run_dir, hint=_HINT)
    state = _with_gateway(root, state)
    return state.admin_url or state.gateway_url, key or operator_key(root)


def _with_gateway(root: Path, state: RegionState) -> RegionState:
    from deploy.region.launch.rundir import WhichRun

    if not state.gateway_url:
        raise WhichRun(f"{state.title} in {root} is a part without the gateway; {_HINT}", 1)
    return state


def ask(
    url: str,
    path: str,
    kind: type[T],
    *,
    key: str = "",
    body: bytes | None = None,
    method: str = "",
) -> T:
    """Like `asked`, for callers without an event loop."""
    return asyncio.run(asked(url, path, kind, key=key, body=body, method=method))


async def asked(
    url: str,
    path: str,
    kind: type[T],
    *,
    key: str = "",
    body: bytes | None = None,
    method: str = "",
) -> T:
    """The answer to a GET, or to a POST if there is a `body`, unless `method` is another. Raises
    `CannotAsk`.
    """
    import msgspec

    method = method or ("GET" if body is None else "POST")
    try:
        status, answer = await _fetch(method, url.rstrip("/") + path, key, body)
    except (OSError, TimeoutError, ValueError) as error:
        why = str(error) or type(error).__name__
        what = "start the gateway, or name another address with --gateway URL"
        raise CannotAsk(f"{url} does not answer ({why}); {what}") from error
    if status // 100 != 2:
        said = f"{url} answered {status}: {_message(answer)}"
        raise CannotAsk(
            f"{said.rstrip('.')}; {_OTHER_KEY}" if status in (401, 403) else said, status
        )
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise CannotAsk(f"{url} is no gateway of this version: {error}", status) from error


def show(answer: T, as_json: bool, view: Callable[[Console, T], None]) -> None:
    """Print the answer as JSON, or with `view`."""
    if as_json:
        print_json(answer)
    else:
        view(Console(), answer)


async def _fetch(method: str, url: str, key: str, body: bytes | None) -> tuple[int, bytes]:
    """Status and body of the answer. Raises OSError, TimeoutError, and ValueError for no URL."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.request(method, url, data=body, headers=headers) as response:
                return response.status, await response.read()
    except aiohttp.ClientError as error:
        raise OSError(str(error) or type(error).__name__) from error


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode("utf-8", "replace")
