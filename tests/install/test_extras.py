"""What an extra installs is what its processes import, and the other way round."""

from __future__ import annotations

import ast
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from built_wheel import ROOT, Installed, run
from distribution_closure import closure, normal
from packaging.requirements import Requirement

from prfaas.own_packages import PACKAGES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Mapping[str, list[str]] = PROJECT["optional-dependencies"]
PROCESSES = {
    "": ("prfaas.cli", "local_pd.cli", "deploy.region.cli", "deploy.region.file_cli",
         "deploy.region.doctor.cli", "deploy.region.certs_cli", "deploy.ops.cache",
         "deploy.ops.explain", "deploy.ops.link", "deploy.ops.role", "deploy.ops.instance",
         "deploy.lab.emulator.cli", "deploy.lab.emulator.relay", "deploy.region.launch.arenas"),
    "gateway": ("deploy.gateway.cli", "kvmanager.directory.cli"),
    "agent": ("kvmanager.agent.cli",),
    "engine": ("kvmanager.vllm_connector.connector", "deploy.plan.kv.verify"),
    "plan": ("deploy.plan.cli", "deploy.plan.simulate.cli"),
    "redis": ("deploy.gateway.sharing.redis_region", "kvmanager.directory.redis_sink",
              "kvmanager.directory.redis_store"),
    "dns": ("prfaas.engines.discovery.dns",),
    "kubernetes": ("prfaas.engines.discovery.kubernetes",),
    "traces": ("kvmanager.tracing.export",),
}  # fmt: skip
"""The modules that begin what each extra is for; without one, for what `pip install prfaas` has."""
OPTIONAL = {
    "dns": "prfaas.engines.discovery.dns",
    "kubernetes": "prfaas.engines.discovery.kubernetes",
    "redis": "deploy.gateway.sharing.budgets deploy.gateway.sharing.redis_region"
    " deploy.gateway.sharing.region_sharing kvmanager.directory.redis_client"
    " kvmanager.directory.redis_sink kvmanager.directory.redis_store",
    "traces": "kvmanager.tracing.export",
}
"""Modules that others import inside a function, and that only their extra has to be able to."""
PART_OF = {
    "huggingface_hub": "vllm",
    "pydantic_core": "pydantic",
    "torch": "vllm",
    "transformers": "vllm",
    "urllib3": "kubernetes",
    "yarl": "aiohttp",
}
"""Modules that belong to the interface of a package which therefore brings them."""
SHARED = {
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry": "opentelemetry-sdk",
}
"""Distributions whose modules share a name at the top, the longest module first."""
DEFERRED = ("scipy", "matplotlib")
"""Imported inside functions that only the extras `gateway` and `plan` reach: solvers, pictures."""


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for found in (path / "__init__.py", path.with_suffix(".py")):
        if found.is_file():
            return found
    return None


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _statements(child)


@cache
def _imports(module: str) -> frozenset[str]:
    """Names that a module of ours imports, also inside functions; `a.b` for `from a import b`."""
    file = _file(module)
    assert file is not None
    found: set[str] = set()
    for node in _statements(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                found.update(name.name for name in names)
            case ast.ImportFrom(module=str(source), names=names):
                found.add(source)
                found.update(f"{source}.{name.name}" for name in names)
    return frozenset(found)


def _reached(extra: str) -> tuple[list[str], set[str]]:
    """Our modules that the processes of an extra import at any time, and modules of others."""
    optional = {
        name for other, names in OPTIONAL.items() if other != extra for name in names.split()
    }
    ours: set[str] = set()
    others: set[str] = set()
    todo = ["deploy.cli", *PROCESSES[extra]]
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if top not in PACKAGES:
            if top not in sys.stdlib_module_names:
                shared = (found for module, found in SHARED.items() if name.startswith(module))
                others.add(next(shared, PART_OF.get(top, top)))
            continue
        parent = name.rpartition(".")[0]
        todo += [parent] if parent and parent not in ours else []
        if name not in ours and name not in optional and _file(name) is not None:
            ours.add(name)
            todo += _imports(name)
    return sorted(ours), others


def _named(requirements: list[str]) -> set[str]:
    return {normal(Requirement(line).name) for line in requirements}


_distributions = cache(packages_distributions)


def _distribution(module: str) -> str:
    """The name by which pip knows a module of somebody else."""
    # vLLM is a build for CPUs here, of another name.
    if module == "vllm" or module in SHARED.values():
        return module
    return normal(_distributions()[module][0])


@pytest.mark.parametrize("extra", PROCESSES)
def test_an_extra_names_all_that_its_processes_import(extra: str) -> None:
    _, others = _reached(extra)
    lacking = {_distribution(name) for name in others} - _named(
        [*PROJECT["dependencies"], *EXTRAS.get(extra, [])]
    )
    if extra not in ("gateway", "plan"):
        lacking -= set(DEFERRED)
    assert lacking == set()


@pytest.mark.parametrize("extra", PROCESSES)
def test_an_extra_names_nothing_that_its_processes_do_not_import(extra: str) -> None:
    _, others = _reached(extra)
    imported = {_distribution(name) for name in others}
    if extra == "":
        for each in ("gateway", "agent", "engine", "plan"):
            imported |= {_distribution(name) for name in _reached(each)[1]}
    unused = _named(EXTRAS.get(extra, PROJECT["dependencies"])) - imported
    assert unused == set()


def test_every_extra_is_tested_or_an_alias() -> None:
    assert EXTRAS["gpu"] == ["prfaas[gateway,agent,engine]"]
    assert EXTRAS.keys() == {*PROCESSES, "gpu", "dev"} - {""}


_IMPORT = """
import importlib, json, sys
refused, modules = json.load(sys.stdin)
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
sys.meta_path.insert(0, Refused())
for module in modules:
    importlib.import_module(module)
"""


@pytest.mark.parametrize("extra", [name for name in PROCESSES if name != "engine"])
def test_with_an_extra_alone_all_modules_of_its_processes_can_be_imported(
    environment: Installed, extra: str
) -> None:
    """Every distribution that the extra does not bring is hidden. vLLM's own imports are not ours
    to judge: the engine's modules are compared by name above.
    """
    ours, _ = _reached(extra)
    brought = closure([*PROJECT["dependencies"], *EXTRAS.get(extra, [])])
    refused = [
        module
        for module, names in _distributions().items()
        if module not in PACKAGES and not any(normal(name) in brought for name in names)
    ]
    document = json.dumps([refused, ours])
    code = f"import io, sys; sys.stdin = io.StringIO({document!r})\n{_IMPORT}"
    done = run(environment.python, "-P", "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (("gateway", "--help"), "httptools", "gateway"),
        (("directory", "--help"), "uvloop", "gateway"),
        (("agent", "--help"), "zmq", "agent"),
        (("plan", "solve", "case.yaml", "--plot", "x.png"), "matplotlib", "plan"),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(
    environment: Installed, tmp_path: Path, command: tuple[str, ...], missing: str, extra: str
) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from prfaas.own_packages import main;"
    code += f"sys.argv = ['prfaas', *{command!r}]; main()"
    shutil.copy(ROOT / "deploy/plan/examples/case-study.yaml", tmp_path / "case.yaml")
    done = run("env", "-C", tmp_path, environment.python, "-P", "-c", code)
    assert done.returncode == 1
    assert done.stderr == (f"prfaas {command[0]} needs {missing}: pip install 'prfaas[{extra}]'\n")
