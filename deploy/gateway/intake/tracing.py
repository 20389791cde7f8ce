"""Identity of a request: its id and its W3C trace context (https://www.w3.org/TR/trace-context/).

The gateway takes part in traces without recording spans: a valid context is handed on as it came, a
missing or broken one is replaced by a new one. Does not know what carries them.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def usable_traceparent(value: str | None) -> str | None:
    """`value` if it is a valid traceparent header, else None."""
    match = _TRACEPARENT.fullmatch(value) if value else None
    if match is None:
        return None
    version, trace_id, parent_id, rest = match.groups()
    is_valid = version != "ff" and (version != "00" or rest is None)
    return value if is_valid and int(trace_id, 16) and int(parent_id, 16) else None


def new_traceparent() -> str:
    """A fresh sampled trace context."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def usable_request_id(value: str | None) -> str | None:
    """`value` if it may travel in headers, logs and engine ids unchanged, else None."""
    return value if value and _REQUEST_ID.fullmatch(value) else None


def new_request_id() -> str:
    """A fresh random id."""
    return secrets.token_hex(16)
