"""The rows of `prfaas plan kv`: sizes by kind of layer and by prompt length, and rates.

Pure; it knows neither files nor terminals. The throughput of an instance and the egress of a
cluster are equations 1 and 2 of PrfaaS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmanager.config_files.units import GBIT_PER_S
from kvmanager.hf_config import LayerKv, ModelKv
from kvmanager.layout import KVKind
from scheduler.planning.throughput import cluster_egress_bytes_per_s, kv_bytes_per_s


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One prompt length. Without a prefill time there is no throughput, without GPUs no egress."""

    num_tokens: int
    kv_bytes: int
    rank_kv_bytes: int
    kind_bytes: dict[KVKind, int]
    prefill_s: float | None = None
    kv_gbit_per_s: float | None = None
    egress_gbit_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class KindRow:
    """The layers of one kind and size. Bytes are the sum over these layers."""

    kind: KVKind
    num_layers: int
    window_tokens: int
    bytes_per_token: int
    fixed_bytes: int


def length_rows(
    model: ModelKv,
    lengths: Sequence[int],
    prefill_s: Sequence[float] = (),
    *,
    num_gpus: int = 0,
    gpus_per_instance: int = 8,
) -> list[LengthRow]:
    """One row for each length.

    `prefill_s` is empty or as long as `lengths`. Without GPUs there is no egress.
    """
    rows = []
    for index, num_tokens in enumerate(lengths):
        kv_bytes = model.bytes_for(num_tokens)
        time_s = rate = egress = None
        if prefill_s:
            time_s = prefill_s[index]
            rate = float(kv_bytes_per_s(kv_bytes, time_s)) / GBIT_PER_S
            sent = cluster_egress_bytes_per_s(num_gpus, gpus_per_instance, kv_bytes, time_s)
            egress = float(sent) / GBIT_PER_S if num_gpus else None
        rows.append(
            LengthRow(
                num_tokens=num_tokens,
                kv_bytes=kv_bytes,
                rank_kv_bytes=model.rank_bytes_for(num_tokens),
                kind_bytes=model.bytes_by_kind(num_tokens),
                prefill_s=time_s,
                kv_gbit_per_s=rate,
                egress_gbit_per_s=egress,
            )
        )
    return rows


def kind_rows(model: ModelKv) -> list[KindRow]:
    """Layers of the same kind, window and size together, in the order of `KVKind`."""
    groups: dict[tuple[int, int, int, int], list[LayerKv]] = {}
    order = list(KVKind)
    for layer in model.layers:
        size = (layer.window_tokens, layer.bytes_per_token, layer.fixed_bytes)
        groups.setdefault((order.index(layer.kind), *size), []).append(layer)
    return [
        KindRow(
            kind=layers[0].kind,
            num_layers=len(layers),
            window_tokens=layers[0].window_tokens,
            bytes_per_token=sum(layer.bytes_per_token for layer in layers),
            fixed_bytes=sum(layer.fixed_bytes for layer in layers),
        )
        for _, layers in sorted(groups.items())
    ]


def document(model: ModelKv, rows: Sequence[LengthRow]) -> dict[str, Any]:
    """The output of `--json`, without what the command itself knows."""
    return {
        "model": model.name,
        "dtype": model.dtype,
        "kv_dtype": model.kv_dtype,
        "tp_size": model.tp_size,
        "num_layers": model.num_layers,
        "assumed": list(model.assumed),
        "bytes_per_token": model.bytes_per_token,
        "rank_bytes_per_token": model.rank_bytes_per_token,
        "fixed_bytes": model.fixed_bytes,
        "rank_fixed_bytes": model.rank_fixed_bytes,
        "kinds": [
            {
                "kind": row.kind.value,
                "num_layers": row.num_layers,
                "window_tokens": row.window_tokens,
                "bytes_per_token": row.bytes_per_token,
                "fixed_bytes": row.fixed_bytes,
            }
            for row in kind_rows(model)
        ],
        "lengths": [_length(row) for row in rows],
    }


def _length(row: LengthRow) -> dict[str, Any]:
    item: dict[str, Any] = {
        "num_tokens": row.num_tokens,
        "kv_bytes": row.kv_bytes,
        "rank_kv_bytes": row.rank_kv_bytes,
        "kind_bytes": {kind.value: size for kind, size in row.kind_bytes.items()},
    }
    optional = {
        "prefill_s": row.prefill_s,
        "kv_gbit_per_s": row.kv_gbit_per_s,
        "egress_gbit_per_s": row.egress_gbit_per_s,
    }
    return item | {name: value for name, value in optional.items() if value is not None}
