"""`make stats`: how much code there is, and how it is divided, at one or more git revisions.

Run: python tests/stats/stats.py [REVISION ...] [--json]. Without a revision it measures the files
of the working tree; several revisions stand side by side. It parses Python files and runs none.

What a row counts, where the name does not say it:

- code lines: lines that are neither empty, nor a comment, nor part of a docstring
- link shapes: classes between the socket and the router that declare at least two measures of a
  link (a round trip time, a rate, a loss, a condition ...); settings and histories are left out
- knobs declared more than once: names of fields with a default in more than one settings class; a
  table in a file and the object made of it are two declarations
- comments: on lines of their own or behind code, without the ones that speak to a tool (`# noqa`)
- length of functions: from `def` to the last line
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("transport", "netmon", "kvmanager", "scheduler", "prfaas", "local_pd", "deploy")
LONG_FILE_LINES = 400

# From the kernel's counters to what the router is given.
LINK_FOLDERS = ("transport/", "netmon/", "kvmanager/", "scheduler/", "deploy/gateway/")
LINK_MEASURE = re.compile(
    r"\w*rtt_s|(available|delivery|achieved|reference|floor)_bytes_per_s|retransmitted_bytes"
    r"|loss|utilisation|condition|congestion|queueing_delay_s"
    r"|(queued|backlog|unacked|cwnd|acked)_bytes"
)
# Settings and histories of a link, and replay's own links, are not its present state.
NO_LINK_SHAPE = re.compile(r"_\w+|\w+(Config|Step|Point|Totals)")
REPLAY = "scheduler/replay/"

SETTINGS = re.compile(r"\w+(Config|Section|Settings|Spec|Policy|Limits|File)")
# Files that describe a study declare other things under the same names.
STUDIES = ("deploy/plan/", "deploy/simulate/", "deploy/lab/", "deploy/demo/")
TO_A_TOOL = re.compile(r"#\s*(noqa|type:|mypy:|ruff:|pragma|!)")


@dataclass(frozen=True, slots=True)
class Class:
    """A class of a file: its fields, and those among them that have a default."""

    path: str
    name: str
    fields: tuple[str, ...]
    defaults: tuple[str, ...]


@dataclass(slots=True)
class File:
    """What one Python file holds; lengths in lines."""

    path: str
    num_lines: int
    num_code: int
    num_comments: int
    classes: list[Class] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)


def measured(path: str, text: str) -> File:
    """The counts of one file."""
    tree = ast.parse(text, path)
    quiet = {line for node in ast.walk(tree) for line in _docstring_lines(node)}
    num_comments, code = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            num_comments += TO_A_TOOL.match(token.string) is None
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    file = File(path, text.count("\n"), len(code - quiet), num_comments)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            file.classes.append(_class(path, node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            file.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
    return file


_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def _docstring_lines(node: ast.AST) -> Iterable[int]:
    if not isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) or not ast.get_docstring(node, clean=False):
        return ()
    first = node.body[0]
    return range(first.lineno, (first.end_lineno or first.lineno) + 1)


def _class(path: str, node: ast.ClassDef) -> Class:
    declared = [
        (line.target.id, line.value is not None)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return Class(
        path,
        node.name,
        tuple(name for name, _ in declared),
        tuple(name for name, has_default in declared if has_default),
    )


def link_shapes(classes: Iterable[Class]) -> list[str]:
    """The classes that describe the present state of a link."""
    return sorted(
        one.name
        for one in classes
        if one.path.startswith(LINK_FOLDERS)
        and not one.path.startswith(REPLAY)
        and not NO_LINK_SHAPE.fullmatch(one.name)
        and sum(LINK_MEASURE.fullmatch(name) is not None for name in one.fields) >= 2
    )


def repeated_knobs(classes: Iterable[Class]) -> dict[str, int]:
    """Fields with a default in several settings classes, with the number of such classes."""
    counts = Counter(
        name
        for one in classes
        if SETTINGS.fullmatch(one.name) and not one.path.startswith(STUDIES)
        for name in one.defaults
    )
    return {name: times for name, times in counts.most_common() if times > 1}


def fullest_folder(paths: Iterable[str]) -> tuple[str, int]:
    """The folder that lists the most Python files, with their number."""
    folders = Counter(str(PurePosixPath(path).parent) for path in paths)
    return folders.most_common(1)[0] if folders else ("", 0)


@dataclass(frozen=True, slots=True)
class Stats:
    """One revision's numbers: a row's title, then its value."""

    rows: Mapping[str, int | float | str]
    names: Mapping[str, Sequence[str]]


def stats(files: Mapping[str, str]) -> Stats:
    """Counts the Python files of a tree, given as path and text."""
    source = [measured(path, text) for path, text in files.items() if path.startswith(_SOURCE)]
    test_lines = sum(text.count("\n") for path, text in files.items() if path.startswith("tests/"))
    classes = [one for file in source for one in file.classes]
    num_code = sum(file.num_code for file in source)
    functions = sorted(length for file in source for length in file.functions)
    public = Counter(one.name for one in classes if not one.name.startswith("_"))
    twice = sorted(name for name, times in public.items() if times > 1)
    shapes, knobs = link_shapes(classes), repeated_knobs(classes)
    folder, num_listed = fullest_folder(file.path for file in source)
    num_comments = sum(file.num_comments for file in source)
    rows = {
        "lines of source": sum(file.num_lines for file in source),
        "lines of tests": test_lines,
        "lines of code in the source": num_code,
        "source files": len(source),
        f"files over {LONG_FILE_LINES} lines": sum(
            file.num_lines > LONG_FILE_LINES for file in source
        ),
        "classes": len(classes),
        "code lines per class": round(num_code / len(classes), 1) if classes else 0,
        "public class names used twice": len(twice),
        "link shapes": len(shapes),
        "knobs declared more than once": len(knobs),
        "fields per such knob": round(sum(knobs.values()) / len(knobs), 2) if knobs else 0,
        "comments per 100 lines of code": round(100 * num_comments / max(num_code, 1), 2),
        "functions": len(functions),
        "function length, median": functions[len(functions) // 2] if functions else 0,
        "function length, p95": functions[int(0.95 * len(functions))] if functions else 0,
        "most files in a folder": num_listed,
        "that folder": folder,
    }
    names = {
        "public class names used twice": twice,
        "link shapes": shapes,
        "knobs declared more than once": [f"{name} x{times}" for name, times in knobs.items()],
    }
    return Stats(rows, names)


_SOURCE = tuple(f"{package}/" for package in PACKAGES)


def files_at(revision: str) -> Iterator[tuple[str, str]]:
    """The Python files of a git revision, read without a checkout."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                yield member.name, content.read().decode()


def files_now() -> Iterator[tuple[str, str]]:
    """The Python files of the working tree that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for path in listed.splitlines():
        # Git still lists a file that was deleted and not yet committed.
        if (ROOT / path).exists():
            yield path, (ROOT / path).read_text()


def table(columns: Mapping[str, Stats]) -> str:
    """The numbers of several revisions, one beside the other."""
    titles = list(next(iter(columns.values())).rows)
    lines = [["", *columns]]
    lines += [[title, *(f"{one.rows[title]}" for one in columns.values())] for title in titles]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        line[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Counts the code, at one or more git revisions.")
    parser.add_argument("revisions", nargs="*", help="what git calls it; none: the working tree")
    parser.add_argument("--json", action="store_true", help="also the names behind the counts")
    options = parser.parse_args()
    try:
        columns = {one: stats(dict(files_at(one))) for one in options.revisions}
    except subprocess.CalledProcessError as error:
        print(error.stderr.decode().strip(), file=sys.stderr)
        return 2
    columns = columns or {"working tree": stats(dict(files_now()))}
    if options.json:
        print(json.dumps({name: {**one.rows, "names": one.names} for name, one in columns.items()}))
    else:
        print(table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
