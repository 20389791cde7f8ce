"""Errors of the directory.

DirectoryError
+-- FeedError     a node's feed cannot be understood; a snapshot is requested
+-- StoreError    the shared store cannot be used now
"""


class DirectoryError(Exception):
    """The message names what failed and where."""


class FeedError(DirectoryError):
    """A `CacheFeed` that breaks the rules of its message."""


class StoreError(DirectoryError):
    """The store that several processes share did not answer, or not as expected."""
