"""What can go wrong between a cluster front and its engines.

    EngineError
      EngineStartFailed     the process ended or never became healthy; holds its last log lines
      EngineUnreachable     no connection, a lost connection or a timeout
      EngineRefused         the engine answered with an error status; holds status and body
    PrefillFailed           a prefill ended and its KVCache did not reach the landing
    UnknownInstance         a call named an instance that the cluster does not have

This module does not know how a gateway turns these into answers for clients.
"""

from typing import Final, Literal

from prfaas.engines.supervision.log_lines import shortened

_MAX_LINE_CHARS: Final = 200

PrefillCode = Literal[
    "queue_full",  # the cluster's job queue is at its bound
    "queue_timeout",  # waited in the queue for longer than allowed
    "no_instance",  # no healthy instance for this model that is not being drained
    "engine_failed",  # the engine died, was unreachable or answered with a server error
    "rejected",  # the engine refused the request itself (4xx): no other instance will take it
    "agent_failed",  # the sending node's agent is unreachable or broken
    "outbox_no_room",  # the sending node has no memory for the outgoing KVCache
    "transfer_failed",  # the KVCache did not arrive
    "timeout",  # a bound on the whole leg passed
    "invalid",  # the job contradicts itself or repeats one that is running
    "closed",  # the front is shutting down
    "unreachable",  # the remote front does not answer
]
"""Why a prefill failed. These words cross gRPC between a gateway and a remote front."""


class EngineError(Exception):
    """Base of the errors of an engine or of its process."""


class EngineStartFailed(EngineError):
    """The process ended or stayed unhealthy while it was starting.

    `log_tail` holds its last log lines; the message shows them too, long ones shortened.
    """

    def __init__(self, name: str, reason: str, log_tail: list[str], log_path: str) -> None:
        lines = (shortened(line, _MAX_LINE_CHARS) for line in log_tail)
        shown = "\n".join(f"    {line}" for line in lines) or "    (the log is empty)"
        super().__init__(f"{name}: {reason}; last lines of {log_path}:\n{shown}")
        self.name = name
        self.reason = reason
        self.log_tail = log_tail


class EngineUnreachable(EngineError):
    """No answer from the engine's HTTP server, or the connection broke before the answer ended."""


class EngineRefused(EngineError):
    """The engine answered with an error status.

    `status` and `body` are the engine's answer unchanged, so a caller can pass it to its client.
    """

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"HTTP {status}: {body[:500].decode('utf-8', 'replace')}")
        self.status = status
        self.body = body
        self.content_type = content_type


class PrefillFailed(Exception):
    """A prefill ended and its KVCache did not reach the landing. `message` is for a person."""

    def __init__(self, code: PrefillCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: PrefillCode = code
        self.message = message


class UnknownInstance(LookupError):
    """The cluster has no instance of this name."""

    def __init__(self, cluster: str, instance: str) -> None:
        super().__init__(f"cluster {cluster} has no instance {instance}")
