"""Writes docs/runbook/index.md, and says which pages the runbook must have.

Link conditions, route reasons and alerts each have a page, written by hand, of the same three
sections. `make docs` runs this, and a test compares pages, index and the navigation of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.observability import alert_rules
from netmon.estimate import LinkCondition
from scheduler.routing.decision import Reason

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = Path(__file__).with_name("runbook")
PAGE: Final = FOLDER / "index.md"
SECTIONS: Final = ("## Symptom", "## What it means", "## What to do")

_INTRODUCTION: Final = """\
# Runbook

A page for each link condition, each route reason and each alert: what one sees, what it means, and
what to do. [Monitoring](../monitoring.md) says how to set up the alerts. `make docs` writes this
list.

Three commands answer most questions: `prfaas status` on a host says what runs there, `prfaas link
top` what links carry, and `prfaas explain REQUEST_ID` why a request went where it did.
"""


def rules() -> list[dict[str, Any]]:
    """All alert rules."""
    groups = yaml.safe_load(alert_rules())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def runbook_of(rule: dict[str, Any]) -> str:
    """The page that an alert names, from the folder of the runbook."""
    return str(rule["annotations"]["runbook_url"]).removeprefix("docs/runbook/")


def needed_pages() -> list[str]:
    """The pages that must exist, and no other may, from the folder of the runbook."""
    pages = [f"conditions/{condition}.md" for condition in LinkCondition]
    pages += [f"reasons/{reason}.md" for reason in Reason]
    # An alert about a condition or a reason names that page.
    return pages + [name for rule in rules() if (name := runbook_of(rule)) not in pages]


def nav() -> list[Any]:
    """The part of mkdocs.yml."""
    found: list[Any] = ["runbook/index.md"]
    for title, folder in (
        ("Link conditions", "conditions"),
        ("Route reasons", "reasons"),
        ("Alerts", "alerts"),
    ):
        pages = [page for page in needed_pages() if page.startswith(f"{folder}/")]
        # Shorter than the titles of the pages.
        found.append({title: [{Path(page).stem: f"runbook/{page}"} for page in pages]})
    return found


def page() -> str:
    """The text of the index."""
    lines = [_INTRODUCTION, "## Link conditions", ""]
    lines += _table("condition", [f"conditions/{condition}.md" for condition in LinkCondition])
    lines += ["", "## Route reasons", "", "Answers have them in the header `x-prfaas-reason`.", ""]
    lines += _table("reason", [f"reasons/{reason}.md" for reason in Reason])
    lines += ["", "## Alerts", "", "| alert | severity | fires after | page |", "|---|---|---|---|"]
    for rule in rules():
        name, page = rule["alert"], runbook_of(rule)
        wait = rule.get("for", "at once")
        lines.append(
            f"| `{name}` | {rule['labels']['severity']} | {wait} | [{Path(page).stem}]({page}) |"
        )
    return "\n".join(lines) + "\n"


def _table(head: str, pages: list[str]) -> list[str]:
    rows = [f"| [{Path(page).stem}]({page}) | {_meaning(FOLDER / page)} |" for page in pages]
    return [f"| {head} | what it means |", "|---|---|", *rows]


def _meaning(path: Path) -> str:
    """The first sentence of a page about what it means."""
    text = path.read_text(encoding="utf-8").partition(f"{SECTIONS[1]}\n\n")[2]
    first = re.split(r"(?<=[.:]) |\n\n", " ".join(text.partition("\n\n")[0].split()))[0]
    return first.rstrip(":.") + "."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
