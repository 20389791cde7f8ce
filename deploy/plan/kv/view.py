"""The tables of `prfaas plan kv`. They know rows, not where these come from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from deploy.plan.kv.report import KindRow, LengthRow, kind_rows
from deploy.table_style import new_table
from kvmanager.config_files.units import format_tokens
from kvmanager.hf_config import ModelKv
from kvmanager.layout import KVKind

_KIND_NAMES = {
    KVKind.FULL: "full attention",
    KVKind.MLA: "MLA",
    KVKind.WINDOW: "sliding window",
    KVKind.RECURRENT: "recurrent state",
}


def print_tables(console: Console, model: ModelKv, rows: Sequence[LengthRow]) -> None:
    """Print the model and its data types, what was assumed, and both tables."""
    ranks = "1 rank" if model.tp_size == 1 else f"{model.tp_size} tensor-parallel ranks"
    lines = [
        f"{model.name}, {model.dtype}, KV {model.kv_dtype}, {ranks}: "
        f"{len(model.layers)} of {model.num_layers} layers have a cache",
        *(f"assumed: {note} (the file leaves it out)" for note in model.assumed),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    console.print(_kinds_table(model))
    console.print("KVCache of one prompt, to transfer:", _lengths_table(model, rows), sep="\n")


def _kinds_table(model: ModelKv) -> Table:
    """The bytes that each kind of layer has to transfer, over all layers."""
    table = new_table("kind", numbers=("layers", "B/token"))
    table.add_column("kept for", overflow="fold")
    table.add_column("fixed\nMiB", justify="right")
    for row in kind_rows(model):
        table.add_row(
            _KIND_NAMES[row.kind],
            str(row.num_layers),
            f"{row.bytes_per_token:,}" if row.bytes_per_token else "-",
            _kept_for(row),
            f"{row.fixed_bytes / 2**20:,.2f}" if row.fixed_bytes else "-",
        )
    return table


def _lengths_table(model: ModelKv, rows: Sequence[LengthRow]) -> Table:
    """KVCache, and what it needs of a link, for each prompt length."""
    table = new_table(numbers=("tokens",))
    kinds = list(model.num_layers_by_kind())
    # With one kind its column would repeat the total.
    if len(kinds) > 1:
        for kind in kinds:
            table.add_column(f"{_KIND_NAMES[kind].split()[-1]}\nMiB", justify="right")
    table.add_column("total\nMiB", justify="right", style="bold")
    if model.tp_size > 1:
        table.add_column("on a rank\nMiB", justify="right")
    rates = _rate_columns(rows)
    for heading in rates:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row.kind_bytes[kind] for kind in kinds] if len(kinds) > 1 else []
        cells.append(row.kv_bytes)
        if model.tp_size > 1:
            cells.append(row.rank_kv_bytes)
        table.add_row(
            format_tokens(row.num_tokens),
            *(f"{size / 2**20:,.1f}" for size in cells),
            *(_number(getattr(row, name)) for name in rates.values()),
        )
    return table


def _rate_columns(rows: Sequence[LengthRow]) -> dict[str, str]:
    """The headings of the columns that have values, with the fields they show."""
    columns = {
        "prefill\ns": "prefill_s",
        "Phi\nGbit/s": "kv_gbit_per_s",
        "egress\nGbit/s": "egress_gbit_per_s",
    }
    return {
        heading: name
        for heading, name in columns.items()
        if any(getattr(row, name) is not None for row in rows)
    }


def _kept_for(row: KindRow) -> str:
    if row.kind is KVKind.RECURRENT:
        return "one state"
    if row.kind is KVKind.WINDOW:
        return f"the last {row.window_tokens:,} tokens"
    return "every token"


def _number(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"
