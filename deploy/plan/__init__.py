"""Capacity planning: how large clusters should be, and what the links between them must carry."""
