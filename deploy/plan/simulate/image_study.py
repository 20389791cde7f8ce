"""The study of images: arrangements of the three stages, beside the HydraInfer paper.

Speeds and requests are modelled (`hydrainfer` says how), so that rates say little and their ratios
are what can be compared.
"""

from __future__ import annotations

from typing import Any, Final

from deploy.plan.simulate.hydrainfer import (
    DATASETS,
    LLAVA_15,
    LLAVA_NEXT,
    NUM_INSTANCES,
    VisionModel,
)
from deploy.plan.simulate.study import Goal, Study
from scheduler.stages.arrangement import DISAGGREGATED, Arrangement, Division, divisions
from scheduler.stages.batching import Batching
from scheduler.stages.capacity import bound_rps, stage_work
from scheduler.stages.goodput import Goodput, Samples, best_division, goodput, search
from scheduler.stages.traffic import draw

PAPER_RPS: Final = (9.5, 7.2, 5.1)
"""Its ablation (Figure 14): disaggregated with stage-level scheduling, the same without
disaggregation, neither."""
_ABLATED: Final = LLAVA_NEXT, "TextCaps"
_MOVED: Final = LLAVA_15, "TextCaps", Division(Arrangement.E_P_D, (1, 3, 4))
"""What Figure 13 shows."""
_MOST_REQUESTS: Final = 800
_SECONDS: Final = 20.0
_NUM_DRAWS: Final = 2


def images(seed: int, scale: float) -> Study:
    """Goodput of each arrangement of 8 instances on the paper's data sets, the ablation on
    TextCaps, and what migration costs.

    `together` is every stage on every instance, with stage-level scheduling. `chunked` is the same
    with an engine that decodes first and prefills in chunks (vLLM V1), and `plain` with one that
    encodes and prefills first, first come, first served (vLLM V0).
    """
    rows = [
        _row(model, dataset, seed, scale)
        for model in (LLAVA_15, LLAVA_NEXT)
        for dataset in DATASETS
    ]
    goals = [*_ablation(rows), *_gains(rows), *_migration(seed, scale)]
    return Study(rows, goals, {})


def _samples(model: VisionModel, dataset: str, seed: int, scale: float) -> Samples:
    num = max(60, round(_MOST_REQUESTS * scale))
    traffic = model.traffic(dataset)
    return Samples(
        tuple(draw(traffic, num, seed + at) for at in range(_NUM_DRAWS)), _SECONDS * scale
    )


def _row(model: VisionModel, dataset: str, seed: int, scale: float) -> dict[str, Any]:
    samples = _samples(model, dataset, seed, scale)
    staged = model.stage_model(dataset, Batching.STAGE_LEVEL)
    work = stage_work(staged, model.traffic(dataset))
    row: dict[str, Any] = {"model": model.name, "dataset": dataset}
    for found in search(staged, NUM_INSTANCES, samples, work):
        name = found.division.arrangement.value
        row |= {f"{name}_rps": found.rate_rps, f"{name}_instances": str(found.division)}
    rates = {one.value: row[f"{one.value}_rps"] for one in DISAGGREGATED}
    best = max(rates, key=lambda name: rates[name])
    together, chunked, plain = (
        _together(model, dataset, batching, samples).rate_rps
        for batching in (Batching.STAGE_LEVEL, Batching.ENGINE, Batching.PREFILL_FIRST)
    )
    return row | {
        "best": best,
        "together_rps": together,
        "chunked_rps": chunked,
        "plain_rps": plain,
        "best/chunked_": rates[best] / chunked if chunked else float("inf"),
        "best/plain_": rates[best] / plain if plain else float("inf"),
        "paper_up to": DATASETS[dataset].paper_gain,
    }


def _together(model: VisionModel, dataset: str, batching: Batching, samples: Samples) -> Goodput:
    """All stages on every instance."""
    staged = model.stage_model(dataset, batching)
    work = stage_work(staged, model.traffic(dataset))
    found = best_division(staged, divisions(Arrangement.EPD, NUM_INSTANCES), samples, work)
    assert found is not None
    return found


def _ablation(rows: list[dict[str, Any]]) -> list[Goal]:
    model, dataset = _ABLATED
    row = next(r for r in rows if (r["model"], r["dataset"]) == (model.name, dataset))
    steps = row[f"{row['best']}_rps"], row["together_rps"], row["plain_rps"]
    names = ("disaggregated", "stage-level scheduling alone", "neither")
    goals = []
    for at in (0, 1):
        ratio = steps[at] / steps[at + 1] if steps[at + 1] else float("inf")
        paper = PAPER_RPS[at] / PAPER_RPS[at + 1]
        title = f"ablation on {dataset}, {model.name}: {names[at]} over {names[at + 1]}"
        wanted = f"above 1; the paper has {paper:.2f}"
        goals.append(Goal(title, wanted, ratio, ratio > 1))
    return goals


def _gains(rows: list[dict[str, Any]]) -> list[Goal]:
    least = min(row["best/plain_"] for row in rows)
    goals = [
        Goal(
            "the best arrangement over the plain engine, the least one", "above 1", least, least > 1
        )
    ]
    # With hardly any decode there is nothing to keep apart: MME with LLaVA-NeXT, section 5.2.
    gains = {
        row["dataset"]: row[f"{row['best']}_rps"] / row["together_rps"]
        for row in rows
        if row["model"] == LLAVA_NEXT.name
    }
    other = min(gain for dataset, gain in gains.items() if dataset != "MME")
    title = f"{LLAVA_NEXT.name}: disaggregated over together on MME, which hardly decodes"
    wanted = f"the least; {other:.2f} on the next one"
    return [*goals, Goal(title, wanted, gains["MME"], gains["MME"] <= other)]


def _migration(seed: int, scale: float) -> list[Goal]:
    model, dataset, division = _MOVED
    staged = model.stage_model(dataset, Batching.STAGE_LEVEL)
    highest_rps = bound_rps(stage_work(staged, model.traffic(dataset)), division)
    found = goodput(staged, division, _samples(model, dataset, seed, scale), highest_rps)
    shares = [one.moved_share for one in found.outcomes]
    share = sum(shares) / len(shares) if shares else 1.0
    where = f"{division} at {found.rate_rps:.3g} requests/s"
    image_ms, kv_ms = (
        1000 * found.quantile(name, 0.95) for name in ("embedding_pull_s", "kv_pull_s")
    )
    return [
        Goal(f"{where}: migration's share of a request's time", "under 1%", share, share < 0.01),
        Goal(f"{where}: P95 of an image's migration, ms", "at most 2", image_ms, image_ms <= 2),
        Goal(f"{where}: P95 of a KVCache's migration, ms", "at most 8", kv_ms, kv_ms <= 8),
    ]
