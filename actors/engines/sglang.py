"""SGLang as a child process: the command line and environment for a CPU or a GPU.

Invariant: everything is decided here from `EngineOptions` and the model's config.json, without importing SGLang.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

from actors.device import on_accelerator
from actors.engines.options import EngineOptions, LaunchSpec
from actors.engines.sglang_cpu import CPU_SWITCH
from segue.errors import ConfigError

CPU_KV_TOKENS = 32768


def launch_spec(options: EngineOptions) -> LaunchSpec:
    """The command that starts SGLang; ConfigError for what the device cannot do or a folder that is no model."""
    cpu = not on_accelerator(options.device)
    if cpu and options.memory_saver:
        raise ConfigError("memory_saver gives back GPU memory and cannot be had with device='cpu'; switch it off")
    argv = (sys.executable, "-m", "actors.engines.sglang_launch", *_common_args(options))
    argv += _cpu_args(options) if cpu else _gpu_args(options)
    return LaunchSpec((*argv, *options.extra_args), options.url, options.log_file, _environment(options, cpu))


def _common_args(options: EngineOptions) -> tuple[str, ...]:
    args = {
        "--model-path": options.model_path,
        "--host": options.host,
        "--port": options.port,
        "--dtype": options.dtype,
        "--weight-version": options.weight_version,
        "--tp-size": options.tp_size,
        "--max-running-requests": options.max_running_requests,
        "--mem-fraction-static": options.mem_fraction_static,
        "--context-length": options.context_length,
        "--random-seed": options.random_seed,
        # One line per request, on the path of every turn, is noise at best.
        "--log-level-http": "warning",
    }
    flags = ["--skip-server-warmup"]  # the owner's probe is the warm-up
    if options.return_routed_experts:
        flags.append("--enable-return-routed-experts")
    return (*(str(part) for item in args.items() if item[1] is not None for part in item), *flags)


def _cpu_args(options: EngineOptions) -> tuple[str, ...]:
    return (
        *("--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none"),
        *("--max-total-tokens", str(options.max_total_tokens or CPU_KV_TOKENS)),
        # Without it the scheduler spins a whole core, idle and paused alike.
        "--sleep-on-idle",
    )


def _gpu_args(options: EngineOptions) -> tuple[str, ...]:
    args: tuple[str, ...] = ("--device", "cuda")
    if options.max_total_tokens is not None:
        args += ("--max-total-tokens", str(options.max_total_tokens))
    return (*args, "--enable-memory-saver") if options.memory_saver else args


def _environment(options: EngineOptions, cpu: bool) -> dict[str, str]:
    env = {
        # /health says that the server runs, paused or not; /health_generate (one token, >= 1 s) that it generates.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Longer than any client keeps an idle connection, so that a turn never meets one closed under it.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "120",
        "HF_HUB_OFFLINE": "1",
        # Compiling some 5000 files anew costs more than everything else at start; "" switches the switch off.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    if cpu:
        # Two OpenMP threads spin against each other and against the HTTP process: ten times slower at one request.
        env |= {CPU_SWITCH: "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if "PYTHONPATH" not in options.env:  # an engine with a site of its own: what is in it cannot be seen from here
        env["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(unused_model_modules(options.model_path))
    return env | dict(options.env)


def unused_model_modules(model_path: Path) -> tuple[str, ...]:
    """Names of SGLang's model modules that do not define the model's architecture; importing them all costs half a
    minute of CPU. Empty if no module defines it: SGLang then looks for itself."""
    architecture = read_architecture(model_path)
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ConfigError("SGLang is not installed; install the extra 'engine'")
    defines = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    files = sorted((Path(spec.origin).parent / "srt" / "models").glob("*.py"))
    used = {file.stem for file in files if defines.search(file.read_text())}
    return tuple(file.stem for file in files if file.stem not in used) if used else ()


def read_architecture(model_path: Path) -> str:
    """`architectures[0]` of a model folder's config.json."""
    try:
        return str(json.loads((model_path / "config.json").read_bytes())["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"model_path {model_path} names no architecture in a config.json: {error!r}") from error
