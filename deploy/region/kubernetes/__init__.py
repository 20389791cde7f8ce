"""A region as Kubernetes objects and as a Helm chart."""
