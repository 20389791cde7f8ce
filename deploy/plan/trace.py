"""Reads request traces: JSON lines as the Mooncake project publishes them.

Each line is an object with `timestamp` (ms from the start), `input_length`, `output_length`
(tokens) and `hash_ids` (one id per block of tokens; equal ids mean equal prefixes up to that
block).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvmanager.config_files.problems import FileError, Problem
from scheduler.planning.prefix_reuse import TracePrompt


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int] = []


def load_trace(path: Path) -> list[TracePrompt]:
    """The requests in the order of the file. Raises `FileError` that names the first wrong line."""
    decode = msgspec.json.Decoder(_Line).decode
    prompts: list[TracePrompt] = []
    number = 0
    try:
        with path.open("rb") as file:
            for text in file:
                number += 1
                if not text.strip():
                    continue
                line = decode(text)
                prompts.append(
                    TracePrompt(
                        line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids
                    )
                )
    except OSError as error:
        raise FileError(str(path), [Problem((), f"cannot be read: {error}")]) from error
    except msgspec.MsgspecError as error:
        problem = Problem((), f"not a trace line: {error}", number)
        raise FileError(str(path), [problem]) from error
    if not prompts:
        raise FileError(str(path), [Problem((), "holds no request")])
    return prompts
