"""When a request's prefill would end and its first token come, at one place, part by part.

    TTFT = queue + move + encode + prefill + transfer tail + wait for a slot + one decode step
         + overhead + contention

1. Queue. The work ahead is spread over the cluster's usable instances; the instance that is free
   first takes the next piece of it. The request begins when nothing is left ahead of it.
2. Move. A cached prefix may come from elsewhere during the queue; the prefill waits for it.
   Encode. Images and other media come to the place and are encoded (`scheduler.routing.media`), as
   far as they are not during the queue. It is 0 for text.
3. Prefill. T(whole prompt) less what the cached part saves (`scheduler.routing.profiles`).
4. Tail. The link is a fluid queue, first come, first served, at its present rate. It holds the
   backlog of its last sample, less what it has sent since, what other requests emit meanwhile, and
   the request's own KVCache: emitted evenly over its prefill, with its fixed bytes at the end. The
   tail is what is unsent when the prefill ends, divided by the rate.
5. Slot. Decode slots come free in the order in which their decodes end. Requests that land earlier
   take them earlier.
6. Contention. What others compute meanwhile, as it was learnt (`scheduler.routing.service`).

Every part is monotone in load: more work ahead, a fuller pool, a longer backlog or a slower link
never shorten a prediction. An unusable instance or a link that carries nothing gives `inf`. All is
pure, without a clock. This file knows no routes, thresholds or reasons.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapreplace
from typing import Final, NamedTuple

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.routing.media import MediaTask, media_delay_s
from scheduler.routing.service import ALONE, Load, ServiceModel
from scheduler.routing.views import ClusterView, DecodeView

NO_LOAD: Final = Load()


class PrefillTask(NamedTuple):
    """The work of one request at one place.

    `num_tokens` is the whole prompt. `cached_tokens` of them are not computed, once the move that
    takes `move_s` is over. `token_bytes` leave evenly during the prefill, `fixed_bytes` at its end;
    both are 0 where nothing is transferred. `media` is None for text.
    """

    num_tokens: int
    cached_tokens: int = 0
    token_bytes: float = 0.0
    fixed_bytes: float = 0.0
    move_s: float = 0.0
    media: MediaTask | None = None


class Prediction(NamedTuple):
    """The parts of the time to first token, in seconds and in the order in which they pass.

    `move_s` is only the delay by the move beyond the queue, and `encode_s` only the delay by media
    beyond both; it passes before the prefill. `contention_s` is what the parts before it leave out
    or count twice, and may be negative. `load` is no part of the time; it is what the request
    meets.
    """

    queue_s: float = 0.0
    move_s: float = 0.0
    prefill_s: float = 0.0
    tail_s: float = 0.0
    slot_s: float = 0.0
    step_s: float = 0.0
    overhead_s: float = 0.0
    contention_s: float = 0.0
    load: Load = NO_LOAD
    # The last one, since recordings and gateways have predictions as arrays.
    encode_s: float = 0.0

    @property
    def prefill_end_s(self) -> float:
        """Time from now until the prompt is computed."""
        return self.queue_s + self.move_s + self.prefill_s + self.encode_s

    @property
    def landed_s(self) -> float:
        """Time from now until the KVCache is where decoding happens."""
        return self.queue_s + self.move_s + self.prefill_s + self.tail_s + self.encode_s

    @property
    def ttft_s(self) -> float:
        """Time from now until the first token."""
        queue_s, move_s, prefill_s, tail_s, slot_s, step_s, overhead_s, others_s, _, encode_s = self
        found_s = queue_s + move_s + prefill_s + tail_s + slot_s + step_s + overhead_s
        return found_s + others_s + encode_s

    def parts(self) -> dict[str, float]:
        """The parts by name; together they are `ttft_s`. Media are named only where they count."""
        found = {name: value for name, value in self._asdict().items() if name != "load"}
        if not self.encode_s:
            del found["encode_s"]
        return found


def predict(
    task: PrefillTask,
    cluster: ClusterView,
    decode: DecodeView,
    service: ServiceModel = ALONE,
    load: Load = NO_LOAD,
) -> Prediction:
    """TTFT of a request that is prefilled in `cluster` and decodes in `decode`."""
    queue_s = queue_wait_s(cluster.ahead_s, cluster.free_s)
    prefill_s = cluster.prefill.prefill_s(task.num_tokens, task.cached_tokens)
    begin_s = max(queue_s, task.move_s)
    # No instance is usable. The lines below would subtract infinities and give nan.
    if begin_s == math.inf:
        return Prediction(begin_s, 0.0, prefill_s, step_s=decode.step_s)
    encode_s = 0.0
    if task.media is not None and cluster.media is not None:
        encode_s = media_delay_s(task.media, cluster.media, begin_s)
        # The media cannot come to the place.
        if encode_s == math.inf:
            return Prediction(queue_s, 0.0, prefill_s, step_s=decode.step_s, encode_s=encode_s)
    start_s = begin_s + encode_s
    tail_s = 0.0
    if cluster.link is not None:
        # While the request has an instance, only the others emit KVCache of others.
        beside = 1 - 1 / max(1, len(cluster.free_s))
        tail_s = transfer_tail_s(cluster.link, start_s, prefill_s, task, beside=beside)
    slot_s = slot_wait_s(decode, start_s + prefill_s + tail_s)
    return Prediction(
        queue_s,
        begin_s - queue_s,
        prefill_s,
        tail_s,
        slot_s,
        decode.first_token_s,
        service.overhead_s,
        service.contention_s(prefill_s, load),
        load,
        encode_s,
    )


def queue_wait_s(ahead_s: Sequence[float], free_s: Sequence[float]) -> float:
    """When a prefill begins behind those that take `ahead_s`, seconds, in this order. Each takes
    the instance that is free first; `free_s` are the times until each usable one is, ascending.
    """
    if not free_s:
        return math.inf
    instances = list(free_s)
    for prefill_s in ahead_s:
        heapreplace(instances, instances[0] + prefill_s)
    return instances[0]


def transfer_tail_s(
    link: LinkView, begin_s: float, prefill_s: float, task: PrefillTask, *, beside: float = 1.0
) -> float:
    """Time from the end of a prefill that begins at `begin_s` until its KVCache has landed.
    `beside` is the share of the link's inflow that goes on during the prefill.

    A rate that nobody has measured counts as fast enough, so that only propagation is left. The
    same holds for a mere floor on a clear link where nothing waits: with the floor as the limit,
    no prompt would come that could show that the link is faster. Callers that must not rely on this
    check `link.available_bytes_per_s` first.
    """
    rate = link.available_bytes_per_s
    if rate is None or (link.is_floor and rate > 0 and _is_quiet(link)):
        return link.rtt_s / 2
    if rate <= 0:
        return math.inf
    # A sample found the backlog `age_s` ago, and the link has gone on sending since. What has come
    # in since then nobody has said; most of it left at once.
    backlog = max(0.0, link.backlog_bytes - rate * link.age_s)
    # While this prompt waits, KVCache of others flows in and the link sends it off.
    backlog = max(0.0, backlog + (link.inflow_bytes_per_s - rate) * begin_s)
    # Layers leave while the prompt is computed; the recurrent states leave when it is done.
    gain = beside * link.inflow_bytes_per_s - rate
    backlog = max(0.0, backlog + gain * prefill_s + task.token_bytes)
    return (backlog + task.fixed_bytes) / rate + link.rtt_s / 2


def _is_quiet(link: LinkView) -> bool:
    return link.state is LinkCondition.CLEAR and not link.backlog_bytes


def slot_wait_s(decode: DecodeView, landed_s: float) -> float:
    """How long a request that lands in `landed_s` from now waits for a decode slot."""
    if decode.slots_total <= 0 or landed_s == math.inf:
        return math.inf
    most = decode.slots_used + decode.num_waiting + len(decode.landing_s)
    # A slot stays free even if all requests under way land first.
    if most < decode.slots_total:
        return 0.0
    ahead = decode.num_waiting + bisect_right(decode.landing_s, landed_s)
    num_releases = decode.slots_used + ahead - decode.slots_total + 1
    if num_releases <= 0:
        return 0.0
    return max(0.0, release_s(decode, num_releases) - landed_s)


def release_s(decode: DecodeView, num_releases: int) -> float:
    """Time until `num_releases` decodes have ended, when every freed slot is taken again at once.

    Where nobody knows how long a decode takes, 0 stands for "any time from now on".
    """
    # `slots_total` slots, each taken for `decode_s`, free one every `decode_s` / `slots_total`.
    return max(0, num_releases) * (decode.decode_s or 0.0) / max(1, decode.slots_total)
