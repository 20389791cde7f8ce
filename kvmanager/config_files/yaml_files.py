"""Reads a YAML file into a pydantic model; each problem has its line and what to write instead.

The file is YAML 1.2: `off`, `on`, `yes` and `no` are texts, and a key stands once in a mapping.
``${NAME}`` and ``${NAME:-default}`` in a value are replaced from the variables handed in.
"""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import typer
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from kvmanager.config_files.fields import CoreFields
from kvmanager.config_files.problems import FileError, KeyPath, Problem, suggestion

MAX_VALUES: Final = 200_000
"""Most values of a file. Aliases repeat what they name, so a short file may have any number."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

Model = TypeVar("Model", bound=BaseModel)


def read_text(path: Path) -> str:
    """The file's text; `FileError` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(str(path), [Problem((), f"cannot be read: {error}")]) from error


def read_settings(
    path: Path | None, model: type[Model], *, expected: str, options: Mapping[str, Any] = {}
) -> Model:
    """The `model` that the file describes. A command's `options` that are not None replace the
    file's settings. Without a file the options alone count. Raises `FileError` with all problems.
    """
    return parse_yaml(
        "{}" if path is None else read_text(path),
        model,
        source="options" if path is None else str(path),
        expected=expected,
        options={name: value for name, value in options.items() if value is not None},
    )


@contextmanager
def exit_on_bad_file(status: int = 2) -> Iterator[None]:
    """End a command whose file cannot be used, with all problems on stderr."""
    try:
        yield
    except FileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(status) from error


def parse_yaml(
    text: str,
    model: type[Model],
    *,
    source: str,
    expected: str,
    variables: Mapping[str, str] | None = None,
    options: Mapping[str, Any] = {},
    check: Callable[[Model], Iterable[Problem]] = lambda value: (),
) -> Model:
    """The `model` that the text describes. Raises `FileError` with every problem found.

    `expected` is the message for a file that is no mapping at all. `check` finds problems between
    fields that are each right. Without `variables` nothing is replaced. `options` replace the
    text's values of their keys.
    """
    problems: list[Problem] = []
    document, root = _read(text, source, variables, problems)
    if not isinstance(document, dict):
        raise FileError(source, [Problem((), expected)])
    document |= options
    value: Model | None = None
    if not problems:
        try:
            value = model.model_validate(document)
        except ValidationError as error:
            problems = _field_problems(error, model)
        else:
            problems = list(check(value))
    if problems or value is None:
        lined = [_with_line(item, root, options) for item in problems]
        raise FileError(source, sorted(lined, key=lambda item: item.line or 0))
    return value


def read_values(text: str, source: str) -> Any:
    """The values of a YAML text, as they stand there. Raises `FileError`."""
    return _read(text, source, None, [])[0]


class _Constructor(SafeConstructor):
    def check_mapping_key(
        self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any
    ) -> bool:
        # The error of the library shows both values, which may be secrets.
        if key in mapping:
            message = f"the key {key!r} stands twice in one mapping; remove one"
            raise ConstructorError(None, None, message, key_node.start_mark)
        return True

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        # Each level of `<<: [*a, *a]` doubles them, before there is any value to count.
        if len(node.value) > MAX_VALUES:
            message = f"more than {MAX_VALUES} keys are merged here"
            raise ConstructorError(None, None, message, node.start_mark)


def _read(
    text: str, source: str, variables: Mapping[str, str] | None, found: list[Problem]
) -> tuple[Any, Node | None]:
    """The values of the text, and its nodes, which have the line numbers. Raises `FileError`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        root = yaml.compose(text)
        document = None if root is None else yaml.constructor.construct_document(root)
        return _expand(document, variables, (), found, itertools.count(1)), root
    except MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        problem = Problem((), f"not valid YAML: {error.problem}", line)
    except (YAMLError, ValueError) as error:  # no character of YAML; a date that does not exist
        problem = Problem((), f"not valid YAML: {error}")
    except RecursionError:
        problem = Problem((), "too many levels, or an alias within what it names")
    raise FileError(source, [problem])


def _expand(
    value: Any,
    variables: Mapping[str, str] | None,
    at: KeyPath,
    found: list[Problem],
    numbers: Iterator[int],
) -> Any:
    if next(numbers) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values, with what aliases repeat")
    if isinstance(value, dict):
        return {
            key: _expand(item, variables, (*at, key), found, numbers) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_expand(item, variables, (*at, i), found, numbers) for i, item in enumerate(value)]
    if not isinstance(value, str) or variables is None:
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
    return int(expanded) if expanded != value and expanded.isdecimal() else expanded


def _field_problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """The problems, without those that only follow from a problem further inside, such as a list
    that is empty because its items are wrong.
    """
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
        known = _keys(list(_kinds_along(path[:-1], model))[-1])
        return Problem(path, f"unknown key{suggestion(str(path[-1]), known)}")
    if kind == "missing":
        return Problem(path, "is required and missing")
    message = error["msg"].removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        message = "use letters, digits, '_', '.' and '-', at most 63"
    if kind == "tuple_type":
        message = "write a list, such as [1, 2]"
    # A wrong value of a secret is not shown: it may be the secret, in the wrong place or spelling.
    # Also where a whole section should be: a URL in place of `{redis: URL}`.
    kinds = list(_kinds_along(path, model))
    is_secret = any(map(_hides_input, kinds)) or _model_in(kinds[-1]) is not None
    shown = repr(value) if isinstance(value, str | int | float | bool) and not is_secret else ""
    if shown and shown not in message:
        message = f"{shown}: {message}"
    return Problem(path, message)


def _kinds_along(path: KeyPath, root: type[BaseModel]) -> Iterator[Any]:
    """The types of `root` and of each part of `path` below it; None where no type says."""
    here: Any = root
    yield here
    for part in path:
        model = _model_in(here)
        if isinstance(part, int):
            pass  # The type of a list says what its items are.
        elif typing.get_origin(here) is dict:
            here = typing.get_args(here)[1]
        else:
            fields = {} if model is None else _fields(model)
            field = fields.get(part)
            # Annotations that pydantic keeps apart from the type may say more than it.
            here = None if field is None else _annotated(field)
        yield here


def _annotated(field: FieldInfo) -> Any:
    if not field.repr:
        return SecretStr
    for item in field.metadata:
        if isinstance(item, CoreFields):
            return item.section
    return field.annotation


def _hides_input(kind: Any) -> bool:
    if kind is SecretStr or any(map(_hides_input, typing.get_args(kind))):
        return True
    return (
        isinstance(kind, type)
        and issubclass(kind, BaseModel)
        and bool(kind.model_config.get("hide_input_in_errors"))
    )


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _keys(kind: Any) -> list[str]:
    """The keys that a mapping of this type may have."""
    model = _model_in(kind)
    return [] if model is None else list(_fields(model))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, CoreFields):
        return annotation.section
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    found = (_model_in(item) for item in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def _with_line(problem: Problem, root: Node | None, options: Mapping[str, Any]) -> Problem:
    # An option of the command has no line in the file.
    is_option = bool(problem.path) and problem.path[0] in options
    return problem if is_option else replace(problem, line=_line(root, problem.path))


def _line(root: Node | None, path: KeyPath) -> int | None:
    """The line of the deepest part of `path` that the file has."""
    line: int | None = None
    node = root
    for part in path:
        found: Node | None = None
        if isinstance(node, MappingNode):
            for key, item in node.value:
                if key.value == part:
                    line, found = key.start_mark.line + 1, item
        elif isinstance(node, SequenceNode) and isinstance(part, int):
            found = node.value[part] if part < len(node.value) else None
            line = found.start_mark.line + 1 if found is not None else line
        if found is None:
            break
        node = found
    return line
