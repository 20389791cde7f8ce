"""Plays recordings of a gateway's scheduler: the same decisions again, or those of other settings.

It reads files and makes values to print. It does not know the command line, nor how a frame is
written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.scheduling.recorder import SUFFIX
from deploy.gateway.scheduling.scheduler import live_settings
from deploy.region.spec.region import RegionSpec, spill_of
from scheduler.live.events import TenantsLimited
from scheduler.live.settings import LiveSettings
from scheduler.replay.recording import (
    Entry,
    Frame,
    Header,
    Played,
    RecordingError,
    frames_in,
    play,
    scheduler_of,
)

Resettle = Callable[[LiveSettings], LiveSettings]
"""Gives other settings in place of the recorded ones. May raise `RecordingError`."""

MAX_TOLD: Final = 20
"""The number of differences that a table shows. JSON has all of them."""


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """How often a kind of question had an outcome, as recorded and now."""

    decision: str
    outcome: str
    recorded: int
    replayed: int


def play_recordings(directory: Path, resettle: Resettle | None = None) -> tuple[Played, int]:
    """Play all files of a directory, the oldest first. Also returns how many there are.

    Raises `RecordingError` for a directory without any, and for files that cannot be played.
    """
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    if not paths:
        raise RecordingError(f"{directory}: there is no file *{SUFFIX} in it")
    played = Played()
    for path in paths:
        try:
            _play_file(path, resettle, played)
        except RecordingError as error:
            raise RecordingError(f"{path}: {error}") from error
    return played, len(paths)


def settings_of(region: RegionSpec, path: Path) -> Resettle:
    """The scheduler's settings from a region file, for the clusters of the recording."""
    config = GatewayConfig(
        models=tuple(ModelConfig(name=model.name) for model in region.models),
        threshold_tokens=region.gateway.threshold_tokens,
        scheduling=region.gateway.scheduling,
    )
    own = {cluster.name for cluster in region.clusters}

    def resettle(recorded: LiveSettings) -> LiveSettings:
        clusters = {*(pd.name for pd in recorded.pd_clusters), *recorded.prefill_clusters}
        if clusters != own:
            raise RecordingError(
                f"it is of the clusters {', '.join(sorted(clusters))}; "
                f"{path} has {', '.join(sorted(own))}"
            )
        pds = [replace(pd, spill=spill_of(region.cluster(pd.name))) for pd in recorded.pd_clusters]
        wanted = live_settings(config, tuple(pds), region.uplinks)
        # The events name the recorded models, and a region file does not set `hand_off_tokens`.
        return replace(wanted, hand_off_tokens=recorded.hand_off_tokens, models=recorded.models)

    return resettle


def outcome_rows(played: Played) -> list[OutcomeRow]:
    """All outcomes of each kind of question, the most frequent first."""
    return [row for name, pairs in sorted(played.outcomes.items()) for row in _rows(name, pairs)]


def num_changed(played: Played, decision: str) -> int:
    """How many answers to this kind of question have another outcome now."""
    pairs = played.outcomes.get(decision, Counter())
    return sum(num for (before, now), num in pairs.items() if before != now)


def document_of(played: Played, num_files: int) -> dict[str, Any]:
    """The whole result, JSON-ready."""
    return {
        "files": num_files,
        "events": played.num_events,
        "decisions": played.num_decisions,
        "lost_events": played.num_lost,
        "is_complete": played.num_lost == 0,
        "differences": [
            {
                "number": item.number,
                "now_s": item.now_s,
                "event": item.event,
                "field": item.field,
                "recorded": item.recorded,
                "replayed": item.replayed,
            }
            for item in played.differences
        ],
        "outcomes": [
            {
                "decision": row.decision,
                "outcome": row.outcome,
                "recorded": row.recorded,
                "replayed": row.replayed,
            }
            for row in outcome_rows(played)
        ],
        "changed": {name: num_changed(played, name) for name in sorted(played.outcomes)},
    }


def _rows(name: str, pairs: Counter[tuple[str, str]]) -> Iterator[OutcomeRow]:
    before: Counter[str] = Counter()
    now: Counter[str] = Counter()
    for (recorded, replayed), num in pairs.items():
        before[recorded] += num
        now[replayed] += num
    for outcome, _ in (before + now).most_common():
        yield OutcomeRow(name, outcome, before[outcome], now[outcome])


def _limits_tenants(frame: Frame) -> bool:
    return isinstance(frame, Entry) and isinstance(frame.event, TenantsLimited)


def _play_file(path: Path, resettle: Resettle | None, played: Played) -> None:
    # Frames are read while they are played, so reading may fail anywhere in here.
    try:
        with path.open("rb") as stream:
            frames = frames_in(stream)
            header = next(frames, None)
            if header is None:
                # The recorder has just begun this file, or ended before its first write.
                return
            if not isinstance(header, Header):
                raise RecordingError("it does not begin as a recording does")
            live = scheduler_of(header)
            try:
                if resettle is not None:
                    live.reconfigure(resettle(header.settings))
                    # The other settings have limits of their own for the whole time.
                    frames = (frame for frame in frames if not _limits_tenants(frame))
                play(live, frames, played)
            except RecordingError:
                raise
            # Fields of a state may have other types than those of this version, or than anybody
            # wrote, which shows when an event needs them.
            except Exception as error:
                raise RecordingError(
                    f"written by version {header.version}, whose state this one cannot use: "
                    f"{type(error).__name__}: {error}"
                ) from error
    except OSError as error:
        raise RecordingError(str(error)) from error
