"""Checks the names of a plan file: clusters, the links between them, and their uplinks."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.plan.solve.spec import PlanSpec
from kvmanager.config_files.problems import Problem, suggestion


def name_problems(spec: PlanSpec) -> Iterator[Problem]:
    """Names that are used twice, or that nothing has."""
    sources = {cluster.name for cluster in spec.prefill_clusters}
    targets = {cluster.name for cluster in spec.pd_clusters}
    seen: set[tuple[str, str]] = set()
    kinds: dict[str, str] = {}
    for key, clusters in (
        ("prefill_clusters", spec.prefill_clusters),
        ("pd_clusters", spec.pd_clusters),
    ):
        for i, cluster in enumerate(clusters):
            names = cluster.name, cluster.model
            if names in seen or kinds.setdefault(cluster.name, key) != key:
                yield Problem((key, i, "name"), f"{cluster.name!r} is used twice")
            seen.add(names)
    for i, up in enumerate(spec.uplinks):
        if up.cluster not in (sources if up.way == "egress" else targets):
            kind = "prefill" if up.way == "egress" else "PD"
            yield Problem(("uplinks", i, "cluster"), f"no {kind} cluster {up.cluster!r}")
    if not any(cluster.instances for cluster in spec.pd_clusters):
        yield Problem(("pd_clusters",), "no instance decodes: give one cluster at least 1")
    linked: set[tuple[str, str]] = set()
    for i, link in enumerate(spec.links):
        if link.source not in sources:
            hint = suggestion(link.source, sources)
            yield Problem(("links", i, "from"), f"no prefill cluster {link.source!r}{hint}")
        if link.target not in targets:
            hint = suggestion(link.target, targets)
            yield Problem(("links", i, "to"), f"no PD cluster {link.target!r}{hint}")
        if (link.source, link.target) in linked:
            yield Problem(("links", i), f"a second link from {link.source} to {link.target}")
        linked.add((link.source, link.target))
    for i, cluster in enumerate(spec.prefill_clusters):
        if not any(source == cluster.name for source, _ in linked):
            yield Problem(("prefill_clusters", i), f"{cluster.name!r} has no link: add one from it")
