"""Reads region.yaml: variables, unknown keys and wrong values, each error with its line and fix.

Paths in the file are relative to the file. ``${NAME}`` and ``${NAME:-default}`` in a value are
replaced from the variables handed in.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deploy.region.checks import Path as KeyPath
from deploy.region.checks import Problem, check_region, suggestion
from deploy.region.spec import RegionSpec

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class RegionError(Exception):
    """A region file that cannot be used; `problems` says why, all at once."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n  ".join([f"{source}: {count}", *map(str, problems)]))
        self.source = source
        self.problems = problems


def load_region(path: Path, variables: Mapping[str, str]) -> RegionSpec:
    """The region described by the file at `path`; `RegionError` with every problem found."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RegionError(str(path), [Problem((), f"cannot be read: {error}")]) from error
    return parse_region(text, variables, source=str(path), directory=path.parent)


def parse_region(
    text: str,
    variables: Mapping[str, str],
    *,
    source: str = "region",
    directory: Path = Path(),
) -> RegionSpec:
    """Like `load_region` for text at hand; `directory` is what relative paths start from."""
    try:
        document = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RegionError(source, [_yaml_problem(error)]) from error
    if not isinstance(document, dict):
        message = "a region file is a mapping with the keys models, clusters, links, security"
        raise RegionError(source, [Problem((), message)])
    problems: list[Problem] = []
    document = _expand(document, variables, (), problems)
    region: RegionSpec | None = None
    if not problems:
        try:
            region = RegionSpec.model_validate(document)
        except ValidationError as error:
            problems = _field_problems(error)
        else:
            problems = check_region(region)
    if problems or region is None:
        lined = [Problem(item.path, item.message, _line(root, item.path)) for item in problems]
        raise RegionError(source, lined)
    return _absolute(region, directory)


def _expand(value: Any, variables: Mapping[str, str], at: KeyPath, found: list[Problem]) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, variables, (*at, key), found) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, variables, (*at, i), found) for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in variables:
            return variables[name]
        if default is None:
            message = f"the variable {name} is not set; export it or write ${{{name}:-default}}"
            found.append(Problem(at, message))
        return default or ""

    expanded = _VARIABLE.sub(replaced, value)
    # A value that is one variable keeps YAML's types: port: ${PORT} is a number.
    return yaml.safe_load(expanded) if expanded != value and expanded.isdigit() else expanded


def _absolute(region: RegionSpec, directory: Path) -> RegionSpec:
    """Paths made absolute; a model's path only if it is one (it may be a name on a hub)."""
    base = directory.resolve()

    def model_path(text: str) -> str:
        path = base / Path(text).expanduser()
        return str(path.resolve()) if text.startswith((".", "/", "~")) or path.is_dir() else text

    def full(path: Path) -> Path:
        return (base / path.expanduser()).resolve()

    models = tuple(m.model_copy(update={"path": model_path(m.path)}) for m in region.models)
    gateway, security = region.gateway, region.security
    if gateway.api_keys_file is not None:
        gateway = gateway.model_copy(update={"api_keys_file": full(gateway.api_keys_file)})
    if security.tls is not None:
        files = {key: full(path) for key, path in security.tls}
        security = security.model_copy(update={"tls": security.tls.model_copy(update=files)})
    return region.model_copy(update={"models": models, "gateway": gateway, "security": security})


def _field_problems(error: ValidationError) -> list[Problem]:
    """Without those that only say that a list is empty because its items are wrong."""
    problems = [_field_problem(item) for item in error.errors()]
    paths = [problem.path for problem in problems]
    return [
        problem
        for problem in problems
        if not any(
            len(path) > len(problem.path) and path[: len(problem.path)] == problem.path
            for path in paths
        )
    ]


def _field_problem(error: ErrorDetails) -> Problem:
    path = tuple(error["loc"])
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        known = _keys_at(path[:-1])
        return Problem(path, f"unknown key{suggestion(str(path[-1]), known)}")
    if kind == "missing":
        return Problem(path, "is required and missing")
    message = error["msg"].removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        message = "use letters, digits, '_', '.' and '-', at most 63"
    shown = repr(value) if isinstance(value, str | int | float | bool) else ""
    if shown and shown not in message:
        message = f"{shown}: {message}"
    return Problem(path, message)


def _keys_at(path: KeyPath) -> list[str]:
    """The keys a mapping at `path` may have."""
    model: type[BaseModel] | None = RegionSpec
    for part in path:
        if model is None:
            return []
        if isinstance(part, int):
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        model = _model_in(fields[part].annotation) if part in fields else None
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    found = (_model_in(item) for item in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def missing_models(region: RegionSpec) -> list[Problem]:
    """The models whose path is a directory that this machine does not have."""
    return [
        Problem(
            ("models", index, "path"),
            f"there is no {model.path} here; a relative path starts at the region file's directory",
        )
        for index, model in enumerate(region.models)
        if Path(model.path).is_absolute() and not Path(model.path).is_dir()
    ]


def _line(root: yaml.Node | None, path: KeyPath) -> int | None:
    """The line of the deepest part of `path` that the file has."""
    line: int | None = None
    node = root
    for part in path:
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, item in node.value:
                if key.value == part:
                    line, found = key.start_mark.line + 1, item
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            found = node.value[part] if part < len(node.value) else None
            line = found.start_mark.line + 1 if found is not None else line
        if found is None:
            break
        node = found
    return line


def _yaml_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    return Problem((), f"not valid YAML: {what}", mark.line + 1 if mark is not None else None)
