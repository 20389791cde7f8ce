"""Numbers of tokens as people write them: 32Ki is 32,768, 32K and 32k are 32,000, 32768 is itself.

Knows nothing of what is counted.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER_AND_SUFFIX = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(|[kK]|[mM]|[kK]i|Mi)\s*$")
_TOKENS_PER_SUFFIX = {"": 1, "k": 10**3, "ki": 2**10, "m": 10**6, "mi": 2**20}


def parse_tokens(text: str) -> int:
    """Tokens of "128Ki", "19.4K" or "131072". Raises ValueError, showing the spelling."""
    match = _NUMBER_AND_SUFFIX.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens; write 32Ki, 32K or 32768")
    tokens = Decimal(match[1]) * _TOKENS_PER_SUFFIX[match[2].lower()]
    if tokens != int(tokens) or tokens < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1 token")
    return int(tokens)


def format_tokens(num_tokens: int) -> str:
    """The shortest exact spelling: 32768 -> "32Ki", 32000 -> "32K", 32001 -> "32001"."""
    for suffix, scale in (("M", 10**6), ("Mi", 2**20), ("K", 10**3), ("Ki", 2**10)):
        if num_tokens and num_tokens % scale == 0:
            return f"{num_tokens // scale}{suffix}"
    return str(num_tokens)
