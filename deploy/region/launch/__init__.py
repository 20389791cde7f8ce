"""Starts, watches and stops a region on this machine."""
