"""Prometheus series that the gateway counts itself: histograms, and labels of bounded number."""
