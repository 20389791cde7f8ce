"""Gives the clients of engines what engines demand: a key, and TLS where their URLs say https.

Engines on loopback are asked over plain HTTP. It does not know engines or requests.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from pathlib import Path

from kvmanager.private_files import read_secret
from transport import TlsFiles
from transport.errors import LocalError
from transport.rotating import Rotating
from transport.tls import client_context


class EngineAccess:
    """How one process asks its engines. Without arguments they demand nothing."""

    def __init__(self, key_file: Path | None = None, tls: TlsFiles | None = None) -> None:
        """`tls`: the certificate to show, and the authority that engines' certificates are of.

        Raises LocalError when a file cannot be used. Reads files.
        """
        self.headers: Mapping[str, str] = {}
        if key_file is not None:
            self.headers = {"Authorization": f"Bearer {_key(key_file)}"}
        self._contexts = None if tls is None else Rotating(tls, _context)

    def tls(self) -> ssl.SSLContext | bool:
        """For the `ssl` of aiohttp's requests: looks at the files again when they have changed."""
        return True if self._contexts is None else self._contexts.current(time.monotonic())


def _key(path: Path) -> str:
    try:
        return read_secret(path)
    except (OSError, ValueError) as error:
        raise LocalError("engine_key", f"cannot use the engines' key: {error}") from error


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = client_context(files)
    # The name that is dialled must be in the engine's certificate, as for gRPC.
    context.check_hostname = True
    return context
