"""Reads request traces: JSON lines as the Mooncake project publishes them.

Each line is an object with `timestamp`, `input_length`, `output_length` (tokens) and `hash_ids`
(one id per block of tokens; equal ids mean equal prefixes up to that block). Traces of other makers
differ in the unit of their times and in the size of their blocks, which no line says. So what
cannot be as it was said is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from kvmanager.config_files.problems import FileError, Problem
from scheduler.planning.prefix_reuse import TracePrompt

TimeUnit: TypeAlias = Literal["ms", "s"]
_MAX_RPS: Final = 100.0
"""A faster trace must say its unit: one in seconds that is read as milliseconds is as fast."""
_FEW_REQUESTS: Final = 100
"""So few may well come at once."""
_MOST_TOKENS: Final = 1 << 40


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
    hash_ids: list[int] = []


def load_trace(
    path: Path, block_tokens: int = 512, unit: TimeUnit | None = None
) -> list[TracePrompt]:
    """The requests in the order of the file; the earliest arrives at 0.

    `unit` is that of the timestamps; None: milliseconds, if they can be. Raises `FileError` that
    names the first wrong line.
    """
    decode = msgspec.json.Decoder(_Line).decode
    lines: list[_Line] = []
    numbers: list[int] = []
    number = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(decode(text))
                    numbers.append(number)
    except OSError as error:
        raise FileError(str(path), [Problem((), f"cannot be read: {error}")]) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        problem = Problem((), f"not a trace line: {error}", number)
        raise FileError(str(path), [problem]) from error
    if not lines:
        raise FileError(str(path), [Problem((), "holds no request")])
    for number, line in zip(numbers, lines, strict=True):
        if not _fits(line, block_tokens):
            problem = Problem((), _why_not(line, lines, block_tokens), number)
            raise FileError(str(path), [problem])
    begin = min(line.timestamp for line in lines)
    if unit is None:
        _check_rate(path, [line.timestamp - begin for line in lines])
    second = 1 if unit == "s" else 1000
    return [
        TracePrompt(
            (line.timestamp - begin) / second, line.input_length, line.output_length, line.hash_ids
        )
        for line in lines
    ]


def _fits(line: _Line, block_tokens: int) -> bool:
    # Some makers leave out the last block, which is not full, and some count the answer's first.
    num_blocks = -(-line.input_length // block_tokens)
    return not line.hash_ids or abs(num_blocks - len(line.hash_ids)) <= 1


def _why_not(line: _Line, lines: Sequence[_Line], block_tokens: int) -> str:
    sizes = [2**i for i in range(15) if all(_fits(other, 2**i) for other in lines)]
    advice = f"block_tokens: {sizes[0]} fits" if sizes else "no block_tokens fits all lines"
    return (
        f"input_length {line.input_length} makes {-(-line.input_length // block_tokens)} blocks of "
        f"{block_tokens} tokens, and hash_ids has {len(line.hash_ids)}; {advice}"
    )


def _check_rate(path: Path, times_ms: Sequence[float]) -> None:
    if len(times_ms) < _FEW_REQUESTS:
        return
    rps = len(times_ms) * 1000 / max(1.0, max(times_ms))
    if rps > _MAX_RPS:
        message = (
            f"has {rps:,.0f} requests per second if its timestamps are milliseconds; write unit: s "
            "or unit: ms beside its file"
        )
        raise FileError(str(path), [Problem((), message)])
