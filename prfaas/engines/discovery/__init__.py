"""Instances of a cluster that are found in DNS or in Kubernetes instead of being listed."""
