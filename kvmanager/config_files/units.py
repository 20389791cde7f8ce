"""Converts quantities as people write them ("1Gbit", "20ms", "512MiB", "8k") to SI numbers.

Knows nothing of what the numbers are for. Every parser raises ``ValueError`` with a message that
shows the accepted spelling.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER_AND_UNIT = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ/]*)\s*$")

GBIT_PER_S = 1e9 / 8
"""Bytes per second."""

_BYTES_PER_RATE_UNIT = {
    "bit": 1 / 8,
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "bps": 1 / 8,
    "kbps": 1e3 / 8,
    "mbps": 1e6 / 8,
    "gbps": 1e9 / 8,
    "b/s": 1.0,
    "kb/s": 1e3,
    "mb/s": 1e6,
    "gb/s": 1e9,
    "kib/s": 2.0**10,
    "mib/s": 2.0**20,
    "gib/s": 2.0**30,
}
_SECONDS_PER_UNIT = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BYTES_PER_SIZE_UNIT = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}

_NUMBER_AND_TOKENS = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(|[kK]|[mM]|[kK]i|Mi)\s*$")
_TOKENS_PER_SUFFIX = {"": 1, "k": 10**3, "ki": 2**10, "m": 10**6, "mi": 2**20}


def parse_rate(text: str) -> float:
    """Bytes per second of "1Gbit", "200Mbit/s", "10Gbps" or "100MB/s"; 0 for "unlimited"."""
    if text.strip().lower() == "unlimited":
        return 0.0
    number, unit = _split(text, "a rate such as 1Gbit, 200Mbit, 100MB/s or unlimited")
    per_s = unit.removesuffix("/s") if "bit" in unit else unit
    if per_s not in _BYTES_PER_RATE_UNIT:
        raise ValueError(f"{text!r} is not a rate; write 1Gbit, 200Mbit, 100MB/s or unlimited")
    value = number * _BYTES_PER_RATE_UNIT[per_s]
    if value <= 0:
        raise ValueError(f"{text!r}: a rate must be above zero; write unlimited for no limit")
    return value


def parse_duration(text: str) -> float:
    """Seconds of "20ms", "500us", "1.5s" or "2min"; a bare "0" is allowed."""
    number, unit = _split(text, "a time such as 20ms, 500us or 1.5s")
    if number == 0 and not unit:
        return 0.0
    if unit not in _SECONDS_PER_UNIT:
        raise ValueError(f"{text!r} is not a time; write 20ms, 500us or 1.5s")
    return number * _SECONDS_PER_UNIT[unit]


def parse_size(text: str) -> int:
    """Bytes of "64KiB", "16MiB", "1GB" or a bare number of bytes."""
    number, unit = _split(text, "a size such as 16MiB or 1GB")
    if unit not in _BYTES_PER_SIZE_UNIT:
        raise ValueError(f"{text!r} is not a size; write 64KiB, 16MiB or 1GB")
    return round(number * _BYTES_PER_SIZE_UNIT[unit])


def parse_tokens(text: str) -> int:
    """Tokens of "128Ki", "19.4K" or "131072". Raises ValueError, showing the spelling."""
    match = _NUMBER_AND_TOKENS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens; write 32Ki, 32K or 32768")
    tokens = Decimal(match[1]) * _TOKENS_PER_SUFFIX[match[2].lower()]
    if tokens != int(tokens) or tokens < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1 token")
    return int(tokens)


def format_rate(bytes_per_s: float) -> str:
    """The shortest bit spelling of a rate: 125e6 -> "1Gbit", 0 -> "unlimited"."""
    if bytes_per_s == 0:
        return "unlimited"
    bits = bytes_per_s * 8
    for unit, scale in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.4g}{unit}"
    return f"{bits:.4g}bit"


def format_duration(seconds: float) -> str:
    """A short spelling of a time: 0.02 -> "20ms"."""
    if seconds == 0:
        return "0ms"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g}{unit}"
    return f"{seconds / 1e-6:.4g}us"


def format_bytes(nbytes: int) -> str:
    """About `nbytes`, in the largest binary unit that fits."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return str(nbytes)


def format_tokens(num_tokens: int) -> str:
    """The shortest exact spelling: 32768 -> "32Ki", 32000 -> "32K", 32001 -> "32001"."""
    for suffix, scale in (("M", 10**6), ("Mi", 2**20), ("K", 10**3), ("Ki", 2**10)):
        if num_tokens and num_tokens % scale == 0:
            return f"{num_tokens // scale}{suffix}"
    return str(num_tokens)


def format_age(seconds: float) -> str:
    """About `seconds`, for people who ask how long ago."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _split(text: str, expected: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not {expected}")
    return float(match[1]), match[2].lower()
