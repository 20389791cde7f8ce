"""What scheduling costs: routing, placement, admission, the queue's order, a whole request.

Run: python tests/bench/bench_decision.py [--json FILE] [--smoke] [--rounds N] [--clusters N]
[--instances N].
One process on one core; each round times many decisions over different prompts, the median round
is printed. The limit is the one that the router was built for: 50 microseconds for 4 clusters of 16
instances. The last line is everything that the gateway asks its scheduler and tells it in the life
of one short streamed request, with reports and links as they come; its limit is 150 microseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from smoke import add_smoke

from deploy.gateway.scheduling.scheduler import RegionScheduler
from deploy.plan.solve.case_study import H20_PREFILL, H200_PREFILL, KV
from netmon.region_link import LinkView
from scheduler.live.admission import AdmissionConfig, AdmissionRequest, admit
from scheduler.live.events import AdmissionOver, AdmitAsked
from scheduler.live.feedback import (
    AnswerDecoded,
    DirectAnswered,
    DirectBegun,
    DirectOver,
    FirstToken,
    InstanceGiven,
    InstanceOver,
    PromptCounted,
    RequestArrived,
)
from scheduler.live.learning.prompt_length import PromptContent
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.live.snapshots import Reported
from scheduler.reports import ClusterReport, InstanceReport, Role
from scheduler.routing.decision import ONE_ENGINE, RequestShape
from scheduler.routing.instance_choice import InstanceView, choose_instance
from scheduler.routing.prediction import Prediction
from scheduler.routing.profiles import KvProfile, PrefillProfile
from scheduler.routing.queue_order import QueueOrder, WaitingJob
from scheduler.routing.short_term import RouteConfig, route
from scheduler.routing.views import ClusterView, DecodeView, RegionSnapshot

NUM_PROMPTS: Final = 500
GOAL_US: Final = 50.0
REQUEST_GOAL_US: Final = 150.0
MODEL: Final = "m"
REQUESTS_PER_S: Final = 1000.0
REPORT_EVERY_S: Final = 0.5
NUM_WAITING: Final = 1000


def cluster(name: str, num_instances: int, draw: random.Random, *, is_local: bool) -> ClusterView:
    """A busy cluster: every instance has a different remainder, and work waits for all of them."""
    return ClusterView(
        name=name,
        prefill=PrefillProfile.of(H20_PREFILL if is_local else H200_PREFILL),
        free_s=tuple(sorted(draw.uniform(0, 5) for _ in range(num_instances))),
        num_queued=8,
        ahead_s=tuple(draw.uniform(1, 4) for _ in range(10)),
        link=None if is_local else LinkView(available_bytes_per_s=12.5e9, backlog_bytes=1e8),
        threshold_tokens=19_400,
    )


def decode_pool(draw: random.Random) -> DecodeView:
    """Five instances of 20 slots, most of them busy, and as many requests on their way."""
    return DecodeView(
        slots_total=100,
        slots_used=95,
        decode_s=25.6,
        step_s=0.025,
        landing_s=tuple(sorted(draw.uniform(0, 20) for _ in range(30))),
        kv_bytes=80e9,
        kv_total_bytes=200e9,
    )


def waiting_order(draw: random.Random) -> QueueOrder[int]:
    """A long queue of all lengths and three classes."""
    order: QueueOrder[int] = QueueOrder()
    for key in range(NUM_WAITING):
        order.add(WaitingJob(key, key % 3, int(draw.lognormvariate(9.9, 1.0)), key / 100))
    return order


def decisions(num_clusters: int, num_instances: int) -> dict[str, Callable[[], object]]:
    """What is timed, each a call that takes one decision."""
    draw = random.Random(1)
    snapshot = RegionSnapshot(
        taken_s=0.0,
        local=cluster("pd", num_instances, draw, is_local=True),
        decode=decode_pool(draw),
        prefill_clusters=tuple(
            cluster(f"far-{i}", num_instances, draw, is_local=False)
            for i in range(num_clusters - 1)
        ),
    )
    config = RouteConfig(kv=KvProfile.of(KV, 32_000), hand_off_tokens=1)
    names = [c.name for c in snapshot.prefill_clusters]
    shapes = itertools.cycle(
        [
            RequestShape(
                num_prompt_tokens=min(131_072, 128 + int(draw.lognormvariate(9.9, 1.0))),
                local_cached_tokens=draw.choice((0, 0, 4096)),
                prefill_cached_tokens={draw.choice(names): 8192} if names else {},
            )
            for _ in range(NUM_PROMPTS)
        ]
    )
    instances = [
        InstanceView(name=f"pd-{i}", running_s=running_s, num_requests=1)
        for i, running_s in enumerate(snapshot.local.free_s)
    ]
    hits = {instances[0].name: 8192}
    request = AdmissionRequest(Prediction(queue_s=3.0, prefill_s=4.0), 5e8)
    order = waiting_order(draw)
    return {
        f"route, {num_clusters} clusters x {num_instances}": lambda: route(
            next(shapes), snapshot, config, 0.1
        ),
        f"choose an instance of {num_instances}": lambda: choose_instance(
            instances, 32_000, 4.9, hits
        ),
        "admit by prediction": lambda: admit(request, snapshot.decode, AdmissionConfig(), 0.0),
        f"next of {NUM_WAITING} waiting jobs": lambda: order.next(20.0),
    }


class LivingRegion:
    """A PD cluster and prefill clusters that report and have links, and requests that pass."""

    def __init__(self, num_clusters: int, num_instances: int) -> None:
        self._num_instances = num_instances
        self._far = tuple(f"far-{number}" for number in range(num_clusters - 1))
        self._now_s = self._reported_s = 1000.0
        self._num = 0
        settings = LiveSettings(
            pd_clusters=(PdSettings("pd", self._far),),
            threshold_tokens=4096,
            hand_off_tokens=4096,
            models=(MODEL,),
        )
        self._scheduler = RegionScheduler(
            settings, self, lambda a, b: self._link, clock=lambda: self._now_s
        )
        self._link = LinkView(available_bytes_per_s=1e9, rtt_s=0.02)
        self._report()
        known = self._scheduler.knowledge(MODEL)
        for num_tokens in (1000, 2000, 4000, 8000, 3000, 5000):
            known.reserved(num_tokens, 0, num_tokens * 50_000)
            for place in (*self._far, ONE_ENGINE):
                known.prefilled(place, num_tokens, 0, num_tokens / 8000, self._now_s)

    def reported_pds(self) -> list[Reported]:
        return [self._pd]

    def reported_prefill(self) -> list[Reported]:
        return self._prefill

    def request(self) -> None:
        """A request that the PD cluster serves alone, from its route to its end."""
        self._num += 1
        self._now_s += 1 / REQUESTS_PER_S
        if self._now_s - self._reported_s > REPORT_EVERY_S:
            self._report()
        scheduler, instance = self._scheduler, f"pd-{self._num % self._num_instances}"
        shape, content = RequestShape(num_prompt_tokens=80, bound_tokens=320), PromptContent(320)
        route = scheduler.route_early(MODEL, shape, home="pd")
        assert route is not None
        predicted = route.predicted
        assert predicted is not None
        admit_asked = AdmitAsked(self._num, "", MODEL, 80, predicted, 112, "pd")
        assert scheduler.tell(admit_asked).verdict.admitted
        scheduler.taken(self._num, MODEL, shape, route)
        scheduler.tell(RequestArrived(MODEL, 80, 0, "pd"))
        key = scheduler.tell(DirectBegun(instance, 80, 80))
        scheduler.tell(InstanceGiven(instance, self._num))
        scheduler.tell(DirectOver(key))
        scheduler.tell(DirectAnswered(instance, self._now_s))
        scheduler.ask(FirstToken(MODEL, ONE_ENGINE, predicted, 0.02, False, "pd"))
        scheduler.tell(InstanceOver(instance))
        scheduler.tell(AdmissionOver(self._num, 112))
        scheduler.tell(PromptCounted(MODEL, content, 80))
        scheduler.tell(AnswerDecoded(MODEL, 32, 0.3))

    def _report(self) -> None:
        self._reported_s = self._now_s
        self._pd = Reported("pd", self._cluster("pd", "decode"), self._now_s)
        self._prefill = [
            Reported(name, self._cluster(name, "prefill"), self._now_s) for name in self._far
        ]

    def _cluster(self, name: str, role: Role) -> ClusterReport:
        instances = tuple(
            InstanceReport(
                name=f"{name}-{number}",
                role=role,
                model=MODEL,
                healthy=True,
                draining=False,
                running=3,
                max_concurrent=8,
                node=f"{name}-{number}:7000",
                decode_slots=200,
                kv_usage=0.4,
                kv_total_bytes=80 << 30,
                landing_cap_bytes=10 << 30,
                landing_room_bytes=9 << 30,
            )
            for number in range(self._num_instances)
        )
        return ClusterReport(
            name=name, healthy=True, queue_depth=0, running=3, instances=instances, max_queued=100
        )


def microseconds(decide: Callable[[], object]) -> float:
    """Of one decision, over as many as there are prompts."""
    began_s = time.perf_counter()
    for _ in range(NUM_PROMPTS):
        decide()
    return (time.perf_counter() - began_s) / NUM_PROMPTS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clusters", type=int, default=4, help="the PD cluster is one of them")
    parser.add_argument("--instances", type=int, default=16)
    add_smoke(parser, rounds=1)
    arguments = parser.parse_args()
    results = []
    timed = {
        name: (decide, GOAL_US)
        for name, decide in decisions(arguments.clusters, arguments.instances).items()
    }
    region = LivingRegion(arguments.clusters, arguments.instances)
    timed["all calls of a short request"] = region.request, REQUEST_GOAL_US
    for name, (decide, goal_us) in timed.items():
        microseconds(decide)
        found = [microseconds(decide) for _ in range(arguments.rounds)]
        median = statistics.median(found)
        print(f"{name:32} {median:8.1f} us   least {min(found):6.1f} us   goal {goal_us:.0f} us")
        results.append({"name": name, "goal_us": goal_us, "microseconds": found})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
