"""Views of the region from reports of its fronts, and tasks in the background."""

import asyncio
from typing import Any

from deploy.gateway.background import Background
from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.watcher import RegionWatcher
from kvmanager.engines.jobs import ClusterReport, InstanceReport


class Front:
    """Reports what it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instances: tuple[InstanceReport, ...] = ()
        self.error: Exception | None = None

    async def report(self) -> ClusterReport:
        if self.error is not None:
            raise self.error
        return ClusterReport(
            name=self.name,
            healthy=any(item.healthy for item in self.instances),
            queue_depth=3,
            running=1,
            instances=self.instances,
            max_queued=4,
        )


def instance(model: str = "tiny", role: Any = "prefill", **fields: Any) -> InstanceReport:
    values = {
        "name": "i",
        "role": role,
        "model": model,
        "healthy": True,
        "draining": False,
        "running": 0,
        "max_concurrent": 1,
    }
    return InstanceReport(**(values | fields))


async def test_views_follow_the_reports_and_grow_stale() -> None:
    home, far = Front("home"), Front("far")
    home.instances = (instance(role="both"), instance(role="prefill"))
    far.instances = (instance(), instance("other"), instance(draining=True))
    now_s = 100.0
    config = GatewayConfig(models=(ModelConfig(name="tiny"),), threshold_tokens=5)
    pd: Any = home
    clusters: Any = {"far": far}
    watcher = RegionWatcher(config, pd, clusters, clock=lambda: now_s)
    assert not watcher.is_healthy()
    await watcher.start()
    await watcher.close()
    assert watcher.is_healthy()
    view = watcher.view("tiny")
    assert view.threshold_tokens == 5
    assert view.local.has_prefill_instances
    (cluster,) = view.prefill_clusters
    assert (cluster.num_instances, cluster.queue_depth, cluster.max_queue_depth) == (1, 3, 4)
    assert cluster.is_healthy
    assert not watcher.view("third").prefill_clusters[0].is_healthy
    now_s += config.report_stale_s + 1
    assert not watcher.is_healthy()
    assert not watcher.view("tiny").prefill_clusters[0].is_healthy
    assert watcher.prefill_reports() == {"far": None}


async def test_a_front_that_raises_is_not_healthy() -> None:
    home, far = Front("home"), Front("far")
    home.instances = (instance(role="both"),)
    far.error = RuntimeError("bug")
    config = GatewayConfig(models=(ModelConfig(name="tiny"),))
    pd: Any = home
    clusters: Any = {"far": far}
    watcher = RegionWatcher(config, pd, clusters)
    await watcher.start()
    await watcher.close()
    assert watcher.is_healthy()
    assert not watcher.view("tiny").prefill_clusters[0].is_healthy


async def test_background_tasks_are_waited_for_and_then_cancelled() -> None:
    background = Background()
    done: list[str] = []

    async def work(name: str, event: asyncio.Event) -> None:
        await event.wait()
        done.append(name)

    async def fail() -> None:
        raise ValueError("nobody awaits this")

    go, never = asyncio.Event(), asyncio.Event()
    background.spawn(work("first", go), "first")
    background.spawn(fail(), "fails")
    go.set()
    await background.drain(1.0)
    assert done == ["first"]
    stuck = background.spawn(work("stuck", never), "stuck")
    await background.drain(0.0)
    assert stuck.cancelled()
    assert len(background) == 0
