"""MegatronTrainer beyond the common contract: numbers, replay through the real routers, what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from segue.errors import TrainerError
from segue.wire.mask import SamplingMask
from segue.wire.sample import ROW_ABSENT, ROW_RECOMPUTED, Sample
from training.logprobs import token_logprobs
from training.megatron import compat
from training.megatron.attention import packed_params
from training.protocol import TrainerOptions
from training.trainer import MegatronTrainer

pytestmark = pytest.mark.slow

Make = Callable[..., Sample]
Folders = Callable[[str], Path]


def trainer(folder: Path, **changes: object) -> MegatronTrainer:
    options = {"lr": 1e-3, "advantage": "per_turn", "micro_batch_tokens": 64} | changes
    return MegatronTrainer(TrainerOptions(folder, **options))  # type: ignore[arg-type]


def on_policy(made: MegatronTrainer, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the log-probs that the trainer's own weights give them."""
    result = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logits = made.policy(tokens, packed_params([len(tokens)], torch.device("cpu")))
        logprobs, _ = token_logprobs(logits[:-1], tokens[1:], sample.temperature)
        full = np.concatenate(([0.0], logprobs.numpy())) * sample.loss_mask
        result.append(dataclasses.replace(sample, logprobs=full.astype(np.float32)))
    return result


def groups(make_sample: Make, count: int = 8, **fields: object) -> list[Sample]:
    return [make_sample(i, group=f"g{i // 4}", length=14 + i, **fields) for i in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen3", "qwen3_moe"])
def test_scoring_agrees_with_the_behaviour_and_a_step_moves_towards_reward(
    model_folder: Folders, make_sample: Make, family: str
) -> None:
    made = trainer(model_folder(family), lr=3e-3)
    samples = on_policy(made, groups(make_sample, temperature=0.8))
    first = made.step(samples, step=1, version=0, seed=7)
    assert first.metrics["logprob_abs_diff_max"] < 2e-5
    assert first.metrics["logprob_abs_diff_tokens"] == first.metrics["tokens"] == 48
    assert first.metrics["loss"] == pytest.approx(0, abs=0.05), "ratio 1 and centred advantages"
    result = first
    for step in range(2, 8):
        result = made.step(samples, step=step, version=step - 1, seed=7)
    assert result.metrics["loss"] < first.metrics["loss"] - 0.05
    assert all(np.isfinite(value) for value in result.metrics.values())


def test_tokens_of_older_weights_are_scored_apart(model_folder: Folders, make_sample: Make) -> None:
    made = trainer(model_folder("qwen3"))
    own, older = on_policy(made, [make_sample(0, version=5), make_sample(1, version=4)])
    older = dataclasses.replace(older, logprobs=older.logprobs - older.loss_mask * np.float32(0.5))
    metrics = made.step([own, older], step=1, version=5, seed=0).metrics
    assert metrics["logprob_abs_diff_mean"] < 1e-5
    assert metrics["logprob_abs_diff_tokens"] == 6
    assert metrics["logprob_abs_diff_mean_older"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["logprob_abs_diff_tokens_older"] == 6


def test_packing_changes_nothing_but_rounding(model_folder: Folders, make_sample: Make) -> None:
    weights = []
    for budget in (1, 50, 10_000):
        made = trainer(model_folder("qwen3_moe"), micro_batch_tokens=budget)
        metrics = made.step(groups(make_sample), step=1, version=0, seed=0).metrics
        weights.append((metrics["loss"], metrics["grad_norm"]))
    assert weights[0] == pytest.approx(weights[1], rel=1e-4)
    assert weights[0] == pytest.approx(weights[2], rel=1e-4)


def test_minibatches_and_epochs_give_that_many_updates(model_folder: Folders, make_sample: Make) -> None:
    made = trainer(model_folder("qwen3"), epochs=2, minibatches=3)
    made.step(groups(make_sample), step=1, version=0, seed=0)
    steps = {int(state["step"]) for state in made._model.optimizer.state_dict()["state"].values()}
    assert steps == {6}


def test_a_batch_without_trained_tokens_leaves_the_weights(model_folder: Folders, make_sample: Make) -> None:
    made = trainer(model_folder("qwen3"), weight_decay=0.1)
    before = made.digest()
    result = made.step([make_sample(turns=())], step=1, version=0, seed=0)
    assert result.digest == before
    assert result.metrics["loss"] == 0
    assert result.metrics["tokens"] == 0


@pytest.mark.parametrize("fault", ["token id", "no samples", "older version", "first token"])
def test_an_unusable_batch_is_refused_and_changes_nothing(model_folder: Folders, make_sample: Make, fault: str) -> None:
    made = trainer(model_folder("qwen3"))
    made.step([make_sample(0)], step=1, version=2, seed=0)
    before = made.digest()
    batch = {"no samples": [], "token id": [make_sample(vocab=100, length=60)], "first token": [
        make_sample(turns=((0, 3),))]}.get(fault, [make_sample()])  # fmt: skip
    with pytest.raises(TrainerError):
        made.step(batch, step=2, version=1 if fault == "older version" else 3, seed=0)
    assert made.digest() == before
    assert made.version == 3


# --- replay through the real routers ----------------------------------------------------------------------------


def recorded(made: MegatronTrainer, sample: Sample) -> Sample:
    """The sample with the routes that the trainer's own routers choose for it."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    for router in made.policy.routers:
        router.set_router_replay_action(compat.RouterReplayAction.RECORD)
    with torch.no_grad():
        made.policy(tokens, packed_params([len(tokens)], torch.device("cpu")))
    routes = np.zeros((len(tokens) - 1, made.shape.layers, 2), np.uint8)
    assert made.shape.moe is not None
    for layer, router in zip(made.shape.moe.layers, made.policy.routers, strict=True):
        routes[:, layer] = router.get_recorded_indices()[:-1].numpy()
        router.clear_router_replay_action()
        router.clear_indices()
    return dataclasses.replace(sample, routes=routes)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_mixed"])
def test_replaying_the_routers_own_choice_changes_nothing(
    model_folder: Folders, make_sample: Make, family: str
) -> None:
    made = trainer(model_folder(family), replay_routes=True)
    samples = [recorded(made, s) for s in on_policy(made, groups(make_sample, layers=2))]
    replayed = made.step(samples, step=1, version=0, seed=0)
    free = trainer(model_folder(family)).step(samples, step=1, version=0, seed=0)
    assert replayed.metrics["logprob_abs_diff_max"] < 2e-5
    assert replayed.metrics["grad_norm"] == pytest.approx(free.metrics["grad_norm"], rel=1e-4)
    assert replayed.metrics["rows_replayed"] == sum(len(s.tokens) - 1 for s in samples)


def test_log_probs_over_kept_sets_agree_with_a_sampler_that_cut(model_folder: Folders, make_sample: Make) -> None:
    made = trainer(model_folder("qwen3"))
    samples = []
    for sample in groups(make_sample, temperature=0.8):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logits = made.policy(tokens, packed_params([len(tokens)], torch.device("cpu")))
        kept = [[int(token)] for token in sample.tokens]
        logprobs = np.zeros(len(tokens), np.float32)
        for at in np.flatnonzero(sample.loss_mask).tolist():
            kept[at] = sorted({int(tokens[at]), *logits[at - 1].topk(3).indices.tolist()})
            scores = logits[at - 1].float() / 0.8
            logprobs[at] = scores[tokens[at]] - scores[kept[at]].logsumexp(0)
        samples.append(dataclasses.replace(sample, logprobs=logprobs, mask=SamplingMask.of(kept)))
    assert made.step(samples, step=1, version=0, seed=0).metrics["logprob_abs_diff_max"] < 2e-5
    ignored = [dataclasses.replace(sample, mask=None) for sample in samples]
    other = trainer(model_folder("qwen3")).step(ignored, step=1, version=0, seed=0)
    assert other.metrics["logprob_abs_diff_mean"] > 0.1, "the full vocabulary gives another distribution"


def test_other_routes_change_the_log_probs(model_folder: Folders, make_sample: Make) -> None:
    made = trainer(model_folder("qwen3_moe"), replay_routes=True)
    samples = on_policy(made, groups(make_sample, layers=2))
    metrics = made.step(samples, step=1, version=0, seed=0).metrics
    assert metrics["logprob_abs_diff_mean"] > 0.01, "random experts cannot agree with the router's"


def test_absent_and_recomputed_rows_leave_the_loss_and_are_counted(model_folder: Folders, make_sample: Make) -> None:
    sample = make_sample(layers=2, turns=((4, 8),))
    assert sample.routes_provenance is not None
    provenance = sample.routes_provenance.copy()
    provenance[4], provenance[5] = ROW_ABSENT, ROW_RECOMPUTED
    sample = dataclasses.replace(sample, routes_provenance=provenance)
    for policy, tokens in (("mask_loss", 2), ("replay", 3)):
        made = trainer(model_folder("qwen3_moe"), replay_routes=True, recomputed=policy)
        metrics = made.step([sample], step=1, version=0, seed=0).metrics
        assert metrics["tokens"] == tokens
        assert (metrics["rows_replayed"], metrics["rows_absent"], metrics["rows_recomputed"]) == (12, 1, 1)


def test_routers_are_free_again_after_a_step_and_after_a_failure(model_folder: Folders, make_sample: Make) -> None:
    made = trainer(model_folder("qwen3_moe"), replay_routes=True)
    samples = groups(make_sample, layers=2)
    made.step(samples, step=1, version=0, seed=0)
    broken = dataclasses.replace(made.policy.shape, vocab=1000)
    made.shape = broken  # lets an id through that the embedding cannot look up
    with pytest.raises(IndexError):
        made.step([dataclasses.replace(samples[0], tokens=samples[0].tokens + 500)], step=2, version=1, seed=0)
    for router in made.policy.routers:
        assert router.router_replay_action is None
        assert router.target_topk_idx is None
        assert router.replay_backward_list == []


def test_bfloat16_steps_and_resumes_with_its_float32_masters(
    model_folder: Folders, make_sample: Make, tmp_path: Path
) -> None:
    samples = groups(make_sample)
    made = trainer(model_folder("qwen3_moe"), dtype="bfloat16", lr=1e-5)
    for step in (1, 2):
        made.step(samples, step=step, version=step - 1, seed=0)
    made.save(tmp_path / "c", step=2, cursor="")
    straight = made.step(samples, step=3, version=2, seed=0)
    again = trainer(model_folder("qwen3_moe"), dtype="bfloat16", lr=1e-5)
    again.load(tmp_path / "c")
    resumed = again.step(samples, step=3, version=2, seed=0)
    assert resumed.digest == straight.digest
    assert {str(t.dtype) for _, t in again.named_tensors()} == {"torch.bfloat16"}
