"""Writes the objects of a scheduler's state as plain values, and makes them again.

A state is a list of nodes. A node holds scalars and references to other nodes, so that what two
objects share is shared again. A recording may come from another person's machine: the reader makes
only containers, number arrays of a few types, and objects of classes that the scheduler's modules
define. It runs no code that the file chooses. Enumerations are looked up, structs are made of their
fields, and other objects get their fields without a call.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

Node: TypeAlias = list[Any]

_PACKAGES: Final = ("scheduler.", "netmon.")
_DTYPES: Final = frozenset({"bool", "int32", "int64", "float32", "float64"})
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_MAX_ITEMS: Final = 1 << 27
"""Of all arrays of a state: a few bytes of a file must not take all memory."""
_SPARSE_ITEMS: Final = 1024
"""Larger arrays of counts are nearly all zero, so only the others are written."""
_CONTAINERS: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class StateError(ValueError):
    """A state that cannot be written or read; the message says why."""


def nodes_of(value: object) -> list[Node]:
    """The nodes of an object and of all that it refers to; the first is its own."""
    writer = _Writer()
    writer.reference(value)
    return writer.nodes


def object_of(nodes: list[Node]) -> Any:
    """The object of the first node. Raises `StateError`."""
    try:
        return _Reader(nodes).reference(0)
    # Nodes that nobody wrote may have anything wrong with them.
    except Exception as error:
        raise StateError(f"{type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[int, int] = {}
        self._names: dict[type, str] = {}
        self._written: list[object] = []
        """Kept, so that no other object gets the address of one that was written."""

    def reference(self, value: Any) -> Any:
        """The value itself if it is a scalar, else the number of its node in a list."""
        if type(value) in _SCALARS:
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.nodes)
            self._written.append(value)
            node: Node = []
            self.nodes.append(node)
            node += self._node(value)
        return [number]

    def _node(self, value: Any) -> Node:
        kind = type(value)
        if kind is dict or kind is MappingProxyType:
            keys, values = list(value), list(value.values())
            return [kind.__name__, self._all(keys), self._all(values)]
        if kind is deque:
            return ["deque", value.maxlen, self._all(value)]
        if kind is list or (kind.__name__ in _CONTAINERS and kind.__module__ == "builtins"):
            return [kind.__name__, self._all(value)]
        if kind is np.ndarray or isinstance(value, np.generic):
            return _array(np.asarray(value), is_scalar=kind is not np.ndarray)
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = f"{kind.__module__}:{kind.__qualname__}"
            if kind is not _class(name):
                raise StateError(f"{name} is no part of a scheduler's state")
        if isinstance(value, Enum):
            return ["enum", name, value.name]
        names = _field_names(value)
        return ["object", name, names, self._all(getattr(value, each) for each in names)]

    def _all(self, values: Iterable[Any]) -> list[Any]:
        return [self.reference(value) for value in values]


class _Reader:
    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._made: dict[int, Any] = {}
        self._num_items = 0

    def reference(self, number: int) -> Any:
        """The object of a node."""
        if number not in self._made:
            self._make(number, *self._nodes[number])
        return self._made[number]

    def _make(self, number: int, kind: str, *parts: Any) -> None:
        match kind:
            case "list":
                self._made[number] = made = []
                made += self._all(parts[0])
            case "deque":
                self._made[number] = held = deque[Any](maxlen=parts[0])
                held.extend(self._all(parts[1]))
            case "dict":
                mapping: dict[Any, Any] = {}
                self._made[number] = mapping
                mapping.update(zip(self._all(parts[0]), self._all(parts[1]), strict=True))
            case "mappingproxy":
                pairs = zip(self._all(parts[0]), self._all(parts[1]), strict=True)
                self._made[number] = MappingProxyType(dict(pairs))
            case "array" | "counts":
                self._num_items += math.prod(parts[1] or ())
                if self._num_items > _MAX_ITEMS:
                    raise StateError(f"its arrays have more than {_MAX_ITEMS} numbers")
                self._made[number] = _array_of(kind, *parts)
            case "enum":
                self._made[number] = _known(parts[0], Enum)[parts[1]]
            case "object":
                self._object(number, *parts)
            case _:
                self._made[number] = _CONTAINERS[kind](self._all(parts[0]))

    def _object(self, number: int, name: str, names: list[str], values: list[Any]) -> None:
        found = _known(name, object)
        if issubclass(found, msgspec.Struct):
            self._made[number] = found(**dict(zip(names, self._all(values), strict=True)))
            return
        if issubclass(found, tuple):
            self._made[number] = tuple.__new__(found, self._all(values))
            return
        made = self._made[number] = object.__new__(found)
        for each, value in zip(names, self._all(values), strict=True):
            if not each.isidentifier() or each.startswith("__"):
                raise StateError(f"{name} cannot have a field {each!r}")
            object.__setattr__(made, each, value)

    def _all(self, values: list[Any]) -> list[Any]:
        return [self.reference(v[0]) if type(v) is list else v for v in values]


def _field_names(value: Any) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    if isinstance(value, tuple):
        return list(getattr(value, "_fields", ()))
    slots = [
        name
        for kind in type(value).__mro__
        for name in kind.__dict__.get("__slots__", ())
        if not name.startswith("__") and hasattr(value, name)
    ]
    return [*slots, *getattr(value, "__dict__", ())]


def _class(name: str) -> Any:
    """The class of this name, if a module of the scheduler defines it; else None. Modules that are
    not loaded are not: no object of theirs is in a state.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if module.startswith(_PACKAGES) else None
    for part in path.split("."):
        found = getattr(found, part, None)
    is_own = isinstance(found, type) and (found.__module__, found.__qualname__) == (module, path)
    return found if is_own else None


def _known(name: str, base: type) -> Any:
    found = _class(name)
    if found is None or not issubclass(found, base):
        raise StateError(f"{name} is no part of a scheduler's state")
    return found


def _array(array: np.ndarray[Any, Any], *, is_scalar: bool) -> Node:
    dtype = array.dtype.name
    if dtype not in _DTYPES:
        raise StateError(f"an array of {dtype} is no part of a scheduler's state")
    if array.size > _SPARSE_ITEMS and array.dtype.kind == "i":
        flat = array.ravel()
        at = np.flatnonzero(flat)
        return ["counts", dtype, list(array.shape), at.tobytes(), flat[at].tobytes()]
    return ["array", dtype, None if is_scalar else list(array.shape), array.tobytes()]


def _array_of(kind: str, dtype: str, shape: list[int] | None, *parts: bytes) -> Any:
    if dtype not in _DTYPES:
        raise StateError(f"an array of {dtype} is no part of a scheduler's state")
    values: np.ndarray[Any, Any] = np.frombuffer(parts[-1], dtype)
    if kind == "counts":
        full = np.zeros(shape or 0, dtype)
        full.reshape(-1)[np.frombuffer(parts[0], np.int64)] = values
        return full
    # A copy may be written to.
    return values[0] if shape is None else values.reshape(shape).copy()
