"""What this package uses of vLLM, and the files that say what that was in each known version.

Knows files and sources; `check` says which differences between two versions matter.
"""

import ast
import importlib.util
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvmanager.vllm_connector.versions.sources import Name, Sources

PACKAGE = Path(__file__).parents[1]
OWN_ROOT = PACKAGE.parents[1]
FILES = Path(__file__).parent

READ_THROUGH = (
    "vllm.config.CacheConfig",
    "vllm.config.KVTransferConfig",
    "vllm.config.LoadConfig",
    "vllm.config.ModelConfig",
    "vllm.config.ParallelConfig",
    "vllm.lora.request.LoRARequest",
    "vllm.multimodal.inputs.MultiModalFeatureSpec",
    "vllm.multimodal.inputs.PlaceholderRange",
    "vllm.v1.core.sched.output.CachedRequestData",
    "vllm.v1.core.sched.output.KVConnectorBlockState",
    "vllm.v1.core.sched.output.NewRequestData",
    "vllm.v1.kv_cache_interface.KVCacheTensor",
)
"""Classes of objects that this package gets from vLLM, and whose names it does not import."""


class Interface(msgspec.Struct, frozen=True):
    """What this package uses of one version of vLLM, by the full names that it imports."""

    version: str
    names: dict[str, Name]

    @property
    def minor(self) -> tuple[int, int]:
        """The version's first two numbers."""
        return minor_of(self.version)


def minor_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) for one that has none, such as "dev"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def own_modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of this package with its syntax tree. The import contract in pyproject.toml
    keeps vLLM out of all other packages.
    """
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(OWN_ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(file.read_text(encoding="utf-8"))


def imported_names() -> tuple[str, ...]:
    """The full names that this package imports from vLLM, in functions and for types as well."""
    found: set[str] = set()
    for _, tree in own_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _is_vllm(node.module or ""):
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(sorted(found))


def used_names() -> tuple[str, ...]:
    """The full names of all that this package uses of vLLM."""
    return tuple(sorted({*imported_names(), *READ_THROUGH}))


def derived_classes() -> dict[str, tuple[str, ...]]:
    """For each class of this package that derives from vLLM's, by full name: those base classes."""
    own = Sources(OWN_ROOT)
    found = {}
    for module, tree in own_modules():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            name = own.name(f"{module}.{node.name}")
            bases = tuple(base for base in name.bases if _is_vllm(base)) if name else ()
            if bases:
                found[f"{module}.{node.name}"] = bases
    return found


def used_words() -> frozenset[str]:
    """Every word in this package's code that may be a member of an object of vLLM."""
    words: set[str] = set()
    for _, tree in own_modules():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=word) | ast.keyword(arg=str(word)):
                    words.add(word)
                # Names for getattr, and lists of such names.
                case ast.Constant(value=str(word)) if word.isidentifier():
                    words.add(word)
    return frozenset(words)


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def interface_of(sources: Sources) -> Interface:
    """What this package uses of the vLLM in `sources`. A name that is not there is left out."""
    bases = {base for found in derived_classes().values() for base in found}
    names = {}
    for full_name in used_names():
        name = sources.name(full_name, with_methods=full_name in bases)
        if name is not None:
            names[full_name] = name
    return Interface(sources.version(), names)


def known_interfaces() -> list[Interface]:
    """The versions of vLLM that this release was written for, the oldest first."""
    files = FILES.glob("vllm_*.json")
    found = [msgspec.json.decode(file.read_bytes(), type=Interface) for file in files]
    return sorted(found, key=lambda interface: interface.minor)


def file_of(interface: Interface) -> Path:
    """The file for interfaces of this minor version."""
    major, minor = interface.minor
    return FILES / f"vllm_{major}_{minor}.json"


def rendered(interface: Interface) -> str:
    """JSON with a line for each method."""
    text = json.dumps(msgspec.to_builtins(interface), indent=1)
    text = re.sub(r"\{[^][{}]*\}", lambda found: " ".join(found[0].split()), text)
    return re.sub(r"^ *\"\w+\": \[[^][{}]*\]", _wrapped, text, flags=re.MULTILINE) + "\n"


def _wrapped(found: re.Match[str]) -> str:
    line = " ".join(found[0].split())
    return textwrap.fill(
        line, 100, initial_indent=" " * 3, subsequent_indent=" " * 4, break_long_words=False
    )


def installed_root() -> Path:
    """The directory that has the installed package vllm. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vLLM is not installed here; name a wheel of it")
    return Path(spec.origin).parents[1]
