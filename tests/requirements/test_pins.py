"""Every pinned package has hashes and a licence, and is installed only if a hash matches."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def pins(path: Path) -> dict[str, str]:
    """The text behind each `name==version`, its continuation lines included."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    found = {}
    for requirement in text.replace("\\\n", " ").splitlines():
        if requirement.strip():
            name, _, rest = requirement.partition("==")
            found[re.sub(r"[-_.]+", "-", name.strip()).lower()] = rest
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_requirement_is_one_version_with_hashes(path: Path) -> None:
    found = pins(path)
    assert found
    assert {name: rest for name, rest in found.items() if not HASH.search(rest)} == {}
    assert [
        name for name, rest in found.items() if not re.match(r"(\d+!)?\d[^\s,<>=!~]* ", rest)
    ] == []


def test_every_requirement_has_a_listed_licence_and_nothing_else_is_listed() -> None:
    lines = (ROOT / "docs" / "licences.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    listed = {name: (licence, set(files.split(", "))) for name, licence, files in rows[2:]}
    pinned: dict[str, set[str]] = {}
    for path in FILES:
        for name in pins(path):
            pinned.setdefault(name, set()).add(path.stem)
    assert {name: files for name, (_, files) in listed.items()} == pinned
    assert [name for name, (licence, _) in listed.items() if not licence] == []


def test_what_make_installs_is_checked_against_its_hash() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installs = re.findall(r"^.*\bpip install\b.*$|^.*\$\(PIP\) install.*$", makefile, re.MULTILINE)
    unchecked = [line.strip() for line in installs if "--require-hashes" not in line]
    # Our own code, which is no package of an index; what it is built with is installed before.
    assert unchecked == ["@$(PIP) install --quiet --no-deps --no-build-isolation --editable ."]
    assert re.findall(r"-r (requirements/\S+)", makefile)
