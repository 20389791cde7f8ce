"""Quantities as people write them."""

from __future__ import annotations

import pytest

from kvmanager.config_files.units import (
    format_duration,
    format_rate,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1Gbit", 125e6),
        ("1 Gbit/s", 125e6),
        ("10Gbps", 1.25e9),
        ("200Mbit", 25e6),
        ("0.5Mbit", 62.5e3),
        ("100MB/s", 100e6),
        ("64MiB/s", 64 * 2**20),
        ("unlimited", 0.0),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["1Gib", "fast", "", "-1Gbit", "1", "0Gbit", "1e9bit"])
def test_wrong_rates_show_the_right_spelling(text: str) -> None:
    with pytest.raises(ValueError, match="unlimited"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("500us", 5e-4), ("1.5s", 1.5), ("2min", 120), ("0", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


def test_a_bare_number_is_no_duration() -> None:
    with pytest.raises(ValueError, match="20ms"):
        parse_duration("20")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64KiB", 65536), ("1GB", 10**9), ("0.5GiB", 2**29), ("123", 123)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="64KiB"):
        parse_size("1 parsec")


def test_formatting_goes_back() -> None:
    assert format_rate(125e6) == "1Gbit"
    assert format_rate(0) == "unlimited"
    assert format_rate(25e6) == "200Mbit"
    assert format_duration(0.02) == "20ms"
    assert format_duration(0) == "0ms"
    assert parse_rate(format_rate(62.5e3)) == 62.5e3
