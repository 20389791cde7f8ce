"""Compares what a process shows with the page of metrics."""

from __future__ import annotations

import write_metrics
from prometheus_client.parser import text_string_to_metric_families


def undocumented(exposition: str) -> list[str]:
    """The metrics of a scrape, and the labels of them, that the page lacks."""
    known = {
        item.name.removesuffix("_total"): set(item.labels)
        for shown in write_metrics.processes().values()
        for item in shown
    }
    found = []
    for family in text_string_to_metric_families(exposition):
        # The library's own, of the process and of Python.
        if not family.name.startswith("prfaas_") or family.name.endswith("_created"):
            continue
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if family.name not in known:
            found.append(family.name)
        elif family.samples and labels != known[family.name]:
            found.append(f"{family.name} with {sorted(labels)}")
    return found
