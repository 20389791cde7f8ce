"""Checks the values of control plane requests: ids, tokens, endpoints, reasons.

They arrive as text and numbers that anybody may have sent. Every check raises BadRequest.
"""

from __future__ import annotations

from typing import Final

from kvmanager.transfers.records import BadRequest
from transport import Endpoint, Priority

ID_BYTES: Final = 16
KEY_BYTES: Final = 32
"""The size of tokens and of layout fingerprints."""
MAX_REASON_CHARS: Final = 1000

PRIORITIES: Final = {"request": Priority.REQUEST, "replication": Priority.REPLICATION}
"""The priorities of moves, by the words of their requests."""


def hex_bytes(text: str, size: int | None, field: str) -> bytes:
    """The bytes behind hex digits, `size` of them unless that is None."""
    try:
        value = bytes.fromhex(text)
    except ValueError as error:
        raise BadRequest(f"{field} is not hex") from error
    if size is not None and len(value) != size:
        raise BadRequest(f"{field} has {len(value)} bytes, not {size}")
    return value


def transfer_id_of(text: str) -> bytes:
    """The transfer id of a request."""
    return hex_bytes(text, ID_BYTES, "transfer_id")


def endpoint_of(host: str, port: int) -> Endpoint:
    """The address to which a request wants something sent."""
    if not host or not 0 < port <= 65535:
        raise BadRequest(f"{host!r}:{port} is no endpoint")
    return Endpoint(host, port)
