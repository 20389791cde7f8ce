"""What this gateway has under way: prefill legs and prompts that one engine computes by itself.

Clusters report twice a second; a route must know of what was sent, and what ended, since. A leg is
known by its transfer's id, which reports use, too, so that nothing is counted twice. Prefills of
one instance run one after the other (vLLM fills its token budget first come, first served): the
last end of one says since when the next has had the instance for itself.

Pure; time is an argument. Does not know profiles, so nothing about how long anything will take.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import chain, takewhile

KEEP_ENDED_S = 30.0
"""Ended legs are remembered for so long: older reports are not used any more."""
KEEP_LAST_END_S = 3600.0
"""How long it is known when an instance ended its last prefill: no prefill runs for longer."""


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """A prompt computed at `place` (a prefill cluster's name, or the hand-off inside of the PD
    cluster) for decoding elsewhere. `lands_at_s` is when its KVCache is expected to be there.
    `model` is the served name, `priority` what the client gave, `instance` the one that decodes,
    on whose node the landing is.
    """

    place: str
    num_tokens: int
    uncached_tokens: int
    begun_s: float
    lands_at_s: float
    kv_bytes: float = 0.0
    model: str = ""
    priority: int = 0
    instance: str = ""


@dataclass(frozen=True, slots=True)
class DirectPrompt:
    """A prompt given to one engine, which has not begun to answer."""

    instance: str
    num_tokens: int
    uncached_tokens: int
    begun_s: float


class Ledger:
    """What one gateway has under way. Single-threaded."""

    def __init__(self) -> None:
        self._legs: dict[str, PrefillLeg] = {}  # under way
        self._reported: set[str] = set()  # those of them that a report has had
        # When others were over, the earliest first, and what they were.
        self._ended: dict[str, tuple[float, PrefillLeg]] = {}
        # When the answers to legs were over, of legs that are in one of the two above.
        self._answered_s: dict[str, float] = {}
        self._direct: dict[int, DirectPrompt] = {}
        self._num_direct = 0
        self._last_end_s: dict[tuple[str, str], float] = {}
        self._changes: deque[tuple[float, str, int]] = deque()  # time, instance, requests

    # ---- requests of instances

    def begun(self, instance: str, now_s: float) -> None:
        """An instance has one more request to decode, or a slot held for it."""
        self._changes.append((now_s, instance, 1))

    def ended(self, instance: str, now_s: float) -> None:
        """One is over; to be said once for each that began."""
        self._changes.append((now_s, instance, -1))
        # No report that still counts is older.
        while now_s - self._changes[0][0] > KEEP_ENDED_S:
            self._changes.popleft()

    def change_since(self, instances: Set[str], since_s: float) -> int:
        """How many requests more these instances have than then: what a report of then misses."""
        total = 0
        for at_s, name, num_requests in reversed(self._changes):
            # Changes are in order of time: all before this one are in the report.
            if at_s < since_s:
                break
            total += num_requests if name in instances else 0
        return total

    # ---- legs

    def leg_begun(self, transfer_id: str, leg: PrefillLeg) -> None:
        """A landing is reserved and the job is on its way."""
        self._legs[transfer_id] = leg

    def leg_over(self, transfer_id: str, now_s: float) -> None:
        """Nothing of it waits or runs any more. Idempotent."""
        if (leg := self._legs.pop(transfer_id, None)) is not None:
            self._ended[transfer_id] = now_s, leg
            self._reported.discard(transfer_id)
        self._forget(now_s)

    def is_over(self, transfer_id: str) -> bool:
        """Whether it was ours and has ended: a report that still has it is older."""
        return transfer_id in self._ended

    def leg_reported(self, transfer_id: str) -> None:
        """A report has this job: a later one without it says that it is over at its place."""
        if transfer_id in self._legs:
            self._reported.add(transfer_id)

    def unreported(self, place: str, since_s: float) -> Iterator[tuple[str, PrefillLeg]]:
        """Legs to a place that no report has had, begun at `since_s` or later, with their ids."""
        for transfer_id, leg in self._legs.items():
            if leg.place == place and leg.begun_s >= since_s and transfer_id not in self._reported:
                yield transfer_id, leg

    def landing(self, model: str) -> list[PrefillLeg]:
        """All that will decode for a model in the PD cluster once they have landed. A leg may hear
        of its end after the answer is over: that one decodes no more.
        """
        return [
            leg
            for transfer_id, leg in self._legs.items()
            if leg.model == model and transfer_id not in self._answered_s
        ]

    def landing_change(self, reported_s: float, looked_s: float) -> dict[str, float]:
        """Bytes that landings take now beyond what a report of `reported_s` says, by the instance
        that decodes: those reserved since, less those whose requests were answered since the nodes
        were looked at. One that is over and not answered counts: its node holds it until an engine
        has loaded it.
        """
        found: defaultdict[str, float] = defaultdict(float)
        latest = takewhile(lambda e: e[1][0] >= reported_s, reversed(self._ended.items()))
        ended = ((transfer_id, leg) for transfer_id, (_, leg) in latest)
        for transfer_id, leg in chain(reversed(self._legs.items()), ended):
            if leg.begun_s >= reported_s and transfer_id not in self._answered_s:
                found[leg.instance] += leg.kv_bytes
        for transfer_id, answered_s in reversed(self._answered_s.items()):
            if answered_s < looked_s:
                break
            leg = self._legs.get(transfer_id) or self._ended[transfer_id][1]
            # A node says what is left after each reservation, too, and not what it gets back.
            if leg.begun_s < reported_s:
                found[leg.instance] -= leg.kv_bytes
        return found

    def answer_over(self, transfer_id: str, now_s: float) -> None:
        """The request that a leg was for is answered or given up: no engine holds its KVCache."""
        if transfer_id in self._legs or transfer_id in self._ended:
            self._answered_s.setdefault(transfer_id, now_s)

    def kv_change_since(self, model: str, since_s: float) -> float:
        """Bytes of KVCache that engines hold now beyond what they held then: what has landed, or is
        computed by an engine because its leg failed, less what is answered. A leg that ended over
        `KEEP_ENDED_S` ago is not known any more, so its bytes count until engines are looked at.
        """
        total = 0.0
        for transfer_id, (ended_s, leg) in self._ended.items():
            if leg.model != model:
                continue
            answered_s = self._answered_s.get(transfer_id, math.inf)
            was_held = ended_s < since_s <= answered_s
            is_held = answered_s == math.inf
            total += leg.kv_bytes * (is_held - was_held)
        return total

    # ---- prompts of one engine

    def direct_begun(self, prompt: DirectPrompt) -> int:
        """A prompt was given to an engine; the key to say that it is over."""
        self._num_direct += 1
        self._direct[self._num_direct] = prompt
        return self._num_direct

    def direct_over(self, key: int) -> DirectPrompt | None:
        """The engine answers, or never will. None for one that was over before."""
        return self._direct.pop(key, None)

    def direct_computed(self, instance: str, begun_s: float) -> None:
        """A prompt given at `begun_s` has its first token, so those given earlier have theirs: an
        answer in one piece does not say so itself.
        """
        for key, prompt in list(self._direct.items()):
            if prompt.instance == instance and prompt.begun_s < begun_s:
                del self._direct[key]

    def direct(self) -> dict[str, list[DirectPrompt]]:
        """Prompts that have no answer yet by their engine, the earliest first."""
        found: dict[str, list[DirectPrompt]] = {}
        for prompt in self._direct.values():
            found.setdefault(prompt.instance, []).append(prompt)
        return found

    # ---- who had an instance for itself since when

    def prefill_ended(self, place: str, instance: str, at_s: float) -> None:
        """A prefill ended on an instance."""
        # Results may be heard in another order than their prefills ended.
        known = self._last_end_s.pop((place, instance), at_s)
        self._last_end_s[place, instance] = max(known, at_s)
        oldest = next(iter(self._last_end_s))
        while at_s - self._last_end_s[oldest] > KEEP_LAST_END_S:
            del self._last_end_s[oldest]
            oldest = next(iter(self._last_end_s))

    def alone_s(self, place: str, instance: str, begun_s: float, now_s: float) -> float:
        """How much of the time since `begun_s` no earlier prefill took, as far as known."""
        last_s = self._last_end_s.get((place, instance), begun_s)
        return max(0.0, now_s - max(begun_s, last_s))

    def __len__(self) -> int:
        return len(self._legs) + len(self._direct)

    def _forget(self, now_s: float) -> None:
        while self._ended:
            transfer_id, (ended_s, _) = next(iter(self._ended.items()))
            if now_s - ended_s <= KEEP_ENDED_S:
                return
            del self._ended[transfer_id]
            self._answered_s.pop(transfer_id, None)
