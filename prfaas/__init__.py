"""The prefill cluster front: job queue, instance placement, engine supervision.

`cluster.PrefillCluster` is the contract; the front runs in the user's process
(`embedded.EmbeddedPrefillCluster`) or in its own (`prfaas prefill`, reached by
`remote.RemotePrefillCluster`).
"""
