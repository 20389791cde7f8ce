"""The connector's metrics through vLLM: `vllm:prfaas_*` on the engine's /metrics."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvmanager.vllm_connector.counters import COUNTERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class TransferStats(KVConnectorStats):
    """Counts since the last report; `data` maps the keys of `COUNTERS` to numbers."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = dict.fromkeys(COUNTERS, 0)

    def add_sent(self, nbytes: int) -> None:
        self.data["sent_bytes"] += nbytes

    def add_loaded(self, nbytes: int) -> None:
        self.data["loaded_bytes"] += nbytes
        self.data["loads"] += 1

    def add_failed_send(self) -> None:
        self.data["failed_sends"] += 1

    def add_failed_load(self) -> None:
        self.data["failed_loads"] += 1

    def add_cache_loaded(self, nbytes: int, num_blocks: int) -> None:
        self.data["cache_loaded_bytes"] += nbytes
        self.data["cache_loaded_blocks"] += num_blocks
        self.data["cache_loads"] += 1

    def add_failed_cache_load(self) -> None:
        self.data["cache_failed_loads"] += 1

    def add_cache_stored(self, nbytes: int, num_blocks: int) -> None:
        self.data["cache_stored_bytes"] += nbytes
        self.data["cache_stored_blocks"] += num_blocks

    def add_failed_cache_store(self) -> None:
        self.data["cache_failed_stores"] += 1

    def add_staging_wait(self, waited_s: float) -> None:
        self.data["staging_waits"] += 1
        self.data["staging_wait_seconds"] += waited_s

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


class PrfaasPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters, one per key of `COUNTERS`."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            key: self._per_engine(
                self._counter_cls(
                    name=f"vllm:prfaas_{key}", documentation=text, labelnames=labelnames
                )
            )
            for key, text in COUNTERS.items()
        }

    def _per_engine(self, counter: Any) -> dict[int, Any]:
        return {
            index: counter.labels(*values) for index, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(key, 0))


__all__ = ["COUNTERS", "PrfaasPromMetrics", "TransferStats"]
