"""Images of a simulation file: what they need in the model, and what does not go with them.

It turns values into values; `building` reads the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deploy.plan.simulate.spec import SimulationFile, SimulationSpec
from deploy.plan.solve.image_building import ImagePlanInput
from kvmanager.config_files.problems import Problem
from scheduler.planning.region_model import Region
from scheduler.replay.model import EncodingModel


def encoding_of(spec: SimulationSpec, images: ImagePlanInput | None) -> EncodingModel | None:
    """How the clusters encode; None without images."""
    if images is None:
        return None
    return EncodingModel(
        lines=images.encoders,
        prefills=images.prefills,
        num_instances=spec.encode_instances,
        config=images.model.encoding,
    )


def planned_apart(region: Region, encoding: EncodingModel | None) -> Region:
    """The region whose plans count no encoding in prefills of clusters with encode instances."""
    if encoding is None:
        return region
    text = {name: encoding.prefills[name] for name in encoding.num_instances}
    return replace(
        region,
        prefill_clusters=tuple(
            replace(c, prefill=text.get(c.name, c.prefill)) for c in region.prefill_clusters
        ),
        pd_clusters=tuple(
            replace(c, prefill=text.get(c.name, c.prefill)) for c in region.pd_clusters
        ),
    )


def image_problems(spec: SimulationFile) -> Iterator[Problem]:
    """What does not fit together in a file with images or encode instances."""
    whole = spec.simulation
    if spec.images is None:
        if whole.encode_instances:
            message = (
                "needs images: nothing else is encoded; add a section `images`, or leave it out"
            )
            yield Problem(("simulation", "encode_instances"), message)
        return
    if spec.traffic.lengths.trace is not None:
        message = "does not go with a trace, which says nothing of images; give log_normal lengths"
        yield Problem(("images",), message)
    for name, policy in whole.policies.items():
        if policy.rebalance_every is not None:
            message = "does not go with images: a simulation gives no instance to the encode stage"
            yield Problem(("simulation", "policies", name, "rebalance_every"), message)
