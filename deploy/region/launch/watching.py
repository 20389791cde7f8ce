"""Finds what a Prometheus server shall scrape: a part of a region's file, or what runs here.

It looks into run directories and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.region.launch.parts import Part, part_of, part_with, spread_problems, whole
from deploy.region.launch.ports import resolve_part
from deploy.region.launch.prometheus import ScrapeKeys, hidden_targets, needs_gateway_key, rendered
from deploy.region.launch.rundir import RunDirectory, find_run
from deploy.region.launch.trust import engine_key_file
from deploy.region.spec.loading import load_region
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError, Problem


@dataclass(frozen=True, slots=True)
class WatchedRegion:
    """A region with all ports, and the part of it that is scraped. `root` is the directory of its
    run, where it has one.
    """

    region: RegionSpec
    part: Part
    root: Path

    def files(self, gateway_key: Path | None, docs_url: str = "") -> dict[str, str]:
        """The files for Prometheus and Grafana. FileError if a target cannot be reached, or if
        gateways ask for a key and none is given.
        """
        problems = hidden_targets(self.region, self.part)
        if gateway_key is None and needs_gateway_key(self.region, self.part):
            message = "it shows its metrics to operators only; give --gateway-key FILE"
            problems.append(Problem(("gateway",), message))
        if problems:
            raise FileError("for Prometheus", problems)
        keys = ScrapeKeys(
            engine=engine_key_file(self.region, RunDirectory(self.root, self.root)),
            gateway=None if gateway_key is None else gateway_key.absolute(),
        )
        return rendered(self.region, self.part, keys, docs_url=docs_url)


def watched_region(
    region: RegionSpec, *, site: str | None, node: str | None, run_dir: Path | None
) -> WatchedRegion:
    """The part of a region that has its ports and keys in its file, or what runs here (in
    `run_dir`). UnknownPart, WhichRun, RunDirectoryError, FileError.
    """
    part = part_of(region, site=site, node=node)
    # Ports and keys that a file does not name are those of a run on this machine.
    if run_dir is not None or spread_problems(region):
        return _running(run_dir, None if run_dir is not None else region.name)
    part = part_with(region, part.name or region.name, part.nodes)
    return WatchedRegion(resolve_part(region, part).region, part, Path())


def _running(run_dir: Path | None, name: str | None) -> WatchedRegion:
    root, state = find_run(run_dir, name)
    region = load_region(RunDirectory(root, root).region_file, {})
    if not state.part:
        return WatchedRegion(region, whole(region), root)
    nodes = {item.name: (item.name,) for item in region.nodes}
    sites = {item.name: tuple(one.name for one in item.nodes) for item in region.clusters}
    return WatchedRegion(region, part_with(region, state.part, (sites | nodes)[state.part]), root)
