"""`make mutants`: which small faults in a source file do its unit tests notice?

Run: python tests/mutation/run.py FILE[:FROM-TO] ... [--tests PATH ...] [--json FILE]. README.md
beside this file says how to read the result.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forked
from forked import ROOT, Ended, Run
from mutants import Mutant, mutants_of

EQUIVALENT = Path(__file__).parent / "equivalent.toml"
BASELINE_S = 900.0
LEAST_TIME_S = 15.0
TIMES_SLOWER = 6.0
PACKAGES = ("transport", "netmon", "kvmanager", "scheduler", "prfaas", "local_pd", "deploy")


@dataclass(frozen=True, slots=True)
class Result:
    """One mutant's fate: killed, timeout (both noticed), survived, unreached or equivalent."""

    file: str
    line: int
    operator: str
    before: str
    after: str
    status: str
    num_tests: int = 0
    took_s: float = 0.0
    killed_by: str = ""

    @property
    def is_noticed(self) -> bool:
        return self.status in ("killed", "timeout")


@dataclass(frozen=True, slots=True)
class Source:
    """A file to mutate, or some lines of it."""

    path: str
    first_line: int = 1
    last_line: int = sys.maxsize

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def mutants(self) -> list[Mutant]:
        found = mutants_of((ROOT / self.path).read_text())
        return [m for m in found if self.first_line <= m.line <= self.last_line]


class Tests:
    """The tests that may notice a change of a file, with the lines of it that each one runs."""

    def __init__(self, tests: dict[str, dict[str, Any]]) -> None:
        self._tests = {
            name: test for name, test in tests.items() if test["passed"] and not test["is_slow"]
        }
        self.slow = sorted(name for name, test in tests.items() if test["is_slow"])
        self.failed = sorted(set(tests) - set(self._tests) - set(self.slow))
        self._imports = {
            path: _imported(ROOT / path)
            for path in {name.partition("::")[0] for name in self._tests}
        }

    def of(self, source: Source, mutant: Mutant) -> list[str]:
        """Names, the quickest first. What runs on import concerns every test of the file."""
        wanted = range(mutant.first_line, mutant.last_line + 1)
        names = []
        for name, test in self._tests.items():
            lines = test["lines"].get(source.path, ())
            if mutant.is_import_time:
                imports = self._imports[name.partition("::")[0]]
                is_concerned = bool(lines) or source.module in imports
            else:
                is_concerned = any(line in wanted for line in lines)
            if is_concerned:
                names.append(name)
        return sorted(names, key=self.took_s)

    def took_s(self, name: str) -> float:
        return float(self._tests[name]["took_s"])


def tests_for(source: Source) -> list[str]:
    """By convention: the test files of the package that reach the module by their imports."""
    package = source.path.partition("/")[0]
    chosen = []
    for path in sorted((ROOT / "tests" / package).rglob("test_*.py")):
        if source.module in _reached(_imported(path)):
            chosen.append(str(path.relative_to(ROOT)))
    return chosen


def _reached(modules: set[str]) -> set[str]:
    """These modules of ours and of tests/support, and what they import, and so on."""
    reached: set[str] = set()
    waiting = set(modules)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        found = _module_path(name)
        if found is not None:
            package = name.rpartition(".")[0]
            waiting |= ({package, *_imported(found)} - {""}) - reached
    return reached


def _module_path(name: str) -> Path | None:
    if name.partition(".")[0] in PACKAGES:
        stem = ROOT / name.replace(".", "/")
        paths = [stem.with_suffix(".py"), stem / "__init__.py"]
    else:
        paths = [ROOT / "tests" / folder / f"{name}.py" for folder in ("support", "fuzz", "bench")]
    return next((path for path in paths if path.is_file()), None)


def _imported(path: Path) -> set[str]:
    """Modules that a file names in its imports, `from a import b` counting as both."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def measure(
    sources: Sequence[Source], paths: Sequence[str], slowest_s: float
) -> tuple[Tests, list[str]]:
    """The baseline on unchanged sources, and the modules it loaded that no mutant changes."""
    run = forked.start_baseline([source.path for source in sources], paths, slowest_s)
    _, ended = forked.wait_any({run: time.monotonic() + BASELINE_S})
    if ended.status not in (0, 1) or not ended.report or not ended.report["tests"]:
        sys.exit(f"the tests do not run on the unchanged sources: {' '.join(paths)}")
    report = ended.report
    changed = {source.module for source in sources}
    kept = [
        name
        for name in report["own"]
        if name.partition(".")[0] in PACKAGES and not _reached({name}) & changed
    ]
    return Tests(report["tests"]), [*report["others"], *kept]


def try_all(
    source: Source, mutants: Sequence[Mutant], tests: Tests, workers: int
) -> Iterator[Result]:
    """Every mutant against the tests that concern it, some at a time; results as they come."""
    excused = _excused(source)
    waiting = list(reversed(mutants))
    running: dict[Run, tuple[Mutant, list[str]]] = {}
    ends_s: dict[Run, float] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                mutant = waiting.pop()
                names = tests.of(source, mutant)
                key = (_trimmed(mutant.before), _trimmed(mutant.after))
                if key in excused:
                    yield _result(source, mutant, "equivalent", names)
                    continue
                if not names:
                    yield _result(source, mutant, "unreached", names)
                    continue
                run = forked.start_mutant(source.path, mutant.source, names)
                usual_s = sum(map(tests.took_s, names))
                running[run] = mutant, names
                ends_s[run] = time.monotonic() + LEAST_TIME_S + TIMES_SLOWER * usual_s
            if running:
                run, ended = forked.wait_any(ends_s)
                mutant, names = running.pop(run)
                del ends_s[run]
                yield _result(source, mutant, _fate(ended), names, ended)
    finally:
        for run in running:
            run.stop()


def _fate(ended: Ended) -> str:
    if ended.status is None:
        return "timeout"
    return {0: "survived", 5: "unreached"}.get(ended.status, "killed")


def _result(
    source: Source, mutant: Mutant, status: str, names: list[str], ended: Ended | None = None
) -> Result:
    return Result(
        file=source.path,
        line=mutant.line,
        operator=mutant.operator,
        before=mutant.before,
        after=mutant.after,
        status=status,
        num_tests=len(names),
        took_s=round(ended.took_s, 2) if ended else 0.0,
        killed_by=(ended.report or "") if ended else "",
    )


def _excused(source: Source) -> set[tuple[str, str]]:
    """Mutants that are known to behave as the source does."""
    known = tomllib.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    return {
        (_trimmed(entry["before"]), _trimmed(entry["after"]))
        for entry in known.get("equivalent", [])
        if entry["file"] == source.path
    }


def _trimmed(text: str) -> str:
    return " ".join(text.split())


def show(result: Result) -> None:
    """One that was not noticed, as a difference."""
    told = f"{result.status}, {result.num_tests} tests"
    print(f"\n{result.file}:{result.line} {result.operator} ({told})")
    print("\n".join(f"-{line}" for line in result.before.splitlines()))
    print("\n".join(f"+{line}" for line in result.after.splitlines()), flush=True)


def summary(source: Source, results: Sequence[Result]) -> str:
    count = Counter(result.status for result in results)
    num_noticed = count["killed"] + count["timeout"]
    num_judged = len(results) - count["equivalent"]
    share = f"{num_noticed / num_judged:.1%}" if num_judged else "nothing to judge"
    kinds = ("killed", "timeout", "survived", "unreached", "equivalent")
    told = ", ".join(f"{count[kind]} {kind}" for kind in kinds if count[kind])
    return f"{source.path}: {share} ({told})"


def _again(mutants: Sequence[Mutant], source: Source, path: str) -> list[Mutant]:
    """Those of the mutants that an earlier run's file of results has as not noticed."""
    left = {
        (entry["operator"], entry["before"], entry["after"])
        for entry in json.loads(Path(path).read_text())
        if entry["file"] == source.path and entry["status"] in ("survived", "unreached")
    }
    return [m for m in mutants if (m.operator, m.before, m.after) in left]


def _source(text: str) -> Source:
    path, _, lines = text.partition(":")
    path = str(Path(path).resolve().relative_to(ROOT)) if Path(path).is_absolute() else path
    if not (ROOT / path).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {path}")
    first, _, last = lines.partition("-")
    return Source(path, int(first), int(last or first)) if lines else Source(path)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Try small faults in a file on its unit tests.")
    parser.add_argument("files", nargs="+", type=_source, metavar="FILE[:FROM-TO]")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="instead of those found")
    parser.add_argument("--json", metavar="FILE", help="write every result there")
    parser.add_argument("--again", metavar="FILE", help="only what that run's results left over")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument(
        "--slowest", type=float, default=3.0, metavar="S", help="test to use, CPU time (3 s)"
    )
    options = parser.parse_args(argv)
    sources: list[Source] = options.files
    forked.prepare()
    paths = options.tests or sorted({path for source in sources for path in tests_for(source)})
    if not paths:
        parser.error("no test file imports these; name some with --tests")
    print(f"{len(paths)} test files: {' '.join(paths)}", flush=True)
    try:
        tests, others = measure(sources, paths, options.slowest)
    except KeyboardInterrupt:
        return 130
    for name in tests.failed:
        print(f"left out, fails on the unchanged sources: {name}")
    for name in tests.slow:
        print(f"left out, takes more than {options.slowest:g} s of CPU time: {name}")
    forked.warm(others)
    gc.collect()
    gc.freeze()
    found: list[Result] = []
    summaries = []
    try:
        for source in sources:
            mutants = source.mutants()
            if options.again:
                mutants = _again(mutants, source, options.again)
            results: list[Result] = []
            for result in try_all(source, mutants, tests, options.workers):
                results.append(result)
                found.append(result)
                if result.status in ("survived", "unreached"):
                    show(result)
            summaries.append(summary(source, results))
            print(f"\n{summaries[-1]}", flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        if options.json:
            found.sort(key=lambda result: (result.file, result.line))
            Path(options.json).write_text(json.dumps([asdict(r) for r in found], indent=1))
    if len(summaries) > 1:
        print("\n" + "\n".join(summaries))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
