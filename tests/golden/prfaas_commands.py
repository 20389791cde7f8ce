"""Runs `prfaas` in this process, and makes what it says the same on every machine and day.

Golden tests of commands share it: what stands in golden files went through `plain`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import yaml
from typer.testing import CliRunner

from deploy.cli import app

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "deploy" / "region" / "examples"
ENVIRONMENT: dict[str, str | None] = {
    "COLUMNS": "120",
    "NO_COLOR": "1",
    "FORCE_COLOR": None,
    "TERM": "dumb",
    "XDG_STATE_HOME": "/nowhere",  # the runs of this machine are nobody's business here
    "CUDA_VISIBLE_DEVICES": None,
    "PRFAAS_API_KEY": None,
    # Variables of region files.
    **dict.fromkeys(("MODEL", "DTYPE", "MAX_MODEL_LEN", "HOST_A", "HOST_B", "HOST_C")),
    **dict.fromkeys(("ANY", "PORT", "ADMIN", "KEYS", "NOWHERE")),
}
"""What commands see of the environment; None: not there."""
_VERSION = re.compile(rf"(?<![\d.]){re.escape(version('prfaas'))}(?![\d.])")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{7,}(?:e[+-]?\d+)?")
_ENDS_OF_LINES = re.compile(r"[ \t]+$", re.MULTILINE)


def plain(text: str, names: Mapping[str, str] | None = None) -> str:
    """`text` without what differs from machine to machine. `names` are what stands for paths and
    addresses of this run.
    """
    known = {str(ROOT): "$ROOT", sys.executable: "$PYTHON"} | dict(names or {})
    for found in sorted(known, key=len, reverse=True):
        text = text.replace(found, known[found])
    text = _VERSION.sub("$VERSION", text)
    # The last digits of what a solver finds are those of its libraries.
    text = _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.6g}", text)
    return _ENDS_OF_LINES.sub("", text)


def ran(words: Iterable[str]) -> tuple[int, str]:
    """The exit status of `prfaas WORDS`, and what it prints on both streams."""
    result = CliRunner().invoke(app, list(words), env=ENVIRONMENT)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def said(words: Iterable[str], names: Mapping[str, str] | None = None) -> str:
    """The command line, what it prints, and its exit status if that is not 0."""
    words = list(words)
    return shown(words, *ran(words), names)


def shown(
    words: Iterable[str], status: int, output: str, names: Mapping[str, str] | None = None
) -> str:
    """`said` for a command that ran elsewhere."""
    lines = [f"$ prfaas {shlex.join(words)}", *map(_readable, output.splitlines())]
    if status:
        lines.append(f"[{status}]")
    return plain("\n".join([*lines, ""]), names)


def _readable(line: str) -> str:
    """A line, or where it is JSON many short ones."""
    try:
        return json.dumps(json.loads(line), indent=1) if line.startswith("{") else line
    except ValueError:
        return line


def refusals(cases: Path, folder: Path) -> str:
    """What commands say of files that have one mistake each. They have to refuse them.

    `cases` is a list of groups: the `command`, the right `file`, and by the name of each case what
    is replaced in it, or the whole file. FILE, OUT and FOLDER in a command are the wrong file, a
    folder that is missing, and one that exists; EXAMPLES has the examples of regions.
    """
    paths = {"FILE": folder / "file.yaml", "OUT": folder / "out", "FOLDER": folder}
    paths["EXAMPLES"] = EXAMPLES
    names = {str(path): word for word, path in paths.items()}
    parts = []
    for group in yaml.safe_load(cases.read_text(encoding="utf-8")):
        parts.append(f"$ prfaas {group['command']}   ({group['file']})\n")
        words = [_filled(word, paths) for word in shlex.split(group["command"])]
        for case, changes in group["cases"].items():
            right = (ROOT / group["file"]).read_text(encoding="utf-8")
            paths["FILE"].write_text(_changed(right, changes, case), encoding="utf-8")
            status, output = ran(words)
            assert status == 2, f"{case}: {status}: {output}"
            assert not paths["OUT"].exists(), case
            parts.append(f"\n## {case}\n{plain(output, names)}")
        parts.append("\n")
    return "".join(parts)


def _filled(word: str, paths: Mapping[str, Path]) -> str:
    for name, path in paths.items():
        word = word.replace(name, str(path))
    return word


def _changed(text: str, changes: str | Mapping[str, str], case: str) -> str:
    if isinstance(changes, str):
        return changes
    for old, new in changes.items():
        assert old in text, f"{case}: the file has no {old!r}"
        text = text.replace(old, new, 1)
    return text
