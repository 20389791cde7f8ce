"""Quantities with units, and sections made of a core's own settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from kvmanager.config_files.fields import (
    Address,
    Bytes,
    CoreFields,
    Gib,
    Seconds,
    Section,
    Tokens,
    field_docs,
    filled_from,
    settings_of,
)


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (Seconds, 1.5, 1.5),
        (Seconds, "1.5", 1.5),
        (Seconds, "20ms", 0.02),
        (Gib, 2, 2.0),
        (Gib, "512MiB", 0.5),
        (Bytes, "500MiB", 500 << 20),
        (Tokens, 8, 8),
        (Tokens, "8k", 8000),
        (Tokens, "8Ki", 8192),
        (Address, "[::1]:7100", "[::1]:7100"),
    ],
)
def test_quantities_have_units_or_are_plain(kind: Any, written: object, value: object) -> None:
    assert TypeAdapter(kind).validate_python(written) == value


@pytest.mark.parametrize(
    ("kind", "written", "words"),
    [
        (Seconds, "20MiB", "write 20ms"),
        (Seconds, 0, "greater than 0"),
        (Seconds, "nan", "finite"),
        (Gib, "1s", "is not a size"),
        (Tokens, "8kb", "is not a number of tokens"),
        (Tokens, 1.5, "integer"),
        (Address, "host:0", "nobody can connect to port 0"),
    ],
)
def test_wrong_quantities_are_explained(kind: Any, written: object, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(kind).validate_python(written)


@dataclass(frozen=True, slots=True)
class Core:
    """Settings of some core."""

    wait_s: float = 1.0
    """How long it waits."""
    pace_bytes_per_s: float = 0.0
    limit_tokens: int | None = None
    secret: str = ""

    def __post_init__(self) -> None:
        if self.wait_s > 10:
            raise ValueError("wait_s must be at most 10")


class File(Section):
    """A file with a core's settings in it."""

    core_settings: Annotated[Core, CoreFields(Core, without={"secret"})] = Field(
        default_factory=Core
    )
    """Of the core."""


def test_a_core_is_its_own_section() -> None:
    assert File().core_settings == Core()
    settings = {"wait_s": "20ms", "pace_bytes_per_s": "1Gbit", "limit_tokens": "8k"}
    file = File.model_validate({"core_settings": settings})
    assert file.core_settings == Core(0.02, 125e6, 8000)
    assert File(core_settings=file.core_settings) == file
    written = file.model_dump_json()
    assert "secret" not in written
    assert File.model_validate_json(written) == file
    assert File().model_dump() == {"core_settings": {}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"secret": "x"}, "core_settings.secret"),
        ({"wait_s": 11}, "core_settings\n.*at most 10"),
        ({"wait_s": "1k"}, "is not a time"),
    ],
)
def test_mistakes_in_a_cores_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        File.model_validate({"core_settings": settings})


def test_descriptions_are_the_docstrings_below_fields() -> None:
    assert field_docs(Core) == {"wait_s": "How long it waits."}
    schema = File.model_json_schema()
    assert schema["properties"]["core_settings"]["description"] == "Of the core."
    fields = schema["$defs"]["Core"]["properties"]
    assert fields["wait_s"]["description"] == "How long it waits."
    assert fields["wait_s"]["default"] == 1.0


@filled_from(Core)
class Both(Section):
    """Some of a core's settings."""

    wait_s: Seconds
    limit_tokens: int | None = 7
    """Its own."""
    more: int = 1


class Further(Both):
    """What another file says of it, too."""

    needed: int


def test_a_core_is_made_of_the_fields_that_it_shares_with_a_section() -> None:
    assert settings_of(Both(wait_s=2.0), Core, limit_tokens=3) == Core(2.0, limit_tokens=3)


def test_a_section_takes_defaults_and_descriptions_from_a_core() -> None:
    assert Both.of() == Both(wait_s=Core().wait_s, limit_tokens=7, more=1)
    assert Further.model_validate({"needed": 1}).wait_s == Core().wait_s
    fields = Further.model_json_schema()["properties"]
    assert fields["wait_s"]["description"] == "How long it waits."
    assert fields["limit_tokens"]["description"] == "Its own."
    with pytest.raises(ValidationError, match="needed"):
        Further.of()
    with pytest.raises(ValidationError, match="wait_s"):
        Further.model_validate({"needed": 1, "wait_s": 0})
