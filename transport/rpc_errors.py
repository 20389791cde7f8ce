"""How a call between our processes can fail, and how a failure travels: as a gRPC status and a
trailer that names it.
"""

from typing import Any, Final, Literal

import grpc

ErrorCode = Literal[
    "NO_ROOM", "NOT_FOUND", "INVALID", "UNAVAILABLE", "REFUSED", "INTERNAL", "TIMEOUT"
]

CODE_TRAILER: Final = "prfaas-code"
OK: Final = "OK"

STATUS_OF: Final[dict[str, Any]] = {
    "NO_ROOM": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "INVALID": grpc.StatusCode.INVALID_ARGUMENT,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "REFUSED": grpc.StatusCode.FAILED_PRECONDITION,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "TIMEOUT": grpc.StatusCode.DEADLINE_EXCEEDED,
}

# The meaning of a status that gRPC itself set, because none of our handlers answered.
# RESOURCE_EXHAUSTED then means a message over the size limit.
CODE_OF: Final[dict[Any, ErrorCode]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "INVALID",
    grpc.StatusCode.UNIMPLEMENTED: "INVALID",
    grpc.StatusCode.UNAVAILABLE: "UNAVAILABLE",
    grpc.StatusCode.CANCELLED: "UNAVAILABLE",
    grpc.StatusCode.PERMISSION_DENIED: "REFUSED",
    grpc.StatusCode.DEADLINE_EXCEEDED: "TIMEOUT",
}


class RpcError(Exception):
    """A call that failed: `code` is one of `ErrorCode`, `message` is meant for a person."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: ErrorCode = code
        self.message = message
