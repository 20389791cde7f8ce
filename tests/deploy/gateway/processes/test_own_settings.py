"""What differs between the processes of a gateway, and settings that exclude several of them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.gateway.file import GatewayFile, load_gateway_file
from deploy.gateway.processes.own_settings import own_file
from kvmanager.config_files.problems import FileError

SHARED = {"redis": "unix:///run/redis.sock", "name": "b1"}


def loaded(folder: Path, *, front: bool = True, **gateway: Any) -> GatewayFile:
    instance = {"name": "d0", "url": "http://127.0.0.1:1", "agent": "127.0.0.1:1"}
    place = {"front": "127.0.0.1:7200"} if front else {"instances": [instance]}
    content = {
        "gateway": {"models": [{"name": "tiny"}], "processes": 2} | gateway,
        "pd": {"name": "home", **place},
        "log_dir": str(folder),
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_gateway_file(path)


def test_each_process_keeps_what_is_its_own(tmp_path: Path) -> None:
    recorder = {"dir": "/var/rec", "keep": "1GiB"}
    file = loaded(tmp_path, shared=SHARED, state="/var/learned", recorder=recorder)
    first, second = (own_file(file, number).gateway for number in range(2))
    assert [item.shared and item.shared.name for item in (first, second)] == ["b1.0", "b1.1"]
    assert (first.state, second.state) == (Path("/var/learned"), Path("/var/learned.1"))
    assert first.recorder is not None
    assert second.recorder is not None
    assert [item.dir.name for item in (first.recorder, second.recorder)] == [
        "process-0",
        "process-1",
    ]
    # Together they take the space of the file.
    assert first.recorder.keep + second.recorder.keep == 1 << 30
    assert second.model_copy(update=dict(first)) == first


def test_without_state_and_recorder_there_is_only_a_name(tmp_path: Path) -> None:
    gateway = own_file(loaded(tmp_path, shared=SHARED), 1).gateway
    assert (gateway.state, gateway.recorder) == (None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "2 processes need shared, the Redis server"),
        ({"shared": SHARED, "front": False}, "home has its front inside"),
        (
            {"shared": SHARED, "recorder": {"dir": "r", "keep": "100MiB"}},
            "recorder.keep: 2 processes need at least 128.0 MiB",
        ),
        ({"shared": SHARED, "processes": 65}, "less than or equal to 64"),
    ],
)
def test_settings_that_exclude_several_processes(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=message):
        loaded(tmp_path, **settings)


def test_one_process_needs_nothing_of_that(tmp_path: Path) -> None:
    assert loaded(tmp_path, front=False, processes=1).gateway.processes == 1
