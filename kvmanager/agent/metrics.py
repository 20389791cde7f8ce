"""Prometheus metrics of a node agent.

It measures nothing itself: when Prometheus asks, it reads gauges from a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmanager.agent.cache.move_messages import MoveRole
from kvmanager.agent.messages import CacheStatus, EmbeddingStatus, StatusReply, TransferReport
from kvmanager.agent.move_records import Move, MoveSend

FamilyT = TypeVar("FamilyT", GaugeMetricFamily, CounterMetricFamily)

_DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class AgentMetrics:
    """Counters of one agent. Has a registry of its own, so several agents fit in one process."""

    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatusCollector(status))
        self.transfers = Counter(
            "prfaas_agent_transfers",
            "Transfers that are over, by end, outcome and way.",
            ["kind", "outcome", "hand_off"],
            registry=self.registry,
        )
        self.transferred = Counter(
            "prfaas_agent_transferred_bytes",
            "Bytes of complete transfers, by end and way.",
            ["kind", "hand_off"],
            registry=self.registry,
        )
        self.resent = Counter(
            "prfaas_agent_resent_bytes",
            "Bytes sent again after a lost connection.",
            registry=self.registry,
        )
        self.wire = Counter(
            "prfaas_agent_wire_bytes",
            "Bytes of ended outboxes as they were sent, coded, with those that were sent again.",
            registry=self.registry,
        )
        self.refused_senders = Counter(
            "prfaas_agent_refused_senders",
            "Transfers turned away at the receiver, by reason.",
            ["code"],
            registry=self.registry,
        )
        self.refused_requests = Counter(
            "prfaas_agent_refused_requests",
            "Control plane requests not granted, by method and code.",
            ["method", "code"],
            registry=self.registry,
        )
        self.transfer_s = Histogram(
            "prfaas_agent_outbox_seconds",
            "Complete outboxes: first byte sent until verified by the receiver.",
            buckets=_DURATION_BUCKETS_S,
            registry=self.registry,
        )
        self.tail_s = Histogram(
            "prfaas_agent_transfer_tail_seconds",
            "Complete outboxes: end of prefill until verified by the receiver.",
            buckets=_DURATION_BUCKETS_S,
            registry=self.registry,
        )
        self.moves = Counter(
            "prfaas_agent_moves",
            "Moves between agents that are over, by content, end and outcome.",
            ["content", "role", "outcome"],
            registry=self.registry,
        )
        self.moved = Counter(
            "prfaas_agent_moved_bytes",
            "Bytes of complete moves, by content and end.",
            ["content", "role"],
            registry=self.registry,
        )
        self.move_s = Histogram(
            "prfaas_agent_move_seconds",
            "Complete sends of moves: first byte sent until verified by the receiver.",
            ["content"],
            buckets=_DURATION_BUCKETS_S,
            registry=self.registry,
        )

    def move_over(self, role: MoveRole, move: Move) -> None:
        """Count the end of one end of a move."""
        self.moves.labels(move.content, role, move.state).inc()
        if move.state != "complete":
            return
        self.moved.labels(move.content, role).inc(move.nbytes)
        if isinstance(move, MoveSend):
            self.move_s.labels(move.content).observe(move.transfer_s)

    def transfer_ended(self, report: TransferReport) -> None:
        """Count the end of one end of a transfer."""
        self.transfers.labels(report.kind, report.state, report.hand_off).inc()
        if report.kind == "outbox":
            self.resent.inc(report.resent_bytes)
            self.wire.inc(report.wire_bytes)
        if report.state != "complete":
            return
        self.transferred.labels(report.kind, report.hand_off).inc(report.nbytes)
        if report.kind == "outbox":
            self.transfer_s.observe(report.first_sent_to_complete_s)
            self.tail_s.observe(report.prefill_end_to_complete_s)


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        # A registry with `auto_describe` would otherwise collect now, before the agent runs.
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, text, value in (
            ("arena_bytes", "Size of the arena.", status.arena_bytes),
            ("arena_free_bytes", "Free for transfers, or evictable.", status.free_bytes),
            ("landing_bytes", "Blocks held by landings.", status.landing_bytes),
            ("outbox_bytes", "Blocks held by outboxes.", status.outbox_bytes),
            ("landing_limit_bytes", "What landings may hold at most.", status.landing_cap_bytes),
            (
                "landing_room_bytes",
                "The largest landing that there is room for.",
                status.landing_room_bytes or 0,
            ),
            (
                "received_connections",
                "Data connections from senders.",
                status.num_received_connections,
            ),
        ):
            yield GaugeMetricFamily(f"prfaas_agent_{name}", text, value)
        yield CounterMetricFamily(
            "prfaas_agent_turned_away_connections",
            "Data connections closed or refused because there were too many.",
            status.num_turned_away,
        )
        for kind, counts in (
            ("landings", status.num_landings),
            ("outboxes", status.num_outboxes),
        ):
            gauge = GaugeMetricFamily(
                f"prfaas_agent_{kind}", f"Known {kind} by state.", labels=["state"]
            )
            for state, count in counts.items():
                gauge.add_metric([state], count)
            yield gauge
        if status.cache is not None:
            yield from _cache_metrics(status.cache)
        if status.embeddings is not None:
            yield from _embedding_metrics(status.embeddings)
        engines = GaugeMetricFamily(
            "prfaas_agent_engine_connections", "Engine connections.", labels=["instance"]
        )
        programs = GaugeMetricFamily(
            "prfaas_agent_engine_info",
            "The model and the program of each connected engine.",
            labels=["instance", "model_name", "engine"],
        )
        for engine in status.engines:
            engines.add_metric([engine.instance], engine.num_connections)
            programs.add_metric([engine.instance, engine.model, engine.engine], 1)
        yield from (engines, programs)


def _cache_metrics(cache: CacheStatus) -> Iterator[Metric]:
    prefix = "prfaas_agent_cache"
    yield _by_place(
        GaugeMetricFamily(f"{prefix}_bytes", "Cached KVCache.", labels=["tier", "kind"]),
        cache.nbytes,
    )
    yield GaugeMetricFamily(
        f"{prefix}_pinned_bytes", "Cached KVCache in the arena that is in use.", cache.pinned_bytes
    )
    yield GaugeMetricFamily(
        f"{prefix}_arena_bytes",
        "What the cache holds of the arena, in whole blocks, with what is being filled.",
        cache.arena_blocks_bytes,
    )
    yield GaugeMetricFamily(f"{prefix}_blocks", "Blocks of prompts.", cache.num_blocks)
    yield _by_place(
        CounterMetricFamily(f"{prefix}_evictions", "Parts dropped.", labels=["tier", "kind"]),
        cache.evictions,
    )
    hits = CounterMetricFamily(
        f"{prefix}_hit_tokens", "Tokens that were not computed.", labels=["tier"]
    )
    for tier, tokens in cache.hit_tokens.items():
        hits.add_metric([tier], tokens)
    yield hits
    for name, text, value in (
        ("queries", "Prompts looked up by engines.", cache.queries),
        (
            "query_tokens",
            "Tokens of the full blocks of prompts that engines looked up.",
            cache.query_tokens,
        ),
        ("fills", "Times that engines were given memory to fill.", cache.fills),
        ("promotions", "Landings of which parts were kept.", cache.promotions),
        ("ssd_reads", "Parts read from SSD.", cache.ssd_reads),
        ("ssd_writes", "Parts written to SSD.", cache.ssd_writes),
        ("ssd_failures", "Parts that could not be read or written.", cache.ssd_failures),
        ("wrong_parts", "Parts found damaged at a start.", cache.wrong_parts),
    ):
        yield CounterMetricFamily(f"{prefix}_{name}", text, value)


def _embedding_metrics(embeddings: EmbeddingStatus) -> Iterator[Metric]:
    prefix = "prfaas_agent_embedding"
    yield GaugeMetricFamily(f"{prefix}s", "Embeddings of images.", embeddings.num_embeddings)
    yield GaugeMetricFamily(
        f"{prefix}_arena_bytes",
        "What embeddings hold of the arena, in whole blocks, with what is being filled.",
        embeddings.held_bytes,
    )
    yield GaugeMetricFamily(
        f"{prefix}_limit_bytes", "What embeddings may hold at most.", embeddings.cap_bytes
    )
    yield CounterMetricFamily(
        f"{prefix}_queries", "Images looked up by engines.", embeddings.num_queries
    )
    yield CounterMetricFamily(
        f"{prefix}_hits", "Images that were looked up and found.", embeddings.num_hits
    )


def _by_place(family: FamilyT, numbers: dict[str, int]) -> FamilyT:
    """Numbers by "tier/kind"."""
    for place, number in numbers.items():
        family.add_metric(place.split("/"), number)
    return family
