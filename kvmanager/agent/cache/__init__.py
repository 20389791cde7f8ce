"""The prefix cache of a node: what engines ask of it, moves between nodes, its feed."""
