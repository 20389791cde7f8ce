"""Makes a line of an engine's log fit to show a person: printable, colourless, of bounded length.

Engines write lines of thousands of characters (their whole configuration), colours, and progress
bars that move the cursor. This module does not know where lines come from.
"""

from __future__ import annotations

import re
from typing import Final

# ECMA-48: control sequences (colours, cursor), then operating system commands (titles, links).
_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def shortened(text: str, max_chars: int) -> str:
    """`text` as one printable line of at most `max_chars`; where some is left out, "…" ends it."""
    line = _UNPRINTABLE.sub(" ", _ESCAPES.sub("", text)).strip()
    if len(line) <= max_chars:
        return line
    return line[: max(0, max_chars - 1)].rstrip() + "…"
