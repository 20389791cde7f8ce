"""Release notes and tags from CHANGELOG.md.

    make release-notes VERSION=0.2.0    print the section of the version
    make release-tag VERSION=0.2.0      tag the commit v0.2.0 with that section as message

The version is written in pyproject.toml alone; wheels and `prfaas --version` take it from there.
Before a release, write it there and give the changelog's section `Unreleased` the title
`0.2.0 (2026-12-31)`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TITLE = re.compile(r"^## (?P<version>\S+)(?: \((?P<date>\d{4}-\d{2}-\d{2})\))?\n", re.MULTILINE)


class ReleaseError(Exception):
    """The version cannot be released yet; the message says why."""


def notes(root: Path, version: str) -> str:
    """The changelog's section of `version`. ReleaseError if there is none, or it has no date or
    no text, or pyproject.toml has another version.
    """
    written = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if written != version:
        raise ReleaseError(f"pyproject.toml has version {written}, not {version}")
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = list(_TITLE.finditer(text))
    for number, title in enumerate(titles):
        if title["version"] != version:
            continue
        if title["date"] is None:
            raise ReleaseError(
                f"the title of {version} in CHANGELOG.md lacks its date (YYYY-MM-DD)"
            )
        end = titles[number + 1].start() if number + 1 < len(titles) else len(text)
        body = text[title.end() : end].strip()
        if not body:
            raise ReleaseError(f"the section {version} of CHANGELOG.md is empty")
        return f"PrfaaS {version}, {title['date']}\n\n{body}\n"
    raise ReleaseError(f"CHANGELOG.md has no section {version}: name it in place of `Unreleased`")


def tag(root: Path, version: str) -> str:
    """Tag the commit that is checked out, and return the tag's name. ReleaseError if files are not
    committed or the tag exists, and as `notes` does.
    """
    message = notes(root, version)
    if _git(root, "status", "--porcelain").stdout:
        raise ReleaseError("there are changes that are not committed")
    name = f"v{version}"
    # Verbatim: headings begin with the character of git's comments.
    done = _git(root, "tag", "--annotate", "--cleanup=verbatim", "--message", message, name)
    if done.returncode != 0:
        raise ReleaseError(done.stderr.strip())
    return name


def main(words: list[str]) -> None:
    """Command line: `print VERSION` or `tag VERSION`."""
    match words:
        case ["print", version] if version:
            action = notes
        case ["tag", version] if version:
            action = tag
        case _:
            raise SystemExit("say which version, as in: make release-notes VERSION=0.2.0")
    try:
        print(action(ROOT, version).rstrip("\n"))
    except ReleaseError as error:
        raise SystemExit(str(error)) from None


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)


if __name__ == "__main__":
    main(sys.argv[1:])
