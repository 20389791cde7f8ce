"""Finds by measurement how many connections one link should use, and how large its frames.

The tuner observes the link at every tick (`observe`) and sets `width` and `frame_bytes`. Only time
in which the link was backlogged counts, summed up over transfers. The first moments of the link,
and those after a change, do not count, because new connections are in slow start. A *window* of
such time gives one rate. It is long enough to tell rates apart when round trips are long or
acknowledged frames are few.

    UP    the present width is doubled while that gains an eighth; connections that add less to the
          rate only add to the tail of each transfer
    DOWN  then it is halved while that loses less than a twentieth
    HOLD  until round-trip time, loss or rate change for three windows in a row (BBR alone makes one
          in ten seconds slow, to probe), or the next search is due (1 minute of busy time, doubling
          to 16 while nothing is found)

A trial that does clearly worse is ended early. Fewer connections are not tried on a link whose send
buffers are the limit, nor on one that loses packets without a queue. A path under 1 ms begins with
one connection and large frames, because there CPU is the limit.

Pure; time is an argument. Knows no socket. It also keeps what `LinkState` tells about the link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from netmon.tcp_info import TcpInfo, together
from transport.config import KIB, MIB, NEAR_RTT_S, TransportConfig

FAR_RTT_S = 2e-3
"""A path is near below `NEAR_RTT_S` and far from here on. In between it stays what it was."""
NEAR_WIDTH = 1
NEAR_FRAME_BYTES = MIB
FRAME_S = 7e-3
"""A frame should take about this long at the link's rate."""
MIN_WINDOW_S, MAX_WINDOW_S = 0.4, 3.0
WINDOW_RTTS = 8
WINDOW_FRAMES = 8
"""Frames that a connection should have acknowledged in a window. Only whole frames count, so one
more or less in a window is chance.
"""
SETTLE_S, SETTLE_RTTS, START_RTTS = 0.2, 8, 16
CHANGED_WINDOWS = 3
UP_GAIN = 1.12
DOWN_KEEP = 0.95
CLEARLY_WORSE = 0.8
SHRINKABLE_LOSS = 5e-4
LIMITED_SHARE = 0.1
"""Share of busy time above which a window or a buffer counts as a limit."""
FULL_QUEUE_RTTS = 1.5
"""In round trips of the empty path: a longer round trip shows a full queue."""
FIRST_LOOK_S, LAST_LOOK_S = 60.0, 960.0


class TuningPhase(Enum):
    """What the next window is for."""

    UP = "trying more connections"
    DOWN = "trying fewer connections"
    HOLD = "steady"


@dataclass(frozen=True, slots=True)
class TuningWindow:
    """One window of a backlogged link. `carried` adds up the counters of its connections over the
    window; its round-trip time is their mean at the end of the window.
    """

    rate_bytes_per_s: float = 0.0
    carried: TcpInfo = field(default_factory=TcpInfo)

    @property
    def fills_queue(self) -> bool:
        """Whether packets wait in the path for so long that losses mostly come from its queue, and
        so from too many connections.
        """
        path = self.carried
        return bool(path.min_rtt_s) and path.rtt_s > FULL_QUEUE_RTTS * path.min_rtt_s


class LinkTuner:
    """Decides how many connections carry data and how large frames are, for one link."""

    def __init__(self, config: TransportConfig) -> None:
        self.width = config.num_connections
        self.frame_bytes = config.frame_bytes
        self.phase = TuningPhase.UP
        self.measured = TuningWindow()
        """The last window in which anything was acknowledged."""
        self._config = config
        self._is_near: bool | None = None
        self._begun_width = self.width
        self._best: _Found | None = None
        self._steady: TuningWindow | None = None  # None until a first search has ended
        self._num_changed_windows = 0
        self._look_s = FIRST_LOOK_S
        self._since_look_s = 0.0
        self._settle_s = SETTLE_S
        self._last: _Reading | None = None
        self._window = _Window()

    @property
    def is_searching(self) -> bool:
        return self._config.autotune and self.phase is not TuningPhase.HOLD

    @property
    def send_buffers_limit(self) -> bool:
        """Whether send buffers were the limit in the last window: larger ones would help."""
        return self.measured.carried.sndbuf_limited > LIMITED_SHARE

    def observe(
        self,
        infos: Mapping[int, TcpInfo],
        *,
        acked_bytes: int,
        is_backlogged: bool,
        now_s: float,
    ) -> None:
        """Take in an observation. `infos` are by connection; `acked_bytes` counts from the link's
        beginning.
        """
        reading = _Reading(dict(infos), acked_bytes, is_backlogged, now_s)
        last, self._last = self._last, reading
        if not self._config.autotune or not infos:
            return
        self._look_at_distance(reading)
        if last is None or not (last.is_backlogged and is_backlogged):
            return
        elapsed_s = now_s - last.now_s
        if self._settle_s > 0:
            self._settle_s -= elapsed_s
            return
        self._since_look_s += elapsed_s
        self._window.add(last, reading)
        if self._is_whole or self._is_hopeless:
            measured, self._window = self._window.measured(), _Window()
            if measured.rate_bytes_per_s:  # a link that stands still says nothing about its width
                self.measured = measured
                self._fit_frames(measured.rate_bytes_per_s)
                self._step(measured)

    @property
    def _window_s(self) -> float:
        return max(MIN_WINDOW_S, WINDOW_RTTS * self._window.carried.rtt_s)

    @property
    def _enough_bytes(self) -> int:
        return WINDOW_FRAMES * self.width * self.frame_bytes

    @property
    def _is_whole(self) -> bool:
        window = self._window
        if window.elapsed_s < self._window_s:
            return False
        return window.acked_bytes >= self._enough_bytes or window.elapsed_s >= MAX_WINDOW_S

    @property
    def _is_hopeless(self) -> bool:
        """Whether a trial of fewer connections can be broken off."""
        if self.phase is not TuningPhase.DOWN or self._best is None:
            return False
        window, best_bytes_per_s = self._window, self._best.measured.rate_bytes_per_s
        is_long_enough = (
            window.elapsed_s >= self._window_s / 3
            and window.elapsed_s * best_bytes_per_s >= self._enough_bytes / 3
        )
        return is_long_enough and window.rate_bytes_per_s < CLEARLY_WORSE * best_bytes_per_s

    def _look_at_distance(self, reading: _Reading) -> None:
        """Begin a search with the first round-trip time, and again when the path changes."""
        min_rtt_s = min((i.min_rtt_s for i in reading.infos.values() if i.min_rtt_s), default=0.0)
        if not min_rtt_s:
            return
        is_near = min_rtt_s < (FAR_RTT_S if self._is_near else NEAR_RTT_S)
        if is_near == self._is_near:
            return
        self._is_near = is_near
        start = self._config.num_connections
        self._steady = None
        self._begin(min(start, NEAR_WIDTH) if is_near else start)
        self._settle_s = max(SETTLE_S, START_RTTS * min_rtt_s)
        if is_near:
            self.frame_bytes = max(self._config.frame_bytes, self._largest(NEAR_FRAME_BYTES))
        else:
            self.frame_bytes = self._config.frame_bytes

    def _step(self, measured: TuningWindow) -> None:
        best = self._best
        if self.phase is TuningPhase.HOLD:
            self._watch(measured)
        elif best is None:  # the first window of a search, at the width it begins from
            self._grow_or_shrink(measured)
        elif self.phase is TuningPhase.UP:
            if measured.rate_bytes_per_s > UP_GAIN * best.measured.rate_bytes_per_s:
                self._grow_or_shrink(measured)
            else:
                self._set_width(best.width)
                self._shrink_or_hold(best)
        elif measured.rate_bytes_per_s >= DOWN_KEEP * best.measured.rate_bytes_per_s:
            # The highest rate stays the one to keep, so that small losses do not add up.
            rate = max(measured.rate_bytes_per_s, best.measured.rate_bytes_per_s)
            self._best = _Found(self.width, replace(measured, rate_bytes_per_s=rate))
            self._shrink_or_hold(self._best)
        else:
            self._set_width(best.width)
            self._hold(best)

    def _begin(self, width: int) -> None:
        self.phase = TuningPhase.UP
        self._best = None
        self._begun_width = width
        self._num_changed_windows = 0
        self._since_look_s = 0.0
        self._window = _Window()
        self._set_width(width)

    def _grow_or_shrink(self, measured: TuningWindow) -> None:
        self._best = _Found(self.width, measured)
        if not self._try(self.width * 2, TuningPhase.UP):
            self._shrink_or_hold(self._best)

    def _shrink_or_hold(self, best: _Found) -> None:
        measured = best.measured
        is_clean = measured.carried.loss < SHRINKABLE_LOSS or measured.fills_queue
        may_shrink = is_clean and measured.carried.sndbuf_limited < LIMITED_SHARE
        if not (may_shrink and self._try(best.width // 2, TuningPhase.DOWN)):
            self._hold(best)

    def _try(self, width: int, phase: TuningPhase) -> bool:
        """Begin a trial with this width. Returns whether it is possible and differs."""
        width = min(width, max(self._config.max_link_connections, self._config.num_connections))
        if width < 1 or width == self.width:
            return False
        self.phase = phase
        self._set_width(width)
        return True

    def _hold(self, best: _Found) -> None:
        found_nothing = self._steady is not None and best.width == self._begun_width
        self._look_s = min(LAST_LOOK_S, self._look_s * 2) if found_nothing else FIRST_LOOK_S
        self.phase = TuningPhase.HOLD
        self._steady = best.measured
        self._since_look_s = 0.0

    def _watch(self, measured: TuningWindow) -> None:
        has_changed = self._steady is not None and _has_changed(self._steady, measured)
        self._num_changed_windows = self._num_changed_windows + 1 if has_changed else 0
        if self._num_changed_windows >= CHANGED_WINDOWS:
            self._steady = None
            self._begin(self.width)
        elif self._since_look_s >= self._look_s:
            self._begin(self.width)

    def _set_width(self, width: int) -> None:
        if width != self.width:
            self.width = width
            # New connections are in slow start, and a change of load shows a few round trips later.
            self._settle_s = max(SETTLE_S, SETTLE_RTTS * self.measured.carried.rtt_s)

    def _fit_frames(self, rate_bytes_per_s: float) -> None:
        # Changed only when it is clearly off, so that noise in the rate does not resize frames.
        wanted_bytes = rate_bytes_per_s * FRAME_S
        if 0.4 * wanted_bytes < self.frame_bytes <= 1.2 * wanted_bytes:
            return
        fitting = 64 * KIB
        while fitting * 2 <= wanted_bytes:
            fitting *= 2
        self.frame_bytes = max(self._config.frame_bytes, self._largest(fitting))

    def _largest(self, wanted_bytes: int) -> int:
        return min(wanted_bytes, self._config.max_autotuned_frame_bytes)


def _has_changed(steady: TuningWindow, measured: TuningWindow) -> bool:
    rate_ratio = measured.rate_bytes_per_s / max(1.0, steady.rate_bytes_per_s)
    now, then = measured.carried, steady.carried
    rtt_moved_s = abs(now.min_rtt_s - then.min_rtt_s)
    is_rtt_known = bool(now.min_rtt_s and then.min_rtt_s)
    # The least round trip, since the smoothed one moves with the link's own queue.
    has_other_rtt = is_rtt_known and rtt_moved_s > max(2e-3, 0.25 * then.min_rtt_s)
    has_other_loss = now.loss > max(1e-3, 3 * then.loss)
    return not 0.7 < rate_ratio < 1.4 or has_other_rtt or has_other_loss


@dataclass(frozen=True, slots=True)
class _Found:
    width: int
    measured: TuningWindow


@dataclass(frozen=True, slots=True)
class _Reading:
    infos: dict[int, TcpInfo]
    acked_bytes: int
    is_backlogged: bool
    now_s: float


class _Window:
    """Sums over the backlogged time of one window."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.acked_bytes = 0
        self.carried = TcpInfo()

    @property
    def rate_bytes_per_s(self) -> float:
        return self.acked_bytes / self.elapsed_s if self.elapsed_s else 0.0

    def add(self, before: _Reading, after: _Reading) -> None:
        self.elapsed_s += after.now_s - before.now_s
        self.acked_bytes += after.acked_bytes - before.acked_bytes
        gains = [
            info.since(earlier)
            for connection, info in after.infos.items()
            # The round trip of a connection that sent nothing may be long out of date.
            if (earlier := before.infos.get(connection)) and info.sent_bytes != earlier.sent_bytes
        ]
        if gains:
            rtt_s = sum(info.rtt_s for info in gains) / len(gains)
            self.carried = together([self.carried, *gains], rtt_s)

    def measured(self) -> TuningWindow:
        return TuningWindow(self.rate_bytes_per_s, self.carried)
