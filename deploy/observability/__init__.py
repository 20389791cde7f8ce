"""Alert rules for Prometheus and dashboards for Grafana, as files beside this module.

`alerts.yaml` is a rule file of Prometheus. `dashboards` has one JSON file for each dashboard, made
by `docs/write_dashboards.py`. Knows no region.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

_RUNBOOK: Final = re.compile(r"(runbook_url: )docs/(runbook/\S+)\.md")


def alert_rules(docs_url: str = "") -> str:
    """The rule file. With `docs_url`, where the site that `make docs` builds is served,
    `runbook_url` is the address of the page; else its path in the sources.
    """
    text = (files(__name__) / "alerts.yaml").read_text(encoding="utf-8")
    if docs_url:
        text = _RUNBOOK.sub(rf"\g<1>{docs_url.rstrip('/')}/\g<2>.html", text)
    return text


def dashboards() -> dict[str, str]:
    """The JSON of every dashboard, by the name of its file."""
    folder = files(__name__) / "dashboards"
    found = (item for item in folder.iterdir() if item.name.endswith(".json"))
    return {item.name: item.read_text(encoding="utf-8") for item in found}
