"""The parts of an engine's configuration that its KVCache's identity has."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvmanager.vllm_connector.engine_layout import _config_digest, _reading
from kvmanager.vllm_connector.stages import Stage

CONFIG = {
    "_name_or_path": "/models/a",
    "transformers_version": "5.0",
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "text_config": {"_name_or_path": "/models/a/text", "sliding_window": 1024},
}


def engine(**changes: Any) -> tuple[Any, Stage]:
    """An engine's configuration and its layers; `changes` of dotted names."""
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float16,))
    hf_config = copy.deepcopy(CONFIG)
    for name, value in changes.pop("hf", {}).items():
        *path, last = name.split(".")
        place: Any = hf_config
        for part in path:
            place = place[part]
        place[last] = value
    readings = {
        "layer.0": _reading(changes.pop("attention", attention)),
        "layer.1": _reading(changes.pop("state", state)),
    }
    model = {
        "hf_config": SimpleNamespace(to_dict=lambda: copy.deepcopy(hf_config)),
        "disable_sliding_window": False,
        "max_model_len": 4096,
        "multimodal_config": None,
        "model": "/nonexistent/model",
        "revision": None,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**(model | changes)),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=changes.pop("skip", [])),
        speculative_config=None,
        load_config=SimpleNamespace(download_dir=None),
    )
    return config, Stage((), readings)


def digest(**changes: Any) -> str:
    return _config_digest(*engine(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"hf": {"_name_or_path": "/elsewhere", "transformers_version": "5.1"}},
        {"hf": {"text_config._name_or_path": "/elsewhere"}},
        {"max_model_len": 8192},
    ],
)
def test_places_releases_and_limits_are_no_part_of_it(changes: dict[str, Any]) -> None:
    assert digest(**changes) == digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"hf": {"rope_scaling.factor": 2.0}},
        {"hf": {"text_config.sliding_window": None}},
        {"disable_sliding_window": True},
        {"skip": ["0"]},
        {"multimodal_config": MultiModalConfig(mm_processor_kwargs={"size": 2})},
        {"multimodal_config": MultiModalConfig(media_io_kwargs={"video": {"num_frames": 8}})},
        {
            "state": MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.bfloat16,)),
        },
        {
            "attention": FullAttentionSpec(
                block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16
            )
        },
    ],
)
def test_what_changes_the_meaning_of_the_bytes_is(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_with_longrope_the_longest_context_chooses_the_factors() -> None:
    longrope = {"rope_scaling.rope_type": "longrope"}
    assert digest(hf=longrope) != digest(hf=longrope, max_model_len=8192)


def test_a_text_only_engine_and_one_that_takes_images_understand_each_other() -> None:
    # vLLM's --language-model-only. Both compute the same KVCache of the same text.
    text_only = digest(multimodal_config=MultiModalConfig(language_model_only=True))
    assert text_only == digest(multimodal_config=MultiModalConfig())


def test_files_that_say_how_images_are_scaled_are_a_part_of_it(tmp_path: Path) -> None:
    def found(**changes: Any) -> str:
        media = MultiModalConfig()
        return digest(multimodal_config=media, model=str(tmp_path), **changes)

    without = found()
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 1000}')
    small = found()
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 9000}')
    assert len({without, small, found()}) == 3


def test_engines_with_and_without_prefix_caching_understand_each_other() -> None:
    blocks = MambaSpec(
        block_size=512, shapes=((4, 4),), dtypes=(torch.float16,), mamba_cache_mode="align"
    )
    assert digest(state=blocks) == digest()
