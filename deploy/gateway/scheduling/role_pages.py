"""`GET` and `POST /v1/pd_role`: the roles of PD clusters' instances, and orders to change them.

Terms and protocol follow vLLM's draft (vllm-project/vllm issue 56133): role, epoch, phase,
`expected_epoch`; the answer is 202 at once, and the operation outlives its caller. Two things
differ. This is the entry of a region and not of one engine, so an order names its instance, and all
are listed. Engines stay as they are: a role is the work that the cluster's front gives an instance.
So no request carries an epoch, and a request that is under way when an order comes ends where it
is.

This file reads arguments and answers with JSON-ready values. The application authenticates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from deploy.gateway.errors import ApiError
from deploy.gateway.scheduling.roles import RoleKeeper, drained_by_others, is_usable
from local_pd.cluster import PdCluster
from local_pd.errors import PdError, RoleRefused
from prfaas.engines.errors import UnknownInstance
from scheduler.live.long_term.conversion import (
    Conversion,
    ConversionOutcome,
    ConversionPhase,
    ConversionWish,
    Ended,
    PdRole,
)
from scheduler.reports import ClusterReport, InstanceReport, Role, why_fixed
from transport.rpc import RpcError

_BODY: Final = (
    '{"instance": NAME, "role": "encode", "prefill" or "decode"}; "expected_epoch": N and "wait": '
    "true may be added"
)
_TRUE: Final = ("1", "true")
_UNKNOWN_INSTANCE: Final = "unknown_instance"
_UNREACHABLE: Final = "cluster_unavailable"


class RoleOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a POST. `expected_epoch` is the epoch that the caller saw; left out: any."""

    instance: str
    role: PdRole
    expected_epoch: int | None = None
    wait: bool = False


class InstanceRole(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's role since the order of `epoch` (0: its configuration).

    `phase` is "ready", "draining" (also for other reasons than a change) or "relabelling". `ready`
    says whether it is given work of its role. `requests` is the number of requests in its engine.
    """

    instance: str
    role: Role
    epoch: int
    phase: str
    ready: bool
    healthy: bool
    requests: int
    model: str = ""
    reason: str = ""
    cluster: str = ""


class RoleChangeNow(msgspec.Struct, frozen=True, kw_only=True):
    """The conversion under way. While it dwells it is done, and no other may begin."""

    instance: str
    from_role: PdRole
    to_role: PdRole
    epoch: int
    phase: str
    for_s: float


class RoleChangeEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The conversion that ended last."""

    instance: str
    from_role: PdRole
    to_role: PdRole
    outcome: str
    detail: str
    ago_s: float


class RolesOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to GET.

    `busy_with` says why no conversion can begin now. If there is no `conversion` then, an instance
    is getting its old role back, and `last` is an earlier conversion. `clusters` are all PD
    clusters; `?cluster=NAME` asks for another one.
    """

    cluster: str
    instances: list[InstanceRole]
    conversion: RoleChangeNow | None = None
    busy_with: str = ""
    last: RoleChangeEnded | None = None
    clusters: list[str] = []


class RegionRolePages:
    """The answers to operators for all PD clusters, which have a conversion each at a time."""

    def __init__(self, clusters: Mapping[str, RolePages]) -> None:
        self._clusters = clusters

    async def overview(self, query: Mapping[str, str]) -> RolesOverview:
        """Answer GET /v1/pd_role, for the first cluster where none is named. Raises `ApiError`."""
        names = list(self._clusters)
        _, pages = self._named(query.get("cluster", names[0]))
        return msgspec.structs.replace(await pages.overview(), clusters=names)

    async def change(self, body: bytes, query: Mapping[str, str]) -> tuple[int, InstanceRole]:
        """Answer POST /v1/pd_role in the cluster that has the instance, or that is named. Raises
        `ApiError`.
        """
        order, errors, found = _order(body), [], []
        wanted = query.get("cluster")
        for name, pages in self._clusters.items() if wanted is None else [self._named(wanted)]:
            try:
                await pages.role_of(order.instance)
                found.append(name)
            except ApiError as error:
                errors.append(error)
        if len(found) > 1:
            names = ", ".join(found)
            message = f"Several clusters have a `{order.instance}`: {names}. Add ?cluster=NAME."
            raise ApiError(409, "ambiguous_instance", message, param="cluster")
        if found:
            return await self._clusters[found[0]].change(body, query)
        # The instance may be in a cluster whose front does not answer.
        worst = max(errors, key=lambda error: error.status)
        if worst.code == _UNREACHABLE:
            raise worst
        message = " ".join(error.message for error in errors)
        raise ApiError(404, _UNKNOWN_INSTANCE, message, param="instance")

    def _named(self, name: str) -> tuple[str, RolePages]:
        if name not in self._clusters:
            names = ", ".join(self._clusters)
            message = f"No PD cluster is called `{name[:200]}`. There are: {names}."
            raise ApiError(404, "unknown_cluster", message, param="cluster")
        return name, self._clusters[name]


class RolePages:
    """The answers about the roles that `keeper` and one PD cluster manage."""

    def __init__(self, keeper: RoleKeeper, pd: PdCluster, timeout_s: float) -> None:
        self._keeper = keeper
        self._pd = pd
        self._timeout_s = timeout_s

    async def overview(self) -> RolesOverview:
        """Answer GET /v1/pd_role. Raises `ApiError`."""
        keeper = self._keeper
        now, for_s, last = keeper.current, keeper.current_s, keeper.last
        busy_with = keeper.busy_with
        # Asked after them, so that a conversion that is over here shows in its instance's role.
        report = await self._report()
        return RolesOverview(
            cluster=report.name,
            instances=[_role(item, now, report.name) for item in report.instances],
            conversion=None if now is None else _change(now, for_s),
            busy_with=busy_with or drained_by_others(report),
            last=None if last is None else _ended(*last),
        )

    async def change(self, body: bytes, query: Mapping[str, str]) -> tuple[int, InstanceRole]:
        """Answer POST /v1/pd_role.

        202 and the instance while it drains; 200 once it has the role, with `wait` or from the
        start. Raises `ApiError`.
        """
        order = _order(body)
        report = await self._report()
        instance = _named(report, order.instance)
        if why := why_fixed(instance, order.role):
            code = "role_both" if instance.role == "both" else "role_fixed"
            raise ApiError(409, code, f"{why}.", param="instance")
        if instance.role == order.role:
            return 200, await self._kept(instance, order)
        self._begin(report, instance, order)
        if not (order.wait or query.get("wait") in _TRUE):
            return 202, _role(instance, self._keeper.current, report.name)
        ended = await self._keeper.ended()
        if ended.outcome is not ConversionOutcome.CONVERTED:
            message = f"{order.instance} is {instance.role} still, and serves: {ended.detail}."
            raise ApiError(409, "not_converted", message)
        return 200, await self.role_of(order.instance)

    def _begin(self, report: ClusterReport, instance: InstanceReport, order: RoleOrder) -> None:
        _check_epoch(instance, order)
        assert instance.role != "both"
        wish = ConversionWish(report.name, instance.role, order.role, instance.model)
        start = self._keeper.ask(wish, report, only=order.instance)
        if start.effects:
            return
        if not self._keeper.leads():
            message = f"{start.reason}. Give it the order."
            raise ApiError(409, "not_leader", message)
        if self._keeper.busy_with:
            message = f"{start.reason}; one conversion at a time. Try again later."
            raise ApiError(409, "conversion_runs", message)
        if not is_usable(instance):
            message = f"{order.instance} is not usable now ({instance.reason}); wait until it is."
            if instance.draining:
                message = (
                    f"{order.instance} drains, and not to change its role. Order the role that it "
                    f"has ({instance.role}): that gives it work again."
                )
            raise ApiError(409, "not_usable", message, param="instance")
        if drained_by_others(report, order.instance):
            raise ApiError(409, "conversion_runs", f"{start.reason}. Try again later.")
        message = f"{order.instance} stays {instance.role}: {start.reason}."
        raise ApiError(409, "last_of_its_role", message, param="instance")

    async def _kept(self, instance: InstanceReport, order: RoleOrder) -> InstanceRole:
        """The answer if the instance has the role. An instance that was left draining gets
        work again.
        """
        _check_epoch(instance, order, repeated=True)
        now = self._keeper.current
        if now and now.instance == instance.name and now.phase is not ConversionPhase.DWELLING:
            message = f"{self._keeper.busy_with}, to become {now.wish.to_role}; wait for its end."
            raise ApiError(409, "conversion_runs", message)
        if instance.draining:
            if not self._keeper.leads():
                message = f"{self._keeper.leadership.why_not}. Give it the order."
                raise ApiError(409, "not_leader", message)
            try:
                async with asyncio.timeout(self._timeout_s):
                    token = self._keeper.leadership.token
                    await self._pd.resume(instance.name, leader=token)
            except RoleRefused as error:
                raise ApiError(409, "not_leader", f"{error.message}.") from error
            except (PdError, UnknownInstance, RpcError, TimeoutError) as error:
                raise _unreachable(str(error) or "no answer in time") from error
        return await self.role_of(instance.name)

    async def role_of(self, name: str) -> InstanceRole:
        """The instance as it is now. Raises `ApiError`."""
        report = await self._report()
        return _role(_named(report, name), self._keeper.current, report.name)

    async def _report(self) -> ClusterReport:
        """A report made now. The watcher's may be older than the last change."""
        try:
            async with asyncio.timeout(self._timeout_s):
                report = await self._pd.report()
        except TimeoutError as error:
            raise _unreachable("no report in time") from error
        if not report.instances:
            raise _unreachable(report.reason or "it reports no instances")
        return report


def _order(body: bytes) -> RoleOrder:
    try:
        return msgspec.json.decode(body, type=RoleOrder)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_body", f"{error}. Send {_BODY}.") from error


def _named(report: ClusterReport, name: str) -> InstanceReport:
    for instance in report.instances:
        if instance.name == name:
            return instance
    names = ", ".join(item.name for item in report.instances)
    message = f"{report.name} has no instance `{name[:200]}`. There: {names}."
    raise ApiError(404, _UNKNOWN_INSTANCE, message, param="instance")


def _check_epoch(instance: InstanceReport, order: RoleOrder, *, repeated: bool = False) -> None:
    """Raise `ApiError` 409 if the caller saw another epoch.

    An order that was carried out already (`repeated`) was given one epoch ago.
    """
    expected = order.expected_epoch
    known = {instance.role_epoch, instance.role_epoch - 1 if repeated else instance.role_epoch}
    if expected is None or expected in known:
        return
    message = (
        f"{instance.name} is {instance.role} since epoch {instance.role_epoch}, not {expected}: "
        "somebody changed it. Look again (GET /v1/pd_role) before you order."
    )
    raise ApiError(409, "stale_epoch", message, param="expected_epoch")


def _unreachable(reason: str) -> ApiError:
    message = f"A PD cluster's front does not answer: {reason}"
    return ApiError(503, _UNREACHABLE, message, retry_after_s=1)


def _role(instance: InstanceReport, now: Conversion | None, cluster: str) -> InstanceRole:
    phase = "ready" if instance.role_ready else "draining"
    is_changing = now is not None and now.instance == instance.name
    if now is not None and is_changing and now.phase is not ConversionPhase.DWELLING:
        phase = now.phase.value
    return InstanceRole(
        instance=instance.name,
        role=instance.role,
        epoch=instance.role_epoch,
        phase=phase,
        ready=phase == "ready" and instance.healthy,
        healthy=instance.healthy,
        requests=instance.running,
        model=instance.model,
        reason=instance.reason,
        cluster=cluster,
    )


def _change(now: Conversion, for_s: float) -> RoleChangeNow:
    return RoleChangeNow(
        instance=now.instance,
        from_role=now.wish.from_role,
        to_role=now.wish.to_role,
        epoch=now.epoch,
        phase=now.phase.value,
        for_s=for_s,
    )


def _ended(ended: Ended, ago_s: float) -> RoleChangeEnded:
    return RoleChangeEnded(
        instance=ended.instance,
        from_role=ended.wish.from_role,
        to_role=ended.wish.to_role,
        outcome=ended.outcome.value,
        detail=ended.detail,
        ago_s=ago_s,
    )
