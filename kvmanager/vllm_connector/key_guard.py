"""Asks every client of an engine for a key: ASGI middleware for vLLM's `--middleware`.

vLLM's own `--api-key` guards /v1, /v2, /inference and /cohere only. Beside them a server has
/invocations, which completes as /v1 does, /tokenize, /metrics, and whatever the next release adds.
Here every path demands the key, /health too: those who probe have it. The key is in a file, so that
neither a command line nor an environment holds it. Does not know vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvmanager.bearer import key_digest, shows_key
from kvmanager.private_files import read_secret

KEY_FILE_VARIABLE: Final = "PRFAAS_ENGINE_KEY_FILE"
"""Environment variable of an engine with the path of the file that holds its key."""

Scope: TypeAlias = Mapping[str, Any]
Send: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[Any]]

_REFUSAL: Final = b'{"error":"This engine answers its own region only."}'
_POLICY_VIOLATION: Final = 1008  # RFC 6455, 7.4.1


class KeyGuard:
    """Passes a request on if it has the header "Authorization: Bearer KEY", else answers 401."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Raises KeyError, OSError or ValueError where there is no usable key: an engine that was
        to have one must not serve without.
        """
        self._app = app
        self._digest = key_digest(read_secret(Path(os.environ[KEY_FILE_VARIABLE])).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_known(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _is_known(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        for name, value in headers:
            if name.lower() == b"authorization":
                return shows_key(value, self._digest)
        return False
