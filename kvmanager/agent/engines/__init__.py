"""Engines of one host and their agent: the socket between them, what they cache."""
