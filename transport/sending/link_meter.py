"""Feeds one link's measurements to its tuner and its coder at every tick. It is the shell around
`LinkTuner`.

It reads TCP_INFO of the link's connections. Each method says whether it needs the link's lock.
Knows no frame and no transfer.
"""

from __future__ import annotations

from collections.abc import Mapping

from netmon.tcp_info import TcpInfo
from transport.codec.coder import LinkCoder
from transport.config import TransportConfig
from transport.sending.link_state import Backlog, ConnectionState, LinkState
from transport.sending.tuning import LinkTuner, TuningWindow
from transport.sockets import SocketOwner

Streams = Mapping[int, SocketOwner]
"""The connections whose handshake is done, by number."""


class LinkMeter:
    """Reads one link's connections for its tuner and its coder."""

    def __init__(self, config: TransportConfig, coder: LinkCoder) -> None:
        self._coder = coder
        self._tuner = LinkTuner(config)
        self._infos: dict[int, TcpInfo] = {}
        # As the kernel counts them, so that coding does not look like a faster link.
        self._acked_wire_bytes = 0
        self._grown_after: TuningWindow | None = None

    @property
    def width(self) -> int:
        return self._tuner.width

    @property
    def frame_bytes(self) -> int:
        return self._tuner.frame_bytes

    def tell_coder(self, *, is_backlogged: bool, now_s: float) -> None:
        """Feed the coder; called without the lock. While the tuner tries numbers of connections,
        the link's rate says nothing about codecs.
        """
        is_steady = is_backlogged and not self._tuner.is_searching
        self._coder.tick(is_backlogged=is_steady, num_lanes=self._tuner.width, now_s=now_s)

    def observe(self, infos: Mapping[int, TcpInfo], *, is_backlogged: bool, now_s: float) -> None:
        """Feed the tuner with `infos` by connection; called with the lock."""
        for number, info in infos.items():
            known = self._infos.get(number)
            self._acked_wire_bytes += info.acked_bytes - (known.acked_bytes if known else 0)
        self._infos = dict(infos)
        self._tuner.observe(
            self._infos,
            acked_bytes=self._acked_wire_bytes,
            is_backlogged=is_backlogged,
            now_s=now_s,
        )

    def grow_buffers(self, streams: Streams) -> None:
        """Grow send buffers if they were the limit, once for each window that shows it. Called
        without the lock.
        """
        measured = self._tuner.measured
        if self._tuner.send_buffers_limit and measured is not self._grown_after:
            self._grown_after = measured
            for stream in streams.values():
                stream.grow_send_buffer()

    def state(
        self,
        endpoint: str,
        streams: Streams,
        carrying: frozenset[int],
        *,
        acked_bytes: int,
        backlog: Backlog,
        trouble: str,
    ) -> LinkState:
        """A snapshot with fresh numbers of the kernel; called without the lock. `carrying`: the
        connections that carry data.
        """
        now = {number: stream.tcp_info() for number, stream in streams.items()}
        infos = self._infos | {number: info for number, info in now.items() if info is not None}
        return LinkState(
            endpoint=endpoint,
            width=self._tuner.width,
            frame_bytes=self._tuner.frame_bytes,
            phase=self._tuner.phase.value,
            measured=self._tuner.measured,
            codec=self._coder.codec_name,
            codec_reason=self._coder.reason,
            acked_bytes=acked_bytes,
            connections=[
                _connection_state(number, info, streams.get(number), number in carrying)
                for number, info in sorted(infos.items())
            ],
            backlog=backlog,
            trouble=trouble,
        )


def _connection_state(
    number: int, info: TcpInfo, stream: SocketOwner | None, carries_data: bool
) -> ConnectionState:
    return ConnectionState(
        number,
        carries_data,
        info,
        congestion=stream.congestion() if stream is not None else "",
        send_buffer_bytes=stream.send_buffer_bytes() if stream is not None else 0,
        is_open=stream is not None,
    )
