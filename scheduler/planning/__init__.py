"""The throughput model, and the search for the best plan."""
