"""Doubles for tests of the transport and of what uses it."""
