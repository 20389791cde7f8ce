"""Which calls of a node agent need a gateway's grant, and what a grant for each of them names.

Callers and agents make the same description of a call, so that nothing in it can be forgotten on
one side. `AgentGrants` holds calls against it. It does not know what becomes of a call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from msgspec import structs

from kvmanager.agent.cache.move_messages import ReserveCacheMove, SendCacheMove
from kvmanager.agent.links.messages import SendLinkProbe
from kvmanager.agent.messages import OpenOutbox, Reserve
from kvmanager.agent.probe_messages import ProbeSend
from kvmanager.landing import ReservedLanding
from kvmanager.transfers.records import CallNotGranted
from transport import Endpoint
from transport.grants import (
    SKEW_S,
    Grant,
    Granted,
    GrantFile,
    NotGranted,
    check_grant,
    content_digest,
    key_digest,
    load_public_keys,
    read_grant,
)
from transport.rotating import Rotating

OUTBOX_GRANT_S: Final = 900.0
"""A prefill job may wait in a queue and be tried again, but no longer than this. The landing that
the grant names takes one transfer only.
"""


def reservation(num_tokens: int, token_digest: str, block_keys: bytes, agents: str = "") -> Granted:
    """Memory for the KVCache of these tokens, kept under these keys once it has landed. A front
    chooses the agent after the gateway has signed, so that a grant names all `agents` of the front.
    """
    content = content_digest(str(num_tokens), token_digest, block_keys)
    return Granted(method=Reserve.__name__, agent=agents, content=content)


def outbox_send(landing: ReservedLanding | OpenOutbox) -> Granted:
    """Sending to this landing. A front chooses who prefills, so that no agent is named."""
    return Granted(
        method=OpenOutbox.__name__,
        endpoint=str(Endpoint(landing.host, landing.port)),
        transfer_id=landing.transfer_id,
        content=content_digest(
            landing.layout_fingerprint, str(landing.num_tokens), str(landing.cached_tokens)
        ),
        nbytes=landing.nbytes,
    )


def move_landing(request: ReserveCacheMove, agent: str) -> Granted:
    """Memory at this agent for cached parts, under these keys."""
    return Granted(method=ReserveCacheMove.__name__, agent=agent, content=_moved(request))


def move_send(request: SendCacheMove, agent: str) -> Granted:
    """Sending cached parts of this agent."""
    return Granted(
        method=SendCacheMove.__name__,
        agent=agent,
        endpoint=str(Endpoint(request.host, request.port)),
        transfer_id=request.transfer_id,
        content=_moved(request),
        nbytes=request.nbytes,
    )


def embedding_pull(keys: Sequence[bytes]) -> Granted:
    """Moving some of these embeddings between agents. A front chooses both agents after the gateway
    has signed, so that none is named, and may move each of them several times.
    """
    return Granted(method="PullEmbeddings", content=content_digest(*sorted(keys)))


def probe_send(request: SendLinkProbe | ProbeSend) -> Granted:
    """Sending bytes without meaning."""
    return Granted(
        method=type(request).__name__,
        endpoint=str(Endpoint(request.host, request.port)),
        transfer_id=request.transfer_id,
        nbytes=request.nbytes,
    )


def _moved(request: ReserveCacheMove | SendCacheMove) -> str:
    parts = repr([(index, part) for index, part in request.parts])
    # Gateways that name no namespace sign without it.
    namespace = (request.namespace,) if request.namespace else ()
    return content_digest(request.layout_fingerprint, request.block_keys, parts, *namespace)


class AgentGrants:
    """Holds the calls of one agent against their grants. Without keys everything is granted.

    Errors are `CallNotGranted`.
    """

    def __init__(
        self, file: GrantFile | None, *, agent: str, send_to: Collection[Endpoint] | None
    ) -> None:
        """`agent`: where this agent receives. `send_to`: the endpoints of its configuration.
        Raises transport.LocalError for a file that cannot be used.
        """
        self._file = file
        self._keys = None if file is None else Rotating(file, load_public_keys)
        self.agent = agent
        self._names_endpoints = send_to is not None
        self._used: dict[bytes, float] = {}  # nonce -> when its grant has ended for every clock

    def key_digests(self) -> list[str]:
        """The keys with which grants are checked, each by its digest."""
        keys = () if self._keys is None else self._keys.current(time.monotonic())
        return [key_digest(key) for key in keys]

    def require(self, raw: bytes, wanted: Granted) -> None:
        """The call must be granted; it may be made again, because what it names is used once."""
        self._checked(raw, wanted)

    @contextlib.contextmanager
    def once(self, raw: bytes, wanted: Granted) -> Iterator[None]:
        """The call must be granted, and is granted no second time unless the block raises: each
        call opens a landing of its own, whose token is told to its caller.
        """
        grant = self._checked(raw, wanted)
        if grant is None:
            yield
            return
        if grant.nonce in self._used:
            raise CallNotGranted(f"{wanted.method}: this grant has been used before")
        self._used[grant.nonce] = grant.ends_s + SKEW_S
        try:
            yield
        except BaseException:
            self._used.pop(grant.nonce, None)
            raise

    def require_for_probe(self, raw: bytes, wanted: Granted) -> None:
        """Probes carry no KVCache: they go without a grant to the endpoints of the configuration,
        which the sender holds them to.
        """
        if not self._names_endpoints:
            self._require_with_hint(raw, wanted)

    def require_within_send_to(self, raw: bytes, wanted: Granted, endpoint: Endpoint) -> None:
        """The call must be granted. Its grant need not name the endpoint where the configuration
        does, which the sender holds the call to.
        """
        if not self._names_endpoints:
            wanted = structs.replace(wanted, endpoint=str(endpoint))
        self._require_with_hint(raw, wanted)

    def _require_with_hint(self, raw: bytes, wanted: Granted) -> None:
        try:
            self.require(raw, wanted)
        except CallNotGranted as error:
            if not wanted.endpoint:
                raise
            message = f"{error}; {wanted.endpoint} could be named in send_to of this agent"
            raise CallNotGranted(message) from error

    def _checked(self, raw: bytes, wanted: Granted) -> Grant | None:
        if self._keys is None or self._file is None:
            return None
        # Grants are signed elsewhere: only wall clocks are about the same there and here.
        now_s = time.time()
        while self._used and next(iter(self._used.values())) < now_s:  # about in order of time
            del self._used[next(iter(self._used))]
        try:
            grant = read_grant(self._keys.current(time.monotonic()), raw, wanted.method)
            check_grant(grant, wanted, region=self._file.region, now_s=now_s)
        except NotGranted as error:
            raise CallNotGranted(str(error)) from error
        return grant
