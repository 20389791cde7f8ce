"""Dashboards are what their script writes."""

from __future__ import annotations

import json

import write_dashboards


def test_the_dashboards_are_current() -> None:
    stored = {path: path.read_text() for path in write_dashboards.FOLDER.iterdir()}
    assert stored == write_dashboards.files(), "run `make docs`"


def test_panels_have_one_title_each_and_say_what_they_show() -> None:
    for text in write_dashboards.files().values():
        board = json.loads(text)
        titles = [panel["title"] for panel in board["panels"]]
        assert len(set(titles)) == len(titles)
        assert all(panel["description"] for panel in board["panels"])
        assert board["uid"].startswith("prfaas-")
