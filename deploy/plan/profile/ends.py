"""Where a profile and its errors go, and the KVCache sizes that it has: for the commands that make
one.

It imports what it needs when it is used, so that their help appears at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from deploy.profile_file import EngineProfileFile, KvCacheSize

_LONG_TOKENS = 10**9
"""Longer than any window, tokens."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where results and errors go."""

    out: Path
    as_json: bool

    def check_target(self, force: bool) -> None:
        """Fail before anything is measured if the result could not be written."""
        if self.out.is_dir() or not self.out.absolute().parent.is_dir():
            self.fail(f"{self.out} cannot be written: give --out a file in an existing folder", 2)
        if self.out.exists() and not force:
            self.fail(f"{self.out} exists; --force replaces it, --out names another", 2)

    def write(self, file: EngineProfileFile) -> None:
        """Write the file, whole or not at all."""
        try:
            file.dump(self.out)
        except OSError as error:
            self.fail(f"{self.out} cannot be written: {error}", 2)

    def show(self, file: EngineProfileFile) -> None:
        """Print the file's numbers on stdout."""
        if self.as_json:
            typer.echo(json.dumps({"ok": True, "file": str(self.out)} | file.as_json()))
            return
        from rich.console import Console

        from deploy.plan.profile.view import tables

        console = Console()
        for table in tables(file.profile):
            console.print(table)
        notes = file.profile.provenance.notes if file.profile.provenance else ()
        for line in (*(f"- {note}" for note in notes), f"wrote {self.out}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def fail(self, message: str, status: int) -> NoReturn:
        """Say what went wrong, and exit."""
        if self.as_json:
            typer.echo(json.dumps({"ok": False, "error": message}))
        else:
            typer.echo(message, err=True)
        raise typer.Exit(status)


def kv_cache_size(config: Path | None, ends: Ends) -> KvCacheSize | None:
    """The sizes from the model's config. Windows count as full, as in long prompts."""
    if config is None:
        return None
    from deploy.plan.model_config import config_file, read_config
    from deploy.profile_file import KvCacheSize
    from kvmanager.hf_config import read_model_kv

    path = config_file(config)
    try:
        kv = read_model_kv(read_config(path))
    except ValueError as error:
        ends.fail(f"--config {path}: {error}", 2)
    # Windows are full at this length, so all but the part per token is fixed.
    fixed_bytes = kv.bytes_for(_LONG_TOKENS) - _LONG_TOKENS * kv.bytes_per_token
    return KvCacheSize(fixed_bytes=fixed_bytes, bytes_per_token=kv.bytes_per_token)
