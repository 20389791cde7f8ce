"""Reads a model's Hugging Face config.json. `kvmanager.hf_config` knows what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config_file(path: Path) -> Path:
    """The config.json for the path of the file itself or of the model's directory."""
    return path / "config.json" if path.is_dir() else path


def read_config(file: Path) -> dict[str, Any]:
    """The parsed file. Raises ValueError that says what is wrong with it, without its name."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; give a model's config.json") from error
    # Bytes that are not UTF-8 raise a ValueError, too; brackets without end a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}; give a model's config.json") from error
    if not isinstance(config, dict):
        raise ValueError("not a JSON object; give a model's config.json")
    return config
