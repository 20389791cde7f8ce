"""Pipeline stages: what each process knows of an engine, and the layout that they make together."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from simple_layouts import attention, hybrid
from vllm.v1.core.kv_cache_utils import _project_kv_cache_groups_to_worker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from kvmanager.layout import KVGroup, KVKind, KVLayout, LayoutError
from kvmanager.vllm_connector import engine_layout, stages
from kvmanager.vllm_connector.engine_layout import layout_of, stage_of
from kvmanager.vllm_connector.stages import (
    LayoutHandshake,
    Stage,
    exchanged,
    joined,
    layout_from,
)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128
)
NUM_LAYERS = 12
GLOBAL = {f"model.layers.{n}.attn": FULL if n % 4 == 0 else WINDOW for n in range(NUM_LAYERS)}
"""A hybrid model: every fourth layer has full attention."""


def groups_of(layers: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """As vLLM forms them over the whole model: groups of equal size, layers in turn."""
    full = [name for name, spec in layers.items() if isinstance(spec, FullAttentionSpec)]
    window = [name for name in layers if name not in full]
    return [
        KVCacheGroupSpec(full, FULL),
        *(KVCacheGroupSpec(window[n::3], WINDOW) for n in range(3)),
    ]


def engine(**parallel: int) -> Any:
    settings = {
        "tensor_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_dbo": False,
        "ubatch_size": 0,
    }
    hf_config = SimpleNamespace(to_dict=lambda: {"num_hidden_layers": NUM_LAYERS})
    model = {
        "served_model_name": "m",
        "dtype": torch.bfloat16,
        "hf_config": hf_config,
        "hf_text_config": hf_config,
        "disable_sliding_window": False,
        "max_model_len": 4096,
        "multimodal_config": None,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(settings | parallel)),
        speculative_config=None,
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[]),
    )


@pytest.fixture(autouse=True)
def _weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_layout, "weights_identity", lambda config: "files:0")


def stages_of(*counts: int) -> list[Stage]:
    """The stages of an engine that divides the layers so, by vLLM's own projection of groups."""
    names, found, at = list(GLOBAL), [], 0
    for count in counts:
        own = {name: GLOBAL[name] for name in names[at : at + count]}
        at += count
        groups = _project_kv_cache_groups_to_worker(groups_of(GLOBAL), own)
        config: Any = SimpleNamespace(transfer_groups=groups, kv_cache_layout=None)
        found.append(stage_of(engine(), config))
    return found


@pytest.mark.parametrize(
    "counts",
    [
        (6, 6),
        (4, 4, 4),
        (1, 11),  # the first stage has a full layer and no window
        (1, 2, 3, 6),  # the second one has windows alone, and not in every group
        (1,) * NUM_LAYERS,
    ],
)
def test_stages_together_have_the_layout_of_one_engine(counts: tuple[int, ...]) -> None:
    parts = stages_of(*counts)
    assert [len(stage.layer_names) for stage in parts] == list(counts)
    cut, whole = layout_of(engine(), parts), layout_of(engine(), stages_of(NUM_LAYERS))
    assert cut == whole
    assert cut.fingerprint() == whole.fingerprint()
    assert [layer.name for _, layer in cut.layers] == list(GLOBAL)


def test_groups_in_another_order_of_layers_have_the_same_fingerprint() -> None:
    stage = joined(stages_of(6, 6))
    turned = msgspec.structs.replace(
        stage,
        groups=tuple(
            msgspec.structs.replace(group, layers=group.layers[::-1]) for group in stage.groups
        ),
        readings=dict(reversed(stage.readings.items())),
    )
    assert layout_of(engine(), [turned]).fingerprint() == layout_of(engine(), [stage]).fingerprint()


def test_a_stage_travels_between_workers_as_it_is() -> None:
    for stage in stages_of(1, 2, 9):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(stage), type=Stage) == stage


def gather(monkeypatch: pytest.MonkeyPatch, others: list[tuple[Stage, str]]) -> None:
    """The group of this worker and of `others`, which follow it; each with its host."""

    def all_gather_object(found: list[Any], own: tuple[str, bytes], group: object) -> None:
        assert group == "gloo"
        assert len(found) == 1 + len(others)
        told = [(host or own[0], msgspec.msgpack.encode(stage)) for stage, host in others]
        found[:] = [own, *told]

    pipeline = SimpleNamespace(world_size=1 + len(others), cpu_group="gloo")
    monkeypatch.setattr(stages, "get_pp_group", lambda: pipeline)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)


def test_every_worker_has_all_stages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = stages_of(4, 4, 4)
    gather(monkeypatch, [(stage, "") for stage in parts[1:]])
    assert exchanged(parts[0]) == parts


def test_stages_on_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = stages_of(6, 6)
    gather(monkeypatch, [(second, "another boot")])
    with pytest.raises(LayoutError, match="stages run on 2 hosts: put all of an engine on"):
        exchanged(first)


def test_an_engine_of_one_stage_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    (stage,) = stages_of(NUM_LAYERS)
    assert exchanged(stage) == [stage]


def test_a_stage_without_kvcache_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"stage 1 of 3 has no layer with KVCache: use fewer"):
        joined(stages_of(6, 0, 6))


def test_stages_of_other_engines_are_refused() -> None:
    first, second = stages_of(6, 6)
    other = msgspec.structs.replace(second.groups[1], window_tokens=64)
    groups = (second.groups[0], other, *second.groups[2:])
    with pytest.raises(LayoutError, match=r"stage 1 has groups .*window\(64\).*stage 0 has"):
        joined([first, msgspec.structs.replace(second, groups=groups)])
    with pytest.raises(LayoutError, match="stage 1 has groups"):
        joined([first, msgspec.structs.replace(second, groups=second.groups[:2])])
    with pytest.raises(LayoutError, match="is there 2 times"):
        layout_of(engine(), [first, first])


def test_context_parallelism_stays_refused() -> None:
    config: Any = SimpleNamespace(transfer_groups=groups_of(GLOBAL), kv_cache_layout=None)
    with pytest.raises(LayoutError, match="--decode-context-parallel-size 2 is not supported"):
        stage_of(engine(decode_context_parallel_size=2), config)


# ---- the scheduler's process


def told_by(layout: KVLayout, *workers: tuple[int, int]) -> dict[tuple[int, int], object]:
    return {worker: LayoutHandshake(layout.encode()) for worker in workers}


def test_the_scheduler_has_the_layout_of_its_workers() -> None:
    layout = hybrid(tp_size=2)
    workers = [(stage, rank) for stage in range(2) for rank in range(2)]
    assert layout_from(told_by(layout, *workers), 4) == layout


def test_a_missing_worker_or_another_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"1 of 2 workers told 1 KV layouts: .*\[\(0, 0\)\]"):
        layout_from(told_by(hybrid(), (0, 0)), 2)
    other = KVLayout(
        "m", "files:1", "digest", 1, (KVGroup(KVKind.FULL, 16, (attention("layers.0"),)),)
    )
    with pytest.raises(LayoutError, match="2 of 2 workers told 2 KV layouts"):
        layout_from(told_by(hybrid(), (0, 0)) | told_by(other, (1, 0)), 2)


def test_another_connectors_handshake_is_refused() -> None:
    @dataclasses.dataclass
    class Nixl:
        agent_metadata: bytes = b""

    with pytest.raises(LayoutError, match="without another connector in front of it"):
        layout_from({(0, 0): Nixl(), (1, 0): Nixl()}, 2)
