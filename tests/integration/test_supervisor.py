"""Supervised processes for real: process groups, restarts, logs, death of the parent."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from eventually import eventually

from prfaas.engines.errors import EngineStartFailed
from prfaas.engines.health import ProbeTiming
from prfaas.engines.supervision.guard import live_session_members
from prfaas.engines.supervision.process import ChildProcess, ProcessSpec
from prfaas.engines.supervision.spawn import spawn
from prfaas.engines.supervision.supervisor import (
    ProcessState,
    Supervisor,
    SupervisorConfig,
    SupervisorEvent,
)

ROOT = str(Path(__file__).resolve().parents[2])

# Starts a child and a grandchild that ignore SIGTERM, one in a process group of its own.
FAMILY = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
stubborn += "time.sleep(60)"
apart = "import os; os.setpgid(0, 0); " + stubborn
subprocess.Popen([sys.executable, "-c", stubborn, *sys.argv[1:]])
subprocess.Popen([sys.executable, "-c", apart, *sys.argv[1:]])
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("family", flush=True)
time.sleep(60)
"""


def process(tmp_path: Path, code: str, *args: str, term_grace_s: float = 0.5) -> ProcessSpec:
    return ProcessSpec(
        name="dummy",
        argv=[sys.executable, "-c", code, *args],
        log_path=tmp_path / "logs" / "dummy.log",
        env=os.environ,
        term_grace_s=term_grace_s,
    )


async def never() -> bool:
    return False


async def always() -> bool:
    return True


FAST = SupervisorConfig(probes=ProbeTiming(interval_s=0.05, start_interval_s=0.02))


@pytest.mark.parametrize("mode", ["polite", "stubborn"])
async def test_stopping_leaves_nothing_of_the_family(tmp_path: Path, mode: str) -> None:
    child = await ChildProcess.start(process(tmp_path, FAMILY, mode))
    await eventually(lambda: child.log_tail().count("up") == 2)
    assert len(child.members()) == 4  # guard, command, two children
    await child.stop()
    assert child.members() == []
    assert child.exit_status == (143 if mode == "polite" else 137)
    await child.stop()


async def test_a_command_that_ends_takes_its_children_along(tmp_path: Path) -> None:
    code = FAMILY.replace("time.sleep(60)\n", "time.sleep(0.5); sys.exit(7)\n")
    child = await ChildProcess.start(process(tmp_path, code))
    assert await child.wait() == 7
    assert child.members() == []


async def test_killing_the_command_is_noticed_and_swept(tmp_path: Path) -> None:
    child = await ChildProcess.start(process(tmp_path, FAMILY))
    await eventually(lambda: child.log_tail().count("up") == 2)
    command = min(pid for pid in child.members() if pid != child.pid)
    os.kill(command, signal.SIGKILL)
    assert await child.wait() == 137
    assert child.members() == []


async def test_killing_the_guard_is_swept_too(tmp_path: Path) -> None:
    child = await ChildProcess.start(process(tmp_path, FAMILY))
    await eventually(lambda: child.log_tail().count("up") == 2)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == 137
    assert child.members() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux only")
async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, sys
from pathlib import Path
from prfaas.engines.supervision.process import ChildProcess, ProcessSpec
async def main():
    spec = ProcessSpec("dummy", [sys.executable, "-c", {FAMILY!r}, "stubborn"],
                       Path({str(tmp_path)!r}) / "dummy.log", os.environ, term_grace_s=0.3)
    child = await ChildProcess.start(spec)
    while child.log_tail().count("up") < 2:
        await asyncio.sleep(0.02)
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    assert parent.stdout is not None
    session = int(await parent.stdout.readline())
    assert len(live_session_members(session)) == 4
    parent.kill()
    await parent.wait()
    await eventually(lambda: live_session_members(session) == [])


async def test_a_crashing_process_is_restarted_with_backoff(tmp_path: Path) -> None:
    events: list[tuple[float, SupervisorEvent]] = []
    supervisor = Supervisor(
        process(tmp_path, "raise SystemExit(3)"),
        never,
        FAST,
        lambda event: events.append((time.monotonic(), event)),
    )
    supervisor.start()
    await eventually(lambda: supervisor.num_restarts >= 2)
    await supervisor.stop()
    starts = [when for when, event in events if event.state is ProcessState.STARTING]
    waits = [when for when, event in events if event.state is ProcessState.BACKOFF]
    delays = [start - wait for wait, start in zip(waits, starts[1:], strict=False)]
    # Jitter takes off up to half.
    for delay, expected in zip(delays, [0.5, 1.0], strict=False):
        assert delay >= expected
    assert "ended with status 3" in next(
        event.reason for _, event in events if event.state is ProcessState.BACKOFF
    )
    assert (supervisor.state, supervisor.members()) == (ProcessState.STOPPED, [])


async def test_a_failed_start_shows_the_last_log_lines(tmp_path: Path) -> None:
    code = "print('noise\\n' * 50); print('ValueError: no such model'); raise SystemExit(1)"
    supervisor = Supervisor(process(tmp_path, code), never, FAST)
    supervisor.start()
    seen: list[str] = []
    with pytest.raises(EngineStartFailed) as caught:
        await supervisor.wait_healthy(30, seen.append)
    await supervisor.stop()
    assert caught.value.log_tail[-1] == "ValueError: no such model"
    assert "status 1" in str(caught.value)
    assert "ValueError: no such model" in str(caught.value)
    assert "dummy.log" in str(caught.value)


async def test_a_start_that_takes_too_long_is_an_error_with_the_log(tmp_path: Path) -> None:
    code = "import time; print('loading weights', flush=True); time.sleep(60)"
    supervisor = Supervisor(process(tmp_path, code), never, FAST)
    supervisor.start()
    log = tmp_path / "logs" / "dummy.log"
    await eventually(lambda: log.exists() and "loading weights" in log.read_text())
    seen: list[str] = []
    with pytest.raises(EngineStartFailed, match=r"not healthy after 1\.2 s") as caught:
        await supervisor.wait_healthy(1.2, seen.append)
    assert caught.value.log_tail == ["loading weights"]
    assert "loading weights" in seen
    await supervisor.stop()
    assert supervisor.members() == []


async def test_a_process_killed_while_healthy_comes_back(tmp_path: Path) -> None:
    supervisor = Supervisor(process(tmp_path, "import time; time.sleep(60)"), always, FAST)
    supervisor.start()
    await supervisor.wait_healthy(30)
    first = supervisor.pid
    assert first is not None
    await eventually(lambda: len(supervisor.members()) == 2)
    os.kill(max(supervisor.members()), signal.SIGKILL)
    await eventually(lambda: supervisor.num_restarts == 1)
    await supervisor.wait_healthy(30, patient=True)
    assert supervisor.pid != first
    await supervisor.stop()


async def test_a_process_that_hangs_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = True

    async def probe() -> bool:
        return healthy

    monkeypatch.setattr("prfaas.engines.supervision.supervisor.HANG_TIMEOUT_S", 0.3)
    supervisor = Supervisor(process(tmp_path, "import time; time.sleep(60)"), probe, FAST)
    supervisor.start()
    await supervisor.wait_healthy(30)
    healthy = False
    await eventually(lambda: supervisor.num_restarts == 1)
    healthy = True
    await supervisor.wait_healthy(30, patient=True)
    await supervisor.stop()


async def test_a_command_that_does_not_exist_is_explained(tmp_path: Path) -> None:
    spec = ProcessSpec("dummy", ["/no/such/engine"], tmp_path / "dummy.log", os.environ)
    supervisor = Supervisor(spec, never, FAST)
    supervisor.start()
    with pytest.raises(EngineStartFailed, match="cannot run /no/such/engine"):
        await supervisor.wait_healthy(30)
    await supervisor.stop()


@pytest.fixture
def waits_for_a_reader(tmp_path: Path) -> ProcessSpec:
    """Its log is a pipe: whoever opens it to write waits until somebody reads."""
    spec = process(tmp_path, FAMILY, str(tmp_path))
    spec.log_path.parent.mkdir()
    os.mkfifo(spec.log_path)
    return spec


async def test_the_event_loop_goes_on_while_a_process_starts(
    waits_for_a_reader: ProcessSpec,
) -> None:
    starting = asyncio.create_task(ChildProcess.start(waits_for_a_reader))
    done, _ = await asyncio.wait({starting}, timeout=0.2)
    assert not done
    with waits_for_a_reader.log_path.open("rb"):
        child = await starting
        assert child.exit_status is None
        await child.stop()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_start_that_is_cancelled_leaves_nothing(
    waits_for_a_reader: ProcessSpec, tmp_path: Path, times: int
) -> None:
    """It cannot be broken off, so whoever cancels it waits until it is undone."""
    starting = asyncio.create_task(ChildProcess.start(waits_for_a_reader))
    for _ in range(times):
        await asyncio.wait({starting}, timeout=0.05)
        starting.cancel()
    done, _ = await asyncio.wait({starting}, timeout=0.2)
    assert not done
    with waits_for_a_reader.log_path.open("rb"):
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert left_of(tmp_path) == []


async def test_a_start_that_fails_after_it_was_cancelled_is_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = ProcessSpec("dummy", ["true"], tmp_path / "file" / "dummy.log", os.environ)
    starting = asyncio.create_task(ChildProcess.start(spec))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(FileExistsError):
        await ChildProcess.start(spec)


def test_other_threads_go_on_while_a_program_is_loaded(tmp_path: Path) -> None:
    """The new process opens its output, a pipe without a reader, before the program is loaded."""
    output = tmp_path / "pipe"
    os.mkfifo(output)
    pids: list[int] = []
    argv = [sys.executable, "-c", "print('loaded')"]
    thread = threading.Thread(target=lambda: pids.append(spawn(argv, os.environ, output)))
    thread.start()
    with output.open("rb") as reader:
        thread.join()
        assert reader.read() == b"loaded\n"
    assert os.waitpid(pids[0], 0) == (pids[0], 0)


def test_a_program_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        spawn(["/no/such/program"], os.environ, tmp_path / "log")


async def test_stopping_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path) -> None:
    for delay_s in (0.0, 0.01, 0.05, 0.2):
        supervisor = Supervisor(process(tmp_path, FAMILY, str(tmp_path)), never, FAST)
        supervisor.start()
        await asyncio.sleep(delay_s)
        await supervisor.stop()
    assert left_of(tmp_path) == []


def left_of(tmp_path: Path) -> list[int]:
    """Processes that have `tmp_path` among their arguments."""
    return [item.pid for item in psutil.process_iter() if str(tmp_path) in command_line(item)]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
