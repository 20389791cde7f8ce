"""The parts of a request's time to first token, from what each process measured of it. Pure.

Each process measures durations on its own clock, and no time of one host is compared with a time of
another. The gateway's clock has the whole, the wait for the landing and the time of the decode
request; the reports of the legs divide these two. It does not know requests or their records.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvmanager.load_times import LoadTimes


class TtftParts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where the time to the first token went, in seconds; parts that did not occur are None.

    They follow each other in this order and add up to the whole:

    - read: the client's body. media: images and the like were fetched from their addresses. render:
      the prompt was turned into tokens. look_up: the directory was asked what is cached. move: a
      cached prefix came from another cluster. reserve: a landing.
    - encode: the delay by media that other instances encoded, or whose embeddings came from another
      node. What passes while the prefill waits for an instance anyway is no delay.
    - queue: in the prefill cluster's front. open: the engine was checked and the outbox opened.
    - engine_queue: the prefill engine got the request and had it in its queue. prefill: from the
      begin of its first forward pass for it to the end of the last one. Without engine_queue the
      engine does not tell them apart, and prefill is both.
    - transfer_tail: until the last byte was in the landing. news: the ways of the order and of the
      news between gateway and fronts.
    - load_wait: in the decode engine, until the load began. load: into the engine's pages.
      first_step: from there to the end of the first forward pass.
    - relay: the gateway asked the decode engine, and the first token came back. other: the
      gateway's own work, and tries that failed.

    `load_and_first_step_s` stands for all after the news where the decode engine has not measured,
    or one engine did everything. The gateway cannot see the first token of an answer that is not
    streamed: what is left then holds every decode step, and is `decode_s`, or `load_and_decode_s`
    where the decode engine has not measured.
    """

    read_s: float | None = None
    media_s: float | None = None
    render_s: float | None = None
    look_up_s: float | None = None
    move_s: float | None = None
    reserve_s: float | None = None
    encode_s: float | None = None
    queue_s: float | None = None
    open_s: float | None = None
    engine_queue_s: float | None = None
    prefill_s: float | None = None
    transfer_tail_s: float | None = None
    news_s: float | None = None
    load_wait_s: float | None = None
    load_s: float | None = None
    first_step_s: float | None = None
    relay_s: float | None = None
    decode_s: float | None = None
    other_s: float | None = None
    load_and_first_step_s: float | None = None
    load_and_decode_s: float | None = None

    def known(self) -> dict[str, float]:
        """The parts that are set, by name without the unit."""
        return {
            word: value for word, name in _PART_NAMES if (value := getattr(self, name)) is not None
        }


_PART_NAMES: Final = tuple((name.removesuffix("_s"), name) for name in TtftParts.__struct_fields__)


class LegTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The durations of a `PrefillResult`, in seconds: a prefill leg tells them of itself."""

    queue_s: float
    open_s: float
    prefill_s: float
    engine_queue_s: float | None
    transfer_tail_s: float
    encode_s: float | None = None
    """None: nothing encodes for others there."""

    @property
    def total_s(self) -> float:
        """From the order at the front until the sender knew that everything had arrived."""
        in_front_s = (self.encode_s or 0.0) + self.queue_s
        return in_front_s + self.open_s + self.prefill_s + self.transfer_tail_s


def spread(
    parts: TtftParts,
    ttft_s: float,
    *,
    is_stream: bool,
    leg: LegTimes | None,
    landing_wait_s: float | None,
    decode_posted_s: float | None,
    load_times: LoadTimes | None,
) -> None:
    """Set what follows the reservation in `parts`, whichever of it is known by now."""
    parts.relay_s = parts.decode_s = parts.other_s = None
    parts.load_and_first_step_s = parts.load_and_decode_s = None
    over_s = 0.0
    if leg is not None:
        over_s = _spread_leg(parts, leg, landing_wait_s)
    if load_times is None or decode_posted_s is None:
        rest_s = max(0.0, ttft_s - sum(parts.known().values()))
        if is_stream:
            parts.load_and_first_step_s = rest_s
        else:
            parts.load_and_decode_s = rest_s
        return
    parts.load_wait_s = load_times.wait_s
    if load_times.wait_s >= over_s:
        # It may be asked before the KVCache has landed, and then waits beside the prefill.
        parts.load_wait_s -= over_s
    elif parts.prefill_s is not None:
        parts.prefill_s = max(0.0, parts.prefill_s - over_s)
    parts.load_s, parts.first_step_s = load_times.load_s, load_times.first_step_s
    decoding_s = max(0.0, ttft_s - decode_posted_s - load_times.total_s)
    if is_stream:
        parts.relay_s = decoding_s
    else:
        parts.decode_s = decoding_s
    parts.other_s = max(0.0, ttft_s - sum(parts.known().values()))


def _spread_leg(parts: TtftParts, leg: LegTimes, landing_wait_s: float | None) -> float:
    """Set the parts of the prefill leg. Returns by how much they exceed the wait for the landing
    all the same.
    """
    parts.queue_s, parts.open_s = leg.queue_s, leg.open_s
    if leg.encode_s is not None:
        parts.encode_s = leg.encode_s
    queue_s, tail_s = leg.engine_queue_s or 0.0, leg.transfer_tail_s
    parts.prefill_s = leg.prefill_s - queue_s
    excess_s = 0.0 if landing_wait_s is None else leg.total_s - landing_wait_s
    parts.news_s = None if landing_wait_s is None else max(0.0, -excess_s)
    # The landing is whole half a round trip before the sender hears of it, which is in the tail,
    # and the front hears of it late too, which is in what is left for the engine's queue.
    excess_s = max(0.0, excess_s)
    from_queue_s = min(queue_s, excess_s - min(tail_s, excess_s / 2))
    from_tail_s = min(tail_s, excess_s - from_queue_s)
    parts.transfer_tail_s = tail_s - from_tail_s
    parts.engine_queue_s = None if leg.engine_queue_s is None else queue_s - from_queue_s
    return excess_s - from_queue_s - from_tail_s
