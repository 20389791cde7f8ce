"""Whose time a gap of the event loop was, and what is kept of gaps."""

import logging
import os
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvmanager.loop.gaps import (
    Halt,
    LoopGap,
    LoopGaps,
    RawGap,
    describe,
    halt_of_sleeper,
    judge,
    keep_evident,
)
from kvmanager.loop.metrics import LoopCollector
from kvmanager.loop.thread_times import stolen_s
from kvmanager.loop.watch import GapLog, aligned_delay_s


def raw(**changes: Any) -> RawGap:
    """Due at 10.0, ran at 10.4, nothing computed and no wait for a core."""
    usual = {"since_s": 9.95, "due_s": 10.0, "ran_s": 10.4, "cpu_s": 0.0, "starved_s": 0.0}
    return RawGap(**(usual | changes))


def gap(own_s: float, ended_s: float = 0.0, machine_s: float = 0.0) -> LoopGap:
    return LoopGap(ended_s=ended_s, gap_s=own_s + machine_s, own_s=own_s, cpu_s=0.0, gc_s=0.0)


def test_blocking_without_computing_is_our_own() -> None:
    found = judge(raw(), [])
    assert found.gap_s == found.own_s == pytest.approx(0.4)
    assert found.machine_s == 0.0


def test_waiting_for_a_core_is_the_machines() -> None:
    found = judge(raw(cpu_s=0.1, starved_s=0.3), [])
    assert found.own_s == pytest.approx(0.1)
    assert found.machine_s == pytest.approx(0.3)


def test_more_waiting_than_the_gap_is_long_leaves_nothing_of_our_own() -> None:
    assert judge(raw(starved_s=0.43), []).own_s == 0.0


def test_without_the_kernels_word_only_cpu_time_is_our_own() -> None:
    assert judge(raw(cpu_s=0.15, starved_s=None), []).own_s == pytest.approx(0.15)
    assert judge(raw(cpu_s=0.45, starved_s=None), []).own_s == pytest.approx(0.4)


def test_a_stopped_process_is_the_machines() -> None:
    assert judge(raw(), [Halt(9.9, 10.41, most_s=0.51)]).own_s == pytest.approx(0.0)


def test_only_as_much_of_a_halt_counts_as_it_lasted() -> None:
    assert judge(raw(), [Halt(9.9, 10.41, most_s=0.15)]).own_s == pytest.approx(0.25)


def test_a_halt_before_the_gap_changes_nothing() -> None:
    assert judge(raw(), [Halt(9.0, 9.9, most_s=0.9)]).own_s == pytest.approx(0.4)


def test_a_halt_and_a_wait_for_a_core_add_up() -> None:
    found = judge(raw(starved_s=0.1), [Halt(10.2, 10.45, most_s=0.25)])
    assert found.own_s == pytest.approx(0.1)


def test_blocking_while_another_thread_has_no_core_is_the_machines() -> None:
    assert judge(raw(), other_starved_s=0.3).own_s == pytest.approx(0.1)
    assert judge(raw(cpu_s=0.25), other_starved_s=0.3).own_s == pytest.approx(0.25)


def test_a_core_that_other_virtual_machines_had_is_the_machines() -> None:
    assert judge(raw(cpu_s=0.001), stolen_s=0.4).own_s == pytest.approx(0.0)
    assert judge(raw(cpu_s=0.001), stolen_s=0.1).own_s == pytest.approx(0.3)


def test_a_halt_by_the_hypervisor_is_not_taken_off_twice() -> None:
    found = judge(raw(), [Halt(9.9, 10.2, most_s=0.3)], stolen_s=0.2)
    assert found.own_s == pytest.approx(0.2)


def test_a_long_gap_needs_evidence() -> None:
    found = judge(raw(cpu_s=0.01))
    assert keep_evident(found, 0.0, 0.0).own_s == pytest.approx(0.01)
    assert keep_evident(found, 1.0, 0.0).own_s == pytest.approx(0.4)
    assert keep_evident(found, 0.5, 0.0).own_s == pytest.approx(0.01 + 0.39 / 2)
    assert keep_evident(found, 0.0, 0.3).own_s == pytest.approx(0.31)
    assert keep_evident(found, 0.5, 9.0).own_s == pytest.approx(0.4)


def test_computing_is_our_own_whatever_else_seems_to_have_happened() -> None:
    halts = [Halt(9.0, 11.0, most_s=2.0)]
    assert judge(raw(cpu_s=0.35), halts).own_s == pytest.approx(0.3)
    assert judge(raw(cpu_s=0.35), stolen_s=1.0).own_s == pytest.approx(0.3)


def test_garbage_collection_is_a_part_of_the_own_time() -> None:
    assert judge(raw(cpu_s=0.4, gc_s=0.3), []).gc_s == pytest.approx(0.3)
    assert judge(raw(starved_s=0.3, gc_s=0.3), []).gc_s == pytest.approx(0.1)


def test_the_kernel_tells_what_was_stolen_of_each_core() -> None:
    before = stolen_s()
    assert len(before) >= (os.cpu_count() or 1) > 0
    assert all(now >= earlier >= 0.0 for earlier, now in zip(before, stolen_s(), strict=True))


def test_a_sleeper_that_wakes_in_time_saw_no_halt() -> None:
    assert halt_of_sleeper((1.0, 1.1, 1.105), 0.0, 0.0) is None


def test_a_sleeper_that_nobody_kept_from_waking_was_stopped() -> None:
    halt = halt_of_sleeper((1.0, 1.1, 1.6), 0.0, 0.0)
    assert halt is not None
    assert (halt.began_s, halt.ended_s) == (1.0, 1.6)
    assert halt.most_s == pytest.approx(0.6)


@pytest.mark.parametrize(("starved_s", "gil_wait_s"), [(0.5, 0.0), (0.0, 0.47), (0.3, 0.2)])
def test_a_sleeper_that_waits_for_a_core_or_for_the_lock_saw_no_halt(
    starved_s: float, gil_wait_s: float
) -> None:
    assert halt_of_sleeper((1.0, 1.1, 1.6), starved_s, gil_wait_s) is None


def test_the_longest_gap_is_kept_for_a_minute() -> None:
    gaps = LoopGaps()
    gaps.add(gap(0.5, ended_s=100.0))
    gaps.add(gap(0.2, ended_s=120.0))
    gaps.add(gap(0.1, ended_s=130.0))
    assert gaps.longest_own_lately_s(160.0) == 0.5
    assert gaps.longest_own_lately_s(160.1) == 0.2
    assert gaps.longest_own_lately_s(180.1) == 0.1
    assert gaps.longest_own_lately_s(190.1) == 0.0
    assert gaps.longest_own_s == 0.5


def test_metrics_show_both_parts_of_gaps() -> None:
    gaps = LoopGaps()
    gaps.add(gap(0.5, ended_s=5.0, machine_s=0.125))
    gaps.add(gap(0.0625, ended_s=6.0, machine_s=1 / 256))
    registry = CollectorRegistry()
    registry.register(LoopCollector("prfaas_agent", gaps, clock_s=lambda: 66.0))
    lines = generate_latest(registry).decode().splitlines()
    name = "prfaas_agent_loop_gap_seconds"
    assert f'{name}_bucket{{le="0.05",part="own"}} 0.0' in lines
    assert f'{name}_bucket{{le="0.1",part="own"}} 1.0' in lines
    assert f'{name}_bucket{{le="+Inf",part="own"}} 2.0' in lines
    assert f'{name}_count{{part="machine"}} 1.0' in lines
    assert f'{name}_sum{{part="machine"}} 0.125' in lines
    longest = "prfaas_agent_loop_longest_own_gap_seconds"
    assert f'{longest}{{within="minute"}} 0.0625' in lines
    assert f'{longest}{{within="start"}} 0.5' in lines


def test_a_line_about_a_gap_says_what_it_was() -> None:
    found = judge(raw(cpu_s=0.12, starved_s=0.2, gc_s=0.08), [])
    assert describe(found) == (
        "the event loop stood still for 400 ms, 200 ms own (120 ms computing, "
        "80 ms collecting garbage)"
    )
    assert describe(gap(0.25)) == "the event loop stood still for 250 ms, 250 ms own"


def test_the_log_names_the_place_where_the_loop_was_seen_most_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = (((("pool.py", 12, "purge"),), 3), ((("rpc.py", 7, "call"),), 1))
    GapLog(0.1).add(replace(gap(0.25), stacks=seen))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "the event loop stood still for 250 ms, 250 ms own; in 3 of 4 looks it was at\n"
        '  File "pool.py", line 12, in purge'
    )


def test_gaps_within_a_second_are_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    log = GapLog(0.1)
    for ended_s, own_s in ((1.0, 0.2), (1.5, 0.3), (1.9, 0.15), (2.1, 0.4), (2.3, 0.11)):
        log.add(gap(own_s, ended_s=ended_s))
    log.flush()
    log.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "the event loop stood still for 200 ms, 200 ms own",
        "the event loop stood still 2 times more within a second, at most 300 ms own",
        "the event loop stood still for 400 ms, 400 ms own",
        "the event loop stood still 1 times more within a second, at most 110 ms own",
    ]


def test_short_gaps_and_those_of_the_machine_are_no_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = GapLog(0.1)
    log.add(gap(0.09))
    log.add(gap(0.09, machine_s=2.0))
    log.flush()
    assert not caplog.records


@pytest.mark.parametrize("now_s", [100.0, 100.01, 100.024, 100.026, 100.049])
def test_timers_of_several_periods_meet(now_s: float) -> None:
    times = [now_s + aligned_delay_s(period_s, now_s) for period_s in (0.05, 0.1, 0.2)]
    for at_s, period_s in zip(times, (0.05, 0.1, 0.2), strict=True):
        assert (at_s - 5e-4) % period_s == pytest.approx(0.0, abs=1e-6) or (
            at_s - 5e-4
        ) % period_s == pytest.approx(period_s, abs=1e-6)
        assert period_s / 2 <= at_s - now_s <= period_s * 1.5 + 1e-3
