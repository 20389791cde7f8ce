"""Which ways of speculation are served, and what tells a drafter's layers and weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmanager.layout import LayoutError
from kvmanager.vllm_connector.drafters import draft_digest, is_draft_layer, refuse_drafter


def engine(
    method: str | None = "mtp",
    *,
    num_guesses: int = 1,
    num_modules: int = 1,
    reads_target: bool = False,
    draft_model: str = "model",
    draft_config: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    num_stages: int = 1,
) -> Any:
    config = draft_config or {"architectures": ["Drafter"]}
    draft = SimpleNamespace(
        model=draft_model,
        revision=None,
        seed=0,
        model_weights="",
        hf_config=SimpleNamespace(to_dict=lambda: config),
    )
    speculative = SimpleNamespace(
        method=method,
        num_speculative_tokens=num_guesses,
        use_multi_module_mtp=lambda: method == "mtp" and min(num_modules, num_guesses) > 1,
        use_gemma4_mtp=lambda: reads_target,
        draft_model_config=draft,
    )
    return SimpleNamespace(
        speculative_config=None if method is None else speculative,
        model_config=SimpleNamespace(
            model="model",
            revision=None,
            seed=0,
            model_weights="",
            hf_text_config=SimpleNamespace(num_hidden_layers=3),
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        load_config=SimpleNamespace(load_format="safetensors", download_dir=None),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"weights": "mine", **(extra or {})}
        ),
    )


@pytest.mark.parametrize("method", [None, "mtp", "eagle", "eagle3", "ngram", "ngram_gpu", "suffix"])
def test_drafters_of_one_module_and_those_without_kvcache_are_served(method: str | None) -> None:
    refuse_drafter(engine(method, num_guesses=3))


@pytest.mark.parametrize("method", ["medusa", "draft_model", "dflash", "custom_class"])
def test_other_ways_are_refused_by_name(method: str) -> None:
    with pytest.raises(LayoutError, match=f"method {method} is not supported: use one of mtp,"):
        refuse_drafter(engine(method))


def test_a_drafter_behind_pipeline_stages_is_refused() -> None:
    refuse_drafter(engine("ngram", num_stages=2))
    with pytest.raises(LayoutError, match="with --pipeline-parallel-size"):
        refuse_drafter(engine("mtp", num_stages=2))


def test_several_modules_are_refused_unless_only_one_is_used() -> None:
    refuse_drafter(engine("mtp", num_modules=2))
    with pytest.raises(LayoutError, match="set num_speculative_tokens to 1"):
        refuse_drafter(engine("mtp", num_modules=2, num_guesses=2))


@pytest.mark.parametrize(
    ("name", "is_drafts"),
    [
        ("model.layers.2.self_attn.attn", False),
        ("language_model.model.layers.0.linear_attn", False),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.mtp_layers.0.self_attn.attn", True),
        ("model.layers.3.mtp_block.self_attn.attn", True),
        ("model.layers.3.self_attn.attn", True),
    ],
)
def test_a_drafters_layers_are_known_by_their_names(name: str, is_drafts: bool) -> None:
    assert is_draft_layer(name, engine()) is is_drafts
    for other in (engine(None), engine("ngram"), engine("mtp", reads_target=True)):
        assert not is_draft_layer(name, other)


def test_the_number_of_guesses_changes_no_digest_and_the_drafter_does() -> None:
    assert draft_digest(engine(num_guesses=1)) == draft_digest(engine(num_guesses=4)) != ""
    assert draft_digest(engine("eagle")) != draft_digest(engine())
    assert draft_digest(engine(draft_config={"rope": 1})) != draft_digest(engine())
    assert draft_digest(engine(draft_config={"_name_or_path": "/x"})) == draft_digest(
        engine(draft_config={"_name_or_path": "/y"})
    )
    for without in (engine(None), engine("ngram"), engine("mtp", reads_target=True)):
        assert draft_digest(without) == ""


def test_a_drafters_own_weights_are_identified(tmp_path: Path) -> None:
    digests = []
    for content in (b"one", b"two", b"one"):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        (folder / "drafter.bin").write_bytes(content)
        digests.append(draft_digest(engine("eagle", draft_model=str(folder))))
    assert digests[0] == digests[2] != digests[1]


def test_a_drafters_weights_may_be_declared_apart_from_the_models() -> None:
    declared = engine("eagle", draft_model="far/away", extra={"draft_weights": "v1"})
    other = engine("eagle", draft_model="elsewhere", extra={"draft_weights": "v1"})
    assert draft_digest(declared) == draft_digest(other)
