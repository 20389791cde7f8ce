"""Build the tiny models as Hugging Face directories, from their seeds and nothing else.

Knows files: checkpoints, manifests, atomic replacement. Does not know what weights mean
(`tiny_specs`).
A directory whose manifest carries the model's fingerprint is left as it is.

    python -m deploy.lab.demo.tiny_models --out DIR [--model NAME]... [--json]
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.lab.demo.byte_tokenizer import tokenizer_files
from deploy.lab.demo.tiny_specs import MODELS, Parameter, TinyModel

_MANIFEST_NAME = "prfaas-model.json"
_WEIGHTS_NAME = "model.safetensors"

Progress = Callable[[str, float], None]
"""Called with the model's name and the share of its weights that is written, 0 to 1."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on disk. `rebuilt` is False when it was there and up to date."""

    spec: TinyModel
    path: Path
    rebuilt: bool

    def describe(self) -> dict[str, Any]:
        """What `--json` prints for one model."""
        return {
            "name": self.spec.name,
            "path": str(self.path),
            "rebuilt": self.rebuilt,
            "fingerprint": self.spec.fingerprint(),
            "kind": self.spec.kind,
            "dtype": self.spec.dtype,
            "max_model_len": self.spec.max_model_len,
            "window_tokens": self.spec.window_tokens,
            "engine_args": list(self.spec.engine_args),
        }


def build_model(spec: TinyModel, out_dir: Path, progress: Progress | None = None) -> BuiltModel:
    """Make `out_dir/<name>` hold the model. Readers see the old directory or the new one, never a
    half-written one. Raises OSError when the directory cannot be written."""
    path = out_dir / spec.name
    if is_up_to_date(spec, path):
        return BuiltModel(spec, path, rebuilt=False)
    out_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=out_dir))
    try:
        _write_model(spec, scratch / "new", progress or _no_progress)
        _swap_in(scratch / "new", path, retired=scratch / "old")
    except OSError:
        if not is_up_to_date(spec, path):  # else another process was faster: its result is the same
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return BuiltModel(spec, path, rebuilt=True)


def is_up_to_date(spec: TinyModel, path: Path) -> bool:
    """Whether `path` holds this very model, every file with the size its manifest says."""
    try:
        manifest = json.loads((path / _MANIFEST_NAME).read_text())
        sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(manifest.get("fingerprint") == spec.fingerprint() and sizes == manifest["files"])


def _write_model(spec: TinyModel, path: Path, progress: Progress) -> None:
    path.mkdir()
    documents = {"config.json": dict(spec.config), **tokenizer_files()}
    for name, document in documents.items():
        (path / name).write_text(json.dumps(document, indent=1) + "\n")
    _write_weights(spec, path / _WEIGHTS_NAME, progress)
    sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    manifest = {"model": spec.name, "fingerprint": spec.fingerprint(), "files": sizes}
    (path / _MANIFEST_NAME).write_text(json.dumps(manifest, indent=1) + "\n")


def _swap_in(new: Path, path: Path, retired: Path) -> None:
    if path.exists():
        path.rename(retired)
    new.rename(path)


def _write_weights(spec: TinyModel, path: Path, progress: Progress) -> None:
    """The safetensors format: u64 header length, JSON header, then the tensors' bytes in order."""
    item_bytes = 2 if spec.dtype == "bfloat16" else 4
    tag = "BF16" if spec.dtype == "bfloat16" else "F32"
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    parameters = list(spec.parameters())
    for parameter in parameters:
        end = offset + int(np.prod(parameter.shape)) * item_bytes
        header[parameter.name] = {
            "dtype": tag,
            "shape": parameter.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for parameter in parameters:
            values = draw(parameter, spec.seed)
            written += file.write((_bfloat16(values) if item_bytes == 2 else values).tobytes())
            progress(spec.name, written / offset)
        file.flush()
        os.fsync(file.fileno())


def draw(parameter: Parameter, seed: int) -> NDArray[np.float32]:
    """The parameter's values: they depend on its name and the seed, not on other parameters."""
    if parameter.values:
        return np.asarray(parameter.values, dtype=np.float32).reshape(parameter.shape)
    if parameter.std == 0.0:
        return np.full(parameter.shape, parameter.mean, dtype=np.float32)
    digest = blake2b(f"{seed}/{parameter.name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    values = generator.standard_normal(parameter.shape, dtype=np.float32)
    values = values * np.float32(parameter.std) + np.float32(parameter.mean)
    if parameter.rows:
        kept = np.zeros_like(values)
        kept[list(parameter.rows)] = values[list(parameter.rows)]
        return kept
    return values


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of finite float32 values, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _no_progress(name: str, share: float) -> None:
    del name, share


def _print_progress(name: str, share: float) -> None:
    if sys.stderr.isatty():
        print(
            f"\r{name}: {share:4.0%}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: build the named models (all of them by default), print where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.lab.demo.tiny_models", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="directory that holds the models")
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="default: all")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args(argv)
    names = options.model or list(MODELS)
    built = [build_model(MODELS[name], options.out, _print_progress) for name in names]
    if options.json:
        print(json.dumps([model.describe() for model in built], indent=1))
    else:
        for model in built:
            print(f"{model.path}: {'built' if model.rebuilt else 'up to date'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
