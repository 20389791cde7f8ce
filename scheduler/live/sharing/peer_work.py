"""The work that the other gateways of a region have under way, as far as they have said.

Reports of clusters are up to a second old. Between two of them a gateway must also know what the
others have sent to the same instances. Each gateway tells all that it has under way, a few times a
second, and not what has changed. So a message that is lost does no harm, and the work of a gateway
that is gone ends at once. Pure; time is an argument. This file does not know how gateways reach
each other.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Final

import msgspec

from scheduler.live.ledger import Count, DirectPrompt, Ledger, PrefillLeg

LAST_ENDS_S: Final = 30.0
"""How long the end of a prefill is told of, seconds: longer than any prefill that is under way."""
MAX_ITEMS: Final = 2000
"""The most legs, prompts, instances and ends each that a gateway tells, the oldest first."""

Items = msgspec.Meta(max_length=MAX_ITEMS)


class SharedLeg(msgspec.Struct, frozen=True, array_like=True):
    """A prefill leg whose request is not answered. Its times count from the moment of telling.

    `is_over`: it has landed or failed.
    """

    transfer_id: str
    leg: PrefillLeg
    is_over: bool


class SharedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that one engine computes. Its times count from the moment of telling."""

    key: int
    prompt: DirectPrompt


class PrefillEnd(msgspec.Struct, frozen=True, array_like=True):
    """When the last prefill of an instance ended."""

    place: str
    instance: str
    age_s: Annotated[float, msgspec.Meta(ge=0, le=LAST_ENDS_S)]


class Work(msgspec.Struct, frozen=True, array_like=True):
    """All that one gateway has under way. `requests` counts those of each decode instance."""

    legs: Annotated[list[SharedLeg], Items]
    prompts: Annotated[list[SharedPrompt], Items]
    requests: Annotated[dict[str, Count], Items]
    last_ends: Annotated[list[PrefillEnd], Items]


NO_WORK = Work([], [], {}, [])


@dataclass(slots=True)
class _Peer:
    """The last message of another gateway: legs, the keys of its prompts here, its requests."""

    legs: dict[str, bool] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)


class PeerWork:
    """Keeps the work of other gateways in a ledger, beside that of its own. Single-threaded."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._peers: dict[str, _Peer] = {}

    @property
    def gateways(self) -> list[str]:
        """The other gateways that have work under way or were heard of."""
        return sorted(self._peers)

    def heard(
        self, gateway: str, work: Work | None, now_s: float, *, places: Set[str], pds: Set[str]
    ) -> None:
        """A gateway has this under way now; None: it is gone, and all that it had is over.

        What is at other places than `places`, or for other PD clusters than `pds`, is left out: a
        file with more of them reaches one gateway after another.
        """
        peer = self._peers.setdefault(gateway, _Peer())
        said = work or NO_WORK
        legs = [item for item in said.legs if item.leg.place in places and item.leg.pd in pds]
        self._take_legs(peer, legs, now_s)
        self._take_prompts(peer, said, now_s)
        self._take_requests(peer, said, now_s)
        for end in said.last_ends:
            if end.place in places:
                self._ledger.prefill_ended(end.place, end.instance, now_s - end.age_s)
        if work is None:
            del self._peers[gateway]

    def own(self, now_s: float) -> Work:
        """The work of this gateway itself, to tell the others."""
        ledger = self._ledger
        foreign = {transfer_id for peer in self._peers.values() for transfer_id in peer.legs}
        theirs = {key for peer in self._peers.values() for key in peer.prompts.values()}
        requests = dict(ledger.requests)
        for peer in self._peers.values():
            for instance, num in peer.requests.items():
                requests[instance] = requests.get(instance, 0) - num
        legs = (
            SharedLeg(transfer_id, _leg_at(leg, -now_s), is_over)
            for transfer_id, leg, is_over in ledger.unanswered()
            if transfer_id not in foreign
        )
        prompts = (
            SharedPrompt(key, _prompt_at(prompt, -now_s))
            for key, prompt in ledger.prompts()
            if key not in theirs
        )
        ends = (
            PrefillEnd(place, instance, now_s - at_s)
            for (place, instance), at_s in ledger.last_ends()
            if 0 <= now_s - at_s <= LAST_ENDS_S
        )
        return Work(
            list(islice(legs, MAX_ITEMS)),
            list(islice(prompts, MAX_ITEMS)),
            dict(islice(((name, num) for name, num in requests.items() if num > 0), MAX_ITEMS)),
            list(islice(ends, MAX_ITEMS)),
        )

    def _take_legs(self, peer: _Peer, said: list[SharedLeg], now_s: float) -> None:
        legs = {item.transfer_id: item for item in said}
        # One that is not told of any more is answered: nothing of it is under way.
        for transfer_id in peer.legs.keys() - legs.keys():
            self._ledger.leg_over(transfer_id, now_s)
            self._ledger.answer_over(transfer_id, now_s)
        for transfer_id, item in legs.items():
            was_over = peer.legs.get(transfer_id)
            if was_over is None:
                # It has begun, whatever is said.
                leg = _leg_at(item.leg, min(now_s, now_s - item.leg.begun_s))
                self._ledger.leg_begun(transfer_id, leg)
            if item.is_over and not was_over:
                self._ledger.leg_over(transfer_id, now_s)
        peer.legs = {transfer_id: item.is_over for transfer_id, item in legs.items()}

    def _take_prompts(self, peer: _Peer, said: Work, now_s: float) -> None:
        prompts = {item.key: item for item in said.prompts}
        for key in peer.prompts.keys() - prompts.keys():
            self._ledger.direct_over(peer.prompts.pop(key))
        for key, item in prompts.items():
            if key not in peer.prompts:
                prompt = _prompt_at(item.prompt, min(now_s, now_s - item.prompt.begun_s))
                peer.prompts[key] = self._ledger.direct_begun(prompt)

    def _take_requests(self, peer: _Peer, said: Work, now_s: float) -> None:
        for instance in peer.requests.keys() | said.requests.keys():
            change = said.requests.get(instance, 0) - peer.requests.get(instance, 0)
            if change:
                self._ledger.changed(instance, change, now_s)
        peer.requests = dict(said.requests)


def _leg_at(leg: PrefillLeg, shift_s: float) -> PrefillLeg:
    return msgspec.structs.replace(
        leg, begun_s=leg.begun_s + shift_s, lands_at_s=leg.lands_at_s + shift_s
    )


def _prompt_at(prompt: DirectPrompt, shift_s: float) -> DirectPrompt:
    return msgspec.structs.replace(prompt, begun_s=prompt.begun_s + shift_s)
