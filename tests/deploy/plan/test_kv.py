"""`prfaas plan kv`: sizes of caches, configurations that are none, verification. `tests/golden` has
its tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from deploy.lab.demo.tiny_specs import MODELS
from deploy.plan.kv import verify as kv_verify
from deploy.plan.kv.cli import kv_command
from deploy.plan.kv.verify import Verification, compare
from kvmanager.hf_config import read_model_kv

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command("kv")(kv_command)
run = CliRunner().invoke

KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": list(range(4, 61, 4)),
        "kda_layers": [layer for layer in range(1, 61) if layer % 4],
        "num_heads": 64,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("config", "beside", "bytes_per_token"),
    [
        # ModelOpt's older releases write what is quantised into a file of its own.
        (LLAMA, {"quantization": {"kv_cache_quant_algo": "FP8"}}, 65_536),
        (LLAMA, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, 131_072),
        # vLLM reads that file only where config.json says nothing.
        (
            LLAMA | {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
            {"quantization": {"kv_cache_quant_algo": "FP8"}},
            131_072,
        ),
        # Granite 4.0 micro is of a hybrid's type, and all of its layers are attention.
        (
            LLAMA
            | {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"}
            | {"layer_types": ["attention"] * 40, "num_hidden_layers": 40, "mamba_d_state": 128},
            None,
            163_840,
        ),
    ],
)
def test_the_cache_is_as_large_as_vllm_makes_it(
    tmp_path: Path, config: dict[str, Any], beside: Any, bytes_per_token: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    for path in (tmp_path, tmp_path / "config.json"):
        result = run(app, [str(path), "--json"])
        assert json.loads(result.output)["bytes_per_token"] == bytes_per_token


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (json.dumps(LLAMA | {"num_hidden_layers": 10**9}), "num_hidden_layers is 1000000000: more"),
        (json.dumps(LLAMA | {"head_dim": 10**400}), "head_dim is 1000"),
        (json.dumps(LLAMA | {"head_dim": 0})[:-1] + ', "x": ' + "1" * 5000 + "}", "not JSON"),
        ('{"x":' * 100_000, "not JSON"),
        ('{"x":' * 200 + "1" + "}" * 200, "nested more than 64 deep"),
        ('{"layer_types": ' + "[" * 60 + "]" * 60 + "}", "dtype missing"),
    ],
)
def test_numbers_and_nesting_beyond_reason_are_refused_at_once(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = run(app, [str(path)])
    assert result.exit_code == 2
    assert told in result.output


@pytest.fixture
def kimi(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KIMI))
    return str(path)


def document(*words: str) -> dict[str, Any]:
    result = run(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] is True
    return dict(found)


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    windows = Path(__file__).parents[2] / "golden" / "plans" / "windows.json"
    options = ["--tp", "2", "--prefill-s", "1,2,3,4", "--gpus", "512"]
    result = run(app, [str(windows), *options])
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    assert max(len(line) for line in result.output.splitlines()) <= columns


def test_defaults_that_were_assumed_are_told(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {"model_type": "gemma3_text", "dtype": "bfloat16", "num_hidden_layers": 34}
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    result = run(app, [str(path)])
    assert result.exit_code == 0, result.output
    assert "assumed: text_config.sliding_window_pattern = 6" in result.output


# --- errors ---------------------------------------------------------------------------------------


def test_a_field_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**KIMI, "kv_lora_rank": None}))
    result = run(app, [str(path)])
    assert result.exit_code == 2
    assert result.stderr == (
        f"{path}: kv_lora_rank missing: a whole number of at least 1 is needed\n"
    )
    result = run(app, [str(path), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"].startswith("kv_lora_rank missing")


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), ("{", "not JSON"), ("[]", "not a JSON object")]
)
def test_files_that_are_no_config(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    result = run(app, [str(path)])
    assert result.exit_code == 2
    assert f"{path}: {words}" in result.stderr
    assert "give a model's config.json" in result.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import typer\n"
        "from typer.testing import CliRunner\n"
        "from deploy.plan.kv.cli import kv_command\n"
        "app = typer.Typer(rich_markup_mode=None)\n"
        "app.command()(kv_command)\n"
        "assert 'config.json' in CliRunner().invoke(app, ['--help']).output\n"
        "heavy = {'rich.table', 'numpy', 'msgspec', 'torch', 'vllm', 'kvmanager'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- verification, with made-up answers of vLLM ---------------------------------------------------


def answer(**changes: Any) -> dict[str, Any]:
    layers = [asdict(layer) for layer in read_model_kv(KIMI).layers]
    layers[3] |= changes
    return {"layers": json.loads(json.dumps(layers))}


def test_comparing_with_the_engine() -> None:
    model = read_model_kv(KIMI)
    same = compare(model, answer())
    assert same.ok
    assert "each of 60 layers" in same.words()
    other = compare(model, answer(bytes_per_token=656, rank_bytes_per_token=656))
    assert not other.ok
    assert "layer 3: mla 1152 B/token, the engine has mla 656 B/token" in other.words()
    failed = compare(model, {"error": "no such kernel"})
    assert not failed.ok
    assert failed.words() == "not verified: KimiLinearForCausalLM: no such kernel"


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (Verification(num_layers=60), 0, "same bytes for each of 60 layers"),
        (Verification(60, ("layer 1: ...",)), 1, "vLLM disagrees"),
        (Verification(reason="no GPU"), 1, "not verified: no GPU"),
    ],
)
def test_verification_decides_the_status(
    kimi: str, monkeypatch: pytest.MonkeyPatch, outcome: Verification, status: int, words: str
) -> None:
    monkeypatch.setattr(kv_verify, "verify", lambda *_, **__: outcome)
    result = run(app, [kimi, "--verify", "--tp", "2"])
    assert (result.exit_code, words in result.output) == (status, True)
    result = run(app, [kimi, "--verify", "--json"])
    assert result.exit_code == status
    assert json.loads(result.stdout)["verification"]["ok"] is (status == 0)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["qwen3-next-tiny", "mimo-v2-tiny"])
def test_the_installed_vllm_agrees(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(MODELS[name].config)))
    found = document(str(path), "--mamba-ssm-cache-dtype", "float32", "--verify")
    assert found["verification"] == {
        "ok": True,
        "tp_size": 1,
        "num_layers": 6,
        "differences": [],
        "reason": "",
    }
