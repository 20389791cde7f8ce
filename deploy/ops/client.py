"""Asks a gateway what its region has cached. Knows its endpoints; prints nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from deploy.region.launch.rundir import default_base, known_runs, read_state

_TIMEOUT_S = 60.0

T = TypeVar("T")


class CannotAsk(Exception):
    """No gateway, or not the answer that was asked for; the message says what helps. `status` is
    the HTTP status where a gateway answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WrongPrompt(Exception):
    """The file does not hold a prompt; the message says what it should hold."""


def find_gateway(environ: Mapping[str, str]) -> str:
    """URL of the only region's gateway on this machine. Raises `CannotAsk`."""
    states = [read_state(root) for root in known_runs(default_base(dict(environ)))]
    found = {
        state.region: state.gateway_url for state in states if state and state.launcher_lives()
    }
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise CannotAsk("no region runs on this machine; give its gateway with --gateway URL")
    names = ", ".join(f"{name} at {url}" for name, url in found.items())
    raise CannotAsk(f"several regions run; name a gateway with --gateway URL: {names}")


def ask(url: str, path: str, kind: type[T], *, key: str = "", body: bytes | None = None) -> T:
    """The answer to a GET, or with `body` to a POST. Raises `CannotAsk`."""
    status, answer = asyncio.run(_fetch(url.rstrip("/") + path, key, body))
    if status // 100 != 2:
        raise CannotAsk(f"{url} answered {status}: {_message(answer)}", status)
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise CannotAsk(f"{url} is no gateway of this version: {error}") from error


def request_body(path: Path, *, model: str, is_chat: bool) -> bytes:
    """The request of a prompt file: JSON as it is, text as a prompt or as one user's message.

    Raises `WrongPrompt`, `OSError`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WrongPrompt(f"{path} is no text: {error}") from error
    request = _request_in(text)
    if request is None and not text:
        raise WrongPrompt(f"{path} is empty; write a prompt or a request body into it")
    if request is None:
        message = [{"role": "user", "content": text}]
        request = {"messages": message} if is_chat else {"prompt": text}
    elif not request.keys() & {"prompt", "messages"}:
        raise WrongPrompt(f"{path} is a JSON object without prompt and messages")
    if model:
        request["model"] = model
    return json.dumps(request).encode()


def _request_in(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, if it is one; prompts may hold any other JSON."""
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


async def _fetch(url: str, key: str, body: bytes | None) -> tuple[int, bytes]:
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
