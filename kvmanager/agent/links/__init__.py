"""Watches the links of a node agent, and probes them."""
