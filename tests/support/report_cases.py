"""What fronts and node agents report, where a test says only what it is about."""

from typing import Any

from kvmanager.agent.messages import StatusReply
from scheduler.reports import ClusterReport, InstanceReport


def instance(name: str, role: Any = "both", **changes: Any) -> InstanceReport:
    """A healthy instance with nothing to do."""
    usual: dict[str, Any] = {"model": "m", "healthy": True, "draining": False}
    usual |= {"running": 0, "max_concurrent": 4}
    return InstanceReport(name=name, role=role, **(usual | changes))


def cluster(name: str, *instances: InstanceReport, **changes: Any) -> ClusterReport:
    """A healthy front with nothing to do."""
    usual: dict[str, Any] = {"healthy": True, "queue_depth": 0, "running": 0}
    return ClusterReport(name=name, instances=instances, **(usual | changes))


def on_nodes(name: str, **nodes: str) -> ClusterReport:
    """A front with an instance on each of these nodes: by node name, the address of its agent."""
    return cluster(
        name, *(instance(f"i-{node}", node=at, node_name=node) for node, at in nodes.items())
    )


def agent_status(**changes: Any) -> StatusReply:
    """An agent with nothing to do and an arena of 1 GiB."""
    usual: dict[str, Any] = {
        "arena_bytes": 1 << 30,
        "block_bytes": 1 << 16,
        "free_bytes": 1 << 30,
        "landing_bytes": 0,
        "landing_cap_bytes": 1 << 30,
        "outbox_bytes": 0,
        "num_landings": {},
        "num_outboxes": {},
        "engines": [],
        "links": [],
        "num_received_connections": 0,
        "uptime_s": 1.0,
        "pid": 1,
        "data_endpoint": "127.0.0.1:7100",
    }
    return StatusReply(**(usual | changes))
