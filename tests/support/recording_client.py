"""A client of the agent for tests of the connector's worker half: it answers nothing."""

from collections.abc import Sequence
from typing import Any

from kvmanager.arena import Arena
from kvmanager.load_times import LoadTimes


class RecordingClient:
    """Stands for the client of an agent that answers nothing."""

    def __init__(self, arena: Arena) -> None:
        self.arena: Arena | None = arena
        self.said: list[tuple[Any, ...]] = []
        self.prefill_s: list[float] = []

    def start(self, events: object) -> None: ...
    def close(self) -> None: ...

    def attach(self, transfer_id: bytes, attempt: int) -> bool:
        self.said.append(("attach", transfer_id, attempt))
        return True

    def ready(self, transfer_id: bytes, attempt: int, ranges: list[tuple[int, int]]) -> bool:
        self.said.append(("ready", transfer_id, attempt, ranges))
        return True

    def prefill_end(self, transfer_id: bytes, attempt: int, prefill_s: float = 0.0) -> bool:
        self.said.append(("prefill_end", transfer_id, attempt))
        self.prefill_s.append(prefill_s)
        return True

    def loaded(self, transfer_id: bytes, times: LoadTimes) -> bool:
        self.said.append(("loaded", transfer_id, times))
        return True

    def abort(self, transfer_id: bytes, attempt: int, reason: str) -> bool:
        self.said.append(("abort", transfer_id, attempt, reason))
        return True

    def release(self, transfer_id: bytes, attempt: int = 0) -> bool:
        self.said.append(("release", transfer_id, attempt))
        return True

    def cache_written(
        self, handle: int, parts: Sequence[tuple[int, int]], *, is_last: bool = False
    ) -> bool:
        self.said.append(("cache_written", handle, list(parts), is_last))
        return True

    def take(self) -> list[tuple[Any, ...]]:
        said, self.said = self.said, []
        return said
