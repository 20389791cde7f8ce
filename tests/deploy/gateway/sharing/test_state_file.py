"""The file in which a gateway keeps what it has learnt: written whole, and refused for a reason."""

import asyncio
import logging
import threading
from pathlib import Path

import msgspec
import pytest
from eventually import eventually
from live_region_cases import MODEL, Region, teach

from deploy.gateway.config import ModelConfig
from deploy.gateway.sharing import state_file
from deploy.gateway.sharing.state_file import StateFile, UnusableState, about, decoded, encoded
from kvmanager.private_files import write_private
from scheduler.live.feedback import RequestArrived
from scheduler.live.sharing.learned_state import VERSION, LearnedState, learned_state

MODELS = (ModelConfig(name=MODEL, root="/weights/tiny"),)


def state_of(region: Region) -> LearnedState:
    scheduler = region.scheduler()
    teach(scheduler, "far", 2e-4)
    return learned_state(scheduler.live, region.now_s)


async def test_the_next_gateway_goes_on_from_the_file(tmp_path: Path) -> None:
    path, region = tmp_path / "learned", Region()
    before = region.scheduler()
    keeper = StateFile(path, MODELS, before, wall_clock=lambda: 5000.0)
    assert not await keeper.restore()
    keeper.start()
    teach(before, "far", 2e-4)
    await keeper.close()
    assert path.stat().st_mode & 0o777 == 0o600
    region.now_s = 7.0
    after = region.scheduler()
    assert await StateFile(path, MODELS, after, wall_clock=lambda: 5030.0).restore()
    expected_s = before.knowledge(MODEL).prefill("far").prefill_s(3000)
    assert after.knowledge(MODEL).prefill("far").prefill_s(3000) == expected_s
    assert after.knowledge(MODEL).kv == before.knowledge(MODEL).kv


async def test_it_is_written_soon_after_something_was_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "SAVE_EVERY_S", 0.01)
    path, scheduler = tmp_path / "learned", Region().scheduler()
    keeper = StateFile(path, MODELS, scheduler)
    keeper.start()
    try:
        scheduler.links()  # reports and links teach nothing that lasts
        await asyncio.sleep(0.1)
        assert not path.exists()
        scheduler.tell(RequestArrived(MODEL, 100, 0))
        await eventually(lambda: path.exists())
    finally:
        await keeper.close()


async def test_a_directory_that_is_gone_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = StateFile(tmp_path / "gone" / "learned", MODELS, Region().scheduler())
    assert not await keeper.restore()
    keeper.start()
    with caplog.at_level(logging.WARNING):
        await keeper.close()
    assert "could not be written" in caplog.text


async def test_what_was_learnt_last_follows_a_write_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "SAVE_EVERY_S", 0.01)
    begun, goes_on = threading.Event(), threading.Event()

    def slow_disk(path: Path, data: bytes) -> None:
        begun.set()
        assert goes_on.wait(20)
        write_private(path, data)

    monkeypatch.setattr(state_file, "write_private", slow_disk)
    path, region = tmp_path / "learned", Region()
    scheduler = region.scheduler()
    keeper = StateFile(path, MODELS, scheduler, wall_clock=lambda: 5000.0)
    keeper.start()
    scheduler.tell(RequestArrived(MODEL, 100, 0))
    assert await asyncio.to_thread(begun.wait, 20)
    teach(scheduler, "far", 2e-4)
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0.05)
    goes_on.set()
    await closing
    last = learned_state(scheduler.live, region.now_s)
    assert path.read_bytes() == encoded(last, about(MODELS), 5000.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: b"", "another version"),
        (lambda data: data.replace(b"state %d" % VERSION, b"state 0"), "another version"),
        (lambda data: data[:-3], "damaged"),
        (lambda data: data[:80] + bytes([data[80] ^ 1]) + data[81:], "damaged"),
        (lambda data: b"no state\n" * 100, "another version"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: object, why: str
) -> None:
    path, region = tmp_path / "learned", Region()
    assert callable(change)
    data = encoded(state_of(region), about(MODELS), 1.0)
    path.touch(mode=0o600)
    path.write_bytes(change(data))
    scheduler = region.scheduler()
    with caplog.at_level(logging.WARNING):
        assert not await StateFile(path, MODELS, scheduler).restore()
    assert f"{path} is not used" in caplog.text
    assert why in caplog.text
    assert not scheduler.models()


def test_a_state_of_other_models_is_refused() -> None:
    data = encoded(state_of(Region()), about(MODELS), 1.0)
    others = about((ModelConfig(name=MODEL, root="/weights/other"),))
    with pytest.raises(UnusableState, match="of other models"):
        decoded(data, others, 2.0)


def test_a_file_with_other_fields_is_refused() -> None:
    kept = msgspec.msgpack.encode(["x", "no time", {}])
    data = state_file._MAGIC + state_file.blake3(kept).digest() + kept
    with pytest.raises(UnusableState, match="cannot be read"):
        decoded(data, "x", 2.0)


async def test_another_users_file_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, region = tmp_path / "learned", Region()
    path.write_bytes(encoded(state_of(region), about(MODELS), 1.0))
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert not await StateFile(path, MODELS, region.scheduler()).restore()
    assert "is not used" in caplog.text
