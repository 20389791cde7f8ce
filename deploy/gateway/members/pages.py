"""`/prfaas/instances`: which instances the region has, and orders to join and to leave.

    GET     /prfaas/instances          all instances and their phases
    POST    /prfaas/instances          {"cluster": NAME, "name": ..., "url": ..., "agent": ...}
    DELETE  /prfaas/instances/NAME     drain, copy its hot prefixes away, forget

Answers to orders come at once (202): what follows shows in GET. This file reads arguments and
answers with JSON-ready values. The application authenticates.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from deploy.gateway.errors import ApiError
from deploy.gateway.members.keeper import MemberKeeper, UnknownCluster
from kvmanager.config_files.units import parse_duration
from prfaas.engines.errors import UnknownInstance
from prfaas.engines.members import LEAVE_LIMIT_S, Join, Leave, MemberRefused
from scheduler.reports import InstanceReport
from transport import Endpoint
from transport.rpc import RpcError

_TRUE: Final = ("1", "true")
_MAX_LIMIT_S: Final = 86400.0


class InstanceNow(msgspec.Struct, frozen=True, kw_only=True):
    """An instance of a cluster.

    `phase` is "joining" (not usable yet, `reason` says why), "serving", "draining" or "leaving".
    `requests` counts what it does now. `copied` says what was copied away from its node when it
    leaves. `paced`: its engine takes the time of another device.
    """

    cluster: str
    instance: str
    phase: str
    role: str
    model: str = ""
    node: str = ""
    agent: str = ""
    requests: int = 0
    reason: str = ""
    weights: str = ""
    layout: str = ""
    copied: str = ""
    paced: bool = False


class InstancesOverview(msgspec.Struct, frozen=True):
    """The answer to GET."""

    instances: list[InstanceNow]


class MemberPages:
    """The answers to operators about the members that `keeper` keeps."""

    def __init__(self, keeper: MemberKeeper) -> None:
        self._keeper = keeper

    def overview(self) -> InstancesOverview:
        """Answer GET."""
        found = [self._now(report.name, item) for report, item in self._keeper.instances()]
        return InstancesOverview(found)

    async def join(self, body: bytes) -> InstanceNow:
        """Answer POST. Raises `ApiError`; that of status 409 says why it cannot join."""
        cluster, order = _order(body)
        await _mapped(self._keeper.join(cluster, order))
        return InstanceNow(
            cluster=cluster,
            instance=order.name,
            phase="joining",
            role=order.role,
            model=order.model,
            node=order.node,
            agent=order.agent,
        )

    async def leave(self, name: str, query: Mapping[str, str]) -> InstanceNow:
        """Answer DELETE. Raises `ApiError`."""
        found = [
            (report.name, item)
            for report, item in self._keeper.instances()
            if item.name == name and query.get("cluster", report.name) == report.name
        ]
        if not found:
            raise ApiError(404, "unknown_instance", f"No cluster has an instance `{name[:200]}`.")
        if len(found) > 1:
            names = ", ".join(cluster for cluster, _ in found)
            message = f"Several clusters have a `{name}`: {names}. Add ?cluster=NAME."
            raise ApiError(409, "ambiguous_instance", message, param="cluster")
        cluster, instance = found[0]
        order = Leave(name=name, limit_s=_limit_s(query.get("limit")))
        await _mapped(self._keeper.leave(cluster, order, force=query.get("force") in _TRUE))
        return msgspec.structs.replace(self._now(cluster, instance), phase="leaving")

    def _now(self, cluster: str, item: InstanceReport) -> InstanceNow:
        phase = "leaving" if item.leaving else "draining" if item.draining else "serving"
        return InstanceNow(
            cluster=cluster,
            instance=item.name,
            phase=phase if item.healthy or item.leaving else "joining",
            role=item.role,
            model=item.model,
            node=item.node_name,
            agent=item.node,
            requests=item.running,
            reason=item.reason,
            weights=item.weights,
            layout=item.layout,
            paced=item.paced,
            copied=self._keeper.copied.get((cluster, item.name), ""),
        )


def _order(body: bytes) -> tuple[str, Join]:
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        cluster = msgspec.convert(fields.pop("cluster", None), str)
        unknown = fields.keys() - set(Join.__struct_fields__)
        if unknown:
            raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
        order = msgspec.convert(fields | {"type": "join"}, Join)
        if urlsplit(order.url).scheme not in ("http", "https"):
            raise ValueError(f"url {order.url!r} does not begin with http:// or https://")
        Endpoint.parse(order.agent)
        order.spec()
    except (ValueError, RecursionError) as error:
        message = f"{error}. Send cluster and the fields of an instance: name, url, agent."
        raise ApiError(400, "invalid_body", message) from error
    return cluster, order


def _limit_s(text: str | None) -> float:
    if text is None:
        return LEAVE_LIMIT_S
    try:
        limit_s = parse_duration(text)
    except ValueError as error:
        raise ApiError(400, "invalid_limit", f"limit: {error}", param="limit") from error
    if not (math.isfinite(limit_s) and 0 <= limit_s <= _MAX_LIMIT_S):
        raise ApiError(400, "invalid_limit", "limit must be from 0 s to a day.", param="limit")
    return limit_s


async def _mapped(work: Awaitable[None]) -> None:
    try:
        await work
    except MemberRefused as error:
        raise ApiError(409, "refused", f"{error.message}.") from error
    except UnknownCluster as error:
        raise ApiError(404, "unknown_cluster", str(error), param="cluster") from error
    except UnknownInstance as error:
        raise ApiError(404, "unknown_instance", str(error)) from error
    except RpcError as error:
        message = f"The cluster's front does not answer: {error.message}"
        raise ApiError(503, "cluster_unavailable", message, retry_after_s=1) from error
