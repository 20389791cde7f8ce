"""The tiny models: what is written, that it is the same every time, and what replaces what."""

import json
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.lab.demo import tiny_models
from deploy.lab.demo.byte_tokenizer import EOS_ID, PRINTABLE_IDS, VOCAB_SIZE, tokenizer_files
from deploy.lab.demo.tiny_models import build_model, draw, is_up_to_date
from deploy.lab.demo.tiny_specs import MODELS, Parameter, TinyModel

TINY = ["qwen3-next-tiny", "mimo-v2-tiny"]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), len(data) - 8 - length


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_is_complete_and_loadable_by_its_header(name: str, tmp_path: Path) -> None:
    path = build_model(MODELS[name], tmp_path)
    header, num_data_bytes = read_header(path / "model.safetensors")
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    ends = sorted(value["data_offsets"] for value in tensors.values())
    assert ends[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(ends))
    assert ends[-1][1] == num_data_bytes
    config = json.loads((path / "config.json").read_text())
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    assert config["max_position_embeddings"] >= 8192


@pytest.mark.parametrize("name", sorted(MODELS))
def test_full_attention_is_neither_first_nor_last_and_layers_differ(name: str) -> None:
    types = MODELS[name].config["layer_types"]
    assert types.count("full_attention") >= 2
    assert types[-1] != "full_attention"
    assert len(set(types)) == 2


def test_kvcache_dominates_the_states_of_the_recurrent_model_at_2048_tokens() -> None:
    config = MODELS["qwen3-next-tiny"].config
    kv_bytes_per_token = 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    key_dim = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_dim = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    conv_bytes = (config["linear_conv_kernel_dim"] - 1) * (2 * key_dim + value_dim) * 2
    ssm_bytes = value_dim * config["linear_key_head_dim"] * 4
    state_bytes = config["layer_types"].count("linear_attention") * (conv_bytes + ssm_bytes)
    kv_bytes = 2048 * kv_bytes_per_token
    assert kv_bytes / (kv_bytes + state_bytes) >= 0.95


@pytest.mark.parametrize("name", TINY)
def test_two_builds_are_equal_byte_for_byte(name: str, tmp_path: Path) -> None:
    first = build_model(MODELS[name], tmp_path / "a")
    second = build_model(MODELS[name], tmp_path / "b")
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in names)


def test_an_up_to_date_model_is_left_alone_and_a_damaged_or_old_one_is_replaced(
    tmp_path: Path,
) -> None:
    spec = MODELS["qwen3-next-tiny"]
    path = build_model(spec, tmp_path)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert build_model(spec, tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp

    (path / "tokenizer.json").unlink()
    assert not is_up_to_date(spec, path)
    build_model(spec, tmp_path)
    assert is_up_to_date(spec, path)

    reseeded = replace(spec, seed=spec.seed + 1)
    assert reseeded.fingerprint() != spec.fingerprint()
    build_model(reseeded, tmp_path)
    assert is_up_to_date(reseeded, path)
    assert not is_up_to_date(spec, path)
    assert [entry.name for entry in tmp_path.iterdir()] == [spec.name]  # no scratch left


def test_a_failed_build_leaves_the_old_model_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = MODELS["mimo-v2-tiny"]
    build_model(spec, tmp_path)

    def fail(parameter: Parameter, seed: int) -> None:
        raise OSError(f"{parameter.name}: disk full")

    monkeypatch.setattr(tiny_models, "draw", fail)
    with pytest.raises(OSError, match="disk full"):
        build_model(replace(spec, seed=7), tmp_path)
    assert is_up_to_date(spec, tmp_path / spec.name)
    assert [entry.name for entry in tmp_path.iterdir()] == [spec.name]


def test_weights_depend_on_name_and_seed_only() -> None:
    parameter = Parameter("x.weight", (64, 64), std=0.5)
    values = draw(parameter, 1)
    assert np.array_equal(values, draw(parameter, 1))
    assert not np.array_equal(values, draw(parameter, 2))
    assert not np.array_equal(values, draw(replace(parameter, name="y.weight"), 1))
    assert values.std() == pytest.approx(0.5, rel=0.05)


def test_only_printable_rows_of_the_output_head_are_drawn() -> None:
    spec = MODELS["mimo-v2-tiny"]
    head = next(item for item in spec.parameters() if item.name == "lm_head.weight")
    drawn = np.flatnonzero(np.any(draw(head, spec.seed) != 0.0, axis=1))
    assert tuple(drawn) == PRINTABLE_IDS
    assert EOS_ID not in PRINTABLE_IDS


@pytest.mark.parametrize("spec", MODELS.values(), ids=lambda spec: spec.name)
def test_fingerprints_differ_and_cover_the_weight_rules(
    spec: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = spec.fingerprint()
    assert all(fingerprint != other.fingerprint() for other in MODELS.values() if other is not spec)
    monkeypatch.setattr("deploy.lab.demo.tiny_specs._OUTPUT_LOGIT_STD", 5.0)
    assert spec.fingerprint() != fingerprint


def test_bytes_are_tokens_and_chat_renders() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    jinja2 = pytest.importorskip("jinja2")
    files = tokenizer_files()
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    text = "Grüße, 世界\n\x00 <|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids[:-1] == list(text.removesuffix("<|im_end|>").encode())
    assert ids[-1] == EOS_ID
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    template = jinja2.Template(files["tokenizer_config.json"]["chat_template"])
    chat = [{"role": "user", "content": "Hello"}]
    rendered = template.render(messages=chat, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
