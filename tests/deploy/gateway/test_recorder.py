"""The flight recorder: what it writes, that it is bounded, and what it says of what is missing."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from eventually import wait_until
from live_region_cases import MODEL, Region, instance, report, teach
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from deploy.gateway.config import RecorderSection
from deploy.gateway.scheduling import recorder as module
from deploy.gateway.scheduling.recorder import SUFFIX, Recorder
from deploy.gateway.scheduling.scheduler import RegionScheduler
from deploy.plan.simulate.cli import simulate_app
from deploy.plan.simulate.recording import document_of, play_recordings
from netmon.region_link import LinkView
from scheduler.live.core import LiveScheduler
from scheduler.replay.recording import Gap, Header, frame_of, frames_in, header_of, scheduler_of
from scheduler.routing.decision import RequestShape

LONG = RequestShape(num_prompt_tokens=4000)
SLOW_LINK = LinkView(available_bytes_per_s=1e3, rtt_s=0.5)


class Flight:
    """A scheduler of a region, recorded to `directory`."""

    def __init__(self, directory: Path, **config: Any) -> None:
        """`config` is not checked: bounds may be smaller than is allowed."""
        self.directory = directory
        self.registry = CollectorRegistry()
        checked = RecorderSection(dir=directory).model_copy(update=config)
        self.recorder = Recorder(checked, self.registry)
        self.region = Region()
        self.scheduler: RegionScheduler = self.region.scheduler()
        teach(self.scheduler, "far", 1e-3)
        self.scheduler.record(self.recorder)

    def decide(self, num: int) -> None:
        for _ in range(num):
            self.region.now_s += 0.01
            self.scheduler.route(MODEL, LONG)

    def has_taken_all(self) -> bool:
        """Whether the recorder's thread has taken everything that it was given."""
        return not self.recorder._frames

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"prfaas_gateway_recorder_{name}_total")

    def played(self) -> dict[str, Any]:
        self.recorder.close()
        return document_of(*play_recordings(self.directory))


def test_what_was_decided_is_decided_again(tmp_path: Path) -> None:
    flight = Flight(tmp_path / "made")
    flight.decide(50)
    found = flight.played()
    assert (found["decisions"], found["differences"], found["is_complete"]) == (50, [], True)
    assert found["files"] == 1
    assert flight.value("events") == found["events"] == 50 + 4  # two reports, two links
    assert flight.value("lost_events") == 0
    flight.recorder.close()


def test_files_rotate_within_the_bound_and_each_can_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.002)
    flight = Flight(tmp_path, keep=400_000)
    for _ in range(40):
        flight.decide(50)
        time.sleep(0.004)
    found = flight.played()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= 400_000
    assert found["files"] == len(sizes) >= 3
    assert (found["differences"], found["is_complete"]) == ([], True)
    assert 0 < found["decisions"] < 2000  # the oldest are gone


def test_a_disk_that_is_too_slow_loses_events_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.01)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    flight = Flight(tmp_path)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 1)
    flight.decide(3)
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 32 << 20)
    wait_until(flight.has_taken_all)
    flight.decide(20)
    found = flight.played()
    assert (found["lost_events"], found["is_complete"]) == (flight.value("lost_events"), False)
    assert found["lost_events"] > 0
    assert found["differences"] == []
    assert found["decisions"] >= 18
    assert "the disk is too slow for the recorder" in caplog.text
    told = CliRunner().invoke(simulate_app, ["--recording", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "incomplete: the recorder lost" in told.output


def test_a_disk_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.005)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    flight = Flight(tmp_path)
    flight.decide(5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "_write_waiting", full)
        wait_until(lambda: "No space left on device" in caplog.text)
    flight.decide(5)
    wait_until(flight.has_taken_all)
    flight.decide(5)
    found = flight.played()
    assert found["is_complete"] is False
    assert found["differences"] == []
    assert found["decisions"] >= 1


def test_what_cannot_be_written_fails_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flight = Flight(tmp_path)
    with caplog.at_level(logging.ERROR):
        flight.scheduler.route(MODEL, LONG, priority=1 << 80)
    assert "cannot write a RouteAsked" in caplog.text
    assert flight.value("lost_events") == 1
    assert flight.played()["lost_events"] == 1


def test_tenants_are_hashes_unless_they_have_limits() -> None:
    def recorder() -> Recorder:
        config = RecorderSection(dir=Path("unused"))
        return Recorder(config, CollectorRegistry(), named={"acme"})

    one = recorder()
    assert (one.hide("acme"), one.hide("")) == ("acme", "")
    assert one.hide("bob") == one.hide("bob") != "bob"
    assert one.hide("bob") not in (one.hide("eve"), recorder().hide("bob"))


def test_reports_are_recorded_without_texts(tmp_path: Path) -> None:
    told = report("home", instance("d0", reason="could not render 'my secret'"), reason="secret")
    flight = Flight(tmp_path)
    flight.region.home = told
    flight.decide(1)
    flight.recorder.close()
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    assert b"secret" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0, "it names tenants"


def test_a_wrong_decision_is_printed_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flight = Flight(tmp_path)
    flight.decide(2)
    flight.recorder.close()
    monkeypatch.setattr(LiveScheduler, "link", lambda *_: SLOW_LINK)
    told = CliRunner().invoke(simulate_app, ["--recording", str(tmp_path)])
    assert told.exit_code == 1, told.output
    assert "event 5 (RouteAsked, at 100.010000 s): " in told.output
    assert " was " in told.output


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_other_settings_are_a_table_and_no_failure(tmp_path: Path, words: tuple[str, ...]) -> None:
    flight = Flight(tmp_path / "flight")
    flight.decide(5)
    flight.recorder.close()
    region = tmp_path / "region.yaml"
    region.write_text(REGION)
    told = CliRunner().invoke(
        simulate_app, ["--recording", str(tmp_path / "flight"), "--with", str(region), *words]
    )
    assert told.exit_code == 0, told.output
    assert "below_threshold" in told.output
    assert "above_threshold" in told.output


def test_what_is_no_recording_is_an_error(tmp_path: Path) -> None:
    told = CliRunner().invoke(simulate_app, ["--recording", str(tmp_path)])
    assert told.exit_code == 2
    (tmp_path / f"x{SUFFIX}").write_bytes(frame_of(Gap(1)))
    told = CliRunner().invoke(simulate_app, ["--recording", str(tmp_path)])
    assert told.exit_code == 2
    assert "does not begin as a recording does" in told.output


def test_a_state_without_a_field_of_this_version_is_an_error(tmp_path: Path) -> None:
    flight = Flight(tmp_path)
    flight.decide(3)
    flight.recorder.close()
    (path,) = tmp_path.iterdir()
    written = path.read_bytes()
    with path.open("rb") as stream:
        header = next(frames_in(stream))
        entries = written[stream.tell() :]
    assert isinstance(header, Header)
    live = scheduler_of(header)
    del live.ledger._taken
    path.write_bytes(frame_of(header_of(live, "0.0.1", 0.0).packed()) + entries)
    told = CliRunner().invoke(simulate_app, ["--recording", str(tmp_path)])
    assert told.exit_code == 2, told.output
    assert "whose state this one cannot use" in told.output
    assert "_taken" in told.output
    assert "0.0.1" in told.output


@pytest.mark.parametrize("begun", [b"", b"abc"])
def test_a_file_that_has_just_begun_is_passed_over(tmp_path: Path, begun: bytes) -> None:
    flight = Flight(tmp_path)
    flight.decide(3)
    flight.recorder.close()
    (tmp_path / f"99990101{SUFFIX}").write_bytes(begun)
    assert flight.played()["decisions"] == 3


REGION = """
name: other
models: [{name: tiny, path: some/model}]
clusters:
  - {name: far, kind: prefill, nodes: [{name: a, instances: [{name: p0}]}]}
  - {name: home, kind: pd, nodes: [{name: b, instances: [{name: d0}]}]}
links: [{from: far, to: home}]
gateway:
  threshold_tokens: 9000
  scheduling: {routing: {policy: threshold}}
security: {trusted_network: true}
"""
