"""The errors of a local PD cluster front.

    PdError
      NoLandingRoom      no node has memory for the landing: serve the request without a transfer
      NoInstance         no healthy instance that may serve this
      FrontUnreachable   the remote front, or the node agents, do not answer
      RoleRefused        the order to change a role is too old, its gateway does not lead any more,
                         or the role never changes

Both fronts raise `PrefillFailed` and `UnknownInstance` of `prfaas.engines.errors` as well.
"""


class PdError(Exception):
    """Base. `message` is meant for a person."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NoLandingRoom(PdError):
    """Every node that may take the landing is full."""


class NoInstance(PdError):
    """No healthy instance of the right role and model that is not being drained."""


class FrontUnreachable(PdError):
    """The remote front, or all node agents that were asked, did not answer."""


class RoleRefused(PdError):
    """The instance keeps its role: a later order gave it, another gateway leads, or it has the
    role `both`.
    """
