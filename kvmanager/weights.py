"""A digest of a checkpoint's files, which says that two engines have the same weights.

Reads sizes, the headers of safetensors files, and samples of every tensor: at most about 128 MiB
of a checkpoint of any size, and all of a small one. Two checkpoints that differ only in bytes
between the samples get one digest. The digest does not depend on where the files lie, what they are
called, or when they were written.

The result is kept beside the files, or in the user's cache directory where those are read-only, and
holds for as long as no file changes size, time or inode. Does not know vLLM or the hub.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

SAMPLE_BYTES: Final = 4096
MAX_SAMPLES: Final = 32768
"""A checkpoint of more tensors than that still has one sample of each."""
MAX_SAMPLES_PER_TENSOR: Final = 16
OPAQUE_STEP_BYTES: Final = 1 << 20
"""Files of other formats are sampled as if they had a tensor in each MiB."""
MAX_HEADER_BYTES: Final = 100 << 20
"""The safetensors format's own limit."""
DIGEST_BYTES: Final = 16
KEPT_NAME: Final = ".prfaas-weights.json"
KEPT_VERSION: Final = 1

Range = tuple[int, int]
"""Begin and end of some bytes of a file."""


class WeightsError(ValueError):
    """The weights of an engine cannot be identified; the message says why."""


class _Tensor(msgspec.Struct):
    data_offsets: Range | None = None


class _Stamp(msgspec.Struct, frozen=True):
    """Fields that change when a file does."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class _Kept(msgspec.Struct, frozen=True):
    version: int
    files: list[_Stamp]
    digest: str


def checkpoint_digest(files: Sequence[Path], cache_dir: Path | None = None) -> str:
    """The digest of these files, hex. `cache_dir` is used where their own folder is read-only; by
    default one of the user. Raises `WeightsError` if there are none or they cannot be read.
    """
    files = sorted(files, key=lambda path: path.name)
    if not files:
        raise WeightsError("there are no weights' files")
    try:
        stamps = [_stamp(path) for path in files]
        places = _places(files[0].parent, cache_dir)
        kept = next(filter(None, (_kept(place, stamps) for place in places)), None)
        if kept is not None:
            return kept
        digest = _digest(files)
        if [_stamp(path) for path in files] != stamps:
            raise WeightsError(f"the weights in {files[0].parent} changed while they were read")
    except OSError as error:
        raise WeightsError(f"the weights cannot be read: {error}") from error
    _keep(places, _Kept(KEPT_VERSION, stamps, digest))
    return digest


def _digest(files: Sequence[Path]) -> str:
    tensors = [_tensors(path) for path in files]
    per_tensor = MAX_SAMPLES // max(1, sum(map(len, tensors)))
    per_tensor = min(MAX_SAMPLES_PER_TENSOR, max(1, per_tensor))
    hasher = blake3()
    for path, ranges in zip(files, tensors, strict=True):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            hasher.update(size.to_bytes(8, "little"))
            for begin, end in ranges:
                for offset, length in _samples(begin, end, per_tensor):
                    hasher.update(os.pread(file.fileno(), length, offset))
    return hasher.digest(DIGEST_BYTES).hex()


def _tensors(path: Path) -> list[Range]:
    """Where the tensors of a file lie. The header of a safetensors file is its first range, in
    pieces that are read whole.
    """
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        with path.open("rb") as file, contextlib.suppress(msgspec.MsgspecError, RecursionError):
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes <= min(size - 8, MAX_HEADER_BYTES):
                header = msgspec.json.decode(file.read(num_bytes), type=dict[str, _Tensor])
                data = 8 + num_bytes
                found = [t.data_offsets for t in header.values() if t.data_offsets is not None]
                pieces = ((at, min(at + SAMPLE_BYTES, data)) for at in range(0, data, SAMPLE_BYTES))
                return [*pieces, *sorted((data + begin, data + end) for begin, end in found)]
    step = max(OPAQUE_STEP_BYTES, size // (MAX_SAMPLES // MAX_SAMPLES_PER_TENSOR))
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]


def _samples(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of at most `most` samples, evenly spaced from the first to the last byte."""
    if end - begin <= most * SAMPLE_BYTES:
        yield begin, end - begin
        return
    room = end - begin - SAMPLE_BYTES
    if most == 1:
        yield begin + room // 2, SAMPLE_BYTES
        return
    for index in range(most):
        yield begin + room * index // (most - 1), SAMPLE_BYTES


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return _Stamp(path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _places(folder: Path, cache_dir: Path | None) -> list[Path]:
    """Where the digest of the files in a folder may be kept, best first."""
    places = [folder / KEPT_NAME]
    with contextlib.suppress(RuntimeError):  # nobody's home
        cache_dir = cache_dir or Path.home() / ".cache" / "prfaas" / "weights"
        name = blake3(os.fsencode(folder.resolve())).digest(DIGEST_BYTES).hex()
        places.append(cache_dir / f"{name}.json")
    return places


def _kept(place: Path, stamps: list[_Stamp]) -> str | None:
    """The digest kept there if it is of just these files and nobody else can have written it."""
    try:
        with open(place, "rb", opener=_no_links) as file:
            found = os.fstat(file.fileno())
            owners = {os.geteuid(), 0, place.parent.stat().st_uid}
            is_safe = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o022
            if not is_safe or found.st_uid not in owners:
                return None
            kept = msgspec.json.decode(file.read(), type=_Kept)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return kept.digest if (kept.version, kept.files) == (KEPT_VERSION, stamps) else None


def _keep(places: Sequence[Path], kept: _Kept) -> None:
    """Keep the digest in the first place that can be written; without any it is made again."""
    for place in places:
        draft = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(draft, flags, 0o644), "wb") as file:
                file.write(msgspec.json.encode(kept))
            draft.replace(place)
            return
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
