"""The keys that clients must show, from files and variables, and the tenants that they belong to.

It does not know what a tenant may do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

from pydantic import ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from kvmanager.config_files.fields import Section

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNNAMED: Final = re.compile(r"key-[0-9a-f]{8}")


class ApiKey(Section):
    """A key and the tenant that it belongs to. It is also read from a string, "KEY" or "NAME KEY".

    Several keys may have one name. No error shows what was written, since it may be the key.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    key: Annotated[SecretStr, Field(min_length=1)]
    """The key that clients send."""
    name: str = ""
    """The name of the tenant."""

    @property
    def tenant(self) -> str:
        """The name of its tenant.

        A key without a name is a tenant of its own, called `key-` and the first 8 digits of the
        key's SHA-256, which identifies it and does not give it away.
        """
        if self.name:
            return self.name
        # `surrogateescape`: keys from files and headers may hold bytes that are no UTF-8.
        secret = self.key.get_secret_value().encode("utf-8", "surrogateescape")
        return "key-" + hashlib.sha256(secret).hexdigest()[:8]

    @model_validator(mode="before")
    @classmethod
    def _from_line(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        words = value.split()
        if not 1 <= len(words) <= 2:
            raise ValueError(f"{len(words)} words; write KEY or NAME KEY")
        return {"key": words[-1], "name": words[0] if len(words) == 2 else ""}

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name and not _NAME.fullmatch(name):
            raise ValueError("a name has up to 64 letters, digits, dots, dashes and underscores")
        if not is_named(name) and name:
            raise ValueError("names like key-0123abcd are those of keys without a name")
        return name


def is_named(tenant: str) -> bool:
    """Whether an operator gave this tenant its name: not "" and not that of an unnamed key."""
    return bool(tenant) and not _UNNAMED.fullmatch(tenant)


class ApiKeysSection(Section):
    """Where the keys are that clients must show. With neither, there is no authentication."""

    api_keys_file: Path | None = None
    """File with API keys, one per line: KEY or NAME KEY. Without this and `api_keys_env`: no
    keys.
    """
    api_keys_env: str | None = None
    """Environment variable with API keys: [NAME=]KEY,..."""


def load_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Keys from a file, one per line: `KEY` or `NAME KEY`. Blank lines and lines that start with #
    are skipped.

    Raises `ValueError` with the number of a line that is neither, and when the file has no key: an
    empty file must not switch authentication off.
    """
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    keys = tuple(
        _api_key(line, f"{path}:{number}")
        for number, line in lines
        if line.strip() and not line.strip().startswith("#")
    )
    if not keys:
        raise ValueError(f"{path}: no API key in it; write one a line: KEY or NAME KEY")
    return keys


def parse_api_keys(text: str, where: str) -> tuple[ApiKey, ...]:
    """Keys from a variable, comma-separated: `key` or `name=key`.

    A word with `=` only at its end is a key by itself, padded like base64. Raises `ValueError` that
    begins with `where`, also when there is no key.
    """
    words = [word.strip() for word in text.split(",")]
    keys = []
    for number, word in enumerate(words, start=1):
        name, _, key = word.partition("=")
        is_pair = name.strip() and key.strip("= ")
        pair = {"name": name.strip(), "key": key.strip()} if is_pair else {"key": word}
        if word:
            keys.append(_api_key(pair, f"{where}, key {number}"))
    if not keys:
        raise ValueError(f"{where} is not set or holds no key")
    return tuple(keys)


def tenants_by_key(keys: Iterable[ApiKey]) -> dict[str, str]:
    """The tenant of each key. Raises `ValueError` for a key that two tenants have."""
    tenants: dict[str, str] = {}
    for key in keys:
        tenant = tenants.setdefault(key.key.get_secret_value(), key.tenant)
        if tenant != key.tenant:
            raise ValueError(f"API keys: {tenant} and {key.tenant} have the same key; remove one")
    return tenants


def _api_key(value: object, where: str) -> ApiKey:
    try:
        return ApiKey.model_validate(value)
    except ValidationError as error:
        # Without the input and without the cause: either could show a key in a log.
        found = error.errors(include_input=False, include_url=False)
        raise ValueError(f"{where}: {'; '.join(item['msg'] for item in found)}") from None
