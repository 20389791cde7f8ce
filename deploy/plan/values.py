"""Lists of numbers as people write them on a command line: "1,2,5,10" and "0:0.9:0.1"."""

from __future__ import annotations

MAX_VALUES = 1000


def parse_over(text: str) -> tuple[str, list[float]]:
    """Name and values of "link_gbps=1,2,5" or "hit_ratio=0:0.9:0.1" (first, last included, step).

    Raises ValueError that shows the accepted spelling.
    """
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise ValueError(f"{text!r}: write NAME=1,2,5 or NAME=FIRST:LAST:STEP")
    return name, parse_values(values)


def parse_values(text: str) -> list[float]:
    """The numbers in "1,2,5" or "0:0.9:0.1". Raises ValueError."""
    try:
        if ":" not in text:
            return [float(word) for word in text.split(",")]
        first, last, step = (float(word) for word in text.split(":"))
    except ValueError:
        raise ValueError(f"{text!r}: write 1,2,5 or FIRST:LAST:STEP") from None
    num = (last - first) / step + 1 if step > 0 else 0.0
    if not 1 <= num <= MAX_VALUES:
        raise ValueError(f"{text!r}: the step must be above 0 and lead to at most {MAX_VALUES}")
    # Rounded, since steps such as 0.1 add up to 0.30000000000000004.
    return [round(first + i * step, 12) for i in range(int(num + 1e-9))]
