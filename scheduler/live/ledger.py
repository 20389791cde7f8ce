"""What is under way as far as is known: prefill legs, and prompts that one engine computes.

Clusters report twice a second. A route must also know what was sent, and what ended, since the last
report. A leg has the id of its transfer, which reports use too, so that nothing counts twice.
Prefills of one instance run one after the other (vLLM fills its token budget first come, first
served). So the last end of a prefill says since when the next one has had the instance for itself.

Pure; time is an argument. It does not know profiles, so not how long anything will take.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Annotated

import msgspec

KEEP_ENDED_S = 30.0
"""How long ended legs are remembered, seconds. No report older than this is used."""
KEEP_LAST_END_S = 3600.0
"""How long the end of an instance's last prefill is remembered, seconds. No prefill runs longer."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
"""A number of tokens or requests. The bounds hold for what another gateway tells."""


class PrefillLeg(msgspec.Struct, frozen=True):
    """A prompt computed at `place` for decoding elsewhere.

    `place` is the name of a prefill cluster, or the hand-off inside a PD cluster. `lands_at_s` is
    when its KVCache is expected at the decode side. `model` is the served name and `priority` the
    client's. `instance` of the cluster `pd` will decode it; the landing is on its node.
    """

    place: str
    num_tokens: Count
    uncached_tokens: Count
    begun_s: float
    lands_at_s: float
    kv_bytes: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    model: str = ""
    priority: int = 0
    instance: str = ""
    pd: str = ""


class DirectPrompt(msgspec.Struct, frozen=True):
    """A prompt that was given to one engine, which has not begun to answer."""

    instance: str
    num_tokens: Count
    uncached_tokens: Count
    begun_s: float


@dataclass(slots=True)
class _Legs:
    """Some legs by their ids. `ended` and `answered_s` have the earliest first."""

    under_way: dict[str, PrefillLeg] = field(default_factory=dict)
    ended: dict[str, tuple[float, PrefillLeg]] = field(default_factory=dict)
    """When the other legs were over, and what they were."""
    answered_s: dict[str, float] = field(default_factory=dict)
    """When the answers were over, for legs of the other two."""


class Ledger:
    """What one gateway has under way. Single-threaded.

    Every route asks for the legs of one PD cluster and for the requests of its instances. So these
    are found without a look at those of other clusters.
    """

    def __init__(self) -> None:
        self._all = _Legs()
        self._by_pd: dict[str, _Legs] = {}
        # Legs under way that no report has had, by place.
        self._unreported: dict[str, dict[str, PrefillLeg]] = {}
        self._taken: dict[int, PrefillLeg] = {}
        self._direct: dict[int, DirectPrompt] = {}
        self._direct_at: dict[str, list[DirectPrompt]] = {}
        self._num_direct = 0
        self._last_end_s: dict[tuple[str, str], float] = {}
        self._leg_versions: dict[str, int] = {}
        self._end_versions: dict[str, int] = {}
        self._changes: dict[str, deque[tuple[float, int]]] = {}  # time, requests, by instance
        self._changed: deque[tuple[float, str]] = deque()  # time, instance, of all changes
        self.requests: dict[str, int] = {}
        """The requests of each decode instance that are not over."""
        # A time, and the requests before it, by instance: every route asks for the same time, that
        # of the last report, and at thousands of requests per second many changes are later.
        self._before: dict[str, tuple[float, int]] = {}

    # ---- requests of instances

    def begun(self, instance: str, now_s: float) -> None:
        """An instance has one more request to decode, or a slot held for one."""
        self.changed(instance, 1, now_s)

    def ended(self, instance: str, now_s: float) -> None:
        """A request of an instance is over. To be called once for each `begun`."""
        self.changed(instance, -1, now_s)

    def changed(self, instance: str, num_requests: int, now_s: float) -> None:
        """An instance has so many more requests, or fewer."""
        if instance in self._before and now_s < self._before[instance][0]:
            del self._before[instance]
        self._changes.setdefault(instance, deque()).append((now_s, num_requests))
        self._changed.append((now_s, instance))
        self.requests[instance] = self.requests.get(instance, 0) + num_requests
        if not self.requests[instance]:
            del self.requests[instance]
        # No report that is still used is older.
        while now_s - self._changed[0][0] > KEEP_ENDED_S:
            at_s, oldest = self._changed.popleft()
            self._changes[oldest].popleft()
            if oldest in self._before and at_s >= self._before[oldest][0]:
                del self._before[oldest]
            if not self._changes[oldest]:
                del self._changes[oldest]
                self._before.pop(oldest, None)

    def change_since(self, instances: Set[str], since_s: float) -> int:
        """How many more requests these instances have now than at `since_s`.

        It is what a report of that time misses.
        """
        total = 0
        for name in self._changes.keys() & instances:
            known = self._before.get(name)
            if known is None or known[0] != since_s:
                known = self._before[name] = since_s, self._requests_before(name, since_s)
            total += self.requests.get(name, 0) - known[1]
        return total

    # ---- requests that were let in and have no instance yet

    def take(self, request: int, leg: PrefillLeg) -> None:
        """A request was let in, or goes another way than before. It is work ahead of others at
        `leg.place`, which may be one engine of `leg.pd`, and will decode in `leg.pd`.

        Requests that arrive together would otherwise all find the region empty.
        """
        self.drop(request)
        self._taken[request] = leg
        _grow(self._leg_versions, leg.place)

    def drop(self, request: int) -> None:
        """An instance has the request, or none ever will. Calling it again changes nothing."""
        leg = self._taken.pop(request, None)
        if leg is not None:
            _grow(self._leg_versions, leg.place)

    def taken(self) -> Mapping[int, PrefillLeg]:
        """The requests that were taken and not dropped."""
        return self._taken

    # ---- legs

    def leg_version(self, place: str) -> int:
        """A number that grows whenever the legs to a place change here, so that what was worked out
        from them must be worked out again.
        """
        return self._leg_versions.get(place, 0)

    def leg_begun(self, transfer_id: str, leg: PrefillLeg) -> None:
        """A landing is reserved, and the job is on its way."""
        for legs in (self._all, self._of_pd(leg.pd)):
            # A leg of a gateway that was not heard for a while was over, and begins again.
            legs.ended.pop(transfer_id, None)
            legs.answered_s.pop(transfer_id, None)
            legs.under_way[transfer_id] = leg
        self._unreported.setdefault(leg.place, {})[transfer_id] = leg
        _grow(self._leg_versions, leg.place)

    def leg_over(self, transfer_id: str, now_s: float) -> None:
        """The leg neither waits nor runs any more. Calling it again changes nothing."""
        if (leg := self._all.under_way.get(transfer_id)) is not None:
            for legs in (self._all, self._of_pd(leg.pd)):
                del legs.under_way[transfer_id]
                legs.ended[transfer_id] = now_s, leg
            self._unreported[leg.place].pop(transfer_id, None)
            _grow(self._leg_versions, leg.place)
        self._forget(now_s)

    def over(self, transfer_ids: Set[str]) -> Set[str]:
        """The legs among `transfer_ids` that were ours and have ended. A report that still has one
        of them is older.
        """
        return self._all.ended.keys() & transfer_ids

    def legs_reported(self, place: str, transfer_ids: Set[str]) -> None:
        """The report of a place has these jobs. A later report without one of them means that it is
        over at its place.
        """
        legs = self._unreported.get(place, {})
        for transfer_id in legs.keys() & transfer_ids:
            del legs[transfer_id]

    def unreported(self, place: str) -> Mapping[str, PrefillLeg]:
        """Legs to a place that no report has had, by their ids."""
        return self._unreported.get(place, {})

    def unanswered(self) -> Iterator[tuple[str, PrefillLeg, bool]]:
        """All legs whose requests are not answered: id, leg, and whether the leg is over."""
        legs = self._all
        for transfer_id, leg in legs.under_way.items():
            if transfer_id not in legs.answered_s:
                yield transfer_id, leg, False
        for transfer_id, (_, leg) in legs.ended.items():
            if transfer_id not in legs.answered_s:
                yield transfer_id, leg, True

    def landing(self, model: str, pd: str = "") -> list[PrefillLeg]:
        """All legs whose requests will decode for a model in a PD cluster once they have landed.

        The end of a leg may be heard after the end of its answer. Such a leg decodes no more.
        """
        legs = self._of_pd(pd)
        return [
            leg
            for transfer_id, leg in legs.under_way.items()
            if leg.model == model and transfer_id not in legs.answered_s
        ]

    def landing_change(self, reported_s: float, looked_s: float, pd: str = "") -> dict[str, float]:
        """How many more bytes landings take now than a report of a PD cluster says.

        They are given by decoding instance: landings reserved since `reported_s`, less landings
        whose requests were answered since the nodes were read at `looked_s`. A landing that is over
        but not answered counts, because its node holds it until an engine has loaded it.
        """
        legs = self._of_pd(pd)
        found: defaultdict[str, float] = defaultdict(float)
        latest = takewhile(lambda e: e[1][0] >= reported_s, reversed(legs.ended.items()))
        ended = ((transfer_id, leg) for transfer_id, (_, leg) in latest)
        for transfer_id, leg in chain(reversed(legs.under_way.items()), ended):
            if leg.begun_s >= reported_s and transfer_id not in legs.answered_s:
                found[leg.instance] += leg.kv_bytes
        for transfer_id, answered_s in reversed(legs.answered_s.items()):
            if answered_s < looked_s:
                break
            leg = legs.under_way.get(transfer_id) or legs.ended[transfer_id][1]
            # A node says what is left after each reservation too, but not what is given back later.
            if leg.begun_s < reported_s:
                found[leg.instance] -= leg.kv_bytes
        return found

    def answer_over(self, transfer_id: str, now_s: float) -> None:
        """The request of a leg is answered or given up, so no engine holds its KVCache."""
        leg = self._all.under_way.get(transfer_id)
        if leg is None:
            _, leg = self._all.ended.get(transfer_id, (0.0, None))
        if leg is not None:
            for legs in (self._all, self._of_pd(leg.pd)):
                legs.answered_s.setdefault(transfer_id, now_s)

    def kv_change_since(self, model: str, since_s: float, pd: str = "") -> float:
        """How many more bytes of KVCache engines of a PD cluster hold now than at `since_s`.

        It counts what has landed, or what an engine computes because a leg failed, less what is
        answered. A leg that ended more than `KEEP_ENDED_S` ago is forgotten, so its bytes count
        until the engines' metrics are read again.
        """
        legs, total = self._of_pd(pd), 0.0
        for transfer_id, (ended_s, leg) in reversed(legs.ended.items()):
            if ended_s < since_s:
                break
            if leg.model == model and transfer_id not in legs.answered_s:
                total += leg.kv_bytes
        for transfer_id, answered_s in reversed(legs.answered_s.items()):
            if answered_s < since_s:
                break
            ended = legs.ended.get(transfer_id)
            if ended is not None and ended[0] < since_s and ended[1].model == model:
                total -= ended[1].kv_bytes
        return total

    # ---- prompts of one engine

    def direct_begun(self, prompt: DirectPrompt) -> int:
        """A prompt was given to an engine. Returns the key for `direct_over`."""
        self._num_direct += 1
        self._direct[self._num_direct] = prompt
        self._direct_at.setdefault(prompt.instance, []).append(prompt)
        return self._num_direct

    def direct_over(self, key: int) -> DirectPrompt | None:
        """The engine answers, or never will. None if the prompt was over before."""
        prompt = self._direct.pop(key, None)
        if prompt is not None:
            given = self._direct_at[prompt.instance]
            given.remove(prompt)
            if not given:
                del self._direct_at[prompt.instance]
        return prompt

    def direct_computed(self, instance: str, begun_s: float) -> None:
        """A prompt given at `begun_s` has its first token, so prompts given earlier have theirs.

        An answer in one piece does not say so itself: its first byte comes after its last token.
        """
        if instance not in self._direct_at:
            return
        for key, prompt in list(self._direct.items()):
            if prompt.instance == instance and prompt.begun_s < begun_s:
                self.direct_over(key)

    def prompts(self) -> Iterator[tuple[int, DirectPrompt]]:
        """Prompts without an answer yet, by their keys."""
        yield from self._direct.items()

    def direct(self) -> Mapping[str, Sequence[DirectPrompt]]:
        """Prompts without an answer yet, by engine, the earliest first."""
        return self._direct_at

    # ---- who had an instance for itself since when

    def end_version(self, place: str) -> int:
        """As `leg_version`, for the ends of prefills at a place."""
        return self._end_versions.get(place, 0)

    def prefill_ended(self, place: str, instance: str, at_s: float) -> None:
        """A prefill ended on an instance at `at_s`."""
        # Results may be heard in another order than the prefills ended. The entry is taken out, so
        # that it comes last again: the first ones are the oldest, and those are forgotten.
        known = self._last_end_s.pop((place, instance), at_s)
        self._last_end_s[place, instance] = max(known, at_s)
        _grow(self._end_versions, place)
        oldest = next(iter(self._last_end_s))
        while at_s - self._last_end_s[oldest] > KEEP_LAST_END_S:
            del self._last_end_s[oldest]
            _grow(self._end_versions, oldest[0])
            oldest = next(iter(self._last_end_s))

    def last_ends(self) -> Iterator[tuple[tuple[str, str], float]]:
        """When the last prefill ended, by place and instance."""
        yield from self._last_end_s.items()

    def alone_s(self, place: str, instance: str, begun_s: float, now_s: float) -> float:
        """How much of the time since `begun_s` no earlier prefill took, as far as is known."""
        return max(0.0, now_s - self.alone_since_s(place, instance, begun_s))

    def alone_since_s(self, place: str, instance: str, begun_s: float) -> float:
        """When a prefill that was begun at `begun_s` got the instance for itself."""
        return max(begun_s, self._last_end_s.get((place, instance), begun_s))

    def forget(self, instances: Set[str]) -> None:
        """Forget the last prefills of instances that have left."""
        for place, instance in [key for key in self._last_end_s if key[1] in instances]:
            del self._last_end_s[place, instance]
            _grow(self._end_versions, place)

    def __len__(self) -> int:
        return len(self._all.under_way) + len(self._direct)

    def _of_pd(self, pd: str) -> _Legs:
        found = self._by_pd.get(pd)
        if found is None:
            found = self._by_pd[pd] = _Legs()
        return found

    def _requests_before(self, instance: str, since_s: float) -> int:
        """The requests that an instance had just before `since_s`."""
        num_requests = self.requests.get(instance, 0)
        for at_s, change in reversed(self._changes[instance]):
            # Changes are in order of time: all before this one are in the report.
            if at_s < since_s:
                break
            num_requests -= change
        return num_requests

    def _forget(self, now_s: float) -> None:
        while self._all.ended:
            transfer_id, (ended_s, leg) = next(iter(self._all.ended.items()))
            if now_s - ended_s <= KEEP_ENDED_S:
                return
            for legs in (self._all, self._of_pd(leg.pd)):
                del legs.ended[transfer_id]
                legs.answered_s.pop(transfer_id, None)


def _grow(versions: dict[str, int], place: str) -> None:
    versions[place] = versions.get(place, 0) + 1
