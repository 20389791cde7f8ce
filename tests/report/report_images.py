"""Prompts with images, with and without an encode stage, and what could cross the link for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from report_figures import Section, number, table
from report_raw import Raw

_CASES: Final = {
    "lone": "new images, a prompt at a time",
    "again": "the same images behind another text",
    "together": "new images, prompts at once",
    "text": "text of as many tokens",
}

_INTRODUCTION: Final = """\
## Images

Prompts with images are prefilled in another cluster, over an emulated link of 1 Gbit/s and 20 ms.
In EP+D the engine that prefills encodes images itself, in E+P+D an encode instance does. The vision
tower of the model is deep, so that its time weighs as it does on GPUs. The last columns are MiB of
a prompt: its body with the pixels, which crosses the link; the embeddings that would cross it in
their place; the KVCache, which crosses it back."""


def section(raws: Sequence[Raw]) -> Section:
    """Of the last run: both arrangements are compared within it."""
    kept = raws[-1].results
    rows = [_cells(row) for row in kept["rows"]]
    head = ["arrangement", "prompts", "TTFT P50, ms", "highest", "pixels", "embeddings", "KVCache"]
    parts = [_INTRODUCTION, table(head, rows, 2)]
    for name, found in kept["embeddings"].items():
        if found is not None:
            parts.append(
                f"{name}: engines looked for {found['num_queries']} embeddings at their agent, "
                f"which had {found['num_hits']} of them."
            )
    return Section("images", "\n\n".join(parts))


def _cells(row: Mapping[str, Any]) -> list[str]:
    sizes = (row[f"{what}_bytes"] / 2**20 for what in ("body", "embedding", "kvcache"))
    return [
        row["arrangement"],
        _CASES[row["case"]],
        number(row["ttft_p50_ms"]),
        number(row["ttft_max_ms"]),
        *map(number, sizes),
    ]
