"""Builds the tiny models as Hugging Face directories, from their seeds alone.

It knows files: checkpoints, manifests, atomic replacement. `tiny_specs` knows what weights mean. A
directory whose manifest has the model's fingerprint stays as it is.
"""

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.lab.demo.tiny_specs import Parameter, TinyModel

_MANIFEST_NAME = "prfaas-model.json"
_WEIGHTS_NAME = "model.safetensors"


def build_model(spec: TinyModel, out_dir: Path) -> Path:
    """Make `out_dir/<name>` hold the model, and return that path.

    Readers see the old directory or the new one, never a half-written one. Raises OSError if the
    directory cannot be written.
    """
    path = out_dir / spec.name
    if is_up_to_date(spec, path):
        return path
    out_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=out_dir))
    try:
        _write_model(spec, scratch / "new")
        _swap_in(scratch / "new", path, retired=scratch / "old")
    except OSError:
        if not is_up_to_date(spec, path):  # else another process was faster: its result is the same
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def is_up_to_date(spec: TinyModel, path: Path) -> bool:
    """Whether `path` holds this very model, every file with the size in its manifest."""
    try:
        manifest = json.loads((path / _MANIFEST_NAME).read_text())
        sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(manifest.get("fingerprint") == spec.fingerprint() and sizes == manifest["files"])


def _write_model(spec: TinyModel, path: Path) -> None:
    path.mkdir()
    for name, document in spec.documents().items():
        (path / name).write_text(json.dumps(document, indent=1) + "\n")
    _write_weights(spec, path / _WEIGHTS_NAME)
    sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    manifest = {"model": spec.name, "fingerprint": spec.fingerprint(), "files": sizes}
    (path / _MANIFEST_NAME).write_text(json.dumps(manifest, indent=1) + "\n")


def _swap_in(new: Path, path: Path, retired: Path) -> None:
    if path.exists():
        path.rename(retired)
    new.rename(path)


def _write_weights(spec: TinyModel, path: Path) -> None:
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
    # The format aligns tensors to 8 bytes.
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for parameter in parameters:
            values = draw(parameter, spec.seed)
            file.write((_bfloat16(values) if item_bytes == 2 else values).tobytes())
        file.flush()
        os.fsync(file.fileno())


def draw(parameter: Parameter, seed: int) -> NDArray[np.float32]:
    """The parameter's values. They depend on its name and the seed, not on other parameters."""
    if parameter.values:
        return np.asarray(parameter.values, dtype=np.float32).reshape(parameter.shape)
    if parameter.std == 0.0:
        return np.full(parameter.shape, parameter.mean, dtype=np.float32)
    digest = blake2b(
        f"{seed}/{parameter.source or parameter.name}".encode(), digest_size=16
    ).digest()
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
