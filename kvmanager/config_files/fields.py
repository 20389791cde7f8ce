"""The building blocks of files: sections, quantities, addresses, and settings of cores.

A core's dataclass is the schema of its settings. `CoreFields` makes a section of it, and
`filled_from` gives fields of hand-written sections its defaults and descriptions. In both, the
docstring below a field is its description.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    create_model,
)
from pydantic_core import CoreSchema, core_schema

from kvmanager.config_files.units import parse_duration, parse_rate, parse_size, parse_tokens
from transport import Endpoint, TlsFiles
from transport.endpoint import check_host, is_wildcard

GIB: Final = 1 << 30

CoreT = TypeVar("CoreT")
SectionT = TypeVar("SectionT", bound="Section")


def spelled(parse: Callable[[str], float]) -> BeforeValidator:
    """A validator that keeps numbers, also those written as text, and parses other text."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return float(value)
        except ValueError:
            return parse(value)

    return BeforeValidator(read, json_schema_input_type=float | str)


def _in_gib(text: str) -> float:
    return parse_size(text) / GIB


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[Positive, spelled(parse_duration)]
SecondsOrZero = Annotated[NotNegative, spelled(parse_duration)]
Gib = Annotated[Positive, spelled(_in_gib)]
GibOrZero = Annotated[NotNegative, spelled(_in_gib)]
Bytes = Annotated[int, Field(gt=0), spelled(parse_size)]
Tokens = Annotated[int, Field(gt=0), spelled(parse_tokens)]
TokensOrZero = Annotated[int, Field(ge=0), spelled(parse_tokens)]
Port = Annotated[int, Field(ge=0, le=65535)]


SHOWN: Final = "shown"
"""The context of a `model_dump` for people: secrets are left out. Files for processes have them."""


def _unless_shown(value: Any, write: SerializerFunctionWrapHandler, info: Any) -> Any:
    if info.context != SHOWN or not value:
        return write(value)
    return dict.fromkeys(value, "***") if isinstance(value, dict) else "***"


# `repr` is what problems of files look at, too.
_SECRET: Final = (Field(repr=False), WrapSerializer(_unless_shown))
SecretText = Annotated[str, *_SECRET]
"""A URL that may have a password, or another text that no output shows."""
SecretTexts = Annotated[dict[str, str], *_SECRET]
"""Environment variables, of which some are tokens."""


def _endpoint(text: str) -> str:
    return str(Endpoint.parse(text))


def address(text: str) -> str:
    """host:port that one can connect to, in its usual spelling. Raises ValueError."""
    at = Endpoint.parse(text)
    if at.port == 0:
        raise ValueError(f"{text!r}: nobody can connect to port 0; write host:port")
    if is_wildcard(at.host):
        raise ValueError(f"{text!r}: nobody can connect to {at.host}; write the host's address")
    return str(at)


def _addresses(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return address(value) if isinstance(value, str) else tuple(map(address, value))


def host(text: str) -> str:
    """A host that one can connect to, in its usual spelling. Raises ValueError."""
    found = check_host(text)
    if is_wildcard(found):
        raise ValueError(
            f"{found} means all addresses of the host that reads it; write the address that others "
            f"connect to, and {found} at `listen`"
        )
    return found


Host = Annotated[str, AfterValidator(host)]
"""The name or address of a host that others connect to; IPv6 without brackets."""
ListenHost = Annotated[str, AfterValidator(check_host)]
"""The name or address of a host to listen on; 0.0.0.0 and :: are all of its addresses."""
ListenAddress = Annotated[str, AfterValidator(_endpoint)]
"""host:port to listen on; port 0: any free one."""
Address = Annotated[str, AfterValidator(address)]
"""host:port to connect to."""
Addresses = Annotated[
    str | Annotated[tuple[str, ...], Field(min_length=1)], AfterValidator(_addresses)
]
"""One or several of them."""


@functools.cache
def _docs_in(source_file: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of a module's classes, by class and field."""
    found: dict[str, dict[str, str]] = {}
    # Python does not keep the docstrings of fields, so they are read from the source.
    for node in ast.parse(Path(source_file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found.setdefault(node.name, {})
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[field.target.id] = " ".join(below.value.value.split())
    return found


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings below the fields of `kind` and of its bases, by field."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        docs |= base.__dict__.get("core_docs", {})
        source_file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
        if source_file.endswith(".py"):
            docs |= _docs_in(source_file).get(base.__name__, {})
    return docs


def _describe(schema: dict[str, Any], section: type[BaseModel]) -> None:
    assert issubclass(section, Section)
    for name, text in field_docs(section).items():
        if name in section.model_fields:
            alias = section.model_fields[name].alias or name
            schema["properties"][alias]["description"] = text


class Section(BaseModel):
    """A mapping in a file. It is frozen, and unknown keys are errors. Its JSON Schema describes
    fields by the docstrings below them.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, json_schema_extra=_describe
    )

    core_docs: ClassVar[Mapping[str, str]] = {}
    """Descriptions of the fields that come from a core, by name."""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """The section with these settings. Unlike the constructor, it type-checks without the
        fields whose defaults come from a core.
        """
        return cls.model_validate(given)


def filled_from(*cores: type) -> Callable[[type[SectionT]], type[SectionT]]:
    """Decorates a section: its fields without a default get the default and the description of the
    field of this name in one of `cores`, which are dataclasses. The types stay the section's,
    because a core knows no units and checks bounds in its constructor.
    """

    def fill(section: type[SectionT]) -> type[SectionT]:
        docs: dict[str, str] = {}
        for core in cores:
            for item in dataclasses.fields(core):
                field = section.model_fields.get(item.name)
                if field is None or not field.is_required():
                    continue
                if item.default_factory is not dataclasses.MISSING:
                    field.default_factory = item.default_factory
                elif item.default is not dataclasses.MISSING:
                    field.default = item.default
                docs[item.name] = field_docs(core).get(item.name, "")
        section.core_docs = docs
        section.model_rebuild(force=True)
        return section

    return fill


class CoreFields:
    """Annotates a field of a section with a core's class, so that a file may give its settings:
    `Annotated[TransportConfig, CoreFields(TransportConfig, without={"tls"})]`.

    Names, types, defaults and descriptions are those of the class, a dataclass or msgspec struct
    with defaults for all fields. Its ValueErrors become problems of the file. Only settings that
    differ from the defaults are written out again. The end of a field's name says which unit a
    quantity may have.
    """

    def __init__(self, core: type, *, without: Collection[str] = ()) -> None:
        hints = get_type_hints(core)
        self._core = core
        self._defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(core).parameters.items()
            if name not in without
        }
        fields: dict[str, Any] = {
            name: (_with_unit(name, hints[name]), default)
            for name, default in self._defaults.items()
        }
        self.section: type[Section] = create_model(
            core.__name__, __base__=Section, __doc__=core.__doc__, **fields
        )
        self.section.core_docs = field_docs(core)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._made,
            handler.generate_schema(self.section),
            serialization=core_schema.plain_serializer_function_ser_schema(self._changed),
        )

    def _made(self, value: Any, read: Callable[[Any], Section]) -> Any:
        return value if isinstance(value, self._core) else self._core(**dict(read(value)))

    def _changed(self, value: Any) -> dict[str, Any]:
        given = {name: getattr(value, name) for name in self._defaults}
        return {name: item for name, item in given.items() if item != self._defaults[name]}


def _with_unit(name: str, kind: Any) -> Any:
    """`kind`, which also takes text with a unit if the end of the field's name says which unit."""
    for end, parse in (
        ("tokens_per_s", parse_tokens),
        ("_bytes_per_s", parse_rate),
        ("_bytes", parse_size),
        ("_tokens", parse_tokens),
        ("_s", parse_duration),
    ):
        if name.endswith(end) and kind in (int, float, int | None, float | None):
            return Annotated[kind, spelled(parse)]
    return kind


def settings_of(section: Section, core: Callable[..., CoreT], **more: Any) -> CoreT:
    """Make a `core` from the fields of `section` that it has, and from `more`."""
    names = inspect.signature(core).parameters.keys() & type(section).model_fields.keys()
    return core(**({name: getattr(section, name) for name in names} | more))


class TlsSection(Section):
    """PEM files for mutual TLS between nodes."""

    cert: Path
    """This side's certificate."""
    key: Path
    """The key of the certificate."""
    ca: Path
    """The certificate of the authority that signed all nodes of the region."""

    def files(self) -> TlsFiles:
        """The files in the form of the transport and RPC layers."""
        return TlsFiles(cert=self.cert, key=self.key, ca=self.ca)


def tls_files(section: TlsSection | None) -> TlsFiles | None:
    """The files of a section that may be left out."""
    return None if section is None else section.files()
