"""A region in virtual time that clients without pause load, decided by the real `LiveScheduler`.

It tells the scheduler what a gateway tells it: reports twice a second, and each step of a request.
Instances prefill one prompt after the other. A decode engine takes one step of `step_s` for its
whole batch, and stands still while it computes a prompt itself. Links are never the limit.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.core import LiveScheduler
from scheduler.live.events import (
    AdmissionOver,
    AdmitAsked,
    LinkHeard,
    ReportHeard,
    RequestTaken,
    RouteAsked,
)
from scheduler.live.feedback import (
    AnswerDecoded,
    Calibrated,
    DirectAnswered,
    DirectBegun,
    DirectOver,
    DirectTook,
    FirstToken,
    InstanceGiven,
    InstanceOver,
    LegAnswered,
    LegBegun,
    LegOver,
    Prefilled,
    RequestArrived,
)
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.reports import ClusterReport, InstanceReport, JobReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, RequestShape
from scheduler.routing.prediction import Prediction

MODEL, HOME, FAR = "m", "home", "far"
ANSWER_TOKENS = 64
REPORT_S = 0.5
TAIL_S = 0.1
KV_BYTES = 100_000_000


@dataclass(eq=False)
class Asked:
    """A request of one client."""

    number: int
    num_tokens: int
    arrived_s: float
    target: str = ""
    predicted: Prediction = field(default_factory=Prediction)
    begun_s: float = 0.0
    landed_s: float = 0.0
    was_full: bool = False
    key: int = 0
    queue_s: float = 0.0
    tokens_left: int = ANSWER_TOKENS
    first_s: float = 0.0


@dataclass(eq=False)
class Prefiller:
    """An instance that prefills for others, one prompt at a time."""

    name: str
    running: Asked | None = None
    started_s: float = 0.0


@dataclass
class ClosedRegion:
    """`far_s` and `local_s` give the seconds of a prefill by its tokens; there are so many
    instances of either, and one decode engine.
    """

    far_s: Callable[[int], float]
    local_s: Callable[[int], float]
    num_far: int
    num_local: int
    slots: int = 20
    step_s: float = 0.4
    threshold_tokens: float = 20_000
    short_share: float = 0.0
    seed: int = 1
    now_s: float = 0.0
    completed_s: list[float] = field(default_factory=list)
    """When each answer was whole."""
    num_refused: int = 0
    targets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lengths = random.Random(self.seed)
        sources = (FAR,) if self.num_far else ()
        self.live = LiveScheduler(
            LiveSettings(
                pd_clusters=(PdSettings(HOME, sources),),
                threshold_tokens=self.threshold_tokens,
                hand_off_tokens=512,
            )
        )
        self._instances = {
            FAR: [Prefiller(f"f{i}") for i in range(self.num_far)],
            HOME: [Prefiller(f"p{i}") for i in range(self.num_local)],
        }
        self._queues: dict[str, deque[Asked]] = {FAR: deque(), HOME: deque()}
        self._direct: deque[Asked] = deque()
        self._waiting: deque[Asked] = deque()
        self._decoding: list[Asked] = []
        self._is_stepping = False
        for place, seconds in ((FAR, self.far_s), (HAND_OFF, self.local_s)):
            times = tuple((n, seconds(n)) for n in (1_000, 30_000))
            self._tell(Calibrated(MODEL, place, "key", times))
        self._report()

    def run(self, num_clients: int, seconds: float) -> None:
        """Serve so many clients without pause for `seconds`."""
        for _ in range(num_clients):
            self._at(0.0, self._ask)
        while self._events and self._events[0][0] <= seconds:
            self.now_s, _, do = heapq.heappop(self._events)
            do()

    def length(self) -> int:
        """The case study's lengths, and short prompts, which one engine computes."""
        if self._lengths.random() < self.short_share:
            return self._lengths.randrange(50, 500)
        return int(min(max(self._lengths.lognormvariate(9.9, 1.0), 600), 131_072))

    def _at(self, after_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._numbers), do))

    def _tell(self, event: Any) -> Any:
        return self.live.take(event, self.now_s)

    # ---- what the gateway does

    def _ask(self) -> None:
        self._route(Asked(next(self._numbers), self.length(), self.now_s))

    def _route(self, asked: Asked) -> None:
        shape = RequestShape(num_prompt_tokens=asked.num_tokens)
        decision = self._tell(RouteAsked(MODEL, shape))
        asked.predicted = decision.predicted
        judged = self._tell(AdmitAsked(asked.number, "", MODEL, asked.num_tokens, asked.predicted))
        if not judged.verdict.admitted:
            self.num_refused += 1
            self._at(judged.verdict.retry_after_s, lambda: self._route(asked))
            return
        asked.target, asked.arrived_s = decision.target, self.now_s
        self.targets[asked.target] = self.targets.get(asked.target, 0) + 1
        self._tell(RequestArrived(MODEL, asked.num_tokens, 0, HOME))
        tokens, lands_s = asked.num_tokens, asked.predicted.landed_s
        self._tell(RequestTaken(asked.number, MODEL, asked.target, tokens, tokens, lands_s))
        asked.was_full = self._tell(InstanceGiven("d0", asked.number))
        asked.begun_s = self.now_s
        if asked.target == ONE_ENGINE:
            asked.key = self._tell(DirectBegun("d0", asked.num_tokens, asked.num_tokens))
            self._direct.append(asked)
            self._step()
            return
        self._tell(
            LegBegun(
                str(asked.number), MODEL, asked.target, asked.num_tokens, asked.num_tokens, 0,
                KV_BYTES, lands_s, instance="d0", pd=HOME,
            )
        )  # fmt: skip
        cluster = HOME if asked.target == HAND_OFF else FAR
        self._queues[cluster].append(asked)
        self._prefill(cluster)

    def _prefill(self, cluster: str) -> None:
        for instance in self._instances[cluster]:
            if instance.running is None and self._queues[cluster]:
                asked = instance.running = self._queues[cluster].popleft()
                asked.queue_s, instance.started_s = self.now_s - asked.begun_s, self.now_s
                self._at(self._seconds(cluster, asked), self._prefilled(cluster, instance))

    def _seconds(self, cluster: str, asked: Asked) -> float:
        return (self.local_s if cluster == HOME else self.far_s)(asked.num_tokens)

    def _prefilled(self, cluster: str, instance: Prefiller) -> Callable[[], None]:
        def done() -> None:
            asked, instance.running = instance.running, None
            assert asked is not None
            self._prefill(cluster)
            seconds = self.now_s - instance.started_s

            def landed() -> None:
                asked.landed_s = self.now_s
                name, tokens = instance.name, asked.num_tokens
                self._tell(Prefilled(MODEL, asked.target, name, tokens, 0, TAIL_S, seconds, HOME))
                self._tell(LegOver(str(asked.number)))
                self._waiting.append(asked)
                self._step()

            self._at(TAIL_S, landed)

        return done

    # ---- the decode engine

    def _step(self) -> None:
        if self._is_stepping:
            return
        batch = list(self._decoding)
        while self._waiting and len(batch) < self.slots:
            batch.append(self._waiting.popleft())
        seconds, direct = self.step_s if batch else 0.0, None
        if self._direct and len(batch) < self.slots:
            direct = self._direct.popleft()
            seconds += self.local_s(direct.num_tokens)
            batch.append(direct)
        self._decoding = batch
        if not batch:
            return
        self._is_stepping = True
        began_s = self.now_s
        self._at(seconds, lambda: self._stepped(direct, began_s))

    def _stepped(self, direct: Asked | None, began_s: float) -> None:
        self._is_stepping = False
        for asked in self._decoding:
            if asked.tokens_left == ANSWER_TOKENS:
                self._first_token(asked, direct, began_s)
            asked.tokens_left -= 1
        over = [asked for asked in self._decoding if not asked.tokens_left]
        self._decoding = [asked for asked in self._decoding if asked.tokens_left]
        for asked in over:
            self._over(asked)
        self._step()

    def _first_token(self, asked: Asked, direct: Asked | None, began_s: float) -> None:
        asked.first_s, waited_s = self.now_s, 0.0
        if asked is direct:
            self._tell(DirectOver(asked.key))
            seconds = self._tell(DirectAnswered("d0", asked.begun_s))
            if seconds is not None and not asked.was_full:
                shape = RequestShape(num_prompt_tokens=asked.num_tokens)
                self._tell(DirectTook(MODEL, shape, seconds))
        else:
            waited_s = asked.queue_s - asked.predicted.queue_s
            waited_s += began_s - asked.landed_s - asked.predicted.slot_s
        ttft_s = self.now_s - asked.arrived_s
        fields = (asked.was_full, HOME, False, waited_s, asked.num_tokens)
        self._tell(FirstToken(MODEL, asked.target, asked.predicted, ttft_s, *fields))

    def _over(self, asked: Asked) -> None:
        self._tell(AnswerDecoded(MODEL, ANSWER_TOKENS, self.now_s - asked.first_s, "d0"))
        self._tell(InstanceOver("d0"))
        if asked.target != ONE_ENGINE:
            self._tell(LegAnswered(str(asked.number)))
        self._tell(AdmissionOver(asked.number))
        self.completed_s.append(self.now_s)
        self._ask()

    # ---- reports

    def _report(self) -> None:
        engine = InstanceReport(
            name="d0", role="decode", model=MODEL, healthy=True, draining=False,
            running=len(self._decoding) + len(self._waiting) + len(self._direct),
            max_concurrent=4, decode_slots=self.slots, num_running=len(self._decoding),
            num_waiting=len(self._waiting) + len(self._direct),
        )  # fmt: skip
        for cluster, instances in self._instances.items():
            if cluster == FAR and not instances:
                continue
            found = [
                InstanceReport(
                    name=item.name, role="prefill", model=MODEL, healthy=True, draining=False,
                    running=int(item.running is not None), max_concurrent=1,
                )
                for item in instances
            ]  # fmt: skip
            jobs = [
                _job(item.running, self.now_s - item.started_s, item.name)
                for item in instances
                if item.running
            ]
            jobs += [_job(asked, self.now_s - asked.begun_s) for asked in self._queues[cluster]]
            report = ClusterReport(
                name=cluster, healthy=True, queue_depth=len(self._queues[cluster]),
                running=len(jobs), jobs=tuple(jobs),
                instances=(*found, engine) if cluster == HOME else tuple(found),
            )  # fmt: skip
            self._tell(ReportHeard(cluster, report, self.now_s))
        link = LinkView(available_bytes_per_s=1e9, rtt_s=0.01, state=LinkCondition.CLEAR)
        self._tell(LinkHeard(FAR, HOME, link))
        self._at(REPORT_S, self._report)


def _job(asked: Asked, for_s: float, instance: str = "") -> JobReport:
    tokens = asked.num_tokens
    return JobReport(
        transfer_id=str(asked.number), num_tokens=tokens, uncached_tokens=tokens, for_s=for_s,
        instance=instance, model=MODEL, pd=HOME,
    )  # fmt: skip


def first_come_first_served(region: ClosedRegion, num_clients: int, seconds: float) -> list[float]:
    """When the same instances would complete answers if each prompt went to the instance that
    ends it first, and waited for nothing but instances and slots.
    """
    rates = [region.far_s] * region.num_far + [region.local_s] * region.num_local
    free_s, slots_s = [0.0] * len(rates), [0.0] * region.slots
    ready_s = [0.0] * num_clients
    completed_s: list[float] = []
    while (now_s := heapq.heappop(ready_s)) < seconds:
        tokens = region.length()
        ends = [max(now_s, free) + rate(tokens) for free, rate in zip(free_s, rates, strict=True)]
        best = min(range(len(ends)), key=ends.__getitem__)
        free_s[best] = ends[best]
        done_s = max(ends[best] + TAIL_S, heapq.heappop(slots_s)) + ANSWER_TOKENS * region.step_s
        heapq.heappush(slots_s, done_s)
        heapq.heappush(ready_s, done_s)
        completed_s.append(done_s)
    return completed_s
