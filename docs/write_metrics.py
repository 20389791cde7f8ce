"""Writes docs/metrics.md from the metrics that the processes have.

`make docs` runs it, and a test compares its text with the page. It makes every object that has
metrics, without starting anything, and asks it what it shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from deploy.gateway.app import Gateway
from deploy.gateway.cache.moves import MoveMetrics
from deploy.gateway.config import GatewayConfig, ModelConfig, RecorderSection
from deploy.gateway.media.metrics import MediaMetrics
from deploy.gateway.scheduling.recorder import Recorder
from deploy.gateway.sharing.region_sharing import SharingMetrics
from kvmanager.agent.messages import CacheStatus, EmbeddingStatus, StatusReply
from kvmanager.agent.metrics import AgentMetrics
from kvmanager.directory.metrics import DirectoryMetrics
from kvmanager.loop.gaps import LoopGaps
from kvmanager.loop.metrics import LoopCollector
from kvmanager.process_series import ProcessSeries, show_exposure
from kvmanager.vllm_connector.counters import COUNTERS
from local_pd.embedded import EmbeddedPdCluster
from local_pd.metrics import PdMetrics
from netmon.metrics import LinkMetrics
from prfaas.embedded import EmbeddedPrefillCluster
from prfaas.encoding.metrics import EncodeMetrics
from prfaas.metrics import PrefillMetrics

PAGE: Final = Path(__file__).with_name("metrics.md")

_INTRODUCTION: Final = """\
# Metrics

`make docs` writes this page from the code that has the metrics. [Monitoring](monitoring.md) says at
which port a process shows them.

Names, labels and buckets are vLLM's where a metric means the same: `model_name` is the served name,
and the buckets of times to first token, between tokens and of whole requests are equal to those of
`vllm:time_to_first_token_seconds`, `vllm:inter_token_latency_seconds` and
`vllm:e2e_request_latency_seconds`. A histogram is shown as `NAME_bucket`, `NAME_sum` and
`NAME_count`.

Labels come from the configuration or from fixed lists, except `tenant` and `adapter`: the 50 that
are used most have series of their own, and all others share `(other)`. The choice is made anew
every 5 minutes. Keys without a name share the tenant `(unnamed)`.

A gateway with fronts inside its process shows their metrics, too. A gateway of several processes
adds up counters and histograms, and its gauges have one more label, `process`.
"""

_UNITS: Final = {
    "timestamp_seconds": "Unix time, seconds",
    "bytes_per_second": "bytes per second",
    "seconds": "seconds",
    "bytes": "bytes",
    "tokens": "tokens",
    "ratio": "ratio",
    "info": "always 1",
}
_YES_OR_NO: Final = ("condition", "limited_by", "cluster_heard", "joined", "leader")
"""The last words of gauges that are 1 or 0."""


@dataclass(frozen=True, slots=True)
class MetricShown:
    """A metric as Prometheus gets it: a counter's name ends in `_total`. `kind` is counter, gauge
    or histogram.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def unit(self) -> str:
        """What its number counts; "" for things."""
        name = self.name.removesuffix("_total")
        if self.kind == "gauge" and name.endswith(_YES_OR_NO):
            return "1 or 0"
        return next((unit for end, unit in _UNITS.items() if name.endswith(f"_{end}")), "")


def shown_by(registry: CollectorRegistry) -> Iterator[MetricShown]:
    """Every metric of a registry, with or without samples, by name."""
    found: dict[str, MetricShown] = {}
    # The library has no public way to ask for metrics without samples.
    for collector in list(registry._collector_to_names):
        own_labels = getattr(collector, "_labelnames", None)
        for family in collector.collect():
            labels = getattr(family, "_labelnames", own_labels)
            kind, name = family.type, family.name
            # An info's labels are the keys of what it shows.
            if kind == "info":
                kind, name, labels = "gauge", f"{name}_info", family.samples[0].labels
            if kind == "counter":
                name += "_total"
            found[name] = MetricShown(name, kind, tuple(labels or ()), family.documentation)
    return iter(sorted(found.values(), key=lambda item: item.name))


def processes() -> dict[str, list[MetricShown]]:
    """The metrics of every kind of process, by what the page calls it."""
    registries = {
        "gateway": _gateway(),
        "prefill": CollectorRegistry(),
        "pd": CollectorRegistry(),
        "agent": _agent(),
        "directory": DirectoryMetrics().registry,
    }
    PrefillMetrics(registries["prefill"])
    PdMetrics(registries["pd"])
    for front in ("prefill", "pd"):
        EncodeMetrics(registries[front])
    for component, registry in registries.items():
        ProcessSeries(registry, component)
        registry.register(LoopCollector(f"prfaas_{component}", LoopGaps()))
    for component in ("prefill", "pd", "directory"):
        show_exposure(registries[component], f"prfaas_{component}", "")
    titles = {
        "gateway": "Gateway",
        "prefill": "Prefill cluster front",
        "pd": "PD cluster front",
        "agent": "Node agent",
        "directory": "Directory",
    }
    found = {titles[component]: list(shown_by(reg)) for component, reg in registries.items()}
    return found | {"vLLM engine (the connector)": list(_engine())}


def _gateway() -> CollectorRegistry:
    gateway = Gateway(
        GatewayConfig(models=(ModelConfig(name="model"),)),
        [EmbeddedPdCluster("home", [], metrics=PdMetrics(CollectorRegistry()))],
        {"far": EmbeddedPrefillCluster("far", [], metrics=PrefillMetrics(CollectorRegistry()))},
    )
    registry = gateway.metrics.registry
    MoveMetrics(registry)
    MediaMetrics(registry, int)
    SharingMetrics(registry)
    Recorder(RecorderSection(dir=Path()), registry)
    return registry


def _agent() -> CollectorRegistry:
    status = StatusReply(
        arena_bytes=0,
        block_bytes=0,
        free_bytes=0,
        landing_bytes=0,
        landing_cap_bytes=0,
        outbox_bytes=0,
        num_landings={},
        num_outboxes={},
        engines=[],
        links=[],
        num_received_connections=0,
        uptime_s=0.0,
        pid=0,
        data_endpoint="",
        cache=CacheStatus(),
        embeddings=EmbeddingStatus(),
    )
    registry = AgentMetrics(lambda: status).registry
    LinkMetrics(registry)
    return registry


def _engine() -> Iterator[MetricShown]:
    for name, text in sorted(COUNTERS.items()):
        labels = ("model_name", "engine")
        yield MetricShown(f"vllm:prfaas_{name}_total", "counter", labels, text)


def page() -> str:
    """The whole page."""
    parts, known = [_INTRODUCTION], processes()
    everywhere = set.intersection(
        *({item.name for item in shown} for name, shown in known.items() if "engine" not in name)
    )
    common = [item for item in known["Gateway"] if item.name in everywhere]
    parts.append(_table("Every process but the engine", common))
    for title, shown in known.items():
        parts.append(_table(title, [item for item in shown if item.name not in everywhere]))
    return "\n".join(parts)


def _table(title: str, shown: list[MetricShown]) -> str:
    lines = [
        f"## {title}\n",
        "| metric | type | labels | unit | meaning |",
        "|---|---|---|---|---|",
    ]
    for item in shown:
        item = replace(item, text=" ".join(item.text.split()).replace("|", "\\|"))
        labels = ", ".join(f"`{label}`" for label in item.labels)
        lines.append(f"| `{item.name}` | {item.kind} | {labels} | {item.unit} | {item.text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
