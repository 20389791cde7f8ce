"""Writes docs/configuration.md from the schemas of the files that users write.

`make docs` runs it, and a test compares its text with the page. The schemas say everything about
single values; this file knows only how to show a JSON Schema as tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from deploy.gateway.file import GatewayFile
from deploy.region.spec.region import RegionSpec
from kvmanager.agent.config import AgentConfig
from kvmanager.directory.config import DirectoryConfig
from local_pd.front_config import PdFrontConfig
from prfaas.front_config import PrefillFrontConfig

PAGE: Final = Path(__file__).with_name("configuration.md")

_INTRODUCTION: Final = """\
# Configuration

`make docs` writes this page from the same schemas that check the files.
`prfaas region schema` prints the schema of `region.yaml` for editors, and
`prfaas region check FILE` checks a file. It names the line and the path of every problem.

A key that is not listed is an error. Where a key takes a number or text, the text is a number with
a unit: `8k` is 8000 tokens and `8Ki` is 8192, `500MiB` is a size, `1Gbit` a rate, `20ms` or `5min`
a time. `${NAME}` in a region file is replaced by the environment variable of that name, or by what
`--set NAME=VALUE` says.

`region.yaml` is the only file that `prfaas up` needs. The other files are for processes that are
started by hand.
"""

_FILES: Final = {
    "region.yaml": RegionSpec,
    "prfaas gateway": GatewayFile,
    "prfaas prefill": PrefillFrontConfig,
    "prfaas pd": PdFrontConfig,
    "prfaas agent": AgentConfig,
    "prfaas directory": DirectoryConfig,
}

_LIMITS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}
_TYPES: Final = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "object": "mapping",
}

Schema = Mapping[str, Any]


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    shown: dict[str, str] = {}
    for title, model in _FILES.items():
        schema = model.model_json_schema(by_alias=True)
        parts.append(f"## {title}\n")
        parts.extend(_sections(title, schema, shown))
    return "\n".join(parts)


def _sections(file: str, root: Schema, shown: dict[str, str]) -> Iterator[str]:
    """A table for each object, the outer one first, titled by the path that leads to it. `shown`
    says by schema where an object has its table already.
    """
    definitions = root.get("$defs", {})
    waiting = [("", root)]
    while waiting:
        path, schema = waiting.pop(0)
        identity = json.dumps(schema, sort_keys=True)
        if identity in shown:
            yield f"### `{path}`\n\nAs {shown[identity]}.\n"
            continue
        shown[identity] = f"`{path}` of {file}"
        required = schema.get("required", ())
        rows, inner = [], []
        for name, field in schema.get("properties", {}).items():
            place = f"{path}.{name}" if path else name
            for suffix, reference in _references(field):
                inner.append((place + suffix, definitions[reference.rpartition("/")[2]]))
            default = "required" if name in required else _default(field)
            value, meaning = _type(field, definitions), _meaning(field)
            rows.append(f"| `{name}` | {value} | {default} | {meaning} |")
        heading = f"### `{path}`\n\n" if path else ""
        about = _one_line(schema.get("description", ""))
        yield f"{heading}{about}\n\n| key | value | default | meaning |\n|---|---|---|---|\n" + (
            "\n".join(rows) + "\n"
        )
        waiting[:0] = inner


def _references(field: Schema, suffix: str = "") -> Iterator[tuple[str, str]]:
    """The objects that a field holds, each with what follows the field's name in their path."""
    if "$ref" in field:
        yield suffix, field["$ref"]
    for part in (*field.get("anyOf", ()), *field.get("allOf", ())):
        yield from _references(part, suffix)
    if "items" in field:
        yield from _references(field["items"], suffix + "[]")
    if values := _values(field):
        yield from _references(values, suffix + ".NAME")


def _values(field: Schema) -> Schema | None:
    """The schema of a mapping's values; None for what is no mapping or holds anything."""
    values = next(iter(field.get("patternProperties", {}).values()), None)
    values = values or field.get("additionalProperties")
    return values if isinstance(values, dict) else None


def _type(field: Schema, definitions: Schema) -> str:
    if "$ref" in field:
        target = definitions[field["$ref"].rpartition("/")[2]]
        return "section" if "properties" in target else _type(target, definitions)
    if "anyOf" in field:
        parts = [_type(part, definitions) for part in field["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        if "items" not in field:
            return "list"
        return f"list of {_type(field['items'], definitions).replace('section', 'sections')}"
    if values := _values(field):
        return f"mapping of names to {_type(values, definitions)}"
    name = "path" if field.get("format") == "path" else _TYPES.get(field.get("type", ""), "any")
    limits = [text.format(field[key]) for key, text in _LIMITS.items() if key in field]
    if examples := field.get("examples"):
        limits.append("such as " + " or ".join(f"`{example}`" for example in examples))
    return ", ".join([name, *limits])


def _default(field: Schema) -> str:
    value = field.get("default")
    if value is None or (isinstance(value, dict) and value):
        return ""  # left out, or the defaults of the section's own keys
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _meaning(field: Schema) -> str:
    # pydantic keeps what is said of an optional value beside the value, not beside the key.
    parts = (field, *field.get("anyOf", ()))
    return next((_one_line(part["description"]) for part in parts if "description" in part), "")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
