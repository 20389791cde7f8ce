"""The slots held on each instance, so that no drain ends between a reservation and its decode
request.

A slot lives from its reservation to its release, or until its lease ends because the gateway that
held it died. Until its landing has ended, its request is awaited; then the request is on its way to
the engine. Pure; time is an argument. It does not know landings or engines.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_PURGE_EVERY_S: Final = 1.0


@dataclass(slots=True)
class _Slot:
    instance: str
    until_s: float
    is_awaited: bool = True


class HeldSlots:
    """Slots by transfer id. Slots whose lease is over are forgotten."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._num_awaited: Counter[str] = Counter()
        self._num_asked: Counter[str] = Counter()
        self._purged_s = 0.0

    def __len__(self) -> int:
        return len(self._slots)

    @contextmanager
    def asked(self, instance: str) -> Iterator[None]:
        """Count a request for the instance while its landing is asked for: without it, requests of
        one moment would all be placed on the instance that was least loaded before them.
        """
        self._num_asked[instance] += 1
        try:
            yield
        finally:
            self._num_asked[instance] -= 1

    def hold(self, transfer_id: str, instance: str, lease_s: float, now_s: float) -> None:
        """Note a new slot."""
        self._purge_now_and_then(now_s)
        self.drop(transfer_id)
        self._slots[transfer_id] = _Slot(instance, now_s + lease_s)
        self._num_awaited[instance] += 1

    def renew(self, transfer_id: str, lease_s: float, now_s: float) -> None:
        """Note that a slot's lease was renewed."""
        if slot := self._slots.get(transfer_id):
            slot.until_s = now_s + lease_s

    def instance(self, transfer_id: str) -> str | None:
        """The instance of this slot; None: there is no such slot."""
        slot = self._slots.get(transfer_id)
        return None if slot is None else slot.instance

    def landing_ended(self, transfer_id: str) -> bool:
        """The slot's landing has ended, so its request is on its way. Returns whether the request
        was awaited until now.
        """
        slot = self._slots.get(transfer_id)
        return slot is not None and self._not_awaited(slot)

    def drop(self, transfer_id: str) -> None:
        """Note that a slot was given back. Idempotent."""
        if slot := self._slots.pop(transfer_id, None):
            self._not_awaited(slot)

    def forget(self, instance: str) -> None:
        """Note that an instance left: its slots are gone with it."""
        for transfer_id in [name for name, s in self._slots.items() if s.instance == instance]:
            self.drop(transfer_id)
        del self._num_awaited[instance]

    def num_held(self, instance: str, now_s: float) -> int:
        """Slots of one instance."""
        self._purge(now_s)
        return sum(slot.instance == instance for slot in self._slots.values())

    def num_awaited(self, instance: str, now_s: float) -> int:
        """Requests that will come to an instance once their landings have ended, those included
        whose landings are asked for.
        """
        # Called for all instances at every placement, so a slot whose lease is over may count for
        # up to a second more.
        self._purge_now_and_then(now_s)
        return self._num_awaited[instance] + self._num_asked[instance]

    def _not_awaited(self, slot: _Slot) -> bool:
        was_awaited, slot.is_awaited = slot.is_awaited, False
        self._num_awaited[slot.instance] -= was_awaited
        return was_awaited

    def _purge_now_and_then(self, now_s: float) -> None:
        if not 0 <= now_s - self._purged_s < _PURGE_EVERY_S:
            self._purge(now_s)

    def _purge(self, now_s: float) -> None:
        self._purged_s = now_s
        for name in [name for name, slot in self._slots.items() if slot.until_s <= now_s]:
            self.drop(name)
