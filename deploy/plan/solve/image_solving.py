"""Which stages of prompts with images share instances: the search's result as plain values.

Goodputs come from a simulation of the PD cluster's instances (`scheduler.stages`). Keys have their
units; rates are requests/s of all kinds of requests together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from deploy.plan.solve.image_building import ImagePlanInput
from scheduler.encoding.travel import Travel, travels
from scheduler.planning.plan import Plan
from scheduler.stages.arrangement import DISAGGREGATED, Arrangement
from scheduler.stages.capacity import stage_work
from scheduler.stages.goodput import Goodput, Samples, search
from scheduler.stages.traffic import draw

_MOST_REQUESTS: Final = 800
_NUM_DRAWS: Final = 2
_TTFTS: Final = 3
"""A simulation lasts at least so many TTFT objectives."""
_LEAST_S: Final = 20.0


@dataclass(frozen=True)
class ImageSolution:
    """What was found, and the goal that it is judged by, if the file has a rate."""

    document: dict[str, Any]
    goals: dict[str, Any]


def solve_images(
    images: ImagePlanInput, plan: Plan, rate_rps: float | None, seed: int
) -> ImageSolution:
    """Search arrangements and divisions of the PD cluster. What the plan offloads to prefill
    clusters comes with its KVCache, and only decodes.
    """
    elsewhere = [
        part
        for index, route in enumerate(plan.routes)
        if route.link is not None
        for part in plan.lengths_of(index)
    ]
    model, traffic = images.model, images.traffic
    seconds = max(_LEAST_S, _TTFTS * model.slo.ttft_s)
    draws = tuple(draw(traffic, _MOST_REQUESTS, seed + at, elsewhere) for at in range(_NUM_DRAWS))
    work = stage_work(model, traffic, prefilled_share=plan.offload_fraction)
    found = search(
        model,
        images.num_instances,
        Samples(draws, seconds),
        work,
        arrangements=(*DISAGGREGATED, Arrangement.EPD),
    )
    best = max(found, key=lambda one: one.rate_rps)
    document = {
        "cluster": images.cluster,
        "instances": images.num_instances,
        "batching": model.batching.value,
        "slo": {"ttft_s": model.slo.ttft_s, "tpot_s": model.slo.tpot_s, "share": model.slo.share},
        "per_image": _per_image(images, plan),
        "offload_fraction": plan.offload_fraction,
        "arrangements": [_row(one) for one in found],
        "best": best.division.arrangement.value,
        "links": _links(images, plan),
    }
    return ImageSolution(document, _goals(best, rate_rps))


def _per_image(images: ImagePlanInput, plan: Plan) -> dict[str, float]:
    """One image in each of its shapes."""
    tokens, sizes = images.spec.tokens, images.model.sizes
    return {
        "tokens": tokens,
        "pixel_bytes": images.spec.pixel_bytes,
        "embedding_bytes": sizes.embedding_bytes(tokens),
        "kv_bytes": sizes.kv.token_part_bytes(tokens),
        "encode_s": images.model.profile.encode.seconds(tokens),
    }


def _row(found: Goodput) -> dict[str, Any]:
    division = found.division
    return {
        "arrangement": division.arrangement.value,
        "division": dict(division.groups),
        "name": str(division),
        "goodput_rps": found.rate_rps,
        "bound_rps": found.bound_rps,
        "missed_above": found.binding.value,
        "used": found.used,
        "ttft_p90_s": found.quantile("ttft_s", 0.9),
        "tpot_p90_s": found.quantile("tpot_s", 0.9),
        "moved_share": max((one.moved_share for one in found.outcomes), default=0.0),
    }


def _links(images: ImagePlanInput, plan: Plan) -> list[dict[str, Any]]:
    """For each link, whether the pixels of an image travel or its embedding."""
    shape = _per_image(images, plan)
    rows = []
    for link in plan.region.links:
        choice: Travel = travels(
            pixel_bytes=shape["pixel_bytes"],
            embedding_bytes=shape["embedding_bytes"],
            bytes_per_s=link.bytes_per_s,
            encode_s=shape["encode_s"],
        )
        rows.append(
            {
                "link": link.name,
                "travels": choice.what,
                "reason": choice.reason,
                "pixels_s": choice.pixels_s,
                "embedding_s": choice.embedding_s,
            }
        )
    return rows


def _goals(best: Goodput, rate_rps: float | None) -> dict[str, Any]:
    if rate_rps is None:
        return {}
    met = best.rate_rps >= rate_rps
    advice = ""
    if not met and best.rate_rps:
        times = rate_rps / best.rate_rps
        advice = (
            f"{best.division} keeps the objectives up to {best.rate_rps:.3g} requests/s; above, "
            f"{best.binding.value} is missed first: give about {times:.2g} times the instances, or "
            "allow more time"
        )
    elif not met:
        advice = (
            "no arrangement keeps the objectives even at a low rate: allow more time, or give "
            "faster hardware"
        )
    goal = {"wanted_rps": rate_rps, "met": met, "goodput_rps": best.rate_rps, "advice": advice}
    return {"images": goal}
