"""What a rehearsal needs to know of paced engines: their profiles, and whether they kept the pace.

It is as `deploy.lab.pace` has it, for a tree without that package.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

LATE_SHARE: Final = 0.02
LATE_S: Final = 0.001
MAX_LATE: Final = 0.01
MAX_BUSY: Final = 0.85


class Pass(msgspec.Struct, frozen=True):
    """One pass: when it ended (Unix seconds), the seconds that it should take and took, the tokens
    that it prefilled and the requests for which it decoded.
    """

    at: float
    asked: float
    took: float
    prefill: int
    decode: int


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
    every = [one for of_one in passes.values() for one in of_one]
    if not every:
        return Verdict(0, 0.0, 0.0, 0.0, busy, ("no paced engine has done any work",))
    off = np.array([abs(one.took - one.asked) / one.asked for one in every])
    late = np.mean([one.took - one.asked > max(LATE_S, LATE_SHARE * one.asked) for one in every])
    reasons = []
    if late > MAX_LATE:
        reasons.append(f"{late:.2%} of the passes were late (at most {MAX_LATE:.0%})")
    if busy > MAX_BUSY:
        reasons.append(f"the machine was {busy:.0%} busy (at most {MAX_BUSY:.0%})")
    p50, p99 = np.quantile(off, [0.5, 0.99])
    return Verdict(len(every), float(p50), float(p99), float(late), busy, tuple(reasons))


def profile_path(text: str) -> Path:
    """The file of a shipped profile's name, or the path that it is."""
    spec = find_spec("deploy.lab.pace")
    places = [] if spec is None else spec.submodule_search_locations or []
    shipped = [Path(place) / "profiles" / f"{text}.yaml" for place in places]
    return next((file for file in shipped if "/" not in text and file.is_file()), Path(text))
