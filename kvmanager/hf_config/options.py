"""Chooses the data type of each part of a cache, by vLLM's options and rules.

It knows data types and tensor parallelism, and does not know layers.
"""

from dataclasses import dataclass
from typing import Final

from kvmanager.hf_config.fields import ConfigError, Fields

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
MODEL_DTYPES: Final = ("bfloat16", "float16", "float32")
CACHE_DTYPES: Final = ("auto", *MODEL_DTYPES, "fp8")
STATE_DTYPES: Final = ("auto", *MODEL_DTYPES)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """An operator's choices. Raises ValueError for names that vLLM does not have.

    `dtype` auto is the config's own (vLLM's auto serves a float32 checkpoint in 16 bits), and for
    attention layers what its `quantization_config` says of the KV cache. bfloat16, float16 and
    float32 are for the whole model (vLLM's `--dtype`). fp8 is one byte for each value in attention
    layers (`--kv-cache-dtype fp8`); recurrent states keep the model's dtype. `mamba_cache_dtype`
    and `mamba_ssm_cache_dtype` are vLLM's options of these names: all recurrent state, and the
    state without the convolution's.
    """

    dtype: str = "auto"
    tp_size: int = 1
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, CACHE_DTYPES),
            ("mamba_cache_dtype", self.mamba_cache_dtype, STATE_DTYPES),
            ("mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, STATE_DTYPES),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
        if self.tp_size < 1:
            raise ValueError(f"tp_size {self.tp_size} must be at least 1")


@dataclass(frozen=True, slots=True)
class CacheDtypes:
    """The dtypes that follow from options and config. `ssm` None: each family's rule applies."""

    model: str
    kv: str
    conv: str
    ssm: str | None


def resolve_dtypes(options: CacheOptions, *levels: Fields) -> CacheDtypes:
    """What `options` mean for the config whose levels are given, innermost first.

    Raises ConfigError when neither the options nor the config name the model's dtype, and for a
    quantised KV cache whose size is not known here.
    """
    model = options.dtype if options.dtype in MODEL_DTYPES else _config_dtype(levels)
    kv = model
    if options.dtype == "fp8" or (options.dtype == "auto" and _has_fp8_kv(levels)):
        kv = "fp8"
    conv = model if options.mamba_cache_dtype == "auto" else options.mamba_cache_dtype
    ssm = None if options.mamba_ssm_cache_dtype == "auto" else options.mamba_ssm_cache_dtype
    return CacheDtypes(model=model, kv=kv, conv=conv, ssm=ssm)


def _config_dtype(levels: tuple[Fields, ...]) -> str:
    for fields in levels:
        for name in ("dtype", "torch_dtype"):
            if not fields.has(name):
                continue
            text = str(fields.value(name)).removeprefix("torch.")
            if text not in MODEL_DTYPES:
                raise fields.error(name, f"known here: {', '.join(MODEL_DTYPES)}")
            return text
    raise ConfigError("dtype", None, "say --dtype bfloat16, or write it into the file")


def _has_fp8_kv(levels: tuple[Fields, ...]) -> bool:
    """Whether vLLM would keep this checkpoint's KV cache in FP8 of its own accord."""
    for fields in levels:
        if not fields.has("quantization_config"):
            continue
        quantization = fields.inner("quantization_config")
        is_modelopt = str(quantization.value("quant_method")).startswith("modelopt")
        if quantization.has("quantization"):  # ModelOpt's older files
            quantization = quantization.inner("quantization")
            is_modelopt = True
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            # AutoFP8's "static" is a word about scales, which vLLM does not read as a type.
            is_word = isinstance(quantization.value(name), str)
            if name == "kv_cache_scheme" and is_word and not is_modelopt:
                continue
            if quantization.has(name):
                return _is_fp8(quantization, name)
    return False


def _is_fp8(quantization: Fields, name: str) -> bool:
    value = quantization.value(name)
    if isinstance(value, dict):
        fp8 = value.get("num_bits") == 8 and value.get("type") == "float"
    else:
        fp8 = str(value).lower() == "fp8"
    if not fp8:
        raise quantization.error(
            name, "only FP8 is known here; say --dtype bfloat16 if the cache is not quantised"
        )
    return True
