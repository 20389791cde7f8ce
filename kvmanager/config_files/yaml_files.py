"""Reads a YAML file into a pydantic model; each problem has its line and what to write instead.

``${NAME}`` and ``${NAME:-default}`` in a value are replaced from the variables handed in.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvmanager.config_files.problems import FileError, KeyPath, Problem, suggestion

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

Model = TypeVar("Model", bound=BaseModel)


def read_text(path: Path) -> str:
    """The file's text; `FileError` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(str(path), [Problem((), f"cannot be read: {error}")]) from error


def parse_yaml(
    text: str,
    model: type[Model],
    *,
    source: str,
    expected: str,
    variables: Mapping[str, str] | None = None,
    check: Callable[[Model], Iterable[Problem]] = lambda value: (),
) -> Model:
    """The `model` that the text describes; `FileError` with every problem found.

    `expected` says what the file should be when it is no mapping at all. `check` looks for problems
    between fields that are each right. Without `variables` nothing is replaced.
    """
    try:
        document = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise FileError(source, [_yaml_problem(error)]) from error
    if not isinstance(document, dict):
        raise FileError(source, [Problem((), expected)])
    problems: list[Problem] = []
    if variables is not None:
        document = _expand(document, variables, (), problems)
    value: Model | None = None
    if not problems:
        try:
            value = model.model_validate(document)
        except ValidationError as error:
            problems = _field_problems(error, model)
        else:
            problems = list(check(value))
    if problems or value is None:
        lined = [Problem(item.path, item.message, _line(root, item.path)) for item in problems]
        raise FileError(source, lined)
    return value


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


def _field_problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Without those that only say that a list is empty because its items are wrong."""
    problems = [_field_problem(item, model) for item in error.errors()]
    paths = [problem.path for problem in problems]
    return [
        problem
        for problem in problems
        if not any(
            len(path) > len(problem.path) and path[: len(problem.path)] == problem.path
            for path in paths
        )
    ]


def _field_problem(error: ErrorDetails, model: type[BaseModel]) -> Problem:
    path = tuple(error["loc"])
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        known = _keys_at(path[:-1], model)
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


def _keys_at(path: KeyPath, root: type[BaseModel]) -> list[str]:
    """The keys a mapping at `path` may have."""
    here: Any = root
    for part in path:
        if isinstance(part, int):
            continue
        if typing.get_origin(here) is dict:
            here = typing.get_args(here)[1]
            continue
        model = _model_in(here)
        if model is None:
            return []
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        here = fields[part].annotation if part in fields else None
    model = _model_in(here)
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    found = (_model_in(item) for item in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


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
