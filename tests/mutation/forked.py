"""Runs of pytest in forked processes, with one module's text replaced in memory.

The parent process has the packages of others loaded and none of this project's, so a fork starts
warm and imports every module of the project anew: whoever imports a mutated module gets the mutant,
its constants too. Nothing is written into the working tree. A fork dies with its parent, and is
killed with its own children when its time is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import hypothesis
import hypothesis.configuration
import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMORY_BYTES = 4 << 30  # more than this on top of the parent's, and a mutant fails with MemoryError
PR_SET_PDEATHSIG = 1
PLUGINS = ("pytest_asyncio.plugin", "_hypothesis_pytestplugin", "pytest_timeout")
ARGUMENTS = (
    *("-q", "--no-header", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"),
    *("-m", "not engine and not alone", "--hypothesis-profile=mutants", "-o", "timeout=0"),
    *(word for plugin in PLUGINS for word in ("-p", plugin)),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a forked run ended: `status` is pytest's, None when its time was over."""

    status: int | None
    report: Any
    took_s: float


class Baseline:
    """What a run on the unchanged sources tells: per test its time and the lines it ran."""

    def __init__(self, paths: Sequence[str], most_s: float) -> None:
        self._most_s = most_s  # CPU time, traced; a test that takes longer is stopped
        self._paths = {str(ROOT / path): path for path in paths}
        self._lines: dict[str, set[int]] = {}
        self._is_slow = False
        self.tests: dict[str, dict[str, Any]] = {}

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        lines = self._lines.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, arg: object) -> Any:
        self._lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._trace_line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines = {path: set() for path in self._paths}
        started_s = time.monotonic()
        self._is_slow = False
        signal.signal(signal.SIGPROF, self._give_up)
        signal.setitimer(signal.ITIMER_PROF, self._most_s)
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            ran = {self._paths[path]: sorted(lines) for path, lines in self._lines.items() if lines}
            test = self.tests.setdefault(item.nodeid, {"passed": True})
            test.update(took_s=time.monotonic() - started_s, lines=ran, is_slow=self._is_slow)

    def _give_up(self, signum: int, frame: FrameType | None) -> None:
        self._is_slow = True
        pytest.fail("takes too long to try it with every mutant")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests.setdefault(report.nodeid, {})["passed"] = False

    def report(self) -> Any:
        tests = {name: test for name, test in self.tests.items() if "lines" in test}
        own = [name for name, module in sys.modules.items() if _is_own(module)]
        others = [name for name in sys.modules if name not in own]
        return {"tests": tests, "others": others, "own": own}


class Selection:
    """Runs just these tests, in this order, and remembers which one failed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._order = {name: index for index, name in enumerate(names)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def report(self) -> Any:
        return self.failed


class _Replaced(importlib.machinery.SourceFileLoader):
    """Loads a module from a text instead of its file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, path: str, source: str) -> None:
        parts = Path(path).with_suffix("").parts
        self._name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self._path = str(ROOT / path)
        self._source = source

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Replaced(fullname, self._path, self._source)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def prepare() -> None:
    """Once, before the first fork: how pytest and hypothesis behave in all of them."""
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    sys.path.insert(0, str(ROOT))
    hypothesis.configuration.set_hypothesis_home_dir(tempfile.gettempdir())
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=25,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def warm(modules: Sequence[str]) -> None:
    """Load what a baseline had loaded of other projects; what does not load here is left out."""
    for name in modules:
        if name not in sys.modules and not name.startswith("_"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def start_baseline(paths: Sequence[str], tests: Sequence[str], most_s: float) -> Run:
    plugin = Baseline(paths, most_s)
    return Run(lambda: _pytest(tests, plugin))


def start_mutant(path: str, source: str, tests: Sequence[str]) -> Run:
    """Tests by name, in order; the run ends with the first failure."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))

    def run() -> tuple[int, Any]:
        sys.meta_path.insert(0, _Finder(path, source))
        return _pytest([*files, "-x"], Selection(tests))

    return Run(run)


def _pytest(arguments: Sequence[str], plugin: Baseline | Selection) -> tuple[int, Any]:
    status = pytest.main([*ARGUMENTS, *arguments], plugins=[plugin])
    return int(status), plugin.report()


class Run:
    """One forked process and what it will have to say."""

    def __init__(self, task: Callable[[], tuple[int, Any]]) -> None:
        self.started_s = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reading)
            _become_child(parent)
            status, report = 1, None
            try:
                status, report = task()
            finally:
                _write(writing, json.dumps([status, report]).encode())
                os._exit(0)
        os.close(writing)
        self._said = b""

    def fileno(self) -> int:
        """Readable when it has something to say or has ended."""
        return self._reading

    def read(self) -> Ended | None:
        """What it said, once it has ended. One that died without a word failed."""
        part = os.read(self._reading, 1 << 20)
        self._said += part
        if part:
            return None
        self._close()
        status, report = json.loads(self._said) if self._said else (1, None)
        return Ended(status, report, time.monotonic() - self.started_s)

    def stop(self) -> Ended:
        self._close()
        return Ended(None, None, time.monotonic() - self.started_s)

    def _close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._reading)


def wait_any(runs: Mapping[Run, float]) -> tuple[Run, Ended]:
    """The first of these runs that ends, or whose time (monotonic seconds) is over."""
    with selectors.DefaultSelector() as selector:
        for run in runs:
            selector.register(run, selectors.EVENT_READ)
        while True:
            late, at_s = min(runs.items(), key=lambda item: item[1])
            left_s = at_s - time.monotonic()
            if left_s <= 0:
                return late, late.stop()
            for key, _ in selector.select(left_s):
                run = key.fileobj
                assert isinstance(run, Run)
                ended = run.read()
                if ended is not None:
                    return run, ended


def _become_child(parent: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _is_own(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    if path is None:
        return any(str(ROOT) in entry for entry in getattr(module, "__path__", []))
    return str(path).startswith(str(ROOT)) and ".venv" not in str(path)
