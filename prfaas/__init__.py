"""The prefill cluster front: job queue, instance placement, engine supervision.

`PrefillCluster` is the contract; the front runs in the user's process (`EmbeddedPrefillCluster`)
or in its own (`prfaas prefill`, reached through `RemotePrefillCluster`).
"""

from prfaas.cluster import PrefillCluster
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.errors import PrefillFailed, UnknownInstance
from prfaas.queue_values import QueueConfig
from prfaas.remote import RemoteConfig, RemotePrefillCluster

__all__ = [
    "EmbeddedPrefillCluster",
    "PrefillCluster",
    "PrefillClusterConfig",
    "PrefillFailed",
    "QueueConfig",
    "RemoteConfig",
    "RemotePrefillCluster",
    "UnknownInstance",
]
