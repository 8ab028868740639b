"""Chunked log-probs against the full float32 path: values, gradients, and what must not happen to the input."""

from __future__ import annotations

import itertools

import pytest
import torch

from training.logprobs import Support, token_logprobs

ROWS, VOCAB = 9, 13


def full_path(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float() / temperature if temperature > 0 else logits.float()
    logp = scores.log_softmax(-1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(-1)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(ROWS, VOCAB, generator=generator) * 3).to(dtype)
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 7, ROWS, ROWS + 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_values_and_gradients_equal_the_full_path(chunk: int, temperature: float) -> None:
    logits, targets = inputs(torch.float32)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.linspace(-1, 1, ROWS)
    got, entropy = token_logprobs(ours, targets, temperature, chunk=chunk)
    want, want_entropy = full_path(theirs, targets, temperature)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-6, rtol=0)
    (got @ weights + 0.3 * entropy @ weights.flip(0)).backward()
    (want @ weights + 0.3 * want_entropy @ weights.flip(0)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=0)


def test_gradient_agrees_with_finite_differences() -> None:
    logits, targets = inputs(torch.float32)

    def total(x: torch.Tensor) -> torch.Tensor:
        logprobs, entropy = token_logprobs(x, targets, 0.8, chunk=4)
        return logprobs.double().sum() + 2 * entropy.double().sum()

    leaf = logits.clone().requires_grad_()
    total(leaf).backward()
    assert leaf.grad is not None
    step = 1e-2
    for row, column in [(0, 0), (3, 7), (8, 12)]:
        moved = torch.zeros_like(logits)
        moved[row, column] = step
        slope = (total(logits + moved) - total(logits - moved)) / (2 * step)
        assert abs(float(slope) - float(leaf.grad[row, column])) < 1e-3


def test_bfloat16_logits_are_divided_after_the_upcast() -> None:
    logits, targets = inputs(torch.bfloat16)
    got, _ = token_logprobs(logits, targets, 0.7, chunk=4)
    right, _ = full_path(logits, targets, 0.7)
    rounded, _ = full_path((logits / 0.7), targets, 1.0)
    torch.testing.assert_close(got, right, atol=1e-6, rtol=0)
    assert (got - rounded).abs().max() > 1e-4, "dividing in bfloat16 would not have been noticed"


def test_every_row_has_its_own_temperature() -> None:
    logits, targets = inputs(torch.float32)
    temperatures = torch.tensor([0.5, 1.0, 2.0] * 3)
    got, _ = token_logprobs(logits, targets, temperatures, chunk=2)
    for row in range(ROWS):
        want, _ = full_path(logits[row : row + 1], targets[row : row + 1], float(temperatures[row]))
        torch.testing.assert_close(got[row : row + 1], want, atol=1e-6, rtol=0)


def test_the_logits_are_never_written_to() -> None:
    logits, targets = inputs(torch.float32)
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf, targets, 0.7, chunk=3)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(leaf.detach(), logits)


def test_a_forbidden_token_gives_neither_nan_entropy_nor_nan_gradient() -> None:
    logits, targets = inputs(torch.float32)
    logits[:, 0] = float("-inf")
    targets = targets.clamp(min=1)
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf, targets, 1.0, chunk=4)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[:, 0] == 0).all()


@pytest.mark.parametrize("chunk", [1, 4, ROWS])
def test_over_a_kept_set_values_and_gradients_equal_the_masked_full_path(chunk: int) -> None:
    logits, targets = inputs(torch.float32)
    kept = [sorted({int(target), row % VOCAB, (3 * row + 1) % VOCAB}) for row, target in enumerate(targets)]
    kept[4] = [int(targets[4])]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, kept))])
    support = Support(torch.tensor([i for ids in kept for i in ids]), offsets)
    bars = torch.full((ROWS, VOCAB), float("-inf"))
    for row, ids in enumerate(kept):
        bars[row, ids] = 0.0
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.linspace(-1, 1, ROWS)
    got, entropy = token_logprobs(ours, targets, 0.7, chunk=chunk, support=support)
    want = (theirs / 0.7 + bars).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    _, want_entropy = full_path(theirs, targets, 0.7)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-6, rtol=0)
    assert float(got[4].detach()) == 0.0  # no other choice
    (got @ weights + 0.3 * entropy @ weights.flip(0)).backward()
    (want @ weights + 0.3 * want_entropy @ weights.flip(0)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=0)


def test_no_rows_give_an_empty_result_on_the_graph() -> None:
    leaf = torch.randn(0, VOCAB, requires_grad=True)
    logprobs, _ = token_logprobs(leaf, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == (0, VOCAB)


def test_a_chunk_below_one_is_refused() -> None:
    logits, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match="chunk"):
        token_logprobs(logits, targets, chunk=0)
