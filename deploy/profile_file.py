"""The file with an engine's profile: prefill times, decode steps, and where they come from.

`prfaas plan profile` writes it and `prfaas plan solve` reads it. A file written by hand may leave
out most fields. This file does not know how the numbers are measured.
"""

from __future__ import annotations

import io
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator
from ruamel.yaml import YAML

from kvmanager.config_files.fields import Seconds, SecondsOrZero, Section, Tokens, spelled
from kvmanager.config_files.units import parse_size
from kvmanager.config_files.yaml_files import parse_yaml, read_text

EXPECTED = "a profile file is a mapping with the key profile; `prfaas plan profile` writes one"

_HEADER = """\
# One engine's speed, for `prfaas plan solve`; written by `prfaas plan profile`.
# Times are seconds. A prefill's `seconds` is the median and `spread_seconds` the range of its
# samples, by `clock`; `client_seconds` includes HTTP. A decode step is the time for a token of one
# stream while `batch_size` streams run, the median over spans of a few tokens; its spread is from
# the 10th to the 90th percentile.
"""


Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0), spelled(parse_size)]


class PrefillPoint(Section):
    """T_prefill at one length, of an otherwise idle engine with nothing of the prompt cached."""

    tokens: Tokens
    seconds: Seconds
    spread_seconds: SecondsOrZero | None = None
    client_seconds: Seconds | None = None
    samples: Count | None = None


class MeasuredPrefill(Section):
    """T_prefill(l). `clock` says who timed `seconds`: the engine's metrics or its HTTP client."""

    clock: Literal["engine", "client"] | None = None
    points: Annotated[tuple[PrefillPoint, ...], Field(min_length=1)]

    @field_validator("points")
    @classmethod
    def _distinct(cls, points: tuple[PrefillPoint, ...]) -> tuple[PrefillPoint, ...]:
        lengths = [point.tokens for point in points]
        twice = sorted({tokens for tokens in lengths if lengths.count(tokens) > 1})
        if twice:
            raise ValueError(f"two points for {twice[0]} tokens; keep one")
        return tuple(sorted(points, key=lambda point: point.tokens))


class DecodeStep(Section):
    """Seconds from one token of a stream to the next while `batch_size` streams decode."""

    batch_size: Count
    step_seconds: Seconds
    spread_seconds: SecondsOrZero | None = None
    samples: Count | None = None


class MeasuredDecode(Section):
    """Decode steps after prompts of `context_tokens`, over `output_tokens` tokens."""

    context_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    steps: Annotated[tuple[DecodeStep, ...], Field(min_length=1)]

    @field_validator("steps")
    @classmethod
    def _distinct(cls, steps: tuple[DecodeStep, ...]) -> tuple[DecodeStep, ...]:
        sizes = [step.batch_size for step in steps]
        twice = sorted({size for size in sizes if sizes.count(size) > 1})
        if twice:
            raise ValueError(f"two steps for a batch of {twice[0]}; keep one")
        return tuple(sorted(steps, key=lambda step: step.batch_size))


class EncodePoint(Section):
    """Seconds to encode media of so many tokens in one pass of an otherwise idle engine."""

    tokens: Tokens
    seconds: Seconds
    images: Count | None = None
    spread_seconds: SecondsOrZero | None = None
    samples: Count | None = None


class MeasuredEncode(Section):
    """Encoder passes by the tokens of their media. Two sizes tell the fixed part of a pass."""

    points: Annotated[tuple[EncodePoint, ...], Field(min_length=1)]


class KvCacheSize(Section):
    """S_kv(l) = fixed_bytes + bytes_per_token * l, for one request. Written like 64KiB or 65536."""

    fixed_bytes: Size
    bytes_per_token: Size


class Provenance(Section):
    """Where the numbers come from. `complete` is false if the measurement was cut short."""

    url: str
    model: str
    vllm_version: str = "unknown"
    date: datetime
    repeats: Count
    complete: bool = True
    notes: tuple[str, ...] = ()


class EngineProfile(Section):
    """The speed of one instance."""

    prefill: MeasuredPrefill
    decode: MeasuredDecode | None = None
    encode: MeasuredEncode | None = None
    kv_cache: KvCacheSize | None = None
    provenance: Provenance | None = None


class EngineProfileFile(Section):
    """The whole file."""

    profile: EngineProfile

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check `path`. Raises `FileError` with every problem, its line and field."""
        return parse_yaml(read_text(path), cls, source=str(path), expected=EXPECTED)

    def as_json(self) -> dict[str, Any]:
        """The file as plain values, without what is unknown."""
        return self.model_dump(mode="json", exclude_none=True)

    def dump(self, path: Path) -> None:
        """Write `path`, whole or not at all. An existing file is replaced. Raises `OSError`."""
        yaml = YAML()
        yaml.width = 100
        text = io.StringIO(_HEADER)
        text.seek(0, io.SEEK_END)
        yaml.dump(self.as_json(), text)
        # In the same directory, so that the last step is a rename within one file system.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("x", encoding="utf-8") as file:
                file.write(text.getvalue())
                file.flush()
                # Before the rename: after a crash the name must not belong to an empty file.
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
