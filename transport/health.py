"""Whether a process can serve now, and grpc.health.v1, by which probes ask a gRPC server for it.

Anybody who reaches the port may ask, so the answer names nothing of the region.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

WhyNotReady = Callable[[], Awaitable[str]]
"""Says why the process cannot serve now, in words that anybody may read; "" when it can."""

SERVICE: Final = "grpc.health.v1.Health"

# Both are a HealthCheckResponse whose field 1, `status`, is SERVING or NOT_SERVING.
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"


async def always_ready() -> str:
    """The `WhyNotReady` of a process that can serve as long as it runs."""
    return ""


def health_handler(why_not_ready: WhyNotReady) -> Any:
    """The handler of `Check` for a gRPC server. Which service is asked about makes no difference,
    because a process serves all of its services or none.
    """

    async def check(_: Any, __: Any) -> bytes:
        # The request is not read: whoever asks needs no name, and must not fill memory.
        return _NOT_SERVING if await why_not_ready() else _SERVING

    method = grpc.stream_unary_rpc_method_handler(check)
    return grpc.method_handlers_generic_handler(SERVICE, {"Check": method})
