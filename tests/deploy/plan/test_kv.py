"""`prfaas plan kv`: tables with units, JSON, throughput and egress, errors with exit status 2."""

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
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
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


def test_json_has_units_in_its_keys(kimi: str) -> None:
    found = document(kimi)
    assert found["bytes_per_token"] == found["rank_bytes_per_token"] == 17_280
    state_bytes = 3 * 64 * 128 * 3 * 2 + 64 * 128 * 128 * 4
    assert found["fixed_bytes"] == 45 * state_bytes
    assert [item["num_tokens"] for item in found["lengths"]] == [1024, 8192, 32768, 131072]
    assert found["lengths"][2]["kv_bytes"] == 45 * state_bytes + 32768 * 17_280
    assert found["lengths"][2]["kind_bytes"] == {
        "mla": 32768 * 17_280,
        "recurrent": 45 * state_bytes,
    }
    assert [kind["num_layers"] for kind in found["kinds"]] == [15, 45]
    assert "prefill_s" not in found["lengths"][0]


def test_throughput_and_egress(kimi: str) -> None:
    """Equations 1 and 2 of the paper: Phi = S / T, egress = N / P * Phi."""
    found = document(kimi, "--lengths", "1K,32Ki", "--prefill-s", "0.5,1.84", "--gpus", "32")
    for item, time_s in zip(found["lengths"], (0.5, 1.84), strict=True):
        rate = item["kv_bytes"] * 8e-9 / time_s
        assert item["kv_gbit_per_s"] == pytest.approx(rate)
        assert item["egress_gbit_per_s"] == pytest.approx(4 * rate)
    assert found["lengths"][0]["num_tokens"] == 1000
    half = document(
        kimi, "--lengths", "1K", "--prefill-s", "1", "--gpus", "8", "--gpus-per-instance", "16"
    )
    item = half["lengths"][0]
    assert item["egress_gbit_per_s"] == pytest.approx(item["kv_gbit_per_s"] / 2)


def test_ranks_and_dtypes(kimi: str) -> None:
    found = document(kimi, "--tp", "8", "--dtype", "fp8", "--lengths", "1000")
    assert found["bytes_per_token"] == found["rank_bytes_per_token"] == 17_280 // 2
    assert found["fixed_bytes"] == 8 * found["rank_fixed_bytes"]
    assert (found["tp_size"], found["dtype"], found["kv_dtype"]) == (8, "bfloat16", "fp8")


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_name_their_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    options = ["--tp", "2", "--prefill-s", "1,2,3,4", "--gpus", "512"]
    result = run(app, [str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for text in ("GptOssForCausalLM", "24 of 24 layers", "sliding window", "the last 128 tokens"):
        assert text in words
    for unit in ("B/token", "MiB", "Gbit/s", "egress", "on a rank"):
        assert unit in result.output
    assert "24,576" in result.output
    assert "128Ki" in result.output
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lengths", "32KB"], "32Ki"),
        (["--prefill-s", "1,2"], "2 times for 4 lengths"),
        (["--prefill-s", "1,2,3,0"], "above zero"),
        (["--gpus", "8"], "--prefill-s"),
        (["--dtype", "int4"], "int4"),
        (["--mamba-cache-dtype", "fp8"], "fp8"),
        (["--tp", "0"], "--tp"),
    ],
)
def test_wrong_arguments(kimi: str, words: list[str], expected: str) -> None:
    result = run(app, [kimi, *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert expected in result.stderr


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
