"""Measures a path between two node agents and explains what limits it."""
