"""A real SGLang engine on a CPU that speaks the session rig's ChatML, and what it says of given tokens by itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines_under_test import ROUTES, START_DEADLINE_S, engine_options
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from session_server_rig import write_model
from tiny_models import make_tiny_moe

from actors.engines import launch_spec
from segue.wire.engine import GenerateRequest, SamplingParams, decode_answer, encode_request


@dataclass(frozen=True)
class RealEngine:
    url: str
    model: Path

    def post(self, path: str, body: dict[str, Any] | bytes) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def set_version(self, version: int) -> None:
        self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def rows(self, ids: list[int]) -> NDArray[np.int32]:
        """int32[len(ids), layers, top_k]: the routes of all these tokens, fed at once with nothing cached."""
        self.post("/flush_cache?timeout=10", {})
        request = GenerateRequest(
            rid=f"oracle-{time.monotonic_ns():020d}", input_ids=ids, return_routed_experts=True,
            sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0),
        )  # fmt: skip
        answer = decode_answer(self.post("/generate", encode_request(request)), request, routes=ROUTES)
        assert answer.rows is not None
        return answer.rows

    def logprobs(self, ids: list[int], vocabulary: int = 64) -> NDArray[np.float64]:
        """float64[len(ids), vocabulary]: log-probs of every token at every place but the first."""
        body = {
            "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True,
            "logprob_start_len": 0, "top_logprobs_num": vocabulary,
        }  # fmt: skip
        found = json.loads(self.post("/generate", body))["meta_info"]["input_top_logprobs"]
        table = np.full((len(ids), vocabulary), np.nan)
        for place, entries in enumerate(found):
            for value, token, _ in entries or ():
                table[place, token] = value
        return table


@contextlib.contextmanager
def real_engine(folder: Path) -> Iterator[RealEngine]:
    model = make_tiny_moe(folder / "model", vocab_size=64, seed=0)
    sizes = json.loads((model / "config.json").read_text())
    write_model(model)
    (model / "config.json").write_text(json.dumps({**sizes, "eos_token_id": 2}))
    _never_end(model)
    spec = launch_spec("sglang", engine_options("sglang", model, folder / "engine.log"))
    with (
        spec.log_file.open("ab") as log,
        subprocess.Popen(spec.argv, env=os.environ | spec.env, stdout=log, stderr=log) as process,
    ):
        try:
            _wait(spec.url, process, spec.log_file)
            yield RealEngine(spec.url, model)
        finally:
            process.kill()


def _never_end(model: Path) -> None:
    """Make the end of an answer all but impossible, so that a turn is as long as it may be. (A min_tokens would do it
    too, but by changing what log-probs are normalised over.) Every hidden state gets one large component, and that
    token's logit hangs on it."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 3.0
    tensors["lm_head.weight"][2] = 0.0
    tensors["lm_head.weight"][2, 0] = -5.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise AssertionError(f"the engine ended: {log.read_text()[-2000:]}")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url + "/health", timeout=2):
            return
        time.sleep(0.2)
    raise AssertionError(f"the engine did not start: {log.read_text()[-2000:]}")
