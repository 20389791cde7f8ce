"""Typed clients of a node agent's control port."""
