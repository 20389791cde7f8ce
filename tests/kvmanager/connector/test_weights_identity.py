"""The identity that an engine gives its weights and adapters."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from kvmanager.vllm_connector.weights import (
    Adapters,
    adapter_identity,
    adapter_settings,
    weights_identity,
)
from kvmanager.weights import WeightsError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config(model: Path | str, load_format: str = "auto", **changes: Any) -> Any:
    extra, lora_config = changes.pop("extra", {}), changes.pop("lora", None)
    return SimpleNamespace(
        lora_config=lora_config,
        model_config=SimpleNamespace(
            model=str(model), revision=None, seed=0, model_weights="", **changes
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
    )


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".").replace("_of_", "-of-")).write_bytes(content)
    return path


def test_a_place_is_not_part_of_it_and_other_bytes_are(tmp_path: Path) -> None:
    one = weights_identity(config(folder(tmp_path / "one", model__safetensors=b"a")))
    same = weights_identity(config(folder(tmp_path / "same", model__safetensors=b"a")))
    other = weights_identity(config(folder(tmp_path / "other", model__safetensors=b"b")))
    assert one.startswith("files:")
    assert one == same != other


def test_a_swap_under_one_path_is_another_identity(tmp_path: Path) -> None:
    place = config(folder(tmp_path, model__safetensors=b"a"))
    before = weights_identity(place)
    folder(tmp_path, model__safetensors=b"b")
    assert weights_identity(place) != before


def test_files_that_an_index_leaves_out_do_not_count(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"t": "model.safetensors"}}).encode()
    names = {"model__safetensors": b"a", "model__safetensors__index__json": index}
    plain = folder(tmp_path / "plain", **names)
    twice = folder(tmp_path / "twice", consolidated__safetensors=b"a", **names)
    assert weights_identity(config(plain)) == weights_identity(config(twice))


def test_pickled_weights_count_where_they_are_what_is_loaded(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", model__bin=b"a", training_args__bin=b"1")
    other = folder(tmp_path / "other", model__bin=b"a", training_args__bin=b"2")
    assert weights_identity(config(one)) == weights_identity(config(other))
    both = folder(tmp_path / "both", model__bin=b"a", model__safetensors=b"c")
    assert weights_identity(config(both, "npcache")) == weights_identity(config(one, "npcache"))
    assert weights_identity(config(both)) != weights_identity(config(one))


def test_a_snapshot_of_the_hub_is_its_commit(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    snapshot = folder(tmp_path / "snapshots" / COMMIT, model__safetensors=b"a")
    link = tmp_path / "latest"
    link.symlink_to(snapshot)
    assert weights_identity(config(snapshot)) == f"hub:{COMMIT}"
    assert weights_identity(config(link)) == f"hub:{COMMIT}"


def test_dummy_weights_are_their_seed() -> None:
    first, second = config("any/name", "dummy"), config("any/name", "dummy")
    second.model_config.seed = 1
    assert weights_identity(first) == "dummy:0"
    assert weights_identity(second) == "dummy:1"


def test_weights_that_cannot_be_read_need_a_word_from_the_operator(tmp_path: Path) -> None:
    for unknown in (config("s3", "tensorizer"), config(tmp_path / "nowhere"), config("no/such")):
        with pytest.raises(WeightsError, match=r"kv_connector_extra_config\.weights"):
            weights_identity(unknown)
    told = config("s3", "tensorizer", extra={"weights": "llama-3.1-8b:v2"})
    assert weights_identity(told) == "declared:llama-3.1-8b:v2"
    with pytest.raises(WeightsError, match="up to 64"):
        weights_identity(config("s3", "tensorizer", extra={"weights": "a b"}))


def adapter(path: Path, content: bytes, **changes: Any) -> Path:
    settings = {"r": 8, "base_model_name_or_path": str(path), **changes}
    made = folder(path, adapter_model__safetensors=content)
    (made / "adapter_config.json").write_text(json.dumps(settings))
    return made


def test_an_adapter_is_its_content_and_rank(tmp_path: Path) -> None:
    one, same = adapter(tmp_path / "one", b"a"), adapter(tmp_path / "same", b"a")
    other, wider = adapter(tmp_path / "other", b"b"), adapter(tmp_path / "wider", b"a", r=16)
    identities = [adapter_identity(str(path)) for path in (one, same, other, wider)]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3


def test_an_adapter_of_the_hub_has_an_identity_only_while_the_hub_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--poet"
    made = adapter(cached / "snapshots" / COMMIT, b"a")
    folder(cached / "blobs")
    folder(cached / "refs", main=COMMIT.encode())
    for is_offline, told in ((True, {"a": f"hub:{COMMIT}"}), (False, {})):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        assert Adapters({"a": "org/poet"}).told == told
    assert "org/poet may change on the hub; give its directory, or HF_HUB_OFFLINE=1" in caplog.text
    assert adapter_identity(str(made)) == f"hub:{COMMIT}", "the content of a directory is fixed"


def lora(path: Path, number: int = 1, **changes: Any) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name="a", lora_path=str(path), **changes)


def test_an_adapter_that_cannot_be_told_is_not_shared(tmp_path: Path) -> None:
    adapters, made = Adapters(), adapter(tmp_path / "made", b"a")
    assert adapters.identity(None) == ""
    assert adapters.identity(lora(made)) == adapter_identity(str(made))
    assert adapters.identity(lora(tmp_path / "nowhere")) is None
    assert adapters.identity(lora(made, load_inplace=True)) is None


def test_an_adapter_of_the_start_is_what_the_engine_loaded_then(tmp_path: Path) -> None:
    made = adapter(tmp_path / "made", b"a")
    identity = adapter_identity(str(made))
    adapters = Adapters({"a": str(made), "gone": str(tmp_path / "gone")})
    assert adapters.told == {"a": identity}, "what cannot be identified is not told"
    adapter(made, b"other")
    assert adapter_identity(str(made)) != identity
    assert adapters.identity(lora(made)) == adapters.told["a"] == identity


def test_settings_that_change_an_adapter_are_part_of_its_identity(tmp_path: Path) -> None:
    def settings(lora_dtype: str = "torch.float16", **changes: Any) -> str:
        lora_config = {
            "target_modules": None,
            "lora_dtype": lora_dtype,
            "enable_moe_shared_loras": False,
        }
        return adapter_settings(
            config("m", dtype="torch.float16", lora=SimpleNamespace(**(lora_config | changes)))
        )

    assert settings() == settings("auto") == adapter_settings(config("m")) == ""
    found = {
        settings(target_modules=["q_proj"]),
        settings(target_modules=["q_proj", "o_proj"]),
        settings("torch.bfloat16"),
        settings(enable_moe_shared_loras=True),
    }
    assert len(found) == 4
    assert settings(target_modules=["o_proj", "q_proj"]) in found, "their order means nothing"
    paths = {"a": str(adapter(tmp_path / "a", b"a"))}
    assert len({Adapters(paths, told).told["a"] for told in ("", *found)}) == 5
