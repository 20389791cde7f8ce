"""`make lint`: tests import package roots, messages, config, settings and testing, and little else.

`inner_imports.txt` lists what else they import: a reason, a module, and the folders of tests that
import it. The list may only shrink. A folder that imports one more module fails, and so does an
entry that nobody needs any more, until `--shrink` has taken it out. Nothing here adds an entry.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent
LIST: Final = TESTS / "inner_imports.txt"
PACKAGES: Final = {"transport", "netmon", "kvmanager", "scheduler", "prfaas", "local_pd", "deploy"}
OPEN: Final = {"messages", "config", "settings", "testing"}
"""Last words of modules and packages, so that `probe_messages` are messages too."""
COMMAND_LINE: Final = "deploy.cli"
REASONS: Final = {"formats", "formulas", "pool", "wire", "inner"}
"""`inner` goes with the code that it describes; the others have closed forms, files or bytes."""

Pairs = dict[tuple[str, str], str]
"""By module and folder: the reason, or one place that imports it."""


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All that are nested in `body`. No expression has an import in it."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, part, ()))


def modules(node: ast.AST) -> Iterator[str]:
    """What an import statement names; `from a import b` names a.b where that is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            path = TESTS.parent.joinpath(*node.module.split("."), alias.name)
            is_module = path.is_dir() or path.with_suffix(".py").exists()
            yield f"{node.module}.{alias.name}" if is_module else node.module


def is_inner(module: str) -> bool:
    root, *parts = module.split(".")
    is_open = any(part.rpartition("_")[2] in OPEN for part in parts) or module == COMMAND_LINE
    return root in PACKAGES and bool(parts) and not is_open


def imported() -> Pairs:
    found: Pairs = {}
    for file in sorted(TESTS.rglob("*.py")):
        folder = file.parent.relative_to(TESTS).as_posix()
        for node in statements(ast.parse(file.read_bytes()).body):
            for module in filter(is_inner, modules(node)):
                found.setdefault((module, folder), f"{folder}/{file.name}:{node.lineno}")
    return found


def main(options: list[str]) -> int:
    lines = [line.split() for line in LIST.read_text().splitlines()]
    found = imported()
    if options == ["--shrink"]:
        for line in lines:
            line[2:] = [folder for folder in line[2:] if (line[1], folder) in found]
        lines = [line for line in lines if line[2:]]
        LIST.write_text("".join(f"{' '.join(line)}\n" for line in lines))
    listed: Pairs = {(line[1], folder): line[0] for line in lines for folder in line[2:]}
    for pair in sorted(found.keys() - listed.keys()):
        print(f"{found[pair]}: imports {pair[0]}, which is inside of its package")
    for module, folder in sorted(listed.keys() - found.keys()):
        print(f"{LIST.name}: {folder} imports {module} no more; --shrink takes it out")
    for reason in (strange := {*listed.values()} - REASONS):
        print(f"{LIST.name}: {reason} is none of the reasons")
    return 1 if strange or found.keys() != listed.keys() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
