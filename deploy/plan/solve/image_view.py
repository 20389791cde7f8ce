"""The tables of prompts with images. They know the document of `image_solving`, not its origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from deploy.table_style import new_table
from kvmanager.config_files.units import format_bytes, format_duration


def print_images(
    console: Console, images: Mapping[str, Any], goals: Mapping[str, Mapping[str, Any]]
) -> None:
    """Print the arrangements, what travels over links, and the goal."""
    image, slo = images["per_image"], images["slo"]
    console.print(
        f"an image: {image['tokens']:,} tokens, {format_bytes(image['pixel_bytes'])} of pixels, "
        f"{format_bytes(image['embedding_bytes'])} of embedding, "
        f"{format_bytes(image['kv_bytes'])} of KVCache; encoded in "
        f"{format_duration(image['encode_s'])}"
    )
    if images["offload_fraction"]:
        console.print(
            f"{images['offload_fraction']:.1%} of requests come with their KVCache from prefill "
            "clusters"
        )
    _print_arrangements(console, images)
    console.print(
        f"goodput: {slo['share']:.0%} of requests with TTFT within {format_duration(slo['ttft_s'])}"
        f" and 90% of their tokens within {format_duration(slo['tpot_s'])} (simulated, batches as "
        f"{images['batching']})"
    )
    for row in images["links"]:
        console.print(
            f"over {row['link']}: {row['travels']}, {row['reason']} "
            f"(pixels {format_duration(row['pixels_s'])}, "
            f"embedding {format_duration(row['embedding_s'])})",
            highlight=False,
        )
    goal = goals.get("images")
    if goal is not None:
        word = "[green]met[/]" if goal["met"] else "[red]NOT met[/]"
        console.print(f"{goal['wanted_rps']:g} requests/s within both objectives: {word}")
        if goal["advice"]:
            console.print(escape(goal["advice"]))


def _print_arrangements(console: Console, images: Mapping[str, Any]) -> None:
    table = new_table(
        "arrangement",
        "instances",
        numbers=("goodput\nrequests/s", "at most", "TTFT\nP90 s", "TPOT\nP90 ms"),
        title=f"which stages share the {images['instances']} instances of "
        f"{escape(images['cluster'])}",
    )
    table.add_column("in use", overflow="fold")
    table.add_column("missed\nabove", overflow="fold")
    for row in images["arrangements"]:
        mark = " *" if row["arrangement"] == images["best"] else ""
        table.add_row(
            row["arrangement"],
            row["name"],
            f"{row['goodput_rps']:.3g}{mark or '  '}",
            f"{row['bound_rps']:.3g}",
            f"{row['ttft_p90_s']:.3g}",
            f"{1000 * row['tpot_p90_s']:.3g}",
            ", ".join(f"{group} {share:.0%}" for group, share in row["used"].items()),
            row["missed_above"],
        )
    console.print(table)
