"""Encoding images apart: which engines share embeddings, and whether the file's words fit together.

Pure. It sees one specification and nothing else. Whether a model has an encoder is in its files,
which vLLM reads: an engine that is to run one and finds none does not start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deploy.region.spec.region import (
    ClusterSpec,
    ModelSpec,
    NodeSpec,
    RegionInstance,
    RegionSpec,
    role_of,
)
from kvmanager.config_files.problems import KeyPath, Problem
from prfaas.engines.command import EncoderRole
from scheduler.reports import decodes

TEXT_ONLY: Final = "--language-model-only"
"""vLLM's option that leaves a model's encoder out."""


def encoder_role_of(
    region: RegionSpec, cluster: ClusterSpec, instance: RegionInstance
) -> EncoderRole | None:
    """How the instance's engine shares embeddings of media; None: not at all. KeyError for an
    unknown model.
    """
    if instance.encodes_only:
        return "ec_producer"
    model = region.model_of(instance)
    encoding = (item for item in cluster.instances if encodes_for_others(item))
    if is_text_only(model, instance) or not any(region.model_of(i) == model for i in encoding):
        return None
    return "ec_both"


def encodes_for_others(instance: RegionInstance) -> bool:
    """Whether the instance encodes media for others of its cluster, from the start."""
    return instance.role == "encode" or instance.encodes


def is_text_only(model: ModelSpec, instance: RegionInstance) -> bool:
    """Whether the instance is started without the model's encoder."""
    # vLLM reads an underscore in the name of an option as a hyphen.
    return TEXT_ONLY in (arg.replace("_", "-") for arg in (*model.args, *instance.args))


def check_encoding(region: RegionSpec) -> Iterator[Problem]:
    """All problems with the roles of instances that encode."""
    models = {model.name for model in region.models}
    all_known = all(item.model is None or item.model in models for item in _instances(region))
    for c, cluster in enumerate(region.clusters):
        for n, node in enumerate(cluster.nodes):
            at: KeyPath = ("clusters", c, "nodes", n)
            for i, instance in enumerate(node.instances):
                here = (*at, "instances", i)
                yield from _check_flags(here, cluster, instance)
                if all_known:  # Else another check names the model.
                    yield from _check_encoder(region, here, cluster, instance)
            if all_known:
                yield from _check_room(region, at, cluster, node)


def _instances(region: RegionSpec) -> Iterator[RegionInstance]:
    return (item for node in region.nodes for item in node.instances)


def _check_flags(at: KeyPath, cluster: ClusterSpec, instance: RegionInstance) -> Iterator[Problem]:
    role = role_of(instance, cluster)
    if instance.whole_model and role != "encode":
        message = f"an instance with the role {role} has the whole model anyway; leave it out"
        yield Problem((*at, "whole_model"), message)
    elif instance.whole_model and cluster.kind == "prefill":
        message = "roles in a prefill cluster stay as they are; leave it out"
        yield Problem((*at, "whole_model"), message)
    if not instance.encodes:
        return
    if cluster.kind == "prefill":
        message = "instances of a prefill cluster encode what they prefill; leave it out"
        yield Problem((*at, "encodes"), message)
    elif not decodes(role):
        message = f"an instance with the role {role} encodes anyway; leave it out"
        yield Problem((*at, "encodes"), message)


def _check_encoder(
    region: RegionSpec, at: KeyPath, cluster: ClusterSpec, instance: RegionInstance
) -> Iterator[Problem]:
    if not encodes_for_others(instance):
        return
    model = region.model_of(instance)
    if is_text_only(model, instance):
        message = f"{TEXT_ONLY} leaves the encoder out, and {instance.name} is to encode"
        yield Problem((*at, "args"), f"{message}; remove one of the two")
    others = (
        item
        for item in cluster.instances
        if not item.encodes_only and region.model_of(item) == model
    )
    if instance.encodes_only and not any(others):
        message = f"no other instance of {cluster.name} serves {model.name}; nobody takes what"
        yield Problem((*at, "role"), f"{message} {instance.name} encodes. Add one, or remove it")
    if instance.encodes_only and region.pipeline_parallel_size_of(instance) > 1:
        message = "an encoder has no stages; write pipeline_parallel_size: 1 here"
        yield Problem((*at, "pipeline_parallel_size"), message)


def _check_room(
    region: RegionSpec, at: KeyPath, cluster: ClusterSpec, node: NodeSpec
) -> Iterator[Problem]:
    if node.agent.embedding_gib != 0:
        return
    share = [item.name for item in node.instances if encoder_role_of(region, cluster, item)]
    if share:
        message = f"0 keeps no embeddings, and {', '.join(share)} would share them; leave it out"
        yield Problem((*at, "agent", "embedding_gib"), message)
