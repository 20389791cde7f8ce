"""TTFT of a plan under load: the queueing model."""
