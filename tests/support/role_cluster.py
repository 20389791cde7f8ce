"""A PD cluster front that has nothing but roles, for tests of those who change them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import report_cases

from local_pd.errors import RoleRefused
from prfaas.engines.errors import UnknownInstance
from scheduler.live.long_term.conversion import RoleChange, RoleStatus, applied
from scheduler.reports import ClusterReport, InstanceReport, Role


@dataclass(slots=True)
class FakeInstance:
    role: Role
    epoch: int = 0
    draining: bool = False
    healthy: bool = True
    running: int = 0
    model: str = ""
    roles: tuple[Role, ...] = ()


class FakeCluster:
    """`calls` in order; `errors` by method are raised one by one; `answers` holds orders up.

    An instance has drained once its event in `idle` is set.
    """

    name = "home"

    def __init__(self, **roles: Role) -> None:
        self.instances = {name: FakeInstance(role) for name, role in roles.items()}
        self.idle = {name: asyncio.Event() for name in roles}
        self.calls: list[str] = []
        self.errors: dict[str, list[Exception]] = {}
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_draining = 0
        self.is_silent = False
        self.leader = 0

    def latest(self) -> ClusterReport | None:
        if self.is_silent:
            return None
        instances = (_report(name, item) for name, item in self.instances.items())
        return report_cases.cluster(self.name, *instances)

    async def report(self) -> ClusterReport:
        gone = report_cases.cluster(self.name, healthy=False, reason="gone")
        return self.latest() or gone

    async def drain(self, instance: str, *, leader: int = 0) -> None:
        self._heard(leader)
        self.calls.append(f"drain {instance}")
        self._found("drain", instance).draining = True
        self.num_draining += 1
        try:
            await self.idle[instance].wait()
        finally:
            self.num_draining -= 1

    async def resume(self, instance: str, *, leader: int = 0) -> None:
        self._heard(leader)
        self.calls.append(f"resume {instance}")
        self._found("resume", instance).draining = False

    async def set_role(self, instance: str, change: RoleChange, *, leader: int = 0) -> RoleStatus:
        self.calls.append(f"set {instance} {change.role} {change.epoch}")
        await self.answers.wait()
        self._heard(leader)
        found = self._found("set_role", instance)
        status = applied(RoleStatus(found.role, found.epoch), change)
        if status is None:
            raise RoleRefused(f"epoch {change.epoch} is too old")
        found.role, found.epoch = status.role, status.epoch
        return status

    def answers_from_now_on(self) -> None:
        """Calls that hang stay so; the next ones are answered."""
        self.answers = asyncio.Event()
        self.answers.set()

    def _heard(self, leader: int) -> None:
        if leader < self.leader:
            raise RoleRefused(f"another gateway leads since ({self.leader}, not {leader})")
        self.leader = leader

    def _found(self, method: str, instance: str) -> FakeInstance:
        if errors := self.errors.get(method):
            raise errors.pop(0)
        if instance not in self.instances:
            raise UnknownInstance(self.name, instance)
        return self.instances[instance]


def drained(cluster: FakeCluster, instance: str) -> None:
    """The instance's engine has nothing left to do."""
    cluster.idle.setdefault(instance, asyncio.Event()).set()


def _report(name: str, item: FakeInstance) -> InstanceReport:
    return report_cases.instance(
        name,
        item.role,
        role_epoch=item.epoch,
        role_ready=not item.draining,
        model=item.model,
        healthy=item.healthy,
        draining=item.draining,
        running=item.running,
        roles=item.roles,
    )
