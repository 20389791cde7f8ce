"""What a prefill cluster front reports to its callers.

    PrefillFailed      a job ended without KVCache at its landing; `.code`, `.message`
    UnknownInstance    drain or resume of an instance the cluster does not have

`PrefillFailed` belongs to the engines package because both fronts raise it.
"""

from prfaas.engines.errors import PrefillFailed

__all__ = ["PrefillFailed", "UnknownInstance"]


class UnknownInstance(LookupError):
    """The cluster has no instance of this name."""

    def __init__(self, cluster: str, instance: str) -> None:
        super().__init__(f"cluster {cluster} has no instance {instance}")
