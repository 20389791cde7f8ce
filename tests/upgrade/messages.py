"""The messages that processes of a region send each other, described so that releases compare.

Run as a script in the tree of a release, it prints what `messages.json` has of that release.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

MODULES: Final = (
    "kvmanager.agent.cache.move_messages",
    "kvmanager.agent.embeddings.messages",
    "kvmanager.agent.engines.protocol",
    "kvmanager.agent.links.messages",
    "kvmanager.agent.messages",
    "kvmanager.agent.probe_messages",
    "kvmanager.directory.messages",
    "kvmanager.layout",
    "kvmanager.vllm_connector.params",
    "local_pd.messages",
    "prfaas.engines.prefill_rpc",
    "prfaas.jobs",
    "scheduler.reports",
    "transport.grants",
)
Schemas = dict[str, dict[str, Any]]
"""JSON Schema of each message, by its name."""


def message_types() -> Iterator[type[msgspec.Struct]]:
    """The types that these modules define, as far as the release has them."""
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The release before may lack it. Without one of this release the comparison would find
            # that its messages are missing.
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                yield value


def schemas() -> Schemas:
    """The messages of this release, with the types of their fields."""
    types = {found.__name__: found for found in message_types()}
    _, found = msgspec.json.schema_components(types.values(), ref_template="{name}")
    return {name: _without_words(found[name]) for name in sorted(found)}


def _without_words(schema: Any) -> Any:
    """Without what says nothing about bytes."""
    if isinstance(schema, dict):
        words = ("description", "title", "default")
        return {
            # A field may have one of these names.
            key: {name: _without_words(field) for name, field in value.items()}
            if key == "properties"
            else _without_words(value)
            for key, value in schema.items()
            if key not in words
        }
    return [_without_words(item) for item in schema] if isinstance(schema, list) else schema


def breaks(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why a process of the one release may not understand this message of the other."""
    fields_before, fields = old.get("properties", {}), new.get("properties", {})
    needed_before, needed = set(old.get("required", ())), set(new.get("required", ()))
    found = [f"{name} is gone, and was needed" for name in sorted(needed_before - fields.keys())]
    found += [f"{name} is new, and needed" for name in sorted(needed - fields_before.keys())]
    for name in sorted(fields.keys() & fields_before.keys()):
        if fields[name] != fields_before[name]:
            found.append(f"{name} has another type: {fields_before[name]}, now {fields[name]}")
        if name in needed - needed_before:
            found.append(f"{name} is needed now")
    rest_before, rest = (
        {key: value for key, value in schema.items() if key not in ("properties", "required")}
        for schema in (old, new)
    )
    if rest_before != rest:
        found.append(f"it has another shape: {rest_before}, now {rest}")
    return found


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in schemas().items())
    print("{", ",\n".join(lines), "}", sep="\n")
