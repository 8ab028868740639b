"""The model against transformers, and its weights against their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.errors import ConfigError, TrainerError
from training.megatron import compat, hf
from training.megatron.attention import packed_params, plan_segments
from training.megatron.model import Policy
from training.megatron.shape import read_shape

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "llama3_rope", "qwen2_tied", "qwen3", "qwen3_moe", "qwen3_moe_mixed"]
LENGTHS = (5, 17, 30, 1, 9, 40)
Folders = Callable[[str], Path]


def load(folder: Path, dtype: str = "float32") -> Policy:
    compat.init_single_process(0)
    policy = Policy(read_shape(folder), dtype)
    hf.load(dict(policy.gpt.named_parameters()), policy.shape, hf.read_folder(folder))
    return policy


def token_lists() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 64, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_transformers(model_folder: Folders, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = model_folder(family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = token_lists()
    with torch.no_grad():
        ours = load(folder)(torch.cat(tokens), packed_params(LENGTHS, torch.device("cpu")))
        theirs = torch.cat([reference(t.unsqueeze(0)).logits[0] for t in tokens])
    assert theirs.abs().max() > 1, "a reference that says nothing proves nothing"
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logits_do_not_depend_on_the_neighbours_in_a_pack(model_folder: Folders, family: str) -> None:
    policy, tokens = load(model_folder(family)), token_lists()
    with torch.no_grad():
        together = policy(torch.cat(tokens), packed_params(LENGTHS, torch.device("cpu"))).split(LENGTHS)
        for piece, alone in zip(together, tokens, strict=True):
            single = policy(alone, packed_params([len(alone)], torch.device("cpu")))
            torch.testing.assert_close(piece, single, atol=1e-5, rtol=0)


def test_a_segment_plan_pads_at_most_twofold_and_restores_the_order() -> None:
    lengths = [1, 2, 3, 4, 5, 33, 64, 40, 7]
    plan = plan_segments(lengths, torch.device("cpu"))
    rows = torch.cat([block.index for block in plan.blocks])
    assert torch.equal(rows[plan.restore], torch.arange(sum(lengths)))
    assert len(rows) <= 2 * sum(lengths)
    with pytest.raises(TrainerError, match="empty"):
        plan_segments([3, 0], torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_back_the_file_bit_for_bit(model_folder: Folders, family: str) -> None:
    folder = model_folder(family)
    policy = load(folder)
    exported = dict(hf.export(dict(policy.gpt.named_parameters()), policy.shape))
    source = load_file(folder / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)


def test_fused_partners_follow_each_other_in_the_export(model_folder: Folders) -> None:
    policy = load(model_folder("qwen3_moe"))
    names = [name for name, _ in hf.export(dict(policy.gpt.named_parameters()), policy.shape)]
    for group in hf.ATOMIC_GROUPS:
        for at, name in enumerate(names):
            if f".{group[0]}." in name:
                assert names[at : at + len(group)] == [name.replace(group[0], part) for part in group]


def test_missing_left_over_and_misshapen_tensors_are_named(model_folder: Folders) -> None:
    folder = model_folder("qwen3")
    policy, state = load(folder), load_file(folder / "model.safetensors")
    parameters = dict(policy.gpt.named_parameters())

    def fails(changed: dict[str, torch.Tensor], message: str) -> None:
        with pytest.raises(TrainerError, match=message):
            hf.load(parameters, policy.shape, changed.items())

    norm = "model.layers.1.self_attn.q_norm.weight"
    fails({k: v for k, v in state.items() if k != norm}, f"missing {norm}")
    fails(state | {"model.visual.weight": torch.zeros(1)}, "model.visual.weight")
    fails(state | {norm: torch.zeros(3)}, "does not fit")


def test_a_written_folder_is_a_complete_model_and_atomic(model_folder: Folders, tmp_path: Path) -> None:
    source = model_folder("qwen3_moe")
    tensors = list(hf.read_folder(source))
    size = hf.write_folder(tmp_path / "out", tensors, source)
    assert size == sum(t.nbytes for _, t in tensors)
    assert read_shape(tmp_path / "out") == read_shape(source)
    assert all(torch.equal(v, dict(tensors)[k]) for k, v in hf.read_folder(tmp_path / "out"))
    with pytest.raises(TrainerError, match="exists"):
        hf.write_folder(tmp_path / "out", tensors, source)
    with pytest.raises(FileNotFoundError):
        hf.write_folder(tmp_path / "broken", tensors, tmp_path / "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_sharded_folders_are_read_through_their_index(model_folder: Folders, tmp_path: Path) -> None:
    state = load_file(model_folder("llama") / "model.safetensors")
    names = sorted(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({n: state[n] for n in members}, tmp_path / file)
    index = {"weight_map": {n: file for file, members in files.items() for n in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {n for n, _ in hf.read_folder(tmp_path)} == set(names)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(TrainerError, match=r"b\.safetensors"):
        list(hf.read_folder(tmp_path))


def test_bfloat16_logits_stay_bfloat16(model_folder: Folders) -> None:
    policy, tokens = load(model_folder("qwen3_moe"), "bfloat16"), token_lists()
    with torch.no_grad():
        logits = policy(torch.cat(tokens), packed_params(LENGTHS, torch.device("cpu")))
    assert logits.dtype is torch.bfloat16


def test_routing_replay_on_a_dense_model_is_refused(model_folder: Folders) -> None:
    compat.init_single_process(0)
    with pytest.raises(TrainerError, match="no router"):
        Policy(read_shape(model_folder("qwen3")), "float32", routing_replay=True)


def test_two_models_in_one_process_own_their_routers(model_folder: Folders) -> None:
    compat.init_single_process(0)
    shape = read_shape(model_folder("qwen3_moe_mixed"))
    first, second = (Policy(shape, "float32", routing_replay=True) for _ in range(2))
    assert len(first.routers) == len(second.routers) == 1
    assert first.routers[0] is not second.routers[0]
    assert compat.RouterReplay.global_router_replay_instances == []


def test_unknown_architectures_list_the_choices(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM"):
        read_shape(tmp_path)
