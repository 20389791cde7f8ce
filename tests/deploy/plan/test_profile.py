"""Profiling an engine: from samples to the file, and what is worth measuring."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling_cases import provenance

from deploy.plan.profile.engine import ProfilingError, base_url, parse_counters
from deploy.plan.profile.measuring import (
    Wishes,
    default_lengths,
    make_plan,
)
from deploy.plan.profile.stats import (
    DecodeSample,
    DecodeSetup,
    Measured,
    PrefillSample,
    TokenTimes,
    build_profile,
    decode_step,
    doubts,
    prefill_profile,
)
from deploy.profile_file import (
    EngineProfileFile,
    MeasuredPrefill,
    PrefillPoint,
)
from kvmanager.config_files.problems import FileError

seconds = st.floats(1e-4, 1e3)


# --- numbers ---


@given(st.lists(st.tuples(st.integers(1, 6), seconds, seconds), min_size=1))
def test_every_prefill_sample_counts(samples: list[tuple[int, float, float]]) -> None:
    profile = prefill_profile([PrefillSample(*sample) for sample in samples])
    assert profile.clock == "engine"
    assert sum(point.samples or 0 for point in profile.points) == len(samples)
    for point in profile.points:
        times = [engine for tokens, _, engine in samples if tokens == point.tokens]
        low, high = min(times), max(times)
        assert low * 0.9999 <= point.seconds <= high * 1.0001
        assert point.spread_seconds == pytest.approx(high - low, rel=1e-4, abs=1e-9)


def test_one_sample_without_the_engines_time_and_the_client_counts() -> None:
    samples = [PrefillSample(100, 0.3, 0.2), PrefillSample(100, 0.5, None)]
    profile = prefill_profile(samples)
    assert profile.clock == "client"
    assert profile.points[0].seconds == 0.4


def streams(batch: int, tokens: int, step_s: float, stagger_s: float) -> tuple[TokenTimes, ...]:
    return tuple(
        TokenTimes(
            tuple(n * stagger_s + i * step_s for i in range(tokens)), tuple(range(1, tokens + 1))
        )
        for n in range(batch)
    )


@given(st.integers(1, 20), st.integers(32, 80), st.floats(1e-4, 1.0), st.integers(0, 1))
def test_a_step_is_the_gap_while_all_decode(
    batch: int, tokens: int, step_s: float, stagger_steps: int
) -> None:
    step = decode_step(DecodeSample(streams(batch, tokens, step_s, stagger_steps * step_s)))
    assert step is not None
    assert step.batch_size == batch
    assert step.step_seconds == pytest.approx(step_s, rel=1e-4)
    assert step.spread_seconds == pytest.approx(0, abs=step_s * 1e-3)


def test_slow_steps_before_all_decode_do_not_count() -> None:
    early = TokenTimes((0.0, 5.0, *(10 + 0.1 * i for i in range(20))), tuple(range(1, 23)))
    late = TokenTimes(tuple(10 + 0.1 * i for i in range(40)), tuple(range(1, 41)))
    step = decode_step(DecodeSample((early, late)))
    assert step is not None
    assert step.step_seconds == pytest.approx(0.1)
    assert step.spread_seconds == pytest.approx(0, abs=1e-9)


@given(st.lists(st.integers(1, 3), min_size=30, max_size=40))
def test_bursts_hardly_matter(bursts: list[int]) -> None:
    nums = list(itertools.accumulate(bursts))
    together = TokenTimes(tuple(0.1 * num for num in nums), tuple(nums))
    step = decode_step(DecodeSample((together,)))
    assert step is not None
    assert step.step_seconds == pytest.approx(0.1)
    # The same, but the tokens of a burst arrive one after the other within microseconds.
    at_s = [0.1 * num - 1e-6 * i for num, n in zip(nums, bursts, strict=True) for i in range(n)]
    apart = TokenTimes(tuple(sorted(at_s)), tuple(range(1, len(at_s) + 1)))
    step = decode_step(DecodeSample((apart,)))
    assert step is not None
    assert step.step_seconds == pytest.approx(0.1, rel=0.26)


def test_streams_that_take_turns_are_no_batch() -> None:
    assert decode_step(DecodeSample(streams(2, 20, 0.1, 5.0))) is None
    assert decode_step(DecodeSample(streams(1, 5, 0.1, 0.0))) is None


def test_doubts_are_said() -> None:
    samples = [PrefillSample(256, 1, 0.5), PrefillSample(512, 1, 0.4), PrefillSample(512, 1, 0.1)]
    measured = Measured(
        prefill=samples,
        decode=[
            DecodeSample(streams(1, 40, 0.2, 0), engine_mean_s=0.1),
            DecodeSample(streams(4, 40, 0.1, 0), engine_mean_s=0.1),
        ],
        notes=["said before"],
    )
    profile = build_profile(measured, DecodeSetup(16, 40), provenance)
    assert profile.provenance is not None
    notes = profile.provenance.notes
    assert notes[0] == "said before"
    assert len(notes) == 5
    assert "512 tokens took 0.25 s, less than" in notes[1]
    assert "samples 0.3 s apart" in notes[2]
    assert "step of 4 streams" in notes[3]
    assert "the engine made one every 0.1 s" in notes[4]


@given(st.lists(seconds, min_size=1, max_size=8).map(sorted))
def test_times_that_grow_are_not_doubted(times: list[float]) -> None:
    points = tuple(
        PrefillPoint(tokens=256 * (i + 1), seconds=time_s) for i, time_s in enumerate(times)
    )
    assert doubts(MeasuredPrefill(points=points), None) == []


# --- the file ---


def profile_file(times: list[float]) -> EngineProfileFile:
    samples = [PrefillSample(2**i, time_s, time_s / 2) for i, time_s in enumerate(times)]
    measured = Measured(prefill=samples, decode=[DecodeSample(streams(2, 40, times[0], 0))])
    return EngineProfileFile(profile=build_profile(measured, DecodeSetup(16, 40), provenance))


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(20):
        file = profile_file([10 ** rng.uniform(-5, 3) for _ in range(rng.randint(1, 9))])
        file.dump(tmp_path / "profile.yaml")
        assert EngineProfileFile.load(tmp_path / "profile.yaml") == file
    assert [path.name for path in tmp_path.iterdir()] == ["profile.yaml"]
    assert (tmp_path / "profile.yaml").stat().st_mode & 0o077 == 0o666 & ~_umask() & 0o077


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def test_a_file_written_by_hand_needs_little(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "profile:\n"
        "  prefill:\n"
        "    points:\n"
        "    - {tokens: 8Ki, seconds: 440ms}\n"
        "    - {tokens: 1024, seconds: 0.1}\n"
        "  kv_cache: {fixed_bytes: 2MiB, bytes_per_token: 512}\n"
    )
    profile = EngineProfileFile.load(path).profile
    assert [point.tokens for point in profile.prefill.points] == [1024, 8192]
    assert profile.prefill.points[1].seconds == pytest.approx(0.44)
    assert profile.kv_cache is not None
    assert profile.kv_cache.fixed_bytes == 2 * 2**20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "a profile file is a mapping"),
        ("profile: {prefill: {points: [{tokens: 1, second: 2}]}}\n", "did you mean 'seconds'"),
        ("profile:\n  prefill:\n    points: []\n", r"profile.prefill.points \(line 3\)"),
        ("profile: {prefill: {points: [{tokens: 1, seconds: 0}]}}\n", "greater than 0"),
        ("profile: {prefill: {points: [{tokens: 1, seconds: .nan}]}}\n", "nan: "),
        (
            "profile: {prefill: {points: [{tokens: 9, seconds: 1}, {tokens: 9, seconds: 2}]}}\n",
            "two points for 9 tokens",
        ),
        ("profile: {prefill: {points: [", "not valid YAML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        EngineProfileFile.load(path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        profile_file([1.0]).dump(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- the plan ---


@given(st.integers(4, 2_000_000))
def test_default_lengths_fit_and_end_at_the_limit(max_model_len: int) -> None:
    lengths = default_lengths(max_model_len)
    assert 1 <= len(lengths) <= 10
    assert list(lengths) == sorted(set(lengths))
    assert (max_model_len - 2) / 1.25 <= lengths[-1] <= max_model_len - 2


def test_default_lengths() -> None:
    assert default_lengths(2050) == (256, 512, 1024, 2048)
    assert default_lengths(4096) == (256, 512, 1024, 2048, 4094)
    assert default_lengths(2) == ()


def test_a_plan_within_the_engines_limits() -> None:
    plan = make_plan(Wishes(), max_model_len=2048, kv_tokens=5000)
    assert plan.batch_sizes == (1, 4)
    assert plan.setup == DecodeSetup(1024, 64)
    assert make_plan(Wishes(), 600, None).setup == DecodeSetup(536, 64)
    wished = Wishes(lengths=(9, 3, 9), batch_sizes=(64,))
    plan = make_plan(wished, max_model_len=2048, kv_tokens=5000)
    assert (plan.lengths, plan.batch_sizes) == ((3, 9), (64,))
    assert plan.total_work > 12 * 6


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(lengths=(2048,)), "above 2047"),
        (Wishes(context_tokens=2000), "--decode-context"),
        (Wishes(output_tokens=4096), "--output-tokens"),
    ],
)
def test_plans_that_cannot_be(wishes: Wishes, message: str) -> None:
    with pytest.raises(ProfilingError, match=message):
        make_plan(wishes, max_model_len=2048, kv_tokens=None)


def test_counters_are_summed_over_ranks() -> None:
    text = (
        "# HELP vllm:num_requests_running Number of requests\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 1.5e-05\n'
        'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="8192",x="None"} 1.0\n'
        "python_info 1.0\n"
    )
    counters = parse_counters(text)
    assert counters is not None
    assert (counters.num_running, counters.num_waiting, counters.num_ranks) == (3, 0, 2)
    assert counters.kv_tokens == 8192
    assert counters.since(counters, "vllm:request_prefill_time_seconds_sum") == 0
    assert counters.since(counters, "vllm:nothing") is None
    assert parse_counters("python_info 1.0\n") is None


def test_urls() -> None:
    assert base_url("http://h:1/v1/") == "http://h:1"
    with pytest.raises(ProfilingError, match="write http://127"):
        base_url("localhost:8000")
