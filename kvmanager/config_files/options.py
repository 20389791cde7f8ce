"""Command options for settings that a file may have as well. Knows no single command."""

from __future__ import annotations

from typing import Any

import typer

from kvmanager.config_files.fields import Section, field_docs


def setting(section: type[Section], name: str) -> Any:
    """The option for one field of `section`, with the field's description and default as its help.
    It annotates a parameter that is None when the option is not given.
    """
    default = section.model_fields[name].default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    shown = "" if default is None else f" [{default}]"
    return typer.Option(help=f"{field_docs(section)[name]}{shown}")
