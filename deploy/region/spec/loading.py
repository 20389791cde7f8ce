"""Reads region.yaml: variables, unknown keys and wrong values, each error with its line and fix.

Paths in the file are relative to the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from deploy.lab.pace.times import profile_path
from deploy.region.spec.checks import check_region
from deploy.region.spec.pace import check_profiles
from deploy.region.spec.region import ClusterSpec, ModelSpec, RegionSpec
from kvmanager.config_files.problems import KeyPath, Problem
from kvmanager.config_files.yaml_files import parse_yaml, read_text
from prfaas.engines.command import DEFAULT_LORA_RANK, LoraRank

_RELATIVE: Final = "a relative path starts at the region file's directory"

EXPECTED = "a region file is a mapping with the keys models, clusters, links, security"


def load_region(path: Path, variables: Mapping[str, str]) -> RegionSpec:
    """The region that the file at `path` describes. `FileError` with every problem found."""
    return parse_region(read_text(path), variables, source=str(path), directory=path.parent)


def parse_region(
    text: str,
    variables: Mapping[str, str],
    *,
    source: str = "region",
    directory: Path = Path(),
) -> RegionSpec:
    """Like `load_region`, for a text. Relative paths start at `directory`."""
    region = parse_yaml(
        text,
        RegionSpec,
        source=source,
        expected=EXPECTED,
        variables=variables,
        check=check_region,
    )
    return _absolute(region, directory)


def _absolute(region: RegionSpec, directory: Path) -> RegionSpec:
    """The region with absolute paths. The path of a model or adapter is only changed if it is no
    name on a hub.
    """
    base = directory.resolve()

    def model_path(text: str) -> str:
        path = base / Path(text).expanduser()
        return str(path.resolve()) if text.startswith((".", "/", "~")) or path.is_dir() else text

    def full(path: Path) -> Path:
        return (base / path.expanduser()).resolve()

    def full_model(model: ModelSpec) -> ModelSpec:
        adapters = {name: model_path(path) for name, path in model.adapters.items()}
        changes: dict[str, Any] = {"path": model_path(model.path), "adapters": adapters}
        if model.pace is not None:
            profile = _full_profile(model.pace.profile, full)
            changes["pace"] = model.pace.model_copy(update={"profile": profile})
        return model.model_copy(update=changes)

    models = tuple(map(full_model, region.models))
    gateway, security = region.gateway, region.security
    if gateway.api_keys_file is not None:
        gateway = gateway.model_copy(update={"api_keys_file": full(gateway.api_keys_file)})
    if gateway.state is not None:
        gateway = gateway.model_copy(update={"state": full(gateway.state)})
    if gateway.recorder is not None:
        recorder = gateway.recorder.model_copy(update={"dir": full(gateway.recorder.dir)})
        gateway = gateway.model_copy(update={"recorder": recorder})
    for name in ("region_key", "engine_key", "granting_key", "granting_keys", "metrics_key"):
        if (path := getattr(security, name)) is not None:
            security = security.model_copy(update={name: full(path)})
    if security.tls is not None:
        files = {key: full(path) for key, path in security.tls}
        security = security.model_copy(update={"tls": security.tls.model_copy(update=files)})
    clusters = tuple(_with_full_paths(cluster, full) for cluster in region.clusters)
    changes = {"models": models, "gateway": gateway, "security": security, "clusters": clusters}
    return region.model_copy(update=changes)


def _full_profile(text: str, full: Callable[[Path], Path]) -> str:
    return text if profile_path(text) != Path(text) else str(full(Path(text)))


def _with_full_paths(cluster: ClusterSpec, full: Callable[[Path], Path]) -> ClusterSpec:
    nodes = []
    for node in cluster.nodes:
        instances = tuple(
            item
            if item.pace is None
            else item.model_copy(update={"pace": _full_profile(item.pace, full)})
            for item in node.instances
        )
        node = node.model_copy(update={"instances": instances})
        if node.agent.ssd_dir is not None:
            agent = node.agent.model_copy(update={"ssd_dir": full(node.agent.ssd_dir)})
            node = node.model_copy(update={"agent": agent})
        nodes.append(node)
    return cluster.model_copy(update={"nodes": tuple(nodes)})


def missing_packages(region: RegionSpec, nodes: Collection[str] | None = None) -> list[Problem]:
    """The packages that the engines here, or those of `nodes`, import and this Python lacks. The
    engines run on it.
    """
    return [
        Problem(
            ("clusters", index, "hand_off"),
            "nixl needs the Python package nixl here, where the engines run: pip install nixl",
        )
        for index, cluster in enumerate(region.clusters)
        if cluster.hand_off == "nixl"
        and (nodes is None or any(node.name in nodes for node in cluster.nodes))
        and find_spec("nixl") is None
    ]


def missing_models(region: RegionSpec, nodes: Collection[str] | None = None) -> list[Problem]:
    """The models and LoRA adapters whose path is a directory that this machine does not have,
    adapters that their model's engines would refuse, and profiles of paced instances that cannot be
    read. With `nodes`, those of these nodes.
    """
    served = {
        region.model_of(instance).name
        for node in region.nodes
        if nodes is None or node.name in nodes
        for instance in node.instances
    }
    found = list(check_profiles(region, nodes))
    for index, model in enumerate(region.models):
        if model.name not in served:
            continue
        at: KeyPath = ("models", index)
        if _is_missing(model.path):
            found.append(Problem((*at, "path"), f"there is no {model.path} here; {_RELATIVE}"))
        for name, path in model.adapters.items():
            if _is_missing(path):
                message = f"there is no {path} here; {_RELATIVE}"
            elif (rank := _adapter_rank(Path(path))) > (model.max_lora_rank or DEFAULT_LORA_RANK):
                fitting = [most for most in get_args(LoraRank) if most >= rank]
                cure = f"write max_lora_rank: {fitting[0]}" if fitting else "vLLM serves none"
                message = f"its rank is {rank}; {cure}"
            else:
                continue
            found.append(Problem((*at, "adapters", name), message))
    return found


class _AdapterConfig(msgspec.Struct):
    """The ranks in the file that PEFT writes beside an adapter."""

    r: int
    rank_pattern: dict[str, int] | None = None


def _is_missing(path: str) -> bool:
    return Path(path).is_absolute() and not Path(path).is_dir()


def _adapter_rank(folder: Path) -> int:
    """The largest rank of an adapter's layers, 0 where this machine does not have the adapter."""
    try:
        config = msgspec.json.decode(
            (folder / "adapter_config.json").read_bytes(), type=_AdapterConfig
        )
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0  # the engine reads it, or says what is wrong with it
    return max([config.r, *(config.rank_pattern or {}).values()])
