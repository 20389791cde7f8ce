"""What several engines of one node hold together. Pure; it does not know events or sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvmanager.agent.engines.blocks import BlockBits


class MergedBlocks:
    """What any of several engines holds. Single-threaded."""

    def __init__(self) -> None:
        self._held: dict[str, dict[bytes, int]] = {}

    def instance_changed(self, instance: str, changes: Iterable[BlockBits]) -> list[BlockBits]:
        """The same changes of one engine, each with what is held by all engines together."""
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
        """The engine is gone: what is left of the blocks that it held, as each is taken."""
        gone = self._held.pop(instance, {})
        return ((key, self._bits(key)) for key in gone)

    def _bits(self, key: bytes) -> int:
        bits = 0
        for held in self._held.values():
            bits |= held.get(key, 0)
        return bits
