"""Key files of grants for tests."""

from __future__ import annotations

from pathlib import Path

from transport.grants import GrantFile, new_key_pair


def grant_files(folder: Path, name: str = "granting") -> tuple[GrantFile, GrantFile]:
    """A new pair of keys of region "r" in `folder`: the private one, the public one."""
    private, public = (GrantFile(folder / f"{name}.{kind}", "r") for kind in ("key", "pub"))
    for file, text in zip((private, public), new_key_pair(), strict=True):
        file.path.touch(mode=0o600)
        file.path.write_bytes(text)
    return private, public
