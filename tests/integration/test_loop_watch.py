"""The watch of the event loop, in real time: what it finds, where, and what it does not blame."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from agent_process import AgentProcess

from kvmanager.loop.watch import LoopWatch

LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def block_the_loop() -> None:
    time.sleep(0.3)


def compute_on_the_loop() -> None:
    end_s = time.thread_time() + 0.3
    while time.thread_time() < end_s:
        pass


def watched(loop_factory: Callable[[], Any], *steps: Callable[[], None]) -> LoopWatch:
    async def run() -> LoopWatch:
        with LoopWatch() as watch:
            for step in steps:
                step()
                await asyncio.sleep(0.2)
        return watch

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(run())


@LOOPS
@pytest.mark.parametrize("culprit", [block_the_loop, compute_on_the_loop])
@pytest.mark.alone
def test_a_gap_of_our_own_is_found_and_its_place_logged(
    loop_factory: Callable[[], Any],
    culprit: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "prfaas.kvmanager.loop.watch"):
        gaps = watched(loop_factory, lambda: None, culprit).gaps
    # A heartbeat's period may have passed before the next one was due.
    assert 0.2 < gaps.longest_own_s < 0.4
    assert gaps.longest_own_lately_s(time.monotonic()) == gaps.longest_own_s
    (record,) = caplog.records
    assert culprit.__name__ in record.getMessage()
    assert re.search(r"stood still for \d+ ms, [23]\d\d ms own", record.getMessage())


@LOOPS
def test_a_loop_that_does_its_work_in_time_has_no_gap(
    loop_factory: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "prfaas.kvmanager.loop.watch"):
        gaps = watched(loop_factory, *[lambda: None] * 3).gaps
    assert gaps.longest_own_s < 0.1
    assert not caplog.records


def test_a_gap_that_the_end_of_the_loop_cuts_off_is_counted() -> None:
    async def run() -> LoopWatch:
        with LoopWatch() as watch:
            await asyncio.sleep(0.01)
            block_the_loop()
        return watch

    assert asyncio.run(run()).gaps.longest_own_s > 0.2


CHILD = """
import asyncio, sys, uvloop
from kvmanager.loop.watch import LoopWatch

async def main():
    with LoopWatch() as watch:
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        line = await loop.run_in_executor(None, sys.stdin.readline)
        await asyncio.sleep(0.3)
    machine = dict(watch.gaps.machine.buckets())
    print(watch.gaps.longest_own_s, machine["+Inf"] - machine["0.25"], flush=True)

uvloop.run(main())
"""


def test_a_process_that_was_stopped_has_no_gap_of_its_own() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    child.send_signal(signal.SIGCONT)
    output, _ = child.communicate("go\n", timeout=20)
    longest_own_s, num_of_the_machine = output.split()
    assert float(longest_own_s) < 0.1
    assert int(num_of_the_machine) == 1


STARVED = """
import asyncio, time
from kvmanager.loop.watch import LoopWatch

async def main():
    with LoopWatch() as watch:
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            begun_s = time.thread_time()
            while time.thread_time() - begun_s < 0.03:
                pass
            await asyncio.sleep(0.001)
    print(watch.gaps.longest_own_s, watch.gaps.machine.sum_s, flush=True)

asyncio.run(main())
"""


def test_a_process_without_a_core_has_no_gap_of_its_own() -> None:
    """It shares one core with three others that are more important to the kernel."""
    core = min(os.sched_getaffinity(0))

    def pin() -> None:
        os.sched_setaffinity(0, {core})

    rivals = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=pin)
        for _ in range(3)
    ]
    try:
        done = subprocess.run(
            ["nice", "-n", "10", sys.executable, "-c", STARVED],
            capture_output=True, text=True, check=True, timeout=60, preexec_fn=pin,
        )  # fmt: skip
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    longest_own_s, machine_s = map(float, done.stdout.split())
    assert longest_own_s < 0.1
    assert machine_s > 0.3


def test_an_agent_shows_the_gaps_of_its_loop(tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "agent", metrics_port=0) as agent:
        url = f"http://{agent.ready['metrics']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    assert 'prfaas_agent_loop_gap_seconds_bucket{le="0.1",part="own"}' in text
    assert 'prfaas_agent_loop_longest_own_gap_seconds{within="minute"}' in text
    assert "stood still" not in agent.log()
