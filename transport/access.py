"""Which role may call which method, and which role serves it: the policy of a region in one table.

It knows services and methods by name only. A method that is missing here is refused to everybody
who must show a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from transport.identity import Role

_GATEWAY: Final = frozenset[Role]({"gateway"})
_SEES: Final = frozenset[Role]({"gateway", "operator"})
_FRONTS: Final = frozenset[Role]({"gateway", "prefill-front", "pd-front"})
_LANDS: Final = frozenset[Role]({"gateway", "pd-front"})
_FOLLOWS: Final = frozenset[Role]({"gateway", "directory"})
_OPERATOR: Final = frozenset[Role]({"operator"})
# Any member of the region may read the numbers of an agent: they name no prompt.
_MEMBERS: Final = frozenset[Role]({"gateway", "prefill-front", "pd-front", "directory", "operator"})


@dataclass(frozen=True, slots=True)
class ServiceAccess:
    """`servers`: who may serve it. A front inside the gateway has the gateway's name."""

    servers: frozenset[Role]
    callers: Mapping[str, frozenset[Role]]


ACCESS: Final[Mapping[str, ServiceAccess]] = {
    "prfaas.NodeAgent": ServiceAccess(
        servers=frozenset[Role]({"agent"}),
        callers={
            "Status": _MEMBERS,
            "Reserve": _LANDS,
            "OpenOutbox": _FRONTS,
            "Renew": _FRONTS,
            "Cancel": _FRONTS,
            "Await": _FRONTS,
            "HasEmbeddings": _FRONTS,
            "ReserveEmbeddings": _FRONTS,
            "SendEmbeddings": _FRONTS,
            "WatchCache": _FOLLOWS,
            "ListCache": _SEES,
            "ReserveCacheMove": _GATEWAY,
            "SendCacheMove": _GATEWAY,
            # Moves of embeddings, too. Whoever opened a move knows its id, and no one can guess it.
            "CacheMoveStatus": _FRONTS,
            "EndCacheMove": _FRONTS,
            "DropCached": _GATEWAY,
            "WatchLinks": _GATEWAY,
            "SendLinkProbe": _GATEWAY,
            # The gateway probes idle links, the doctor measures those it is asked about.
            "ProbeLanding": _SEES,
            "ProbeEnd": _SEES,
            "ProbeSend": _OPERATOR,
            "ProbeStatus": _OPERATOR,
            # It names processes, devices and addresses of a host.
            "HostFacts": _OPERATOR,
        },
    ),
    "prfaas.PrefillCluster": ServiceAccess(
        servers=frozenset[Role]({"prefill-front"}),
        # `prfaas up` looks at a front with Report, to see whether it serves.
        callers={"Report": _SEES}
        | dict.fromkeys(("Submit", "Drain", "Resume", "Members", "Time"), _GATEWAY),
    ),
    "prfaas.PdCluster": ServiceAccess(
        servers=frozenset[Role]({"pd-front"}),
        callers={"Report": _SEES}
        | dict.fromkeys(
            (
                *("Reserve", "Renew", "AwaitLanding", "Release", "Ended", "Direct", "Place"),
                *("Encode", "Prefill"),
                *("Drain", "Resume", "SetRole", "Members", "Time"),
            ),
            _GATEWAY,
        ),
    ),
    "prfaas.Directory": ServiceAccess(
        servers=frozenset[Role]({"directory"}),
        callers=dict.fromkeys(("Match", "Nodes", "FindEmbeddings"), _SEES),
    ),
}


def callers_of(service: str, method: str) -> frozenset[Role]:
    """The roles that may call it; none for a method that is not in the table."""
    access = ACCESS.get(service)
    return access.callers.get(method, frozenset()) if access is not None else frozenset()
