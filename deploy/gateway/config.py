"""The settings of a gateway: parsed once at the start, frozen afterwards.

Unknown keys are errors. It does not know region files; the launcher turns those into this.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from deploy.gateway.api_keys import ApiKey, tenants_by_key
from deploy.gateway.media.config import MediaSection
from deploy.gateway.scheduling.config import SchedulingConfig
from kvmanager.config_files.fields import (
    Address,
    Bytes,
    ListenAddress,
    ListenHost,
    Port,
    Positive,
    Seconds,
    SecondsOrZero,
    SecretText,
    Section,
    Tokens,
    TokensOrZero,
    spelled,
)
from kvmanager.config_files.security import is_loopback
from kvmanager.config_files.units import format_bytes, parse_rate
from scheduler.live.ledger import KEEP_ENDED_S
from scheduler.live.settings import HAND_OFF_TOKENS, REPORT_EVERY_S
from transport import Endpoint
from transport.rpc import MAX_MESSAGE_BYTES

LEAST_KEEP: Final = 64 << 20
"""The least disk space of the recordings of one process, bytes."""

MOST_BODY: Final = MAX_MESSAGE_BYTES - (16 << 20)
"""The largest body that a front takes in one message beside the ids of its prompt, bytes."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


def _fits_a_message(nbytes: int) -> int:
    if nbytes > MOST_BODY:
        raise ValueError(f"fronts take no larger one than {format_bytes(MOST_BODY)}; write that")
    return nbytes


class ModelConfig(Section):
    """One served model."""

    name: Annotated[str, Field(min_length=1)]
    """The name that clients ask for."""
    max_model_len: Tokens | None = None
    """The most tokens of prompt and output together."""
    root: str | None = None
    """Where its weights come from, as /v1/models shows it."""
    adapters: dict[Annotated[str, Field(min_length=1)], str] = Field(default={})
    """Its LoRA adapters: the names that clients ask for, and where the weights of each come from.
    All its engines must have them.
    """


class TimeoutConfig(Section):
    """Limits on every wait, in seconds or such as 500ms."""

    connect_s: Seconds = 5.0
    """The wait for a connection to an engine."""
    body_s: Seconds = 60.0
    """The wait for the body of a request."""
    body_grace_s: Seconds = 10.0
    """The wait for a body that arrives more slowly than `min_client_bytes_per_s`."""
    render_s: Seconds = 30.0
    """The wait for an engine to render a prompt."""
    cluster_s: Seconds = 10.0
    """The wait for the answer of a cluster's front."""
    engine_silence_s: Seconds = 600.0
    """The wait without a byte from an engine, also for the first byte of a stream, and before it
    the wait for a landing. It must exceed the longest queueing plus prefill.
    """
    engine_answer_s: Seconds | None = None
    """The wait for an answer that is not streamed: an engine sends nothing of it before it is
    whole. It must exceed the longest queueing, prefill and decoding. Left out: six times
    `engine_silence_s`.
    """
    client_stall_s: Seconds = 120.0
    """The wait for a client that does not read, or reads more slowly than
    `min_client_bytes_per_s`.
    """
    result_grace_s: Seconds = 2.0
    """How long a finished answer waits for the numbers of its transfer, and a failed landing for
    the reason from the prefill leg.
    """
    drain_s: Seconds = 30.0
    """The wait for requests in flight when the gateway stops."""

    @property
    def whole_answer_s(self) -> float:
        """The wait for an answer that is not streamed."""
        return self.engine_answer_s or 6 * self.engine_silence_s


class DirectorySection(Section):
    """Which directory follows what is cached where."""

    kind: Literal["embedded", "grpc", "redis"] = "embedded"
    """embedded: this gateway, which asks every node agent. grpc: a `prfaas directory` at `target`.
    redis: a server at `url` that another process keeps filled, for several gateways.
    """
    target: Address | None = None
    """host:port of the `prfaas directory`, with kind grpc."""
    url: SecretText = ""
    """URL of the Redis server, with kind redis."""

    @model_validator(mode="after")
    def _check(self) -> DirectorySection:
        wanted = {"embedded": set(), "grpc": {"target"}, "redis": {"url"}}[self.kind]
        given = {name for name in ("target", "url") if getattr(self, name)}
        if missing := wanted - given:
            raise ValueError(f"a directory of kind {self.kind} needs {', '.join(missing)}")
        if unused := given - wanted:
            raise ValueError(f"a directory of kind {self.kind} has no {', '.join(unused)}")
        return self


class SharedSection(Section):
    """How the gateways of a region share what they learn and what tenants have used up."""

    redis: SecretText = ""
    """URL of a Redis server that all of them reach. Left out: that of `directory.url`."""
    region: Name = "region"
    """Name of the region there, if regions share a server. `prfaas up` gives the region's name."""
    name: Name = "gateway"
    """What operators call this gateway. `prfaas up` gives the name of its node."""


class SharedUplink(Section):
    """Bandwidth that all links from a cluster share (egress), or all links to it (ingress)."""

    cluster: Annotated[str, Field(min_length=1)]
    """The name of the cluster."""
    way: Literal["egress", "ingress"]
    """egress: what leaves the cluster. ingress: what comes to it."""
    rate: Annotated[Positive, spelled(parse_rate)]
    """The rate, bytes per second or such as 20Gbit."""


class RecorderSection(Section):
    """The flight recorder: writes what scheduling is told and what it decides, but no prompt.

    `prfaas simulate --recording` takes the same decisions again.
    """

    dir: Path
    """The directory of the files. It is created if it is missing."""
    keep: Annotated[Bytes, Field(ge=LEAST_KEEP)] = 1 << 30
    """The most disk space that they take, a number or such as 1GiB. The oldest files are
    deleted first.
    """


class GatewaySection(Section):
    """The settings of a gateway that a region's file may contain, too."""

    host: ListenHost = "127.0.0.1"
    """The address that clients connect to; 0.0.0.0 for all of IPv4, and :: for all."""
    port: Port = 8000
    """The port that clients connect to; 0: any free one."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """How many processes serve at `host` and `port`; the kernel spreads connections over them.
    Several need `shared`, and fronts that are processes of their own. Each counts its own requests
    and bytes for `max_in_flight`, `max_buffered_bytes` and the like.
    """
    threshold_tokens: TokensOrZero = 1024
    """Prompts with more uncached tokens, a number or such as 8k, go to prefill clusters, until the
    long-term loop knows better.
    """
    operators: tuple[str, ...] = ()
    """Names of the API keys that may change roles and see what is protected. Left out: the key, if
    only one tenant has keys.
    """
    protect_admin: bool = True
    """/metrics, /prfaas/* and GET /v1/pd_role ask for an operator's key where there are keys."""
    admin: ListenAddress | None = None
    """host:port where these pages are, and nowhere else. Left out: at `host` and `port`."""
    priority_tenants: tuple[str, ...] = ()
    """Names of the API keys whose requests may go before others (a negative `priority`). Without
    keys all may.
    """
    shared_caches: dict[str, tuple[str, ...]] = Field(default={})
    """Tenants that share what is cached of their prompts, by the name of their group. A tenant in
    no group shares with nobody.
    """
    home: str = ""
    """The PD cluster that decodes requests whose client and API key name none. Left out: the
    gateway's own, else the first.
    """
    homes: dict[str, str] = Field(default={})
    """The PD cluster that decodes the requests of an API key, by the name of the key. A request's
    header `x-prfaas-home` goes before it.
    """
    max_body_bytes: Annotated[Bytes, AfterValidator(_fits_a_message)] = 32 << 20
    """The largest body of a request, bytes, a number or such as 32MiB. Fronts that are processes of
    their own take no larger one than 48MiB.
    """
    min_client_bytes_per_s: Annotated[Positive, spelled(parse_rate)] = 1024.0
    """A client that sends its body or reads its answer more slowly, bytes per second or such as
    8kbit, is cut off; see `timeouts.body_grace_s` and `timeouts.client_stall_s`.
    """
    client_keep_alive_s: Seconds = 75.0
    """How long an idle connection of a client is kept. It must exceed what a load balancer in front
    of the gateway waits (60 s is usual, Google's waits 600 s), else some requests end in 502.
    """
    stream_keep_alive_s: SecondsOrZero = 30.0
    """A stream that has been silent for so long gets a comment, which clients pass over, so that no
    proxy cuts it. Before the first token this sends the status 200, too: an error after it is an
    event of the stream. 0: never.
    """
    allowed_origins: tuple[str, ...] = ()
    """Origins such as https://chat.example whose pages in a browser may use the API, `*`: all.
    They still need an API key where there are keys. Pages for operators are for no other origin.
    """
    media: MediaSection = MediaSection()
    """Images, videos and audio at addresses in requests: who fetches them, within which limits."""
    directory: DirectorySection = DirectorySection()
    """Which directory follows what is cached where."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """How requests are routed, queued and refused, and roles changed."""
    recorder: RecorderSection | None = None
    """Records scheduling to files. Left out: nothing is recorded."""
    shared: SharedSection | None = None
    """What several gateways share, through Redis. Left out: this is the region's only gateway."""
    state: Path | None = None
    """File in which it keeps what it has learnt, over a restart. Left out: `prfaas up` keeps it in
    the directory of the run, and `prfaas gateway` nowhere.
    """
    timeouts: TimeoutConfig = TimeoutConfig()
    """The limits on every wait."""
    hand_off_tokens: Tokens = HAND_OFF_TOKENS
    """Prompts with more uncached tokens prefill on another instance than they decode on."""
    template_tokens: TokensOrZero = 256
    """How many tokens a chat template may add to the text in the body. The estimate saves the
    rendering of prompts that are certainly short.
    """
    max_buffered_bytes: Bytes = 1 << 30
    """The most bytes of all bodies and answers in one piece together, a number or such as 1GiB."""
    max_tenant_buffered_bytes: Bytes = 512 << 20
    """The most bytes of the bodies of one tenant's requests in flight, and of their answers in one
    piece, a number or such as 512MiB.
    """
    max_answer_bytes: Bytes = 256 << 20
    """The largest answer that is not streamed, bytes, a number or such as 256MiB."""
    max_in_flight: Annotated[int, Field(gt=0)] = 512
    """The most requests in flight."""
    max_uploads_per_address: Annotated[int, Field(gt=0)] = 128
    """The most bodies that arrive from one address at a time. An IPv6 network of 64 bits counts as
    one address.
    """
    max_uploads_per_tenant: Annotated[int, Field(gt=0)] = 256
    """The most bodies that arrive from one tenant at a time."""
    retry_after_s: Annotated[int, Field(ge=1)] = 1
    """The least Retry-After, seconds, for a client that is refused because of `max_in_flight` or
    `max_buffered_bytes`. It is longer where requests end more slowly than that.
    """
    num_records: Annotated[int, Field(gt=0)] = 1000
    """How many ended requests are remembered for `prfaas explain`."""
    report_interval_s: Seconds = REPORT_EVERY_S
    """The time between two reports of a cluster, seconds or such as 500ms."""
    report_stale_s: Seconds = 5.0
    """An older report of a cluster is not used, seconds or such as 5s."""

    @property
    def shared_url(self) -> str:
        """The Redis server through which gateways share, "" if this one does not."""
        return "" if self.shared is None else self.shared.redis or self.directory.url

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        if self.shared is not None and not self.shared_url:
            raise ValueError("shared needs redis, the URL of a server (or directory.url)")
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.max_buffered_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_bytes must hold at least one body of max_body_bytes")
        if self.report_stale_s <= self.report_interval_s:
            raise ValueError("report_stale_s must be longer than report_interval_s")
        # The scheduler's ledger forgets what ended longer ago than this.
        if self.report_stale_s > KEEP_ENDED_S:
            raise ValueError(
                f"report_stale_s must be at most {KEEP_ENDED_S:g}: what has ended since an older"
                " report would count again"
            )
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.processes == 1:
            return self
        if self.shared is None:
            raise ValueError(
                f"processes: {self.processes} processes need shared, the Redis server through"
                " which they work together; give it, or write processes: 1"
            )
        if self.recorder is not None and self.recorder.keep < self.processes * LEAST_KEEP:
            least = format_bytes(self.processes * LEAST_KEEP)
            raise ValueError(f"recorder.keep: {self.processes} processes need at least {least}")
        return self


def open_listeners(gateway: GatewaySection) -> dict[str, str]:
    """The danger of each address that other hosts reach if there are no API keys, by setting."""
    listeners = {"host": (gateway.host, "use the models")}
    if gateway.admin is not None:
        listeners["admin"] = (Endpoint.parse(gateway.admin).host, "change roles")
    return {
        name: f"{host} is reachable from other hosts and anybody could {what}"
        for name, (host, what) in listeners.items()
        if not is_loopback(host)
    }


class GatewayConfig(GatewaySection):
    """Everything a gateway needs besides its clusters."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    """The models that it serves."""
    api_keys: tuple[ApiKey, ...] = ()
    """The keys that clients must show; none: no authentication."""

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        names = [name for model in self.models for name in (model.name, *model.adapters)]
        if len(set(names)) != len(names):
            message = "models: two models or adapters have the same name; names must differ"
            raise ValueError(f"{message}: {names}")
        return self


def with_api_keys(config: GatewayConfig, keys: Iterable[ApiKey]) -> GatewayConfig:
    """`config` with these keys.

    Raises `ValueError` for a key that two tenants have, for limits or rights of a tenant without a
    key, and for a tenant that shares with two groups.
    """
    keys = tuple(keys)
    tenants = tenants_by_key(keys)
    sharing = [name for names in config.shared_caches.values() for name in names]
    if twice := sorted({name for name in sharing if sharing.count(name) > 1}):
        raise ValueError(f"gateway.shared_caches: {', '.join(twice)} may be in one group only")
    named = {
        "gateway.scheduling.admission.tenants": config.scheduling.admission.tenants.keys(),
        "gateway.operators": config.operators,
        "gateway.priority_tenants": config.priority_tenants,
        "gateway.shared_caches": sharing,
        "gateway.homes": config.homes,
    }
    for where, names in named.items():
        if unknown := sorted(set(names).difference(tenants.values())):
            known = ", ".join(sorted(set(tenants.values()))) or "none, as there are no API keys"
            raise ValueError(
                f"{where}: no API key has the name {', '.join(map(repr, unknown))}; "
                f"tenants with keys: {known}"
            )
    return config.model_copy(update={"api_keys": keys})
