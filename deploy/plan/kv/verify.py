"""Asks the installed vLLM what it would allocate, in a process of its own, and compares.

It knows the command line of `kvmanager.vllm_connector.spec_check`, and never imports vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.processes import module_argv, module_environment
from kvmanager.hf_config import LayerKv, ModelKv, differences
from kvmanager.layout import KVKind

_MODULE = "kvmanager.vllm_connector.spec_check"
_TIMEOUT_S = 600.0
# The process must neither look for files at a hub nor report anything.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a comparison at one rank. `reason` says why vLLM gave no answer; "" if it
    did.
    """

    num_layers: int = 0
    differences: tuple[str, ...] = ()
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason and not self.differences

    def words(self) -> str:
        """The result as a sentence."""
        if self.reason:
            return f"not verified: {self.reason}"
        if self.differences:
            return "\n  ".join(["vLLM disagrees (at 1 rank):", *self.differences])
        return f"verified at 1 rank: vLLM has the same bytes for each of {self.num_layers} layers"

    def as_json(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return {
            "ok": self.ok,
            "tp_size": 1,
            "num_layers": self.num_layers,
            "differences": list(self.differences),
            "reason": self.reason,
        }


def verify(file: Path, model: ModelKv, *, mamba_cache: str, mamba_ssm_cache: str) -> Verification:
    """Compare `model`, read from `file` for one rank, with vLLM's own specs, layer by layer.

    It starts a process and waits for it, usually half a minute.
    """
    if importlib.util.find_spec("vllm") is None:
        return Verification(reason="vLLM is not installed here")
    options = {
        "--dtype": model.dtype,
        "--kv-cache-dtype": "fp8" if model.kv_dtype == "fp8" else "auto",
        "--mamba-cache-dtype": mamba_cache,
        "--mamba-ssm-cache-dtype": mamba_ssm_cache,
    }
    with TemporaryDirectory(prefix="prfaas-verify-") as scratch:
        out = Path(scratch) / "layers.json"
        words = [word for pair in options.items() for word in pair]
        argv = module_argv(_MODULE, str(file.absolute()), "--out", str(out), *words)
        try:
            done = subprocess.run(
                argv,
                env=module_environment(os.environ) | _ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Verification(reason=f"vLLM was not done after {_TIMEOUT_S:.0f} s")
        # Without the file, the process died before it could write even an error.
        if not out.exists():
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            return Verification(reason=f"vLLM ended with status {done.returncode}: {last}")
        return compare(model, json.loads(out.read_text()))


def compare(model: ModelKv, answer: dict[str, Any]) -> Verification:
    """Compare the answer of `spec_check` with the model that it was asked about."""
    if "error" in answer:
        return Verification(reason=f"{model.name}: {answer['error']}")
    layers = [LayerKv(**(item | {"kind": KVKind(item["kind"])})) for item in answer["layers"]]
    return Verification(len(layers), tuple(differences(model.layers, layers)))
