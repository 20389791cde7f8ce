"""The documentation names files, names and settings that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import write_configuration
import write_support

ROOT = Path(__file__).parents[2]
PACKAGES = ("transport", "netmon", "kvmanager", "scheduler", "prfaas", "local_pd", "deploy")
FOLDERS = (*PACKAGES, "tests", "docs", "requirements")
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / package / "README.md" for package in PACKAGES),
        *(ROOT / "tests").rglob("*.md"),
    )
    if path.is_file() and path.name != "CHANGELOG.md"
)
ENTRY = re.compile(r"`(?P<names>[^`]+)`(?: and `(?P<more>[^`]+)`)? in `(?P<path>[^`]+\.py)`")


def _prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _named_paths(page: Path) -> Iterator[str]:
    """What is written as a path from the root, or as one beside the page."""
    for code in re.findall(r"`([\w./-]+)`", _prose(page)):
        parts = code.split("/")
        is_path = parts[0] in FOLDERS or code.endswith((".py", ".md", ".yaml", ".toml"))
        # A part in capitals stands for any name.
        if len(parts) > 1 and is_path and not any(map(str.isupper, parts)):
            yield code


@cache
def _definitions(path: Path) -> frozenset[str]:
    """Classes, functions and constants of a module, and `Class.member`; nothing is imported."""
    found: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.ClassDef(name=name):
                    found.add(prefix + name)
                    add(node.body, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(prefix + name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)
                case ast.Assign(targets=targets):
                    found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    add(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def test_the_configuration_reference_is_current() -> None:
    current = write_configuration.page()
    assert write_configuration.PAGE.read_text() == current, "run `make docs`"


def test_the_support_matrix_is_current() -> None:
    assert write_support.PAGE.read_text() == write_support.page(), "run `make docs`"


def test_each_package_has_a_readme() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "README.md").is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_of_a_page_exist(page: Path) -> None:
    links = [
        link.partition("#")[0]
        for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page))
        if "://" not in link
    ]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    missing += [
        path
        for path in _named_paths(page)
        if not (ROOT / path).exists() and not (page.parent / path).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_a_page_are_defined_where_it_says(page: Path) -> None:
    missing = [
        f"{name} in {entry['path']}"
        for entry in ENTRY.finditer(_prose(page))
        for name in (entry["names"], entry["more"])
        if name is not None and name not in _definitions(ROOT / entry["path"])
    ]
    assert missing == []


def test_every_term_of_the_glossary_says_where_it_is() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| term"))
    ]
    assert len(rows) > 30
    assert [row[0] for row in rows if len(row) != 3 or "`" not in row[2]] == []
