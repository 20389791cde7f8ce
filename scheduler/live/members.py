"""Which instances the region's clusters have, from report to report. Pure.

An instance has joined when it is first found healthy. It has left when its front answers and does
not name it any more. This file does not know why instances join or leave.
"""

from __future__ import annotations

from scheduler.reports import ClusterReport


class Members:
    """The instances that count, by cluster."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}
        self.num_changes = 0
        """How often instances joined or left; those of a cluster's first report did not join."""

    def heard(self, report: ClusterReport | None) -> frozenset[str]:
        """Take in a report, and return the names of instances that left since the last one."""
        if report is None or not report.heard:
            return frozenset()
        names = {item.name for item in report.instances}
        known = self._known.get(report.name)
        if known is None:
            self._known[report.name] = names
            return frozenset()
        left = frozenset(known - names)
        joined = {item.name for item in report.instances if item.healthy} - known
        if left or joined:
            self._known[report.name] = (known | joined) - left
            self.num_changes += 1
        return left
