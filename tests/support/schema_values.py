"""Values that a JSON schema of an OpenAPI document allows, odd ones among them."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any


def resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def legal_values(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0
) -> Iterator[Any]:
    """Values of each kind that `schema` allows, with its bounds among them."""
    schema = resolved(schema, schemas)
    if either := schema.get("anyOf") or schema.get("oneOf"):
        for one in either:
            yield from itertools.islice(legal_values(one, schemas, depth), 4 - depth)
        return
    if "const" in schema or "enum" in schema:
        yield from schema.get("enum", [schema.get("const")])
        return
    kind = schema.get("type")
    if kind == "boolean":
        yield from (True, False)
    elif kind == "integer":
        low = int(schema.get("minimum", 0))
        yield from dict.fromkeys((max(low, 0), max(low, 1), max(low, 0) + 2))
    elif kind == "number":
        yield from (0.5, 0, 1.5)
    elif kind == "string":
        yield from ("x", *([] if schema.get("minLength") else [""]), "\u00e9\u2028\U0001f600")
    elif kind == "null":
        yield None
    elif kind == "array" and depth < 3:
        items = list(itertools.islice(legal_values(schema.get("items", {}), schemas, depth + 1), 2))
        yield from ([], items[:1], items)
    elif kind == "object" and depth < 3:
        yield from _objects(schema, schemas, depth)


def _objects(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int
) -> Iterator[dict[str, Any]]:
    """One with only what it must have, and one more for each other property."""
    properties = schema.get("properties", {})
    firsts = {
        name: next(legal_values(one, schemas, depth + 1), None) for name, one in properties.items()
    }
    needed = {name: firsts[name] for name in schema.get("required", ()) if name in firsts}
    yield needed
    for name, first in firsts.items():
        if name not in needed:
            yield needed | {name: first}
    if not properties and isinstance(schema.get("additionalProperties"), dict):
        yield {"1": next(legal_values(schema["additionalProperties"], schemas, depth + 1), None)}
