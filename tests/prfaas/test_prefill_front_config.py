"""The configuration file of a stand-alone prefill front."""

import math
from pathlib import Path

import pytest

from kvmanager.config_files.problems import FileError
from kvmanager.config_files.yaml_files import read_settings
from prfaas.engines.front_config import EXPECTED
from prfaas.front_config import PrefillFrontConfig
from scheduler.routing.order_config import LengthBucket, OrderConfig

PLAIN = """
name: east
instances:
  - {name: p0, url: "http://127.0.0.1:8100", agent: "127.0.0.1:7101", role: prefill}
"""
ORDERED = (
    PLAIN
    + """
queue:
  patience_s: 10
  buckets: [{up_to_tokens: 32768, share: 0.7}, {share: 0.3}]
"""
)


def load(tmp_path: Path, text: str) -> PrefillFrontConfig:
    path = tmp_path / "front.yaml"
    path.write_text(text)
    return read_settings(path, PrefillFrontConfig, expected=EXPECTED)


def test_the_order_of_the_queue_has_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, PLAIN)
    assert config.queue.order() == OrderConfig()
    assert config.instances[0].decode_slots == 256


def test_the_order_of_the_queue_may_be_given(tmp_path: Path) -> None:
    assert load(tmp_path, ORDERED).queue.order() == OrderConfig(
        buckets=(LengthBucket(32768, 0.7), LengthBucket(math.inf, 0.3)), patience_s=10.0
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ORDERED.replace("patience_s: 10", "patience_s: 0"), "queue.patience_s"),
        (ORDERED.replace(", {share: 0.3}", ""), "ascend from above 0 to infinity"),
        (
            ORDERED.replace("patience_s", "patience"),
            "queue.patience (line 7): unknown key; did you mean",
        ),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FileError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
