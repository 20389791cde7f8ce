"""Dashboards are what their script writes."""

from __future__ import annotations

import json
import re

import write_dashboards
import write_metrics

from deploy.observability import alert_rules


def test_the_dashboards_are_current() -> None:
    stored = {path: path.read_text() for path in write_dashboards.FOLDER.iterdir()}
    assert stored == write_dashboards.files(), "run `make docs`"


def test_panels_and_alerts_ask_for_metrics_that_exist() -> None:
    """The page of metrics is made from the code, and compared with it."""
    listed = set(re.findall(r"`((?:prfaas_|vllm:prfaas_)\w+)", write_metrics.PAGE.read_text()))
    asked = alert_rules() + "".join(write_dashboards.files().values())
    # The pattern of the loops' metrics names several processes.
    names = set(re.findall(r"(?<![\w\"])((?:prfaas_|vllm:prfaas_)[a-z]\w+)(?=[{\[ )/])", asked))
    assert len(names) > 50
    unlisted = {name for name in names if name not in listed}
    assert {n for n in unlisted if re.sub("_(bucket|sum|count)$", "", n) not in listed} == set()


def test_panels_have_one_title_each_and_say_what_they_show() -> None:
    for text in write_dashboards.files().values():
        board = json.loads(text)
        titles = [panel["title"] for panel in board["panels"]]
        assert len(set(titles)) == len(titles)
        assert all(panel["description"] for panel in board["panels"])
        assert board["uid"].startswith("prfaas-")
