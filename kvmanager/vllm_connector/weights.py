"""Which weights an engine has: the identity that its KVCache and its adapters' has.

Knows vLLM's configuration and where its loaders find files. Asks the hub's cache on disk, never
the hub.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from blake3 import blake3
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from kvmanager.weights import WeightsError, checkpoint_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("prfaas.kvmanager.connector")

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DECLARED: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_OTHER_PATTERNS: Final = {"pt": ("*.pt",), "npcache": ("*.bin",)}
_FILE_FORMATS: Final = frozenset(
    (
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    )
)
"""vLLM's load formats whose weights are files of the model's folder, beside `_OTHER_PATTERNS`."""
_NO_WEIGHTS: Final = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt"}
)
_PROCESSOR_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_INDEX: Final = "model.safetensors.index.json"
_MAX_ADAPTERS: Final = 4096
_ADAPTER_PLACES: Final = ("base_model_name_or_path", "revision", "inference_mode")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weights_identity(vllm_config: VllmConfig) -> str:
    """The identity of the weights: "hub:COMMIT", "files:DIGEST", "dummy:SEED", or "declared:NAME".

    Raises `WeightsError` for weights that are not on this host's disk and were not declared.
    """
    hint = (
        "name them yourself, with one word wherever the same weights are loaded: `weights` of the "
        "model in region.yaml, or kv_connector_extra_config.weights"
    )
    declared = _declared(vllm_config, "weights")
    return declared or _identity(vllm_config, vllm_config.model_config, hint)


def draft_weights_identity(vllm_config: VllmConfig) -> str:
    """The identity of a drafter's weights, in the same form. Those of MTP are among the model's.
    Raises `WeightsError`.
    """
    model = vllm_config.model_config
    draft = vllm_config.speculative_config.draft_model_config
    if (str(draft.model), draft.revision) == (str(model.model), model.revision):
        return weights_identity(vllm_config)
    hint = (
        "name the drafter's weights yourself, with one word wherever the same ones are loaded: "
        "kv_connector_extra_config.draft_weights"
    )
    return _declared(vllm_config, "draft_weights") or _identity(vllm_config, draft, hint)


def _declared(vllm_config: VllmConfig, name: str) -> str:
    """What the operator says that the weights are; "" for nothing."""
    transfer = vllm_config.kv_transfer_config
    declared = transfer.kv_connector_extra_config.get(name) if transfer is not None else None
    if declared is None:
        return ""
    if not _DECLARED.fullmatch(str(declared)):
        raise WeightsError(f"kv_connector_extra_config.{name}: up to 64 of A-Z a-z 0-9 . _ : -")
    return f"declared:{declared}"


def _identity(vllm_config: VllmConfig, model: Any, hint: str) -> str:
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy:{model.seed}"
    is_in_files = load_format in _FILE_FORMATS or load_format in _OTHER_PATTERNS
    if not is_in_files or model.model_weights:  # the latter: in object storage
        raise WeightsError(f"weights of load format {load_format} cannot be identified; {hint}")
    folder = _folder(str(model.model), model.revision, vllm_config.load_config.download_dir)
    if folder is None:
        raise WeightsError(f"the weights of {model.model} are not on this host; {hint}")
    if (commit := _commit(folder)) is not None:
        return f"hub:{commit}"
    patterns = _OTHER_PATTERNS.get(load_format, _PATTERNS)
    begun_s = time.monotonic()
    digest = checkpoint_digest([folder] if folder.is_file() else _weight_files(folder, patterns))
    logger.info("weights %s, identified in %.2f s", digest, time.monotonic() - begun_s)
    return f"files:{digest}"


def processor_identity(vllm_config: VllmConfig) -> str:
    """The identity of the files that say how media become the encoder's input; "" where the hub's
    commit or nothing says it.
    """
    model = vllm_config.model_config
    folder = _folder(str(model.model), model.revision, vllm_config.load_config.download_dir)
    if folder is None or not folder.is_dir() or _commit(folder) is not None:
        return ""
    files = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    told = [(path.name, blake3(path.read_bytes()).hexdigest()) for path in files]
    return blake3(repr(told).encode()).hexdigest()[:32] if told else ""


def adapter_identity(path: str) -> str:
    """The identity of a LoRA adapter, in the form of `weights_identity`. A name on the hub has one
    only while the hub's client is offline. Raises `WeightsError`.
    """
    if not Path(path).expanduser().exists() and not constants.HF_HUB_OFFLINE:
        # vLLM's workers download the newest commit when they load the adapter, which may be another
        # one than the cache has at this time.
        raise WeightsError(f"{path} may change on the hub; give its directory, or HF_HUB_OFFLINE=1")
    folder = _folder(path, None, None)
    if folder is None:
        raise WeightsError(f"the adapter {path} is not on this host")
    if (commit := _commit(folder)) is not None:
        return f"hub:{commit}"
    files = _weight_files(folder, ("adapter_model.safetensors", "adapter_model.bin"))
    try:
        config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"the adapter {path} has no usable adapter_config.json") from error
    for name in _ADAPTER_PLACES:
        config.pop(name, None)
    told = checkpoint_digest(files).encode() + msgspec.json.encode(config, order="deterministic")
    return f"files:{blake3(told).hexdigest()[:32]}"


def adapter_settings(vllm_config: VllmConfig) -> str:
    """What vLLM's own settings change of what an adapter computes; "" where they change nothing."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    changes = []
    if lora.target_modules is not None:
        changes.append(f"target_modules={sorted(lora.target_modules)}")
    if str(lora.lora_dtype) not in ("auto", str(vllm_config.model_config.dtype)):
        changes.append(f"lora_dtype={lora.lora_dtype}")
    if lora.enable_moe_shared_loras:
        changes.append("enable_moe_shared_loras")
    return " ".join(changes)


class Adapters:
    """The identities of one engine's LoRA adapters. `paths` are those that it starts with, by name:
    they are identified once, here, and so as the engine loads them.
    """

    def __init__(self, paths: Mapping[str, str] | None = None, settings: str = "") -> None:
        """`settings`: `adapter_settings` of the engine."""
        self._settings = settings
        self._known: dict[tuple[int, str, str], str | None] = {}
        self._at_start = {
            (name, path): self._identified(name, path) for name, path in (paths or {}).items()
        }

    @property
    def told(self) -> dict[str, str]:
        """What others may know: the identities by name, without adapters that have none."""
        return {name: found for (name, _), found in self._at_start.items() if found is not None}

    def identity(self, lora_request: Any) -> str | None:
        """ "" without an adapter; None for one that cannot be identified, whose KVCache must not
        be shared.
        """
        if not lora_request:
            return ""
        if getattr(lora_request, "load_inplace", False):
            return None  # its content changes under one id
        key = (lora_request.lora_int_id, lora_request.lora_name, lora_request.lora_path)
        # The files may have changed since the engine read them, which it did at its start.
        if key[1:] in self._at_start:
            return self._at_start[key[1:]]
        if key not in self._known:
            if len(self._known) >= _MAX_ADAPTERS:
                self._known.clear()  # adapters come and go; each is identified again when asked for
            self._known[key] = self._identified(*key[1:])
        return self._known[key]

    def _identified(self, name: str, path: str) -> str | None:
        try:
            found = adapter_identity(path)
        except WeightsError as error:
            logger.warning("KVCache of adapter %s is not shared: %s", name, error)
            return None
        if self._settings:
            found += f"+{blake3(self._settings.encode()).hexdigest()[:16]}"
        return found


def _folder(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Where a model is on this host: itself a path, or a name on the hub."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(found)


def _commit(folder: Path) -> str | None:
    """The commit that the hub's client keeps in this folder, if it is one of its snapshots."""
    place = folder.resolve()
    is_snapshot = place.parent.name == "snapshots" and (place.parent.parent / "blobs").is_dir()
    return place.name if is_snapshot and _COMMIT.fullmatch(place.name) else None


def _weight_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of the first format that there are any of; those that an index leaves out, which
    are the same weights once more, are not among them.
    """
    for pattern in patterns:
        files = [path for path in folder.glob(pattern) if path.name not in _NO_WEIGHTS]
        if files:
            return _indexed(folder, files)
    raise WeightsError(f"no weights in {folder}")


def _indexed(folder: Path, files: list[Path]) -> list[Path]:
    try:
        index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError):
        return files
    names = set(index.weight_map.values())
    return [path for path in files if path.name in names] or files
