"""The newer name of the same functions."""
