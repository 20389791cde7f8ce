"""Messages about a node agent's links, each of which is a `netmon.estimate.PathReport`: structs of
service `prfaas.NodeAgent`.

They do not know how they travel. A link is named by the endpoint that the sender connects to,
"host:port". Ages and durations are counted back from the moment of the reply.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| WatchLinks | WatchLinks -> LinkFeed | INVALID |
| SendLinkProbe | SendLinkProbe -> SendLinkProbeReply | INVALID (also: probes are off), NO_ROOM |
"""

from __future__ import annotations

import msgspec

from netmon.estimate import PathReport


class WatchLinks(msgspec.Struct, frozen=True):
    """Ask for all links. The answer comes as soon as there is news after `after_seq`, at the latest
    after `timeout_s`.

    News is a change of any link's condition and, about twice a second, new numbers of links with
    traffic. `sends_probes`: the caller will send the probes that a reply asks for.
    """

    after_seq: int = 0
    timeout_s: float = 0.0
    sends_probes: bool = False


class LinkFeed(msgspec.Struct, frozen=True):
    """All links of an agent. `data_endpoint` is the agent's own receiving address, by which the
    links of others to it are named, unless they go through a proxy.
    """

    seq: int
    data_endpoint: str
    links: list[PathReport]


class SendLinkProbe(msgspec.Struct, frozen=True):
    """Send a probe to the landing that a `ProbeLanding` has opened, and answer when it is over. The
    link's estimate takes the result in. After `lease_s` the probe is given up.
    """

    transfer_id: str
    token: str
    fingerprint: str
    nbytes: int
    host: str
    port: int
    lease_s: float
    grant: bytes = b""
    """A gateway's grant for the call (`kvmanager.agent.grants`)."""


class SendLinkProbeReply(msgspec.Struct, frozen=True):
    """`duration_s` counts from the first byte sent; 0 when none was. `error` "": all bytes were
    acknowledged.
    """

    acked_bytes: int
    duration_s: float
    error: str = ""
