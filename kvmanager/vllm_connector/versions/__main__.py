"""Writes the file of a version of vLLM, from a wheel that need not be installed:

    pip download --no-deps vllm==0.33.0
    python -m kvmanager.vllm_connector.versions vllm-0.33.0-*.whl

Without an argument the installed vLLM is read. With `--check` nothing is written: the differences
from the file are printed, and the exit status is 1 if there are any.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvmanager.vllm_connector.versions.check import compare, lost_members, own_classes
from kvmanager.vllm_connector.versions.interface import (
    Interface,
    file_of,
    installed_root,
    interface_of,
    known_interfaces,
    rendered,
    used_names,
    used_words,
)
from kvmanager.vllm_connector.versions.sources import Sources


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: write the file of a version, or compare with it. 1: what is used is missing,
    or, with `--check`, the file differs.
    """
    parser = argparse.ArgumentParser(prog="python -m kvmanager.vllm_connector.versions")
    parser.add_argument("source", type=Path, nargs="?", help="a wheel, or the directory of vllm/")
    parser.add_argument("--check", action="store_true", help="compare with the file")
    options = parser.parse_args(argv)
    interface = interface_of(Sources(options.source or installed_root()))
    problems = _problems(interface)
    file, text = file_of(interface), rendered(interface)
    if options.check:
        known = file.read_text(encoding="utf-8") if file.is_file() else ""
        problems += _changes(known, text, interface.version)
    else:
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in problems)
    return 1 if problems else 0


def _problems(interface: Interface) -> list[str]:
    """What the connector uses and this version does not have."""
    name = f"vLLM {interface.version}"
    found = [f"{name} has no {used}" for used in used_names() if used not in interface.names]
    for other in known_interfaces():
        # What only a newer version has is not lost, and the connector does without it.
        if other.minor > interface.minor:
            continue
        lost = lost_members(other, interface, used_words())
        found += [f"{name} has no {member}, as {other.version} has" for member in lost]
        refusals = compare(other.names, interface.names, own_classes()).refusals
        found += [f"{name}, not as {other.version}: {refusal}" for refusal in refusals]
    return found


def _changes(known: str, text: str, version: str) -> list[str]:
    """The differences between the contents of two files; a patch release alone is none."""
    known = re.sub(r'"version": "[^"]*"', f'"version": "{version}"', known, count=1)
    before, after = known.splitlines(), text.splitlines()
    return list(difflib.unified_diff(before, after, "file", "sources", n=1))


if __name__ == "__main__":
    raise SystemExit(main())
