"""How a gateway works together with others, as operators see it. It knows no Redis."""

from __future__ import annotations

import msgspec


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another gateway, and the requests that it has given to instances."""

    name: str
    requests: int


class ProcessNow(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a gateway that has several. `state` is "starting", "serving", "silent" (it does
    not answer), or "ended" until it is started again.
    """

    number: int
    state: str
    pid: int | None
    for_s: float
    """Since it was started last, or ended, seconds."""
    restarts: int


class SharingOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to GET /prfaas/gateways.

    `state` is "joined", or "alone" with the reason in `error`. `leader` is the name of the gateway
    that acts on the long term, as far as this one knows.
    """

    name: str
    state: str
    for_s: float
    error: str = ""
    leads: bool
    leader: str
    token: int
    peers: list[Peer]
    pending: int
    """Observations that the others have not been told."""
    processes: list[ProcessNow] = []
    """The processes of this gateway, if it has several; `name` and the rest are those of the one
    that answers.
    """
