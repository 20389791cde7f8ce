"""The configuration file of a stand-alone front, whichever kind."""

from pathlib import Path

import pytest

from kvmanager.config_files.problems import FileError
from kvmanager.config_files.yaml_files import read_settings
from prfaas.engines.front_config import EXPECTED, FrontConfig
from prfaas.front_config import PrefillFrontConfig

GOOD = """
name: east
listen: 127.0.0.1:7300
instances:
  - {name: p0, url: "http://127.0.0.1:8100", agent: "127.0.0.1:7101", role: prefill}
  - name: p1
    agent: 127.0.0.1:7101
    engine: {instance: p1, model: /m, served_name: tiny, port: 8101, kv_space_gib: 1}
tls: {cert: c.pem, key: k.pem, ca: a.pem}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "front.yaml"
    path.write_text(text)
    return path


def load(path: Path) -> FrontConfig:
    return read_settings(path, PrefillFrontConfig, expected=EXPECTED)


def test_a_good_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    first, second = config.instances
    assert (first.engine_url, first.served_name, first.role) == (
        "http://127.0.0.1:8100",
        "",
        "prefill",
    )
    assert (second.engine_url, second.served_name) == ("http://127.0.0.1:8101", "tiny")
    assert config.tls is not None
    assert config.tls.files().ca == Path("a.pem")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "front.yaml"),
        ("- 1", "(top level): a front's file is a mapping"),
        ("name: east\ninstances: []", "(top level): write instances, or discover"),
        (GOOD + "max_queue: 3\n", "max_queue (line 10): unknown key"),
        (GOOD.replace("role: prefill", "role: cook"), "instances[0].role (line 5)"),
        (GOOD.replace('url: "http://127.0.0.1:8100", ', ""), "p0 needs `url` or `engine`"),
        (GOOD.replace("instance: p1", "instance: p9"), "p1 has an engine called p9"),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FileError) as caught:
        load(write(tmp_path, text))
    assert said in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere"):
        load(tmp_path / "nowhere.yaml")
