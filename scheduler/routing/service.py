"""What a first token takes beyond the parts that are predicted one by one: contention.

The parts of a prediction (`scheduler.routing.prediction`) are those of a request that has its
instances for itself. Others compute beside it: decodes in its engine's batch, and engines that
share a host, a memory bus or a link. How much that costs cannot be derived from one request, so it
is learnt (`scheduler.live.learning.service_meter`) as the numbers of a `ServiceModel`:

    TTFT = queue + move + tail + slot + step
         + overhead_s + prefill * prefill_s
         + decode_s * decodes + busy_s * busy + render * render_s

Queue, tail and slot have no factor. What is wrong with them comes from the work and the link of the
moment, and a factor learnt from them would be wrong with the next change of either. All numbers
are 0 or more, so a prediction never falls with load. Overhead and what load adds to it stay below
the most that was ever measured, since load may be higher than it ever was. Routing and the
simulator use the same numbers. Pure; this file does not know how anything is measured.
"""

from __future__ import annotations

from typing import Final, NamedTuple

NO_BOUND_S: Final = 1e6
"""Finite, since it is kept and sent as JSON."""


class Load(NamedTuple):
    """What others compute while a request is served.

    `decodes` are the requests that a decoding engine has in its batch, on average. `busy` is the
    share of the instances at other places that prefill (0..1). It matters where they share a host.
    `render_s` is how long the prompt took to be turned into tokens, seconds. That is past when a
    route is chosen, and shows how busy the host is just now.
    """

    decodes: float = 0.0
    busy: float = 0.0
    render_s: float = 0.0


class ServiceModel(NamedTuple):
    """How a place serves beside others. Without anything learnt, the parts are the whole."""

    overhead_s: float = 0.0
    """Fixed time that no part contains: rendering, reserving, opening, HTTP; seconds."""
    prefill: float = 1.0
    """Measured over predicted time of the prefill."""
    decode_s: float = 0.0
    """Seconds for each request in a decoding engine's batch."""
    busy_s: float = 0.0
    """Seconds while all instances at other places prefill."""
    render: float = 1.0
    """What each second of rendering stands for: itself, and what else is late on such a host."""
    most_s: float = NO_BOUND_S
    """The most that a first token came later than its parts say, seconds."""

    def contention_s(self, prefill_s: float, load: Load) -> float:
        """How much later the first token comes than the parts and the overhead say, seconds. It is
        negative where prefills are faster than their profile.
        """
        others_s = self.decode_s * load.decodes + self.busy_s * load.busy
        others_s += self.render * load.render_s
        return (self.prefill - 1.0) * prefill_s + min(others_s, self.most_s - self.overhead_s)

    def aged(self, kept: float) -> ServiceModel:
        """The model when only the share `kept` (0..1) of what was learnt is believed."""
        return ServiceModel(
            kept * self.overhead_s,
            1.0 + kept * (self.prefill - 1.0),
            kept * self.decode_s,
            kept * self.busy_s,
            1.0 + kept * (self.render - 1.0),
            self.most_s,
        )


ALONE: Final = ServiceModel()
"""The model of a place of which nothing was learnt."""
