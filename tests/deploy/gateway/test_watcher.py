"""Views of the region from reports of its fronts, and tasks in the background."""

import asyncio
from typing import Any

import report_cases

from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.links.watcher import INCOMPATIBLE, RegionWatcher, without_incompatible
from deploy.gateway.serving.background import Background
from scheduler.reports import ClusterReport, InstanceReport


class Front:
    """Reports what it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instances: tuple[InstanceReport, ...] = ()
        self.error: Exception | None = None

    async def report(self) -> ClusterReport:
        if self.error is not None:
            raise self.error
        healthy = any(item.healthy for item in self.instances)
        return report_cases.cluster(self.name, *self.instances, healthy=healthy, queue_depth=3)


def instance(model: str = "tiny", role: Any = "prefill", **fields: Any) -> InstanceReport:
    return report_cases.instance("i", role, model=model, **fields)


async def test_views_follow_the_reports_and_grow_stale() -> None:
    home, far = Front("home"), Front("far")
    home.instances = (instance(role="both"), instance(role="prefill"))
    far.instances = (instance(), instance("other"), instance(draining=True))
    now_s = 100.0
    config = GatewayConfig(models=(ModelConfig(name="tiny"),))
    pds: Any = [home]
    clusters: Any = {"far": far}
    watcher = RegionWatcher(config, pds, clusters, clock=lambda: now_s)
    assert not watcher.is_healthy()
    await watcher.start()
    await watcher.close()
    assert watcher.is_healthy()
    (home_seen,), (far_seen,) = watcher.reported_pds(), watcher.reported_prefill()
    assert (home_seen.name, far_seen.name, far_seen.at_s) == ("home", "far", now_s)
    assert far_seen.report is not None
    assert far_seen.report.instances == far.instances
    now_s += config.report_stale_s + 1
    assert not watcher.is_healthy()
    assert watcher.reported_pds()[0].report is None
    assert watcher.prefill_reports() == {"far": None}


def cluster(*instances: InstanceReport) -> ClusterReport:
    healthy = any(item.healthy and not item.draining for item in instances)
    return report_cases.cluster("c", *instances, healthy=healthy)


def test_instances_whose_kvcache_nobody_can_use_get_no_prompts() -> None:
    home = cluster(
        instance(role="both", layout_fingerprint="a"),
        instance("other", role="decode", layout_fingerprint="b"),
        instance(role="prefill", layout_fingerprint="c"),
    )
    fine = cluster(instance(layout_fingerprint="a"), instance("other", layout_fingerprint="b"))
    assert without_incompatible(fine, [home]) is fine
    for unknown in (cluster(instance()), cluster(instance("new", layout_fingerprint="x")), None):
        assert without_incompatible(unknown, [home]) is unknown
    assert without_incompatible(fine, [None]) is fine
    mixed = without_incompatible(cluster(*fine.instances, instance(layout_fingerprint="b")), [home])
    assert mixed is not None
    assert [item.healthy for item in mixed.instances] == [True, True, False]
    assert [item.compatible for item in mixed.instances] == [True, True, False]
    assert mixed.healthy
    swapped = without_incompatible(cluster(instance(layout_fingerprint="c")), [home])
    assert swapped is not None
    assert not swapped.healthy
    assert swapped.reason == swapped.instances[0].reason == INCOMPATIBLE


async def test_a_cluster_of_which_nothing_new_was_heard_has_the_same_report() -> None:
    home, far = Front("home"), Front("far")
    home.instances = (instance(role="both", layout_fingerprint="a"),)
    far.instances = (instance(layout_fingerprint="b"),)
    config = GatewayConfig(models=(ModelConfig(name="tiny"),))
    pds: Any = [home]
    clusters: Any = {"far": far}
    watcher = RegionWatcher(config, pds, clusters)
    await watcher.start()
    first = watcher.prefill_reports()["far"]
    assert first is not None
    assert not first.instances[0].compatible
    assert watcher.prefill_reports()["far"] is first
    far.instances = (instance(layout_fingerprint="a"),)
    await watcher.start()
    await watcher.close()
    mended = watcher.prefill_reports()["far"]
    assert mended is not None
    assert mended.instances[0].compatible


async def test_a_front_that_raises_is_not_healthy() -> None:
    home, far = Front("home"), Front("far")
    home.instances = (instance(role="both"),)
    far.error = RuntimeError("bug")
    config = GatewayConfig(models=(ModelConfig(name="tiny"),))
    pds: Any = [home]
    clusters: Any = {"far": far}
    watcher = RegionWatcher(config, pds, clusters)
    await watcher.start()
    await watcher.close()
    assert watcher.is_healthy()
    assert [seen.report for seen in watcher.reported_prefill()] == [None]


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


async def test_a_report_counts_from_when_it_was_asked_for() -> None:
    home, now_s = Front("home"), 100.0

    async def slow() -> ClusterReport:
        nonlocal now_s
        now_s += 1.5
        return await Front.report(home)

    home.report = slow  # type: ignore[method-assign]
    pds: Any = [home]
    config = GatewayConfig(models=(ModelConfig(name="tiny"),))
    watcher = RegionWatcher(config, pds, {}, clock=lambda: now_s)
    await watcher.start()
    await watcher.close()
    assert watcher.reported_pds()[0].at_s == 100.0
