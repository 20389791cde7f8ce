"""No test may see an event loop of ours stand still for more than 100 ms of its own time.

A conftest imports the fixtures and the hook below. Processes that a test starts watch their loops
themselves, from the moment they are ready; what they log of it ends in files that are read after
each test. Services that run inside the test share its loop with the test's own work: there a
gap counts as far as the loop's thread was seen in our packages.
"""

import functools
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmanager.loop.gaps import LoopGap, Stack, describe
from kvmanager.loop.watch import LIMIT_S, LOOK_S, LoopWatch

ROOT = Path(__file__).parents[2]
PACKAGES = ("transport", "netmon", "kvmanager", "scheduler", "prfaas", "local_pd", "deploy")
IN_CHILDREN = Path(__file__).with_name("in_children")


def is_ours(stack: Stack) -> bool:
    """Whether the innermost frame that is of this project is no test and no test double."""
    for name, _, _ in reversed(stack):
        path = Path(name)
        if path.is_relative_to(ROOT):
            package, *_ = path.relative_to(ROOT).parts
            if package == "tests" or "testing" in path.parts:
                return False
            if package in PACKAGES:
                return True
    return False


def our_part_s(gap: LoopGap) -> float:
    """How much of a gap in a test's process our packages caused.

    Collecting garbage is left out: its time grows with all that the tests of a process have made.
    So are gaps of which little was seen because the looking thread had no core either.
    """
    num_looks = sum(count for _, count in gap.stacks)
    if gap.machine_s > gap.own_s and num_looks < gap.own_s / LOOK_S / 2:
        return 0.0
    num_ours = sum(count for stack, count in gap.stacks if is_ours(stack))
    return (gap.own_s - gap.gc_s) * num_ours / num_looks if num_looks else 0.0


def place(gap: LoopGap) -> str:
    """Where our packages were seen most often."""
    ours = next(stack for stack, _ in gap.stacks if is_ours(stack))
    return "\n".join(f"  {file}:{line} {function}" for file, line, function in ours[-12:])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Watch the loop of a test that is a coroutine, while the test itself runs."""
    if not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.obj):
        return
    if item.get_closest_marker("many_at_once"):
        return
    test = item.obj

    @functools.wraps(test)
    async def watched(*arguments: Any, **by_name: Any) -> None:
        gaps: list[LoopGap] = []
        with LoopWatch(limit_s=LIMIT_S / 2, idle_period_s=LIMIT_S / 10, on_gap=gaps.append):
            await test(*arguments, **by_name)
        found = [
            f"{our_part_s(gap) * 1e3:.0f} ms at\n{place(gap)}\n({describe(gap)})"
            for gap in gaps
            if our_part_s(gap) >= LIMIT_S
        ]
        assert not found, "our code held up the test's event loop:\n" + "\n".join(found)

    item.obj = watched


@pytest.fixture(scope="session")
def gaps_of_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which processes write down their gaps."""
    folder = tmp_path_factory.mktemp("gaps")
    paths = [str(IN_CHILDREN), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRFAAS_TEST_GAPS", str(folder))
        patch.setenv("PYTHONPATH", ":".join(paths))
        yield folder


@pytest.fixture(autouse=True)
def no_gaps_in_children(gaps_of_children: Path) -> Iterator[None]:
    """Fails the test during which a process wrote down a gap."""
    yield
    found = []
    for file in gaps_of_children.iterdir():
        found.append(file.read_text())
        file.unlink()
    assert not found, "an event loop of ours stood still:\n" + "\n".join(found)
