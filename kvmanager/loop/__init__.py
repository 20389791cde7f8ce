"""Watches the event loop of a process: how long it stood still, where, and whose fault it was."""
