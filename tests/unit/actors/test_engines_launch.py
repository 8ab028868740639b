"""Command lines, environments and the CPU stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actors.engines import ENGINE_KINDS, EngineOptions, launch_spec
from actors.engines.sglang import CPU_KV_TOKENS, unused_model_modules
from segue.errors import ConfigError


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    return EngineOptions(model_path=tmp_path, port=31000, log_file=tmp_path / "e.log", device="cpu", weight_version=4)


def value_of(argv: tuple[str, ...], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_unknown_kind_lists_the_choices(options: EngineOptions) -> None:
    assert ENGINE_KINDS == ("fake", "sglang")
    with pytest.raises(ConfigError, match=r"'vllm'; choose one of fake, sglang"):
        launch_spec("vllm", options)


def test_a_cpu_engine_is_bounded_and_sleeps_when_idle(options: EngineOptions) -> None:
    spec = launch_spec("sglang", options)
    assert "--sleep-on-idle" in spec.argv
    assert value_of(spec.argv, "--max-total-tokens") == str(CPU_KV_TOKENS)
    assert value_of(spec.argv, "--weight-version") == "4"
    assert spec.env["OMP_NUM_THREADS"] == "1"
    assert spec.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "--enable-return-routed-experts" not in spec.argv


def test_a_gpu_engine_has_none_of_the_cpu_shims(options: EngineOptions) -> None:
    spec = launch_spec("sglang", replace(options, device="cuda", memory_saver=True, return_routed_experts=True))
    assert value_of(spec.argv, "--device") == "cuda"
    assert "--enable-memory-saver" in spec.argv
    assert "--enable-return-routed-experts" in spec.argv
    assert not {"OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE"} & set(spec.env)
    assert "--max-total-tokens" not in spec.argv


def test_extra_arguments_come_last(options: EngineOptions) -> None:
    for kind in ENGINE_KINDS:
        spec = launch_spec(kind, replace(options, extra_args=("--port", "1")))
        assert spec.argv[-2:] == ("--port", "1")


def test_memory_cannot_be_given_back_on_a_cpu(options: EngineOptions) -> None:
    with pytest.raises(ConfigError, match=r"memory_saver.*device='cpu'"):
        launch_spec("sglang", replace(options, memory_saver=True))


def test_only_the_models_own_module_stays_enabled(options: EngineOptions) -> None:
    disabled = unused_model_modules(options.model_path)
    assert "qwen3_moe" not in disabled
    assert {"llama", "qwen2", "deepseek_v2"} <= set(disabled)


def test_an_architecture_that_no_module_defines_disables_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodysModel"]}))
    assert unused_model_modules(tmp_path) == ()


def test_a_folder_that_is_no_model_is_named(options: EngineOptions, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*config\.json"):
        launch_spec("sglang", replace(options, model_path=tmp_path / "nowhere"))


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50).stdout


def test_the_engine_package_imports_no_heavy_module() -> None:
    code = (
        "import sys, actors.engines, actors.engines.sglang, actors.engines.sglang_cpu, actors.engines.process;"
        "import actors.engines.http, actors.engines.fake.server;"
        "print(sorted({'torch', 'ray', 'sglang', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert run(code).strip() == "[]"


@pytest.mark.slow
def test_the_kernel_stand_in_writes_slots_and_refuses_the_rest() -> None:
    code = """
import os; os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from actors.engines.sglang_cpu import early
early()
import torch, sgl_kernel
table = torch.zeros(3, 6, dtype=torch.int32)
sgl_kernel.assign_req_to_token_pool_cpu(
    torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 2]), torch.tensor([7, 8, 9, 10]), 6)
assert table.tolist() == [[9, 10, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]], table
try:
    sgl_kernel.fused_experts(1)
except NotImplementedError as error:
    print(error)
"""
    assert "sgl_kernel.fused_experts has no CPU version" in run(code)


def test_without_the_switch_nothing_is_put_in_place() -> None:
    code = (
        "import sys; from actors.engines.sglang_cpu import early, plugin; early(); plugin();"
        "print('sgl_kernel' in sys.modules, 'sglang' in sys.modules)"
    )
    assert run(code).strip() == "False False"
