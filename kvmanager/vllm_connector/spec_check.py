"""Computes what vLLM itself would allocate for a config.json, to check `kvmanager.hf_config`.

It builds the model's modules on torch's meta device, without weights and almost without memory, and
asks every layer for its KV cache spec, as vLLM's model runner does. Knows vLLM, nothing of
transfers.

vLLM leaves process-wide state behind (logging, process groups, default dtypes), so run it in a
process of its own,

    python -m kvmanager.vllm_connector.spec_check CONFIG --out FILE --dtype bfloat16

which writes `{"layers": [...]}`, or `{"error": why}` when vLLM cannot build the model here.
"""

import argparse
import importlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from transformers import AutoConfig, PretrainedConfig
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.worker.utils import customize_attention_spec

from kvmanager.hf_config import LayerKv
from kvmanager.layout import LayoutError
from kvmanager.vllm_connector.engine_layout import data_bytes, kind_of

_MAX_MODEL_LEN_TOKENS = 2048
"""Bounds caches that are not built here. A page's bytes for each token do not depend on it."""

# Fields that describe how weights are stored, or name code that does not lie beside the file.
_LEFT_OUT = ("auto_map", "quantization_config", "compression_config")


class EngineSpecError(RuntimeError):
    """The installed vLLM cannot build the model here; the text says why."""


def engine_kv(
    path: Path,
    *,
    dtype: str,
    kv_cache_dtype: str = "auto",
    tp_size: int = 1,
    mamba_cache_dtype: str = "auto",
    mamba_ssm_cache_dtype: str = "auto",
) -> tuple[LayerKv, ...]:
    """The cache of every layer by vLLM's own specs, in layer order, padding left out.

    `path` is a config.json or a directory that has one; weights and tokenizer are not looked for,
    and a quantisation of the weights is left aside. The dtypes are vLLM's options. Raises
    EngineSpecError, also for a `tp_size` other than 1: each rank would need a process.
    """
    if tp_size != 1:
        raise EngineSpecError(f"only one tensor-parallel rank can be built here, not {tp_size}")
    file = path / "config.json" if path.is_dir() else path
    with TemporaryDirectory(prefix="prfaas-spec-") as scratch:
        try:
            _write_config(file, Path(scratch) / "config.json")
            arguments = EngineArgs(
                model=scratch,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=cast(Any, dtype),
                kv_cache_dtype=cast(Any, kv_cache_dtype),
                mamba_cache_dtype=cast(Any, mamba_cache_dtype),
                mamba_ssm_cache_dtype=cast(Any, mamba_ssm_cache_dtype),
                max_model_len=_MAX_MODEL_LEN_TOKENS,
                max_num_batched_tokens=_MAX_MODEL_LEN_TOKENS,
                enable_prefix_caching=False,
                enforce_eager=True,
            )
            config = arguments.create_engine_config()
            with _one_rank(config, Path(scratch) / "rendezvous"):
                return _layers(config)
        # A model's code may lack anything on this machine: kernels, operators, fields.
        except Exception as error:
            cause = _import_error(Path(scratch) / "config.json") or error
            raise EngineSpecError(f"vLLM cannot build it here: {_reason(cause)}") from error


def _layers(config: VllmConfig) -> tuple[LayerKv, ...]:
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        initialize_model(config)
    modules = get_layers_from_vllm_config(config, cast(type[Any], AttentionLayerBase))
    layers = []
    for name, module in modules.items():
        # Such a layer reads the cache of another one and has none itself.
        if getattr(module, "kv_sharing_target_layer_name", None):
            continue
        spec = module.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(module.get_attn_backend(), spec)
        if spec is not None:
            layers.append(_layer(extract_layer_index(name), spec))
    return tuple(sorted(layers, key=lambda layer: layer.index))


def _layer(index: int, spec: KVCacheSpec) -> LayerKv:
    if isinstance(spec, MambaSpec):
        nbytes = data_bytes(spec)
        return LayerKv(index, kind_of(spec), fixed_bytes=nbytes, rank_fixed_bytes=nbytes)
    per_token, rest = divmod(data_bytes(spec), spec.block_size)
    if rest:
        raise LayoutError(f"layer {index}: {data_bytes(spec)} B for {spec.block_size} tokens")
    window_tokens = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    return LayerKv(
        index,
        kind_of(spec),
        per_token,
        window_tokens=window_tokens,
        rank_bytes_per_token=per_token,
    )


@contextmanager
def _one_rank(config: VllmConfig, rendezvous: Path) -> Iterator[None]:
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def _write_config(source: Path, target: Path) -> None:
    config = json.loads(source.read_text(encoding="utf-8"))
    for name in _LEFT_OUT:
        config.pop(name, None)
    target.write_text(json.dumps(config), encoding="utf-8")
    _register(str(config.get("model_type")))


def _register(model_type: str) -> None:
    """A bare config class for types whose class comes with the weights: attributes are enough."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if model_type not in CONFIG_MAPPING and model_type not in _CONFIG_REGISTRY:
        bare = type("BareConfig", (PretrainedConfig,), {"model_type": model_type})
        AutoConfig.register(model_type, bare)


def _import_error(file: Path) -> ImportError | None:
    """Why the model's code does not load here; vLLM's own message only says that it does not."""
    for name in json.loads(file.read_text(encoding="utf-8")).get("architectures") or ():
        model = ModelRegistry.models.get(name)
        try:
            importlib.import_module(getattr(model, "module_name", "vllm"))
        except ImportError as error:
            return error
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: write the layers or the error as JSON. Exit status 0 in both cases."""
    parser = argparse.ArgumentParser(prog="python -m kvmanager.vllm_connector.spec_check")
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    for name in ("kv-cache-dtype", "mamba-cache-dtype", "mamba-ssm-cache-dtype"):
        parser.add_argument(f"--{name}", default="auto")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    try:
        layers = engine_kv(
            options.config,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            mamba_cache_dtype=options.mamba_cache_dtype,
            mamba_ssm_cache_dtype=options.mamba_ssm_cache_dtype,
        )
        result: dict[str, Any] = {"layers": [asdict(layer) for layer in layers]}
    except EngineSpecError as error:
        result = {"error": str(error)}
    options.out.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
