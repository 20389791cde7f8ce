"""How long a pass of a paced engine takes: the prefill curve and the decode steps of a profile.

Pure, apart from reading a profile file. A real token stands for several tokens of the profile, one
of an answer perhaps for fewer, and all of the profile's times are multiplied by `slowdown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
import numpy as np
from pydantic import Field

from deploy.profile_file import EngineProfile, EngineProfileFile
from kvmanager.config_files.fields import Positive, Section
from scheduler.planning.curves import Curve, CurveError, fit_quadratic, interpolate

VARIABLE: Final = "PRFAAS_PACE"
"""The variable of an engine's environment with its `PassTimes` as JSON."""
_SHIPPED: Final = Path(__file__).with_name("profiles")


class PaceSpec(Section):
    """Makes instances take the time of another device. They are real engines on the CPU
    (docs/rehearsal.md).
    """

    profile: Annotated[str, Field(min_length=1)]
    """The speed of the device: h200 or h20, which are the paper's, or a file that `prfaas plan
    profile` has written.
    """
    tokens_per_token: Annotated[int, Field(ge=1)] = 1
    """How many tokens of the profile one real token of a prompt stands for."""
    output_tokens_per_token: Annotated[int, Field(ge=1)] | None = None
    """How many tokens of the profile one real token of an answer stands for, so how many steps one
    step. Left out: tokens_per_token.
    """
    slowdown: Positive = 1.0
    """All times of the profile are multiplied by it, where this machine is too small for them."""
    memory_gib: Positive | None = None
    """KV memory of the device, GiB; the profile needs `kv_cache`. Left out: the engine has
    kv_space_gib.
    """

    @property
    def output_tokens(self) -> int:
        """How many tokens of the profile one real token of an answer stands for."""
        return self.output_tokens_per_token or self.tokens_per_token


class PassTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a paced engine.

    `curve` is the prefill time in seconds over tokens of the profile: pieces of (start, c0, c1,
    c2). `steps` are (batch, seconds) of decoding. `kv_requests` is how many requests of the
    engine's greatest length its KV memory holds; 0: what kv_space_gib holds.
    """

    curve: tuple[tuple[float, float, float, float], ...]
    steps: tuple[tuple[int, float], ...]
    tokens_per_token: int = 1
    output_tokens_per_token: int = 1
    slowdown: float = 1.0
    kv_requests: float = 0.0
    log: str = ""
    """The file that gets a line for each pass."""

    @classmethod
    def of(cls, pace: PaceSpec, max_model_len: int | None, log: Path) -> Self:
        """The times of an instance. Raises `FileError` or OSError for its file, ValueError for
        what the profile lacks.
        """
        profile = EngineProfileFile.load(profile_path(pace.profile)).profile
        curve = prefill_curve(profile)
        num = 0.0
        if pace.memory_gib is not None:
            size = profile.kv_cache
            if size is None or max_model_len is None:
                raise ValueError(
                    "memory_gib needs kv_cache in the profile and max_model_len of the model"
                )
            tokens = max_model_len * pace.tokens_per_token
            num = pace.memory_gib * 2**30 / (size.fixed_bytes + size.bytes_per_token * tokens)
        decode = profile.decode
        return cls(
            curve=tuple(
                (float(start), float(c0), float(c1), float(c2))
                for start, (c0, c1, c2) in zip(curve.starts, curve.coefficients, strict=True)
            ),
            steps=()
            if decode is None
            else tuple((step.batch_size, step.step_seconds) for step in decode.steps),
            tokens_per_token=pace.tokens_per_token,
            output_tokens_per_token=pace.output_tokens,
            slowdown=pace.slowdown,
            kv_requests=num,
            log=str(log),
        )

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what `encode` has written."""
        return msgspec.json.decode(text, type=cls)

    def encode(self) -> str:
        """The value of `VARIABLE`."""
        return msgspec.json.encode(self).decode()

    def pass_s(self, chunks: Iterable[tuple[int, int, bool]], batch: int) -> float:
        """Seconds of a pass that decodes for `batch` requests and prefills `chunks`: real tokens
        done before, real tokens, and whether the prompt begins, which costs the fixed part.
        """
        seconds = sum(self._chunk_s(*chunk) for chunk in chunks)
        if batch:
            sizes, steps = zip(*self.steps, strict=True)
            seconds += float(np.interp(batch, sizes, steps)) * self.output_tokens_per_token
        elif seconds and self.steps:
            # The end of a prompt reads all weights as well, however short it is.
            seconds = max(seconds, self.steps[0][1])
        return seconds * self.slowdown

    def _chunk_s(self, done: int, num: int, begins: bool) -> float:
        rows = np.array(self.curve)
        curve = Curve(rows[:, 1:], rows[:, 0])
        at = np.array([0, done, done + num]) * self.tokens_per_token
        fixed, before, after = curve(at)
        return float(after - before + (fixed if begins else 0.0))


def prefill_curve(profile: EngineProfile) -> Curve:
    """The prefill time over tokens of the profile, as a paced engine takes it."""
    points = [(float(point.tokens), point.seconds) for point in profile.prefill.points]
    try:
        return fit_quadratic(points).curve
    except CurveError:
        return interpolate(points).curve


def profile_path(text: str) -> Path:
    """The file of a shipped profile's name, or the path that it is."""
    shipped = _SHIPPED / f"{text}.yaml"
    return shipped if "/" not in text and shipped.is_file() else Path(text)
