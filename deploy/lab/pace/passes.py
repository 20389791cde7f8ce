"""Reads what paced engines have logged of their passes, and judges whether they kept the pace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

LATE_SHARE: Final = 0.02
LATE_S: Final = 0.001
MAX_LATE: Final = 0.01
"""The largest share of passes that may be late."""
MAX_BUSY: Final = 0.85
"""The largest share of its time that the machine may compute."""


class Pass(msgspec.Struct, frozen=True):
    """One pass: when it ended (Unix seconds), the seconds that it should take and took, the tokens
    that it prefilled and the requests for which it decoded.
    """

    at: float
    asked: float
    took: float
    prefill: int
    decode: int

    @property
    def late_s(self) -> float:
        return self.took - self.asked

    @property
    def is_late(self) -> bool:
        return self.late_s > max(LATE_S, LATE_SHARE * self.asked)


class Verdict(msgspec.Struct, frozen=True):
    """Whether engines kept the pace. `off_p50` and `off_p99` are |took - asked| / asked, `late` the
    share of passes that were late, `busy` the share of its time that the machine computed.
    """

    num_passes: int
    off_p50: float
    off_p99: float
    late: float
    busy: float
    reasons: tuple[str, ...]
    """Why the rehearsal is void; none: it is not."""


def read_passes(folder: Path) -> dict[str, list[Pass]]:
    """The passes by instance. Raises OSError, `msgspec.DecodeError`."""
    decoder = msgspec.json.Decoder(Pass)
    return {
        file.stem: [decoder.decode(line) for line in file.read_bytes().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }


def judge(passes: Mapping[str, Collection[Pass]], busy: float) -> Verdict:
    """The verdict on all passes of a rehearsal."""
    every = [item for of in passes.values() for item in of]
    if not every:
        return Verdict(0, 0.0, 0.0, 0.0, busy, ("no paced engine has done any work",))
    off = np.array([abs(item.late_s) / item.asked for item in every])
    late = sum(item.is_late for item in every) / len(every)
    reasons = []
    if late > MAX_LATE:
        reasons.append(f"{late:.2%} of the passes were late (at most {MAX_LATE:.0%})")
    if busy > MAX_BUSY:
        reasons.append(f"the machine was {busy:.0%} busy (at most {MAX_BUSY:.0%})")
    p50, p99 = np.quantile(off, [0.5, 0.99])
    return Verdict(len(every), float(p50), float(p99), late, busy, tuple(reasons))
