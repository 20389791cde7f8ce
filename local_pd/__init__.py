"""The local PD cluster front: decode and prefill instances, their roles, landings, hand-off.

`cluster.PdCluster` is the contract; the front runs in the user's process
(`embedded.EmbeddedPdCluster`) or in its own (`prfaas pd`, reached by `remote.RemotePdCluster`).
"""
