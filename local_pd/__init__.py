"""The local PD cluster front: decode and prefill instances, their roles, landings, hand-off.

`PdCluster` is the contract; the front runs in the user's process (`EmbeddedPdCluster`) or in its
own (`prfaas pd`, reached through `RemotePdCluster`).
"""

from local_pd.cluster import PdCluster
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from local_pd.errors import (
    FrontUnreachable,
    NoInstance,
    NoRoom,
    PdError,
    PrefillFailed,
    RoleRefused,
    UnknownInstance,
)
from local_pd.messages import DecodeSlot, DirectTarget, LandingReport
from local_pd.remote import RemoteConfig, RemotePdCluster

__all__ = [
    "DecodeSlot",
    "DirectTarget",
    "EmbeddedPdCluster",
    "FrontUnreachable",
    "LandingReport",
    "NoInstance",
    "NoRoom",
    "PdCluster",
    "PdClusterConfig",
    "PdError",
    "PrefillFailed",
    "RemoteConfig",
    "RemotePdCluster",
    "RoleRefused",
    "UnknownInstance",
]
