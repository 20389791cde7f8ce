"""Bytes in and out of an arena's runs of pages, as engines copy them."""

from __future__ import annotations

from kvmanager.arena import Arena


def put_bytes(arena: Arena, runs: list[tuple[int, int]], data: bytes, offset: int = 0) -> None:
    """Put `data` at a logical offset of `runs`."""
    left = memoryview(data)  # else each run would copy all that is left
    for view in arena.view(runs, offset + len(data)).views(offset, len(data)):
        view[:] = left[: len(view)]
        left = left[len(view) :]


def get_bytes(arena: Arena, runs: list[tuple[int, int]], nbytes: int) -> bytes:
    """The first `nbytes` of `runs`."""
    return b"".join(arena.view(runs, nbytes).views(0, nbytes))
