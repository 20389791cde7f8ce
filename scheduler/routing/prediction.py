"""When a request's prefill would end and its first token come, at one place, part by part.

    TTFT = queue + move + prefill + transfer tail + wait for a slot + one decode step + overhead

1. Queue. The work ahead is poured over the cluster's usable instances, the one that is free first
   takes it first: a request begins when the lowest level is reached.
2. Move. A cached prefix that is fetched from elsewhere meanwhile; the prefill waits for it.
3. Prefill. T(whole prompt) less what the cached part saves (`scheduler.routing.profiles`).
4. Tail. The link is a fluid queue, first come, first served, at its present rate: the backlog of
   now, what others emit until then, the request's own KVCache emitted evenly over its prefill and
   its fixed bytes at the end. The tail is what is unsent when the prefill ends, over the rate.
5. Slot. Decode slots come free in the order in which their decodes end; requests that land earlier
   take them earlier.

Everything grows with load: more work ahead, a fuller pool, a longer backlog or a slower link never
make a prediction shorter. An instance that cannot be had or a link that carries nothing is `inf`.
Pure, no clock. What is predicted against what was measured teaches `ProfileCorrection` and
`OverheadMeter`. Knows no routes, thresholds or reasons.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.views import ClusterView, DecodeView


class PrefillTask(NamedTuple):
    """What one request asks of one place.

    `num_tokens` is the whole prompt, of which `cached_tokens` need not be computed there, once the
    move that takes `move_s` is over. `token_bytes` leave evenly during the prefill, `fixed_bytes`
    at its end; both 0 where nothing is transferred.
    """

    num_tokens: int
    cached_tokens: int = 0
    token_bytes: float = 0.0
    fixed_bytes: float = 0.0
    move_s: float = 0.0


class Prediction(NamedTuple):
    """Parts of the time to first token, s, in the order in which they pass. See the module text.

    `move_s` is only what the move delays beyond the queue.
    """

    queue_s: float = 0.0
    move_s: float = 0.0
    prefill_s: float = 0.0
    tail_s: float = 0.0
    slot_s: float = 0.0
    step_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def prefill_end_s(self) -> float:
        """Time from now until the prompt is computed."""
        return self.queue_s + self.move_s + self.prefill_s

    @property
    def landed_s(self) -> float:
        """Time from now until the KVCache is where decoding happens."""
        return self.queue_s + self.move_s + self.prefill_s + self.tail_s

    @property
    def ttft_s(self) -> float:
        """Time from now until the first token."""
        queue_s, move_s, prefill_s, tail_s, slot_s, step_s, overhead_s = self
        return queue_s + move_s + prefill_s + tail_s + slot_s + step_s + overhead_s


def predict(
    task: PrefillTask, cluster: ClusterView, decode: DecodeView, overhead_s: float = 0.0
) -> Prediction:
    """TTFT of a request that is prefilled in `cluster` and decodes in `decode`."""
    queue_s = queue_wait_s(cluster.queued_s, cluster.free_s)
    prefill_s = cluster.prefill.prefill_s(task.num_tokens, task.cached_tokens)
    begin_s = max(queue_s, task.move_s)
    # No instance is usable. Below, infinities would be subtracted and give nan.
    if begin_s == math.inf:
        return Prediction(begin_s, 0.0, prefill_s, 0.0, 0.0, decode.step_s, overhead_s)
    tail_s = 0.0
    if cluster.link is not None:
        tail_s = transfer_tail_s(cluster.link, begin_s, prefill_s, task)
    slot_s = slot_wait_s(decode, begin_s + prefill_s + tail_s)
    return Prediction(
        queue_s, begin_s - queue_s, prefill_s, tail_s, slot_s, decode.step_s, overhead_s
    )


def queue_wait_s(queued_s: float, free_s: Sequence[float]) -> float:
    """When a prefill behind `queued_s` of work begins, on whichever instance is free first.

    `free_s` are the times until each usable instance is free, ascending. The result is the least w
    for which they are free for `queued_s` altogether before w.
    """
    below_s = 0.0
    for num_below, wait_s in enumerate(free_s):
        if num_below and wait_s * num_below - below_s >= queued_s:
            return (queued_s + below_s) / num_below
        below_s += wait_s
    return (queued_s + below_s) / len(free_s) if free_s else math.inf


def transfer_tail_s(link: LinkView, begin_s: float, prefill_s: float, task: PrefillTask) -> float:
    """Time from the end of a prefill that begins at `begin_s` until its KVCache has landed.

    A rate that nobody has measured counts as fast enough: only the propagation is left. So does one
    that is only a floor on a clear link where nothing waits: believed, it would keep away what
    would show that the link is faster. Whoever must not rely on that looks at
    `link.available_bytes_per_s` first.
    """
    rate = link.available_bytes_per_s
    if rate is None or (link.is_floor and rate > 0 and _is_quiet(link)):
        return link.rtt_s / 2
    if rate <= 0:
        return math.inf
    # While this prompt waits and computes, KVCache of others flows in and the link drains it.
    gain = link.inflow_bytes_per_s - rate
    backlog = max(0.0, link.backlog_bytes + gain * begin_s)
    # Layers are sent while the prompt is computed; recurrent states follow when it is.
    backlog = max(0.0, backlog + gain * prefill_s + task.token_bytes)
    return (backlog + task.fixed_bytes) / rate + link.rtt_s / 2


def _is_quiet(link: LinkView) -> bool:
    return link.state is LinkCondition.CLEAR and not link.backlog_bytes


def slot_wait_s(decode: DecodeView, landed_s: float) -> float:
    """How long a request that lands in `landed_s` from now waits for a decode slot."""
    if decode.slots_total <= 0 or landed_s == math.inf:
        return math.inf
    most = decode.slots_used + decode.num_waiting + len(decode.landing_s)
    # A slot is left even if all that is under way lands first.
    if most < decode.slots_total:
        return 0.0
    ahead = decode.num_waiting + bisect_right(decode.landing_s, landed_s)
    num_releases = decode.slots_used + ahead - decode.slots_total + 1
    if num_releases <= 0:
        return 0.0
    return max(0.0, release_s(decode, num_releases) - landed_s)


def release_s(decode: DecodeView, num_releases: int) -> float:
    """Time until so many decodes have ended, when every slot that falls free is taken again.
    Where nobody knows how long a decode takes, 0 stands for "any time from now on".
    """
    if num_releases <= 0:
        return 0.0
    spread_s = num_releases * (decode.decode_s or 0.0) / max(1, decode.slots_total)
    if decode.left_s is None:
        return spread_s
    if num_releases <= len(decode.left_s):
        return decode.left_s[num_releases - 1]
    return max(decode.left_s[-1] if decode.left_s else 0.0, spread_s)


class ProfileCorrection:
    """Measured over predicted prefill time of one cluster, as a bounded factor.

    The factor is the exponential average of the ratio in logarithms, so that half and double weigh
    the same; until `1 / gain` prefills were seen all of them weigh alike. One observation counts as
    at most a factor of 2 away from what is believed, so that a stall does not teach much.
    """

    MAX_STEP = math.log(2)

    def __init__(self, gain: float = 0.05, bounds: tuple[float, float] = (0.1, 10.0)) -> None:
        low, high = bounds
        if not (0 < gain <= 1 and 0 < low <= 1 <= high):
            raise ValueError(f"gain {gain!r} must be in (0, 1], bounds {bounds!r} must contain 1")
        self._gain = gain
        self._bounds = math.log(low), math.log(high)
        self._log_factor = 0.0
        self._num_seen = 0

    @property
    def factor(self) -> float:
        """What to scale the uncorrected profile by; 1 before the first observation."""
        return math.exp(self._log_factor)

    @property
    def num_seen(self) -> int:
        """How many prefills the factor rests on, however old."""
        return self._num_seen

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """One prefill: the time that the *uncorrected* profile gives, and the time that it took.

        Times that cannot be (0, negative, not finite) are passed over.
        """
        if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
            return
        self._num_seen += 1
        gain = max(self._gain, 1 / self._num_seen)
        error = math.log(measured_s / predicted_s) - self._log_factor
        # The first one is all there is to believe: it may be anywhere.
        if self._num_seen > 1:
            error = min(max(error, -self.MAX_STEP), self.MAX_STEP)
        low, high = self._bounds
        self._log_factor = min(max(self._log_factor + gain * error, low), high)


class OverheadMeter:
    """Fixed time of a route that no profile contains: rendering, reserving, opening, HTTP.

    The median of what the latest TTFTs were beyond their predictions, once there are three: a
    stalled request or two teach nothing, not even the very first. Never negative, and never above
    `max_s`.
    """

    MIN_SEEN = 3

    def __init__(self, memory: int = 32, max_s: float = 5.0) -> None:
        if not (memory >= self.MIN_SEEN and max_s > 0):
            raise ValueError(
                f"memory {memory!r} must be at least {self.MIN_SEEN} and max_s {max_s!r} above 0"
            )
        self._latest: deque[float] = deque(maxlen=memory)
        self._max_s = max_s
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """What to add to a prediction; 0 before there are `MIN_SEEN` observations."""
        return self._seconds

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """One TTFT: as predicted without any overhead, and as measured."""
        if not (0 <= predicted_s < math.inf and 0 <= measured_s < math.inf):
            return
        self._latest.append(measured_s - predicted_s)
        if len(self._latest) >= self.MIN_SEEN:
            self._seconds = min(max(0.0, median(self._latest)), self._max_s)
