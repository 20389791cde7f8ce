"""The runbook has a page for each link condition, route reason and alert, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import write_runbook
import yaml
from typer.testing import CliRunner

from deploy.cli import app

PAGES = write_runbook.needed_pages()


def test_every_condition_reason_and_alert_has_its_page_and_none_is_stale() -> None:
    found = {
        str(path.relative_to(write_runbook.FOLDER)) for path in write_runbook.FOLDER.rglob("*.md")
    }
    assert found - {"index.md"} == set(PAGES)


def test_the_index_is_current() -> None:
    assert write_runbook.PAGE.read_text() == write_runbook.page(), "run `make docs`"


def test_the_site_has_all_pages() -> None:
    nav = yaml.safe_load((write_runbook.ROOT / "mkdocs.yml").read_text())["nav"]
    (run,) = [item["Run"] for item in nav if isinstance(item, dict) and "Run" in item]
    (runbook,) = [item["Runbook"] for item in run if isinstance(item, dict) and "Runbook" in item]
    assert runbook == write_runbook.nav()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_is_what_it_means_and_what_to_do(page: str) -> None:
    path = write_runbook.FOLDER / page
    lines = path.read_text().splitlines()
    assert f"`{Path(page).stem}`" in lines[0]
    assert tuple(line for line in lines if line.startswith("##")) == write_runbook.SECTIONS
    # Short enough for somebody who was just woken.
    assert len(lines) < 60


def test_commands_of_the_pages_exist() -> None:
    texts = [(write_runbook.FOLDER / page).read_text() for page in PAGES]
    words = {found for text in texts for found in re.findall(r"prfaas ((?:[a-z]+ ?)+)", text)}
    commands = {tuple(word.split()[:2]) for word in words}
    assert len(commands) > 10
    for command in sorted(commands):
        run = CliRunner().invoke(app, [*command, "--help"])
        # The second word may be an argument, as in `prfaas up region.yaml`.
        if run.exit_code:
            run = CliRunner().invoke(app, [command[0], "--help"])
        assert run.exit_code == 0, command
