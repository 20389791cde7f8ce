"""Merges the blocks that several engines of one node hold. Pure; knows no events or sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvmanager.agent.engines.blocks import BlockBits


class MergedBlocks:
    """The blocks that any of several engines holds. Single-threaded."""

    def __init__(self) -> None:
        self._held: dict[str, dict[bytes, int]] = {}

    def instance_changed(self, instance: str, changes: Iterable[BlockBits]) -> list[BlockBits]:
        """The changed keys of one engine, each with the bits that all engines together hold."""
        held = self._held.setdefault(instance, {})
        merged = []
        for key, bits in changes:
            if bits:
                held[key] = bits
            else:
                held.pop(key, None)
            merged.append((key, self._bits(key)))
        return merged

    def instance_left(self, instance: str) -> Iterator[BlockBits]:
        """The engine is gone. Yields the blocks that it held with the bits that other engines hold
        at the time of each step.
        """
        gone = self._held.pop(instance, {})
        return ((key, self._bits(key)) for key in gone)

    def _bits(self, key: bytes) -> int:
        bits = 0
        for held in self._held.values():
            bits |= held.get(key, 0)
        return bits
