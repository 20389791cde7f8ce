"""A region of doubles to look at in a page: links that a test cuts, and many instances."""

from collections.abc import Sequence
from typing import Any, NoReturn

from gateway_region import report
from msgspec import structs
from report_cases import cluster

from deploy.gateway.links.region_links import LinksOverview, RegionLinks
from netmon.estimate import LinkCondition
from netmon.region_link import LinkNow
from scheduler.reports import ClusterReport


class SetLinks(RegionLinks):
    """The link from far to home as the test sets it, in place of what agents say."""

    def __init__(self) -> None:
        super().__init__(_no_agent)
        self.link = LinkNow(
            source="far",
            target="home",
            available_bytes_per_s=1.2e9,
            achieved_bytes_per_s=4.1e8,
            rtt_s=0.0124,
            loss=0.001,
            age_s=0.1,
        )

    def set(self, condition: LinkCondition, reason: str) -> None:
        self.link = structs.replace(self.link, condition=condition, reason=reason)

    async def watch(self, report: ClusterReport) -> None: ...

    async def wait_heard(self, timeout_s: float) -> None: ...

    def now(self, source: str, target: str) -> LinkNow:
        return self.link

    def links(self) -> list[LinkNow]:
        return [self.link]

    def overview(self) -> LinksOverview:
        return LinksOverview(links=[self.link], paths=[])


def with_instances(front: Any, roles: Sequence[Any]) -> None:
    """Let the double of a front report an instance for each role."""
    instances = tuple(
        structs.replace(
            report(role, f"{front.name}-{number:03d}", True),
            running=number % 5,
            num_running=number * 7 % 32,
            decode_slots=32,
            kv_usage=number % 100 / 100,
        )
        for number, role in enumerate(roles)
    )

    front.set_report = cluster(front.name, *instances, queue_depth=2, running=len(instances))


def _no_agent(target: str) -> NoReturn:
    raise AssertionError(f"nobody asks {target}")
