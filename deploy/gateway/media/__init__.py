"""Fetches the media of requests from their addresses, and refuses addresses that may not be."""
