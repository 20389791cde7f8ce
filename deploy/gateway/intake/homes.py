"""The home of a request: the PD cluster that decodes it unless it spills to another one.

The request's header says it, else the settings of its API key, else that of the gateway. A model
that has no instance in that cluster is at home in the first one where it has. This file does not
know when a request spills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from deploy.gateway.errors import ApiError
from scheduler.reports import ClusterReport

HOME_HEADER: Final = "x-prfaas-home"

Reports = Mapping[str, ClusterReport | None]


@dataclass(frozen=True, slots=True)
class Homes:
    """Tells the homes of requests. `reports` gives the last report of every PD cluster, in the
    order of the configuration. `default` is a PD cluster, "" for the first; `by_tenant` are those
    of API keys.
    """

    reports: Callable[[], Reports]
    default: str
    by_tenant: Mapping[str, str]

    def home(self, tenant: str, model: str, wanted: str | None) -> str:
        """The home of a request; `wanted` is its header. Raises `ApiError` 400 for a name that is
        no PD cluster's.
        """
        reports = self.reports()
        names = list(reports)
        if wanted is not None and wanted not in reports:
            message = f"No PD cluster is called `{wanted[:200]}`. There are: {', '.join(names)}."
            raise ApiError(400, "unknown_home", message, param=HOME_HEADER)
        home = wanted or self.by_tenant.get(tenant) or self.default or names[0]
        if may_have(reports[home], model):
            return home
        # A cluster that does not report is no better than one that has not got the model.
        others = (name for name in names if reports[name] and may_have(reports[name], model))
        return next(others, home)


def may_have(report: ClusterReport | None, model: str) -> bool:
    """Whether the cluster has instances that answer requests for the model, healthy or not, as far
    as is known.
    """
    if report is None or not report.instances:
        return True
    return any(item.role != "encode" and item.model in ("", model) for item in report.instances)
