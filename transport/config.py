"""The transport's settings, immutable. This module does not know which file or command line set
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from transport.codec.codecs import Codec

KIB: Final = 1024
MIB: Final[int] = 1024 * KIB
NEAR_RTT_S = 1e-3
"""Below this a path is within one host or one site: CPU is its limit, not the network."""
_DAY_S: Final = 86400.0
_MOST: Final = 2**31 - 1
"""The largest number that fits an int of the kernel's."""
_TIMEOUT_S: Final = (0.001, _DAY_S)
_DELAY_S: Final = (0.0, _DAY_S)
# A receiver reads a coded or repeated frame into scratch memory of the frame's size, so this bounds
# what one connection can make it allocate.
_FRAME_BYTES: Final = (1, 64 * MIB)
_BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "frame_bytes": _FRAME_BYTES,
    "max_autotuned_frame_bytes": _FRAME_BYTES,
    "max_frame_bytes": _FRAME_BYTES,
    "ack_batch_bytes": (0, _MOST),
    "ack_delay_s": _DELAY_S,
    # A socket with a timeout of 0 does not block: it would fail at once.
    "connect_timeout_s": _TIMEOUT_S,
    "handshake_timeout_s": _TIMEOUT_S,
    "ack_timeout_s": _TIMEOUT_S,
    "idle_timeout_s": _TIMEOUT_S,
    "link_idle_timeout_s": _DELAY_S,
    "drop_grace_s": _DELAY_S,
    "tombstone_s": _DELAY_S,
    # Without a pause all threads of a link would dial at full speed.
    "reconnect_first_s": _TIMEOUT_S,
    "reconnect_max_s": _TIMEOUT_S,
    # tcp(7), and MAX_TCP_KEEP* in the kernel's include/net/tcp.h.
    "keepalive_idle_s": (0, 32767),
    "keepalive_interval_s": (1, 32767),
    "keepalive_probes": (1, 127),
    "notsent_lowat_bytes": (0, _MOST),
    "pace_bytes_per_s": (0.0, math.inf),
    "tenant_bytes_per_s": (0.0, math.inf),
}
"""The least and the most of each number; of those that are not here, 1 and _MOST."""
CODEC_NAMES = ("auto", "none", *(codec.name.lower() for codec in Codec if codec is not Codec.RAW))


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for mutual TLS: both ends show a certificate signed by `ca`. They may be replaced
    while the process runs: new connections use the new ones.

    `cert` names its holder in URIs `spiffe://REGION/ROLE/NAME` (`transport.identity`), and both
    ends check region and role of the other. A sender or caller also wants to see the host that it
    means in the other's certificate, or `server_name`, if that is given.
    """

    cert: Path
    key: Path
    ca: Path
    server_name: str | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key, self.ca)

    @classmethod
    def in_directory(cls, path: Path) -> TlsFiles:
        """The files under the names that cert-manager and Kubernetes give them. Opens none."""
        return cls(cert=path / "tls.crt", key=path / "tls.key", ca=path / "ca.crt")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Everything tunable; the defaults are the ones that did best on measured WAN and loopback
    paths.
    """

    num_connections: int = 8
    """TCP connections of a sender to one endpoint, shared by all its transfers: how many it starts
    with when `autotune` is on, how many it uses when it is off.
    """
    autotune: bool = True
    """Whether each link finds its number of connections and its frame size by measurement."""
    max_link_connections: int = 16
    """Most connections that autotuning opens to one endpoint."""
    frame_bytes: int = 256 * KIB
    """Payload a sender puts into one DATA frame (less when the receiver allows less); the least
    when `autotune` is on.
    """
    max_autotuned_frame_bytes: int = 2 * MIB
    """Most payload of one frame on links so fast that smaller ones would cost too much CPU."""
    max_frame_bytes: int = 4 * MIB
    """Most payload a receiver takes in one DATA frame."""
    ack_batch_bytes: int = 4 * MIB
    """A receiver acknowledges after at most this many bytes, and earlier when no data is waiting
    and none is announced.
    """
    ack_delay_s: float = 0.01
    """A receiver acknowledges after at most this many seconds."""

    connect_timeout_s: float = 5.0
    """Most seconds to establish a TCP connection."""
    handshake_timeout_s: float = 5.0
    """Most seconds for the TLS handshake and the transport's own one on a new connection."""
    ack_timeout_s: float = 10.0
    """A connection with unacknowledged data and no sign of life for this long is given up."""
    idle_timeout_s: float = 30.0
    """A transfer that has something to do and makes no progress for this long fails. One with
    nothing ready to be sent does not age at the sender; at the receiver it ages while no connection
    serves it.
    """
    link_idle_timeout_s: float = 300.0
    """Connections of a link without transfers are closed after this long."""
    drop_grace_s: float = 0.25
    """How long drop() lets a frame in flight finish before it closes that connection."""
    tombstone_s: float = 120.0
    """How long a receiver remembers the end of a transfer, to answer a sender that missed it."""

    reconnect_first_s: float = 0.05
    """Seconds before the first attempt to reconnect; each further failure about doubles them."""
    reconnect_max_s: float = 2.0
    """Most seconds between two tries to connect."""

    keepalive_idle_s: int = 10
    """TCP_KEEPIDLE: seconds of silence before the kernel probes a connection; 0: it never does."""
    keepalive_interval_s: int = 3
    """TCP_KEEPINTVL: seconds between two probes."""
    keepalive_probes: int = 3
    """TCP_KEEPCNT: unanswered probes after which a connection is dead."""

    congestion: str | None = "bbr"
    """TCP_CONGESTION of sending sockets; None or a name the kernel refuses leaves its default."""
    near_congestion: str | None = "reno"
    """TCP_CONGESTION on a path with a round trip below 1 ms, where the pacing of bbr only costs
    CPU.
    """
    notsent_lowat_bytes: int = 128 * KIB
    """TCP_NOTSENT_LOWAT: unsent bytes that the kernel may hold for one connection, so that a slow
    connection does not keep data from the fast ones; 0 leaves the kernel's default.
    """

    pace_bytes_per_s: float = 0.0
    """Most bytes a second that a sender puts on one link; 0: no limit."""
    tenant_bytes_per_s: float = 0.0
    """Most bytes a second of one tenant on one link; 0: no budget."""
    checksum: bool = True
    """Whether every DATA frame carries a checksum; both ends must turn it off to go without."""
    codec: str = "auto"
    """Coding of DATA: "auto" (lossless, while it makes transfers faster), "none", the name of one
    lossless codec, or "fp8" (lossy, bf16 only, and only when the receiver says "fp8" as well).
    """
    tls: TlsFiles | None = None

    max_connections: int = 512
    """Most connections that one receiver serves. Peers without an accepted transfer have at most a
    quarter of them; with TLS those in their handshake have another quarter.
    """
    max_transfers_per_connection: int = 1024
    """Most transfers that one connection may carry at a time."""
    max_ranges_per_transfer: int = 65536
    """Most separate verified ranges that a receiver tracks for one transfer; more fail it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least, most = _BOUNDS.get(field.name, (1, _MOST))
            if not least <= value <= most:  # NaN as well
                raise ValueError(f"{field.name} must be between {least:g} and {most:g}: {value}")
        # A connection that is dead has to be given up before its transfers are. Otherwise none of
        # them ever goes on over another connection.
        for name in ("handshake_timeout_s", "ack_timeout_s"):
            if getattr(self, name) >= self.idle_timeout_s:
                raise ValueError(
                    f"{name} is {getattr(self, name):g}, idle_timeout_s is {self.idle_timeout_s:g}:"
                    f" a lost connection would not be replaced in time; set {name} lower"
                )
        if self.codec not in CODEC_NAMES:
            raise ValueError(f"codec must be one of {', '.join(CODEC_NAMES)}, got {self.codec!r}")

    @property
    def tick_s(self) -> float:
        """Seconds between two rounds of the watchdogs: a quarter of the shortest timeout, but
        between 20 ms and 1 s.
        """
        shortest = min(
            self.handshake_timeout_s,
            self.ack_timeout_s,
            self.idle_timeout_s,
            self.connect_timeout_s,
        )
        return max(0.02, min(1.0, shortest / 4))
