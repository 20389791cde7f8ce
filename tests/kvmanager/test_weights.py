"""Differences that tell one checkpoint from another, and those that do not."""

import json
import os
from pathlib import Path

import pytest

from kvmanager import weights
from kvmanager.weights import KEPT_NAME, WeightsError, checkpoint_digest

NAME = "model.safetensors"


def checkpoint(folder: Path, data: dict[str, bytes], name: str = NAME) -> list[Path]:
    """A safetensors file of these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor, content in data.items():
        offsets = [end, end + len(content)]
        header[tensor] = {"dtype": "U8", "shape": [len(content)], "data_offsets": offsets}  # type: ignore[dict-item]
        end += len(content)
    told = json.dumps(header).encode()
    path = folder / name
    path.write_bytes(len(told).to_bytes(8, "little") + told + b"".join(data.values()))
    return [path]


DATA = {"a": bytes(range(250)) * 4, "b": bytes(50_000)}


def test_places_names_and_times_do_not_matter(tmp_path: Path) -> None:
    here = checkpoint(tmp_path / "here", DATA)
    there = checkpoint(tmp_path / "there", DATA, "weights.safetensors")
    os.utime(there[0], (1, 1))
    assert checkpoint_digest(here) == checkpoint_digest(there)


@pytest.mark.parametrize(
    "data",
    [
        {**DATA, "b": bytes(49_999) + b"x"},
        {**DATA, "b": bytes(30_000) + b"x" + bytes(19_999)},
        {**DATA, "b": bytes(50_001)},
        {"a": DATA["a"], "c": DATA["b"]},
    ],
)
def test_a_small_checkpoint_is_told_by_each_byte(tmp_path: Path, data: dict[str, bytes]) -> None:
    one, other = checkpoint(tmp_path / "one", DATA), checkpoint(tmp_path / "other", data)
    assert checkpoint_digest(one) != checkpoint_digest(other)


def test_of_many_large_tensors_each_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_SAMPLES", 4)
    data = {f"t{index}": bytes(100_000) for index in range(20)}
    plain = checkpoint_digest(checkpoint(tmp_path / "plain", data))
    for index in (0, 7, 19):
        middle = bytes(50_000) + b"x" + bytes(49_999)
        tuned = checkpoint(tmp_path / f"tuned{index}", {**data, f"t{index}": middle})
        assert checkpoint_digest(tuned) != plain


def test_at_most_a_share_of_a_large_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(n) or real(fd, n, at))  # type: ignore[func-returns-value]
    checkpoint_digest(checkpoint(tmp_path, {"t": bytes(10 << 20)}))
    assert sum(read) < 100_000


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, (10).to_bytes(8, "little") * 9])
def test_files_of_other_formats_and_broken_ones_are_told_too(
    tmp_path: Path, content: bytes
) -> None:
    for name in (NAME, "model.bin"):
        one, other = tmp_path / "one" / name, tmp_path / "other" / name
        for path, data in ((one, content), (other, content + b"x")):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        assert checkpoint_digest([one]) != checkpoint_digest([other])


def test_what_was_read_once_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint(tmp_path, DATA)
    digest = checkpoint_digest(files)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_digest", lambda _: pytest.fail("read again"))
        assert checkpoint_digest(files) == digest
    before = files[0].stat()
    checkpoint(tmp_path, {**DATA, "b": bytes(49_999) + b"x"})
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert checkpoint_digest(files) != digest, "the same size and the same time of writing"


def test_what_others_may_write_or_link_to_is_not_believed(tmp_path: Path) -> None:
    files = checkpoint(tmp_path, DATA)
    digest, kept = checkpoint_digest(files), tmp_path / KEPT_NAME
    forged = json.loads(kept.read_text()) | {"digest": "forged"}
    kept.write_text(json.dumps(forged))
    kept.chmod(0o666)
    assert checkpoint_digest(files) == digest
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps(forged))
    kept.unlink()
    kept.symlink_to(elsewhere)
    assert checkpoint_digest(files) == digest


def test_beside_read_only_files_the_digest_goes_to_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint(tmp_path / "model", DATA)
    # A folder that cannot be written stands in for a read-only mount, which root cannot make.
    (tmp_path / "model" / KEPT_NAME).mkdir()
    digest = checkpoint_digest(files, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(weights, "_digest", lambda _: pytest.fail("read again"))
    assert checkpoint_digest(files, tmp_path / "cache") == digest


def test_no_weights_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no weights"):
        checkpoint_digest([])
    with pytest.raises(WeightsError, match="cannot be read"):
        checkpoint_digest([tmp_path / NAME])
