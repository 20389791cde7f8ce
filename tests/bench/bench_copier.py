"""The copier of a GPU: rates over PCIe, what it takes from the GPU, and its Python time.

Run: python tests/bench/bench_copier.py [--json FILE] [--smoke] [--rounds N] [--staging-mib N]. It
needs torch, NumPy, msgspec and blake3, and no vLLM. With a GPU it measures:

- pages of a layer at a time, out of the engine's memory and back, against one large copy of pinned
  memory: `staged` ends in staging memory of the host, `arena` in memory that is not pinned;
- how much longer bf16 matrix products take while the pages of each layer are stored;
- what the engine's thread spends on a layer and step with pages of 16 requests.

Without a GPU it measures the last on a stand-in for CUDA, which leaves out the time of CUDA's own
calls, and the rate at which one core writes staged pages into the arena.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smoke import add_smoke

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

from kvmanager.layout import KVGroup, KVKind, KVLayer, KVLayout, KVPart
from kvmanager.vllm_connector.cuda_pages import DEFAULT_STAGING_MIB, CudaPageCopier
from kvmanager.vllm_connector.sends import GroupSends, Outgoing, StepSends, Units, units_sent
from kvmanager.vllm_connector.slabs import PartView, Piece, Slab, copy_slab

PAGE_TOKENS = 16
HEAD_BYTES = 2 * 128 * 2
"""Of one KV head and token: a key and a value of 128 bf16 each."""
NUM_REQUESTS = 16
NUM_LAYERS = 16
"""Of the group: the full-attention layers of a hybrid of about 64 layers."""
MATRIX = 8192
MATRICES_PER_LAYER = 8
"""About the work of a layer of a model of 70 billion parameters on 8,192 tokens."""
GOAL_RATE, GOAL_SLOWDOWN, GOAL_US = 0.9, 0.03, 50.0


class Memory:
    """The bytes of a transfer: ordinary memory in one run, as a young arena gives."""

    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(np.zeros(nbytes, np.uint8).data).cast("B")

    def views(self, offset: int, length: int) -> list[memoryview]:
        return [self._memory[offset : offset + length]]


@dataclass(frozen=True)
class Ref:
    num_tokens: int
    cached_tokens: int = 0
    window_step: int = 0


@dataclass(frozen=True)
class Step:
    """What `StepSends` plans: a request whose whole prompt one step computes."""

    ref: Ref
    blocks: tuple[list[int], ...]
    computed_tokens: int
    is_last: bool = True


@dataclass
class Engine:
    """Layers of one full-attention group on one rank, and requests that one step computes."""

    device: torch.device
    num_heads: int
    num_requests: int
    tokens_per_request: int
    head_bytes: int = HEAD_BYTES
    is_in_order: bool = False
    layout: KVLayout = field(init=False)
    views: dict[str, tuple[PartView, ...]] = field(init=False)
    units: Units = field(init=False)
    steps: list[tuple[Any, Outgoing]] = field(init=False)

    def __post_init__(self) -> None:
        part = KVPart("kv", self.num_heads, self.head_bytes, "bfloat16")
        layers = tuple(KVLayer(f"layer.{number}", (part,)) for number in range(NUM_LAYERS))
        group = KVGroup(KVKind.FULL, PAGE_TOKENS, layers)
        self.layout = KVLayout("m", "files:0", "digest", 1, (group,))
        pages = self.num_requests * self.tokens_per_request // PAGE_TOKENS
        shape = (pages + 1, self.num_heads, PAGE_TOKENS, self.head_bytes // 2)
        units = range(self.num_heads)
        self.views = {
            layer.name: (PartView(part, units, units, (Piece(self._random(shape)),)),)
            for layer in layers
        }
        self.units = units_sent(self.views)
        order = list(range(1, pages + 1))
        if not self.is_in_order:
            np.random.default_rng(7).shuffle(order)
        self.steps = []
        for number in range(self.num_requests):
            blocks = order[number :: self.num_requests]
            step = Step(Ref(self.tokens_per_request), (blocks,), self.tokens_per_request)
            space: Any = Memory(self.layout.transfer_bytes(self.tokens_per_request))
            extents = {
                extent.layer.name: extent for extent in self.layout.extents(self.tokens_per_request)
            }
            self.steps.append((step, Outgoing(space, extents)))

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=self.device)
        return bits.view(torch.bfloat16)

    @property
    def layer_bytes(self) -> int:
        return self.num_requests * self.tokens_per_request * self.num_heads * self.head_bytes

    def plan(self) -> StepSends:
        for _, outgoing in self.steps:
            outgoing.num_planned_pages.clear()
        return StepSends(self.layout, self.units, self.steps)

    def slabs(self, sends: GroupSends, layer: str) -> Iterator[Slab]:
        for copy in sends.copies(self.layout, layer, self.units, lambda *ended: None):
            yield from copy.slabs

    def store(self, copier: CudaPageCopier, plan: StepSends, layer: str, errors: list[Any]) -> None:
        """Store a layer as the connector's worker does. `errors` gets what every copy ends with."""
        sends = plan.take(layer)
        assert sends is not None
        copier.store(
            self.units[layer],
            sends.blocks,
            lambda: sends.copies(
                self.layout, layer, self.units, lambda send, ranges, error: errors.append(error)
            ),
        )

    def check(self, layer: str) -> None:
        """Raise RuntimeError unless the stored bytes of a layer are those of its pages."""
        (view,) = self.views[layer]
        for step, outgoing in self.steps:
            memory = view.pieces[0].memory[step.blocks[0]].cpu()
            expected = memory.transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes()
            (part,) = outgoing.extents[layer].parts
            (found,) = outgoing.space.views(part.offset, part.nbytes)
            if bytes(found) != expected:
                raise RuntimeError(f"other bytes than those of {layer} were stored")


def timed(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def python_time(engine: Engine, copier: CudaPageCopier, rounds: int) -> dict[str, float]:
    """Microseconds for each layer and step: of the engine's thread, of the plan of a step by
    layer, and of the thread that ends copies.
    """
    stores, plans, others = [], [], []
    for _ in range(rounds + 1):
        errors: list[Any] = []
        begin_s = time.thread_time()
        plan = engine.plan()
        planned_s = time.thread_time() - begin_s
        all_s, mine_s, each = time.process_time(), time.thread_time(), []
        for layer in engine.views:
            begin_s = time.thread_time()
            engine.store(copier, plan, layer, errors)
            each.append(time.thread_time() - begin_s)
            copier.drain()
        others.append(
            (time.process_time() - all_s - (time.thread_time() - mine_s)) / len(engine.views)
        )
        stores.append(statistics.mean(each))
        plans.append(planned_s / len(engine.views))
        if any(errors) or len(errors) != engine.num_requests * len(engine.views):
            raise RuntimeError(f"copies failed: {errors}")
    spent = {"store_us": stores, "plan_us": plans, "end_us": others}
    # The first round makes what is kept for later ones.
    medians = {name: statistics.median(found[1:]) * 1e6 for name, found in spent.items()}
    return {**medians, "best_store_us": min(stores[1:]) * 1e6}


def host_rate(num_heads: int, num_tokens: int, rounds: int) -> dict[str, float]:
    """Bytes/s at which one core writes staged pages into an arena, and of one plain copy."""
    engine = Engine(torch.device("cpu"), num_heads, 1, num_tokens, is_in_order=True)
    written = []
    for _ in range(rounds + 1):
        plan = engine.plan()
        for layer in engine.views:
            sends = plan.take(layer)
            assert sends is not None
            slabs = list(engine.slabs(sends, layer))
            begin_s = time.thread_time()
            for slab in slabs:
                copy_slab(slab, into_space=True)
            written.append(engine.layer_bytes / (time.thread_time() - begin_s))
    engine.check("layer.0")
    source = np.ones(engine.layer_bytes, np.uint8)
    target, plain = np.zeros_like(source), []
    for _ in range(rounds):
        begin_s = time.thread_time()
        np.copyto(target, source)
        plain.append(engine.layer_bytes / (time.thread_time() - begin_s))
    return {
        "num_heads": num_heads,
        "bytes_per_s": statistics.median(written[len(engine.views) :]),
        "memcpy_bytes_per_s": statistics.median(plain),
    }


# ---- with a GPU


def pcie_rates(engine: Engine, copier: CudaPageCopier, rounds: int) -> dict[str, float]:
    """Bytes/s out of the GPU and back. `pinned`: one copy of as many bytes as all layers have."""
    nbytes = engine.layer_bytes * len(engine.views)
    host = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    device = torch.empty(nbytes, dtype=torch.uint8, device=engine.device)

    def staged() -> None:
        plan = engine.plan()
        for layer in engine.views:
            sends = plan.take(layer)
            assert sends is not None
            copier.store(engine.units[layer], sends.blocks, list)
        copier.drain()

    def stored() -> None:
        plan, errors = engine.plan(), list[Any]()
        for layer in engine.views:
            engine.store(copier, plan, layer, errors)
        copier.drain()
        if any(errors):
            raise RuntimeError(f"copies failed: {errors}")

    def loaded() -> None:
        plan = engine.plan()
        found = [(layer, plan.take(layer)) for layer in engine.views]
        copier.load(
            slab
            for layer, sends in found
            if sends is not None
            for slab in engine.slabs(sends, layer)
        )

    def copied(into: torch.Tensor, out_of: torch.Tensor) -> None:
        into.copy_(out_of, non_blocking=True)
        torch.cuda.synchronize()

    calls: dict[str, Callable[[], object]] = {
        "pinned_out": lambda: copied(host, device),
        "staged_out": staged,
        "arena_out": stored,
        "pinned_in": lambda: copied(device, host),
        "arena_in": loaded,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            found[name].append(nbytes / timed(call))
    for layer in engine.views:
        engine.check(layer)
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}


def slowdown(engine: Engine, copier: CudaPageCopier, rounds: int) -> dict[str, float]:
    """By how much matrix products take longer while every layer is stored."""
    one, other, out = (
        torch.randn(MATRIX, MATRIX, device=engine.device).bfloat16() for _ in range(3)
    )

    def layers(*, stores: bool) -> float:
        plan, errors = engine.plan(), list[Any]()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for layer in engine.views:
            for _ in range(MATRICES_PER_LAYER):
                torch.matmul(one, other, out=out)
            if stores:
                engine.store(copier, plan, layer, errors)
        end.record()
        torch.cuda.synchronize()
        copier.drain()
        return float(begin.elapsed_time(end)) / 1000

    alone, beside = [], []
    for _ in range(rounds + 1):
        alone.append(layers(stores=False))
        beside.append(layers(stores=True))
    alone_s, beside_s = (statistics.median(found[1:]) for found in (alone, beside))
    rate = engine.layer_bytes * len(engine.views) / beside_s
    return {"alone_s": alone_s, "beside_s": beside_s, "stored_bytes_per_s": rate}


def with_gpu(rounds: int, staging_mib: int) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    waits: list[float] = []
    copier = CudaPageCopier(device, staging_mib << 20, waits.append)
    kept: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "rates": []}
    for num_heads in (1, 8):
        engine = Engine(device, num_heads, 4, 8192)
        rates = pcie_rates(engine, copier, rounds)
        kept["rates"].append({"num_heads": num_heads, **rates})
        print(
            f"{num_heads} heads, 4 x 8192 tokens: "
            + ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
        )
        for name, limit in (("staged_out", "pinned_out"), ("arena_in", "pinned_in")):
            share = rates[name] / rates[limit]
            print(f"  {name} is {share:.2f} of {limit}; goal {GOAL_RATE}")
        print("  one core's copy in host memory limits arena_out and arena_in (see below)")
    kept["slowdown"] = found = slowdown(Engine(device, 8, 1, 8192), copier, rounds)
    print(
        f"matrix products take {found['beside_s'] / found['alone_s'] - 1:.1%} longer beside stores "
        f"of {found['stored_bytes_per_s'] / 1e9:.1f} GB/s; goal {GOAL_SLOWDOWN:.0%}"
    )
    kept["python"] = python_time(Engine(device, 1, NUM_REQUESTS, 512), copier, 10 * rounds)
    kept["staging_waits_s"] = waits
    copier.close()
    return kept


# ---- without one


def without_gpu(rounds: int, staging_mib: int) -> dict[str, Any]:
    import pytest
    from fake_cuda import install

    print("no GPU: rates over PCIe and the slowdown of matrix products are not measured")
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        install(patch).is_immediate = True
        copier = CudaPageCopier(device, staging_mib << 20, lambda waited_s: None)
        # Few bytes: on the stand-in the engine's thread copies them.
        engine = Engine(device, 1, NUM_REQUESTS, PAGE_TOKENS, head_bytes=16)
        found = python_time(engine, copier, 10 * rounds)
        copier.close()
    return {"device": "stand-in", "python": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8192, help="of host copies")
    parser.add_argument("--staging-mib", type=int, default=DEFAULT_STAGING_MIB)
    add_smoke(parser, rounds=1, tokens=512, staging_mib=8)
    arguments = parser.parse_args()
    measure = with_gpu if torch.cuda.is_available() else without_gpu
    kept = measure(arguments.rounds, arguments.staging_mib)
    spent = kept["python"]
    print(
        f"Python time for a layer and step of {NUM_REQUESTS} requests ({kept['device']}): "
        f"{spent['store_us'] + spent['plan_us']:.0f} us of the engine's thread, goal {GOAL_US:.0f} "
        f"({spent['plan_us']:.0f} of them the step's plan; {spent['best_store_us']:.0f} in the "
        f"quickest step); {spent['end_us']:.0f} us of the thread that ends copies"
    )
    kept["host"] = [host_rate(heads, arguments.tokens, arguments.rounds) for heads in (1, 8)]
    for rate in kept["host"]:
        written, plain = rate["bytes_per_s"] / 1e9, rate["memcpy_bytes_per_s"] / 1e9
        print(
            f"one core writes {written:.1f} GB/s of staged pages with {rate['num_heads']} heads "
            f"into the arena; memcpy {plain:.1f}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
