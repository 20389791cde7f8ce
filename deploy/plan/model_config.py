"""Reads a model's Hugging Face config.json, and what engines read beside it.
`kvmanager.hf_config` knows what it means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

MAX_DEPTH: Final = 64
"""Lists and objects inside each other; those of models have about five."""


def config_file(path: Path) -> Path:
    """The config.json for the path of the file itself or of the model's directory."""
    return path / "config.json" if path.is_dir() else path


def read_config(file: Path) -> dict[str, Any]:
    """The parsed file, with the quantisation that ModelOpt's older files have beside it, as vLLM
    reads it. Raises ValueError that says what is wrong, without the file's name.
    """
    config = _read(file)
    beside = file.with_name("hf_quant_config.json")
    if config.get("quantization_config") is None and beside.exists():
        try:
            config["quantization_config"] = _read(beside)
        except ValueError as error:
            raise ValueError(f"{beside.name} beside it: {error}") from error
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; give a model's config.json") from error
    # Bytes that are not UTF-8 raise a ValueError, too.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}; give a model's config.json") from error
    if not isinstance(config, dict):
        raise ValueError("not a JSON object; give a model's config.json")
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
    if level:
        raise ValueError(f"nested more than {MAX_DEPTH} deep; give a model's config.json")
    return config


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
