"""`prfaas plan kv`: KVCache size by kind of layer, from a Hugging Face config.json.

It turns arguments into calls and errors into exit statuses: 1 when --verify finds that vLLM
disagrees or gives no answer, 2 for the arguments or the file. The command imports what it needs
when it runs, so that its help appears at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from deploy.plan.kv.report import LengthRow
    from deploy.plan.kv.verify import Verification
    from kvmanager.hf_config import ModelKv

_DEFAULT_LENGTHS = "1Ki,8Ki,32Ki,128Ki"

_Number = TypeVar("_Number", int, float)


def kv_command(
    model_config: Annotated[
        Path,
        typer.Argument(metavar="MODEL_CONFIG", help="config.json, or the directory that has it"),
    ],
    lengths: Annotated[
        str,
        typer.Option(metavar="TOKENS,...", help="prompt lengths; Ki is 1024 tokens, k or K 1000"),
    ] = _DEFAULT_LENGTHS,
    dtype: Annotated[
        str,
        typer.Option(
            help="auto: the config's; bfloat16, float16, float32: the whole model's; fp8: one byte "
            "a value in attention layers"
        ),
    ] = "auto",
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel ranks of an instance")] = 1,
    mamba_cache_dtype: Annotated[
        str, typer.Option(help="recurrent states: auto, float32, bfloat16, float16; as vLLM's")
    ] = "auto",
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(help="recurrent states without the convolution's; as vLLM's")
    ] = "auto",
    prefill_s: Annotated[
        str,
        typer.Option(
            metavar="SECONDS,...",
            help="prefill time of each length: adds Phi, the KVCache that one instance makes",
        ),
    ] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that prefill: adds their egress")] = 0,
    gpus_per_instance: Annotated[int, typer.Option(min=1, help="GPUs of one instance")] = 8,
    verify: Annotated[
        bool, typer.Option("--verify", help="compare every layer with what vLLM would allocate")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables")] = False,
) -> None:
    """Show how much KVCache a model makes, by kind of layer and by prompt length.

    Reads the model's config.json and nothing else: no weights, no GPU. Sizes are what a transfer
    moves: each KV head, latent vector and state once, for any --tp. With prefill times it shows
    Phi, the size by the time, and with --gpus the egress of that many GPUs that prefill without a
    pause. --verify builds the model in the installed vLLM, without weights.

    \b
    prfaas plan kv config.json
    prfaas plan kv config.json --prefill-s 0.44,0.72,1.84,7.40 --gpus 32
    prfaas plan kv /models/qwen3-next --dtype fp8 --tp 4 --verify
    """
    from kvmanager.config_files.units import parse_tokens

    counts = _numbers(lengths, "--lengths", parse_tokens)
    times_s = _numbers(prefill_s, "--prefill-s", _seconds) if prefill_s else []
    _check_arguments(counts, times_s, gpus)
    ends = _Ends(model_config, as_json)
    options = {
        "dtype": dtype,
        "tp_size": tp,
        "mamba_cache_dtype": mamba_cache_dtype,
        "mamba_ssm_cache_dtype": mamba_ssm_cache_dtype,
    }
    model, embedding_bytes = _read_model(ends, options), _embedding_bytes(ends, dtype)
    verification = _verify(ends, options) if verify else None

    from deploy.plan.kv.report import length_rows

    rows = length_rows(model, counts, times_s, num_gpus=gpus, gpus_per_instance=gpus_per_instance)
    ends.show(model, rows, verification, embedding_bytes)
    if verification is not None and not verification.ok:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where the config comes from, and where results and errors go."""

    path: Path
    as_json: bool

    @property
    def file(self) -> Path:
        from deploy.plan.model_config import config_file

        return config_file(self.path)

    def show(
        self,
        model: ModelKv,
        rows: list[LengthRow],
        verification: Verification | None,
        embedding_bytes: int,
    ) -> None:
        """Print tables or JSON on stdout."""
        from deploy.plan.kv.report import document

        if self.as_json:
            result = {"ok": True, "file": str(self.file)} | document(model, rows)
            if embedding_bytes:
                result["embedding_bytes_per_token"] = embedding_bytes
            if verification is not None:
                result["verification"] = verification.as_json()
            typer.echo(json.dumps(result))
            return
        from rich.console import Console

        from deploy.plan.kv.view import print_tables

        console = Console()
        print_tables(console, model, rows)
        if embedding_bytes:
            text = f"embeddings of media: {embedding_bytes:,} bytes for each of their tokens"
            console.print(text, highlight=False)
        if verification is not None:
            console.print(verification.words(), highlight=False, markup=False)

    def fail(self, message: str) -> NoReturn:
        """Say what is wrong with the file, and exit."""
        if self.as_json:
            typer.echo(json.dumps({"ok": False, "file": str(self.file), "error": message}))
        else:
            typer.echo(f"{self.file}: {message}", err=True)
        raise typer.Exit(2)


def _read_model(ends: _Ends, options: dict[str, Any]) -> ModelKv:
    from deploy.plan.model_config import read_config
    from kvmanager.hf_config import ConfigError, read_model_kv

    try:
        config = read_config(ends.file)
    except ValueError as error:
        ends.fail(str(error))
    try:
        return read_model_kv(config, **options)
    # A ConfigError is a ValueError too. It blames the file, any other ValueError the options.
    except ConfigError as error:
        ends.fail(str(error))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _embedding_bytes(ends: _Ends, dtype: str) -> int:
    """Bytes of a media token's embedding; 0 for a model that takes text alone."""
    from deploy.plan.model_config import read_config
    from kvmanager.hf_config import ConfigError, embedding_token_bytes

    try:
        return embedding_token_bytes(read_config(ends.file), dtype)
    except ConfigError:
        # A file may say what layers keep and leave the width out. Then only this line is missing.
        return 0


def _verify(ends: _Ends, options: dict[str, Any]) -> Verification:
    """Compare at one rank, since more ranks would need as many processes."""
    from deploy.plan.kv.verify import verify

    return verify(
        ends.file,
        _read_model(ends, options | {"tp_size": 1}),
        mamba_cache=options["mamba_cache_dtype"],
        mamba_ssm_cache=options["mamba_ssm_cache_dtype"],
    )


def _check_arguments(counts: list[int], times_s: list[float], gpus: int) -> None:
    if times_s and len(times_s) != len(counts):
        raise typer.BadParameter(
            f"{len(times_s)} times for {len(counts)} lengths", param_hint="--prefill-s"
        )
    if gpus and not times_s:
        raise typer.BadParameter("egress needs --prefill-s", param_hint="--gpus")


def _numbers(text: str, option: str, parse: Callable[[str], _Number]) -> list[_Number]:
    try:
        return [parse(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        # Refused below, together with times that are not above zero.
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a time in seconds above zero; write 0.44,1.84")
    return value
