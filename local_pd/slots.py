"""Which slots are held where: a drain must not end between a reservation and its decode request.

A slot lives from its reservation to its release, or until its lease runs out unrenewed because the
gateway that held it died. Pure; time is an argument. It does not know landings or engines.
"""

from dataclasses import dataclass
from typing import Final

_FIRST_PURGE: Final = 256


@dataclass(slots=True)
class _Slot:
    instance: str
    until_s: float


class HeldSlots:
    """Slots by transfer id; those whose lease is over are forgotten in time."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._purge_at = _FIRST_PURGE

    def __len__(self) -> int:
        return len(self._slots)

    def hold(self, transfer_id: str, instance: str, lease_s: float, now_s: float) -> None:
        """A slot was given out."""
        if len(self._slots) >= self._purge_at:
            self._purge(now_s)
            self._purge_at = max(_FIRST_PURGE, 2 * len(self._slots))
        self._slots[transfer_id] = _Slot(instance, now_s + lease_s)

    def renew(self, transfer_id: str, lease_s: float, now_s: float) -> None:
        """Its lease was prolonged."""
        if slot := self._slots.get(transfer_id):
            slot.until_s = now_s + lease_s

    def drop(self, transfer_id: str) -> None:
        """It was given back. Idempotent."""
        self._slots.pop(transfer_id, None)

    def num_held(self, instance: str, now_s: float) -> int:
        """Slots of one instance."""
        self._purge(now_s)
        return sum(slot.instance == instance for slot in self._slots.values())

    def _purge(self, now_s: float) -> None:
        self._slots = {name: slot for name, slot in self._slots.items() if slot.until_s > now_s}
