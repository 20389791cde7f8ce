"""How long a decode engine took from a request's arrival to the end of its first step.

Durations of one host's monotonic clock. Knows neither landings nor who measured.
"""

import msgspec


class LoadTimes(msgspec.Struct, frozen=True):
    """Seconds, one after the other, from the arrival of the request at the engine's scheduler.

    `wait_s` ends when the load of its KVCache begins, `load_s` when the KVCache is in the engine's
    pages, and `first_step_s` when the forward pass is over that computes the prompt's last token.
    """

    wait_s: float
    load_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        """All three."""
        return self.wait_s + self.load_s + self.first_step_s
