"""Directories of Python sources, which stand for an installed package."""

from pathlib import Path


def source_tree(root: Path, modules: dict[str, str]) -> Path:
    """Write the modules, texts by path below `root`, and return `root`."""
    for name, text in modules.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root
