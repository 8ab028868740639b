"""The fake engine's functions, so that what tests read off its answers means what they think."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tiny_models import make_tiny_moe

from actors.engines.fake import weights
from actors.engines.fake.model import FakeModel, mix, model_of
from actors.engines.fake.server import FakeEngine, FakeOptions
from actors.engines.http import EngineControl
from segue.errors import EngineError, EngineUnavailable

MODEL = FakeModel(vocab_size=50, layers=3, top_k=2, experts=6, eos_id=7, eos_p=0.2)


def test_the_next_token_depends_on_the_context_and_not_on_where_it_was_cut() -> None:
    whole = MODEL.state_of([3, 4, 5, 6])
    assert mix(mix(MODEL.state_of([3, 4]), 5), 6) == whole
    assert MODEL.state_of([3, 4, 6, 5]) != whole


def test_tokens_stay_in_the_vocabulary_and_end_as_often_as_asked() -> None:
    tokens = [MODEL.next_token(MODEL.state_of([i])) for i in range(4000)]
    assert set(tokens) == set(range(50))
    assert tokens.count(7) / 4000 == pytest.approx(0.2, abs=0.03)
    assert all(MODEL.next_token(MODEL.state_of([i]), may_end=False) != 7 for i in range(500))


def test_rows_depend_on_token_position_and_version_alone() -> None:
    rows = MODEL.rows([5, 6, 7, 5], [0, 1, 2, 3], [1, 1, 1, 2])
    assert rows.shape == (4, 3, 2)
    assert rows.dtype == np.int32
    assert np.array_equal(MODEL.rows([7, 5], [2, 3], [1, 2]), rows[2:])
    many = MODEL.rows(list(range(50)), list(range(50)), [3] * 50)
    assert set(many.ravel()) == set(range(6))
    assert (many[..., 0] != many[..., 1]).all()
    assert not np.array_equal(many, MODEL.rows(list(range(50)), list(range(50)), [4] * 50))


def test_kept_sets_hold_their_token() -> None:
    for i in range(100):
        kept = MODEL.kept(i % 50, MODEL.state_of([i]), 5)
        assert len(set(kept)) == 5
        assert i % 50 in kept


def test_sizes_come_from_the_models_config_unless_given(tmp_path: Path) -> None:
    make_tiny_moe(tmp_path, vocab_size=80)
    model = model_of(tmp_path, layers=9, seed=None)
    assert (model.vocab_size, model.layers, model.experts, model.top_k, model.eos_id) == (80, 9, 8, 2, 1)


@pytest.fixture(scope="module")
def torch_tensors() -> dict[str, object]:
    import torch

    return {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "c": torch.arange(12, dtype=torch.int64).reshape(3, 4).T[1:],
    }


@pytest.mark.slow
def test_pickled_tensors_are_read_without_torch(torch_tensors: dict[str, object]) -> None:
    read = weights.from_pickle(pickle.dumps(list(torch_tensors.items())), None)
    assert (read["a"].dtype, read["a"].shape) == ("float32", (2, 3))
    assert read["a"].data == np.arange(6, dtype="<f4").tobytes()
    assert (read["b"].dtype, read["b"].data) == ("bfloat16", b"\x80\x3f" * 4)
    assert read["c"].data == np.arange(12).reshape(3, 4).T[1:].tobytes()


@pytest.mark.slow
def test_a_flattened_bucket_gives_the_same_tensors(torch_tensors: dict[str, object]) -> None:
    import torch

    flat, entries, start = [], [], 0
    for name, tensor in torch_tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)  # type: ignore[attr-defined]
        end = start + raw.numel()
        shape, dtype = tensor.shape, tensor.dtype  # type: ignore[attr-defined]
        entries.append(SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end))
        flat.append(raw)
        start = end
    bucket = pickle.dumps({"flattened_tensor": torch.cat(flat), "metadata": entries})
    assert weights.from_pickle(bucket, "flattened_bucket") == weights.from_pickle(
        pickle.dumps(list(torch_tensors.items())), None
    )


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 + 1",)


@pytest.mark.parametrize("payload", [pickle.dumps([("a", Evil())]), b"junk", b"", pickle.dumps([("a", 3)])])
def test_a_payload_that_is_no_tensors_is_refused(payload: bytes) -> None:
    with pytest.raises(weights.WeightsRefused):
        weights.from_pickle(payload, None)


def test_checksums_fuse_and_pad_as_the_engine_does() -> None:
    def tensor(fill: int, rows: int = 2) -> weights.Tensor:
        return weights.Tensor("uint8", (rows, 1), bytes([fill] * rows))

    layer = "model.layers.0"
    tensors = {
        f"{layer}.self_attn.v_proj.weight": tensor(3),
        f"{layer}.self_attn.q_proj.weight": tensor(1),
        f"{layer}.self_attn.k_proj.weight": tensor(2),
        f"{layer}.mlp.experts.10.up_proj.weight": tensor(8),
        f"{layer}.mlp.experts.10.gate_proj.weight": tensor(7),
        f"{layer}.mlp.experts.2.gate_proj.weight": tensor(5),
        f"{layer}.mlp.experts.2.up_proj.weight": tensor(6),
        "lm_head.weight": tensor(9),
    }
    by_hand = {
        f"{layer}.self_attn.qkv_proj.weight": bytes([1, 1, 2, 2, 3, 3]),
        f"{layer}.mlp.experts.w13_weight": bytes([5, 5, 6, 6, 7, 7, 8, 8]),
        "lm_head.weight": bytes([9, 9] + [0] * 62),
    }
    sums = weights.checksums(tensors)
    assert set(sums) == set(by_hand)
    assert sums == {name: hashlib.sha256(data).hexdigest()[:16] for name, data in by_hand.items()}


async def test_what_would_kill_the_real_engine_is_refused(tmp_path: Path) -> None:
    async with FakeEngine(FakeOptions(model_path=tmp_path, model=MODEL)) as engine, aiohttp.ClientSession() as http:

        async def post(path: str, body: object) -> tuple[int, str]:
            async with http.post(engine.url + path, json=body) as answer:
                return answer.status, await answer.text()

        status, text = await post("/generate", {"input_ids": [3, 50], "sampling_params": {}})
        assert (status, "[0, 50)" in text) == (400, True)
        status, text = await post("/resume_memory_occupation", {"tags": ["weights"]})
        assert (status, "weights" in text) == (400, True)
        status, text = await post("/update_weights_from_disk", {"model_path": str(tmp_path)})
        assert (status, "safetensors" in text) == (400, True)


async def test_two_requests_of_one_prompt_differ_only_if_asked(tmp_path: Path) -> None:
    async def answers(vary: bool) -> set[str]:
        options = FakeOptions(model_path=tmp_path, model=MODEL, vary_by_rid=vary)
        async with FakeEngine(options) as engine, aiohttp.ClientSession() as http:
            found = set()
            for rid in ("a" * 8, "b" * 8):
                body = {"rid": rid, "input_ids": [1], "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
                async with http.post(engine.url + "/generate", json=body) as answer:
                    found.add(str((await answer.json())["output_ids"]))
            return found

    assert len(await answers(False)) == 1
    assert len(await answers(True)) == 2


async def test_control_names_the_engine_that_does_not_answer() -> None:
    async with EngineControl("http://127.0.0.1:9", name="e3", timeout_s=2) as control:
        assert not await control.health()
        with pytest.raises(EngineUnavailable, match="engine e3 /model_info"):
            await control.info()


async def test_control_that_was_not_entered_says_so() -> None:
    with pytest.raises(EngineError, match="not entered"):
        await EngineControl("http://127.0.0.1:9", name="e3").info()


async def test_an_older_engine_has_no_weight_sessions() -> None:
    def says(body: dict[str, object]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            return web.json_response(body)

        return handler

    app = web.Application()
    app.router.add_get("/model_info", says({"model_path": "m", "weight_version": "default"}))
    app.router.add_get("/server_info", says({"version": "0.5.17"}))
    app.router.add_post("/generate", says({"meta_info": {"weight_version": "default"}}))
    async with (
        TestServer(app) as server,
        EngineControl(str(server.make_url("")).rstrip("/"), name="old", start_version=3) as control,
    ):
        await control.begin()
        await control.end()
        capabilities = await control.probe()
        assert not capabilities.begin_end
        assert not capabilities.weight_versions
        assert (await control.info()).weight_version == 3
