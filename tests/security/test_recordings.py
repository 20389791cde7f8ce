"""A recording of another person may name what it likes: only values are made of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.gateway.scheduling.recorder import SUFFIX
from deploy.plan.simulate.cli import simulate_app
from scheduler.live.core import LiveScheduler
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.replay.recording import Header, entry_frame, frame_of, frames_in, header_of

SETTINGS = LiveSettings(
    pd_clusters=(PdSettings("home", ("far",)),), threshold_tokens=1000, hand_off_tokens=256
)


class _TakesOver:
    def __reduce__(self) -> Any:
        return print, ("taken over",)


def header() -> Header:
    return header_of(LiveScheduler(SETTINGS), "1.0", 0.0)


def forged(*nodes: list[Any]) -> bytes:
    """A true state, in which other nodes stand for the field `admitted`."""
    true = msgspec.msgpack.decode(header().state)
    names, values = true[0][1:]
    values[names.index("admitted")] = [len(true)]
    return msgspec.msgpack.encode([*true, *nodes])


def simulated(directory: Path, state: bytes) -> tuple[int, str]:
    """Exit status and words of `prfaas simulate` for a recording with this state."""
    written = frame_of(msgspec.structs.replace(header(), state=state).packed())
    (directory / f"it{SUFFIX}").write_bytes(written)
    result = CliRunner().invoke(simulate_app, ["--recording", str(directory)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, " ".join(result.output.split())


def test_a_true_state_is_played(tmp_path: Path) -> None:
    assert simulated(tmp_path, header().state)[0] == 0
    assert simulated(tmp_path, forged(["dict", [], []]))[0] == 0


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([["object", "subprocess:Popen", ["args"], ["true"]]], "subprocess:Popen is no part"),
        ([["object", "builtins:object", [], []]], "builtins:object is no part"),
        ([["object", "scheduler.replay.state:sys.modules", [], []]], "sys.modules is no part"),
        ([["object", "scheduler.live.core:LiveScheduler.take", [], []]], "is no part"),
        ([["object", "scheduler.live.core:msgspec.Struct", [], []]], "is no part"),
        ([["object", "scheduler.live.members:Members", ["__class__"], [1]]], "cannot have a field"),
        ([["enum", "scheduler.live.members:Members", "x"]], "is no part"),
        ([["array", "object", [1], b"\x41" * 8]], "an array of object is no part"),
        ([["array", "O", [1], b"\x41" * 8]], "an array of O is no part"),
        ([["array", "int64", [2], b"\x41" * 8]], "cannot reshape"),
        ([["counts", "int64", [1 << 40], b"", b""]], "more than 134217728 numbers"),
        ([["counts", "int64", [4], (9).to_bytes(8, "little"), bytes(8)]], "out of bounds"),
        ([["eval", "1"]], "KeyError"),
        ([["tuple", [[10_000]]]], "IndexError"),
        ([["dict", [1], []]], "shorter"),
    ],
)
def test_what_is_no_value_of_a_scheduler_is_refused(
    tmp_path: Path, nodes: list[list[Any]], told: str
) -> None:
    status, words = simulated(tmp_path, forged(*nodes))
    assert status == 2
    assert "whose state cannot be read" in words
    assert told in words


def test_a_tuple_in_itself_and_a_pickle_are_refused(tmp_path: Path) -> None:
    num = len(msgspec.msgpack.decode(header().state))
    assert "RecursionError" in simulated(tmp_path, forged(["tuple", [[num]]]))[1]
    for state in (pickle.dumps(_TakesOver()), b"", b"\xc1"):
        status, words = simulated(tmp_path, state)
        assert (status, "taken over" in words) == (2, False)


def test_values_of_other_types_than_an_event_needs_are_an_error(tmp_path: Path) -> None:
    from scheduler.live.events import AdmissionOver

    written = frame_of(msgspec.structs.replace(header(), state=forged(["list", [1]])).packed())
    written += entry_frame(AdmissionOver(1), None, 1.0)
    (tmp_path / f"it{SUFFIX}").write_bytes(written)
    with (tmp_path / f"it{SUFFIX}").open("rb") as stream:
        assert len(list(frames_in(stream))) == 2
    result = CliRunner().invoke(simulate_app, ["--recording", str(tmp_path)])
    assert result.exit_code == 2
    assert "whose state this one cannot use" in " ".join(result.output.split())
