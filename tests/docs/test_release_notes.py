"""Release notes are a section of the changelog, and a tag has them as its message."""

import subprocess
from pathlib import Path

import pytest
from release_notes import ROOT, ReleaseError, notes, tag

CHANGELOG = """# Changelog

## 0.2.0 (2026-12-31)

### Added
- A thing.

## 0.1.0

- The first.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def git(tree: Path, *words: str) -> str:
    argv = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def test_notes_are_the_section_of_the_version(tree: Path) -> None:
    assert notes(tree, "0.2.0") == "PrfaaS 0.2.0, 2026-12-31\n\n### Added\n- A thing.\n"


@pytest.mark.parametrize(
    ("version", "changelog", "why"),
    [
        ("0.3.0", CHANGELOG, "pyproject.toml has version 0.2.0, not 0.3.0"),
        ("0.2.0", "## Unreleased\n\n- A thing.\n", "has no section 0.2.0"),
        ("0.2.0", "## 0.2.0\n\n- A thing.\n", "lacks its date"),
        ("0.2.0", "## 0.2.0 (2026-12-31)\n\n## 0.1.0\n", "is empty"),
    ],
)
def test_a_version_that_is_not_ready_is_refused(
    tree: Path, version: str, changelog: str, why: str
) -> None:
    (tree / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(ReleaseError, match=why):
        notes(tree, version)


def test_a_tag_has_the_notes_as_its_message(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(name, "a")
    for name in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@b")
    git(tree, "init", "--quiet")
    with pytest.raises(ReleaseError, match="not committed"):
        tag(tree, "0.2.0")
    git(tree, "add", "-A")
    git(tree, "commit", "--quiet", "-m", "release")
    assert tag(tree, "0.2.0") == "v0.2.0"
    assert git(tree, "tag", "-l", "--format=%(contents)").rstrip() == notes(tree, "0.2.0").rstrip()
    with pytest.raises(ReleaseError, match="already exists"):
        tag(tree, "0.2.0")


def test_the_changelog_of_this_tree_has_sections_that_can_be_read() -> None:
    with pytest.raises(ReleaseError, match=r"pyproject\.toml has version"):
        notes(ROOT, "0.0.0")
