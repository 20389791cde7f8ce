"""What is under way as far as is known: prefill legs, and prompts that one engine computes.

Clusters report twice a second. A route must also know what was sent, and what ended, since the last
report. A leg has the id of its transfer, which reports use too, so that nothing counts twice.
Prefills of one instance run one after the other (vLLM fills its token budget first come, first
served). So the last end of a prefill says since when the next one has had the instance for itself.

Pure; time is an argument. It does not know profiles, so not how long anything will take.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Set
from itertools import chain, takewhile

import msgspec

KEEP_ENDED_S = 30.0
"""How long ended legs are remembered, seconds. No report older than this is used."""
KEEP_LAST_END_S = 3600.0
"""How long the end of an instance's last prefill is remembered, seconds. No prefill runs longer."""


class PrefillLeg(msgspec.Struct, frozen=True):
    """A prompt computed at `place` for decoding elsewhere.

    `place` is the name of a prefill cluster, or the hand-off inside a PD cluster. `lands_at_s` is
    when its KVCache is expected at the decode side. `model` is the served name and `priority` the
    client's. `instance` of the cluster `pd` will decode it; the landing is on its node.
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
    pd: str = ""


class DirectPrompt(msgspec.Struct, frozen=True):
    """A prompt that was given to one engine, which has not begun to answer."""

    instance: str
    num_tokens: int
    uncached_tokens: int
    begun_s: float


class Ledger:
    """What one gateway has under way. Single-threaded."""

    def __init__(self) -> None:
        self._legs: dict[str, PrefillLeg] = {}  # under way
        self._reported: set[str] = set()  # those of them that a report has had
        # When the other legs were over, the earliest first, and what they were.
        self._ended: dict[str, tuple[float, PrefillLeg]] = {}
        # When the answers were over, for legs that are in `_legs` or `_ended`.
        self._answered_s: dict[str, float] = {}
        self._direct: dict[int, DirectPrompt] = {}
        self._num_direct = 0
        self._last_end_s: dict[tuple[str, str], float] = {}
        self._changes: deque[tuple[float, str, int]] = deque()  # time, instance, requests
        self.requests: dict[str, int] = {}
        """The requests of each decode instance that are not over."""

    # ---- requests of instances

    def begun(self, instance: str, now_s: float) -> None:
        """An instance has one more request to decode, or a slot held for one."""
        self._changes.append((now_s, instance, 1))
        self.requests[instance] = self.requests.get(instance, 0) + 1

    def ended(self, instance: str, now_s: float) -> None:
        """A request of an instance is over. To be called once for each `begun`."""
        self._changes.append((now_s, instance, -1))
        self.requests[instance] = self.requests.get(instance, 0) - 1
        if not self.requests[instance]:
            del self.requests[instance]
        # No report that is still used is older.
        while now_s - self._changes[0][0] > KEEP_ENDED_S:
            self._changes.popleft()

    def change_since(self, instances: Set[str], since_s: float) -> int:
        """How many more requests these instances have now than at `since_s`.

        It is what a report of that time misses.
        """
        total = 0
        for at_s, name, num_requests in reversed(self._changes):
            # Changes are in order of time: all before this one are in the report.
            if at_s < since_s:
                break
            total += num_requests if name in instances else 0
        return total

    # ---- legs

    def leg_begun(self, transfer_id: str, leg: PrefillLeg) -> None:
        """A landing is reserved, and the job is on its way."""
        self._legs[transfer_id] = leg

    def leg_over(self, transfer_id: str, now_s: float) -> None:
        """The leg neither waits nor runs any more. Calling it again changes nothing."""
        if (leg := self._legs.pop(transfer_id, None)) is not None:
            self._ended[transfer_id] = now_s, leg
            self._reported.discard(transfer_id)
        self._forget(now_s)

    def is_over(self, transfer_id: str) -> bool:
        """Whether the leg was ours and has ended. A report that still has it is older."""
        return transfer_id in self._ended

    def leg_reported(self, transfer_id: str) -> None:
        """A report has this job. A later report without it means that the job is over at its
        place.
        """
        if transfer_id in self._legs:
            self._reported.add(transfer_id)

    def unreported(self, place: str, since_s: float) -> Iterator[tuple[str, PrefillLeg]]:
        """Legs to a place that no report has had, with their ids, begun at `since_s` or later."""
        for transfer_id, leg in self._legs.items():
            if leg.place == place and leg.begun_s >= since_s and transfer_id not in self._reported:
                yield transfer_id, leg

    def unanswered(self) -> Iterator[tuple[str, PrefillLeg, bool]]:
        """All legs whose requests are not answered: id, leg, and whether the leg is over."""
        for transfer_id, leg in self._legs.items():
            if transfer_id not in self._answered_s:
                yield transfer_id, leg, False
        for transfer_id, (_, leg) in self._ended.items():
            if transfer_id not in self._answered_s:
                yield transfer_id, leg, True

    def landing(self, model: str, pd: str = "") -> list[PrefillLeg]:
        """All legs whose requests will decode for a model in a PD cluster once they have landed.

        The end of a leg may be heard after the end of its answer. Such a leg decodes no more.
        """
        return [
            leg
            for transfer_id, leg in self._legs.items()
            if leg.pd == pd and leg.model == model and transfer_id not in self._answered_s
        ]

    def landing_change(self, reported_s: float, looked_s: float) -> dict[str, float]:
        """How many more bytes landings take now than a report of `reported_s` says.

        They are given by decoding instance: landings reserved since, less landings whose requests
        were answered since the nodes were read at `looked_s`. A landing that is over but not
        answered counts, because its node holds it until an engine has loaded it.
        """
        found: defaultdict[str, float] = defaultdict(float)
        # Both dictionaries are in order of time, so the walk from their ends stops early.
        latest = takewhile(lambda e: e[1][0] >= reported_s, reversed(self._ended.items()))
        ended = ((transfer_id, leg) for transfer_id, (_, leg) in latest)
        for transfer_id, leg in chain(reversed(self._legs.items()), ended):
            if leg.begun_s >= reported_s and transfer_id not in self._answered_s:
                found[leg.instance] += leg.kv_bytes
        for transfer_id, answered_s in reversed(self._answered_s.items()):
            if answered_s < looked_s:
                break
            leg = self._legs.get(transfer_id) or self._ended[transfer_id][1]
            # A node says what is left after each reservation too, but not what is given back later.
            if leg.begun_s < reported_s:
                found[leg.instance] -= leg.kv_bytes
        return found

    def answer_over(self, transfer_id: str, now_s: float) -> None:
        """The request of a leg is answered or given up, so no engine holds its KVCache."""
        if transfer_id in self._legs or transfer_id in self._ended:
            self._answered_s.setdefault(transfer_id, now_s)

    def kv_change_since(self, model: str, since_s: float, pd: str = "") -> float:
        """How many more bytes of KVCache engines of a PD cluster hold now than at `since_s`.

        It counts what has landed, or what an engine computes because a leg failed, less what is
        answered. A leg that ended more than `KEEP_ENDED_S` ago is forgotten, so its bytes count
        until the engines' metrics are read again.
        """
        total = 0.0
        for transfer_id, (ended_s, leg) in self._ended.items():
            if leg.pd != pd or leg.model != model:
                continue
            answered_s = self._answered_s.get(transfer_id, math.inf)
            was_held = ended_s < since_s <= answered_s
            is_held = answered_s == math.inf
            total += leg.kv_bytes * (is_held - was_held)
        return total

    # ---- prompts of one engine

    def direct_begun(self, prompt: DirectPrompt) -> int:
        """A prompt was given to an engine. Returns the key for `direct_over`."""
        self._num_direct += 1
        self._direct[self._num_direct] = prompt
        return self._num_direct

    def direct_over(self, key: int) -> DirectPrompt | None:
        """The engine answers, or never will. None if the prompt was over before."""
        return self._direct.pop(key, None)

    def direct_computed(self, instance: str, begun_s: float) -> None:
        """A prompt given at `begun_s` has its first token, so prompts given earlier have theirs.

        An answer in one piece does not say so itself: its first byte comes after its last token.
        """
        for key, prompt in list(self._direct.items()):
            if prompt.instance == instance and prompt.begun_s < begun_s:
                del self._direct[key]

    def prompts(self) -> Iterator[tuple[int, DirectPrompt]]:
        """Prompts without an answer yet, by their keys."""
        yield from self._direct.items()

    def direct(self) -> dict[str, list[DirectPrompt]]:
        """Prompts without an answer yet, by engine, the earliest first."""
        found: dict[str, list[DirectPrompt]] = {}
        for prompt in self._direct.values():
            found.setdefault(prompt.instance, []).append(prompt)
        return found

    # ---- who had an instance for itself since when

    def prefill_ended(self, place: str, instance: str, at_s: float) -> None:
        """A prefill ended on an instance at `at_s`."""
        # Results may be heard in another order than the prefills ended. The entry is taken out, so
        # that it comes last again: the first ones are the oldest, and those are forgotten.
        known = self._last_end_s.pop((place, instance), at_s)
        self._last_end_s[place, instance] = max(known, at_s)
        oldest = next(iter(self._last_end_s))
        while at_s - self._last_end_s[oldest] > KEEP_LAST_END_S:
            del self._last_end_s[oldest]
            oldest = next(iter(self._last_end_s))

    def last_ends(self) -> Iterator[tuple[tuple[str, str], float]]:
        """When the last prefill ended, by place and instance."""
        yield from self._last_end_s.items()

    def alone_s(self, place: str, instance: str, begun_s: float, now_s: float) -> float:
        """How much of the time since `begun_s` no earlier prefill took, as far as is known."""
        last_s = self._last_end_s.get((place, instance), begun_s)
        return max(0.0, now_s - max(begun_s, last_s))

    def forget(self, instances: Set[str]) -> None:
        """Forget since when instances that left had nobody before them."""
        self._last_end_s = {k: v for k, v in self._last_end_s.items() if k[1] not in instances}

    def __len__(self) -> int:
        return len(self._legs) + len(self._direct)

    def _forget(self, now_s: float) -> None:
        while self._ended:
            transfer_id, (ended_s, _) = next(iter(self._ended.items()))
            if now_s - ended_s <= KEEP_ENDED_S:
                return
            del self._ended[transfer_id]
            self._answered_s.pop(transfer_id, None)
