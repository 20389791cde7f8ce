"""The media of a prompt as routing sees them: what must be encoded where, and how late that is.

Media are encoded before the tokens that they stand for are prefilled: by the encode stage of the
cluster, if it has one and it is not busier than it is worth, or else by the instance that prefills.
The stage encodes while the prompt waits in the queue; the instance can only begin when the prompt's
turn has come. Either way the media have to come to the cluster first.

Pure; a prompt of text alone never gets here. This file knows neither engines nor what a medium is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.encoding.line import EncodeLine
from scheduler.encoding.rule import predict
from scheduler.reports import EncodeReport


class MediaTask(NamedTuple):
    """What one place has to do for a prompt's media: encode those that have `num_tokens` tokens,
    after `nbytes` bytes have come to it.
    """

    num_tokens: int
    nbytes: int = 0


class MediaShape(msgspec.Struct, frozen=True):
    """The media of a prompt. `spans` has (offset, tokens) of each, in the prompt.

    They travel as `nbytes` bytes of the client's body. `embedded` says for each cluster which of
    them, by their number in `spans`, it has embeddings of; none where that is not known.
    """

    spans: tuple[tuple[int, int], ...]
    nbytes: int = 0
    embedded: Mapping[str, frozenset[int]] = MappingProxyType({})

    @property
    def num_tokens(self) -> int:
        """The tokens of all media."""
        return sum(tokens for _, tokens in self.spans)

    def to_encode(self, cluster: str, cached_tokens: int) -> int:
        """The tokens of the media that a cluster must encode which has `cached_tokens` of the
        prompt cached. A medium that is only partly cached is encoded whole.
        """
        known = self.embedded.get(cluster, frozenset())
        return sum(
            tokens
            for number, (offset, tokens) in enumerate(self.spans)
            if offset + tokens > cached_tokens and number not in known
        )

    def task(self, cluster: str, cached_tokens: int) -> MediaTask:
        """The work of a cluster which has so much of the prompt cached."""
        return MediaTask(self.to_encode(cluster, cached_tokens), self.nbytes)


class MediaView(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster gets and encodes media for `model`.

    `stage` is its encode stage, if it has one. `line` are the times of the instances that prefill
    when they encode, None while unknown. `link` leads to the cluster from where the media are; None
    for a PD cluster, which is beside the gateway.
    """

    model: str = ""
    stage: EncodeReport | None = None
    line: EncodeLine | None = None
    link: LinkView | None = None


def media_delay_s(task: MediaTask, view: MediaView, begin_s: float) -> float:
    """By how much media delay a prefill that would begin in `begin_s`. Times that nobody has
    measured count as 0, as they do in the rest of the prediction.
    """
    arrived_s = arrival_s(view.link, task.nbytes)
    late_s = max(0.0, arrived_s - begin_s)
    if not task.num_tokens:
        return late_s
    own = view.line
    own_s = 0.0 if own is None else own.seconds(task.num_tokens)
    if view.stage is None:
        return late_s + own_s
    # The prompt waits anyway until its turn has come, and the stage encodes meanwhile.
    wait_s = max(0.0, begin_s - arrived_s)
    found = predict(view.stage, view.model, task.num_tokens, wait_s=wait_s, own=own)
    if found.reason is None and found.apart_s is not None:
        return max(0.0, arrived_s + found.apart_s - begin_s)
    return late_s + (found.own_s or own_s)


def arrival_s(link: LinkView | None, nbytes: float) -> float:
    """Time until so many bytes have come over a link that takes them at its present rate.

    A rate that nobody has measured counts as fast enough, and so does a mere floor on a clear link
    where nothing waits (`scheduler.routing.prediction.transfer_tail_s`).
    """
    if link is None:
        return 0.0
    rate = link.available_bytes_per_s
    is_quiet = link.state is LinkCondition.CLEAR and not link.backlog_bytes
    if rate is None or (link.is_floor and rate > 0 and is_quiet):
        return link.rtt_s / 2
    if rate <= 0:
        return math.inf
    return (link.backlog_bytes + nbytes) / rate + link.rtt_s / 2
