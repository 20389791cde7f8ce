"""Whether a process can serve now, and grpc.health.v1, by which probes ask a gRPC server for it.

Anybody who reaches the port may ask, so the answer names nothing of the region.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

WhyNotReady = Callable[[], Awaitable[str]]
"""Says why the process cannot serve now, in words that anybody may read; "" when it can."""

SERVICE: Final = "grpc.health.v1.Health"
REMEMBERED_S: Final = 0.5
"""How long one answer serves all probes where it takes work to find, seconds."""

# Both are a HealthCheckResponse whose field 1, `status`, is SERVING or NOT_SERVING.
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"


async def always_ready() -> str:
    """The `WhyNotReady` of a process that can serve as long as it runs."""
    return ""


def remembered(
    ask: WhyNotReady, *, for_s: float = REMEMBERED_S, clock: Callable[[], float] = time.monotonic
) -> WhyNotReady:
    """`ask` for processes in which it takes work: its answer serves for `for_s` seconds, so that
    anybody who probes often takes little of the event loop.
    """
    said, until_s = "", -math.inf

    async def why_not_ready() -> str:
        nonlocal said, until_s
        if clock() >= until_s:
            said = await ask()
            until_s = clock() + for_s
        return said

    return why_not_ready


def health_handler(why_not_ready: WhyNotReady) -> Any:
    """The handler of `Check` for a gRPC server. Which service is asked about makes no difference,
    because a process serves all of its services or none.
    """

    async def check(_: Any, __: Any) -> bytes:
        # The request is not read: whoever asks needs no name, and must not fill memory.
        return _NOT_SERVING if await why_not_ready() else _SERVING

    method = grpc.stream_unary_rpc_method_handler(check)
    return grpc.method_handlers_generic_handler(SERVICE, {"Check": method})
