"""The hook that fails integration tests on gaps of event loops sees them."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from no_gaps import our_part_s

from kvmanager.loop.gaps import LoopGap
from kvmanager.loop.watch import LoopWatch

CHILD = """
import asyncio, time
from kvmanager.loop.watch import LoopWatch

async def main():
    with LoopWatch():
        await asyncio.sleep(0.2)
        time.sleep(0.3)
        await asyncio.sleep(0.2)

asyncio.run(main())
"""


def test_a_gap_of_a_child_process_is_written_down(gaps_of_children: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stderr=subprocess.DEVNULL)
    assert child.wait(30) == 0
    file = gaps_of_children / str(child.pid)
    assert "the event loop stood still for" in file.read_text()
    file.unlink()  # else this very test fails


@pytest.mark.parametrize(
    ("file", "is_blamed"), [("kvmanager/agent/service.py", True), ("tests/test_x.py", False)]
)
def test_a_gap_in_the_tests_own_process_is_ours_by_its_place(
    file: str, is_blamed: bool, request: pytest.FixtureRequest
) -> None:
    module = ModuleType("module")
    source = "import time\ndef block():\n    time.sleep(0.3)\n"
    exec(compile(source, str(request.config.rootpath / file), "exec"), module.__dict__)
    gaps: list[LoopGap] = []

    async def run() -> None:
        with LoopWatch(limit_s=0.05, idle_period_s=0.01, on_gap=gaps.append):
            await asyncio.sleep(0.1)
            module.block()

    asyncio.run(run())
    assert (max(map(our_part_s, gaps)) > 0.2) == is_blamed
