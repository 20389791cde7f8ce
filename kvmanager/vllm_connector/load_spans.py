"""When the requests of one worker were loaded, until their first step is over. Pure.

Knows neither pages nor the agent.
"""

import threading
from typing import TYPE_CHECKING, Final

from kvmanager.load_times import LoadTimes

if TYPE_CHECKING:  # which imports vLLM
    from kvmanager.vllm_connector.metadata import FirstStep

MAX_SPANS: Final = 1024
"""A request that is aborted behind its load takes no step, so the oldest spans are forgotten."""


class LoadSpans:
    """Times are of CLOCK_MONOTONIC, which all processes of a host share, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, tuple[float, float]] = {}

    def loaded(self, request_id: str, began_s: float, ended_s: float) -> None:
        """The request's KVCache was loaded in this time. Any thread."""
        with self._lock:
            self._spans[request_id] = began_s, ended_s
            if len(self._spans) > MAX_SPANS:
                del self._spans[next(iter(self._spans))]

    def first_step_over(self, first: "FirstStep", now_s: float) -> LoadTimes | None:
        """The request's times; None if its load failed. It is forgotten then. Any thread."""
        with self._lock:
            span = self._spans.pop(first.request_id, None)
        if span is None:
            return None
        began_s, ended_s = span
        # A load that ends within the step itself leaves no time for the step.
        return LoadTimes(
            max(0.0, began_s - first.arrived_s), ended_s - began_s, max(0.0, now_s - ended_s)
        )
