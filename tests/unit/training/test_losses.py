"""The contract of every loss, and the closed forms of GRPO."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from segue.errors import ConfigError
from training import losses
from training.losses.contract import LossInputs


def make_inputs(count: int = 12, *, supervised: bool = True) -> LossInputs:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(count, generator=generator) > 0.3 if supervised else torch.zeros(count, dtype=torch.bool)
    return LossInputs(
        logprobs=(-torch.rand(count, generator=generator) * 3).requires_grad_(),
        entropies=torch.rand(count, generator=generator).requires_grad_(),
        behaviour=-torch.rand(count, generator=generator) * 3,
        advantages=torch.randn(count, generator=generator),
        mask=mask,
        datum=torch.arange(count) % 3,
        datums=3,
    )


def part(inputs: LossInputs, rows: slice) -> LossInputs:
    fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
    cut = {name: value[rows] for name, value in fields.items() if name != "datums"}
    cut["logprobs"] = cut["logprobs"].detach().requires_grad_()
    return LossInputs(**cut, datums=inputs.datums)


@pytest.mark.parametrize("name", losses.LOSSES.names())
def test_sums_do_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    loss, inputs = losses.create(name, {}), make_inputs()
    whole = loss(inputs)
    pieces = [loss(part(inputs, rows)) for rows in (slice(0, 1), slice(1, 8), slice(8, None))]
    torch.testing.assert_close(whole.loss_sum, torch.stack([p.loss_sum for p in pieces]).sum())
    assert whole.tokens == sum(p.tokens for p in pieces) == int(inputs.mask.sum())
    for key, value in whole.sums.items():
        assert value == pytest.approx(sum(p.sums[key] for p in pieces))
    for key, tensor in whole.per_datum.items():
        torch.testing.assert_close(tensor, torch.stack([p.per_datum[key] for p in pieces]).sum(0))
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"


@pytest.mark.parametrize("name", losses.LOSSES.names())
@pytest.mark.parametrize("count", [0, 5])
def test_no_supervised_token_gives_an_exact_zero_on_the_graph(name: str, count: int) -> None:
    inputs = make_inputs(count, supervised=False)
    with torch.no_grad():
        inputs.logprobs[:1] = float("-inf")
    out = losses.create(name, {})(inputs)
    assert out.tokens == 0
    assert out.loss_sum.item() == 0.0
    assert out.loss_sum.dtype is torch.float32
    out.loss_sum.backward()
    assert inputs.logprobs.grad is not None
    assert (inputs.logprobs.grad == 0).all()


@pytest.mark.parametrize("name", losses.LOSSES.names())
def test_masked_tokens_get_no_gradient(name: str) -> None:
    inputs = make_inputs()
    losses.create(name, {})(inputs).loss_sum.backward()
    assert inputs.logprobs.grad is not None
    assert (inputs.logprobs.grad[~inputs.mask] == 0).all()


@pytest.mark.parametrize("name", losses.LOSSES.names())
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    loss, inputs = losses.create(name, {}), make_inputs()
    loss(inputs).loss_sum.backward()
    step = 1e-3
    for index in range(len(inputs.mask)):
        moved = inputs.logprobs.detach().clone()
        moved[index] += step
        up = loss(dataclasses.replace(inputs, logprobs=moved)).loss_sum
        moved[index] -= 2 * step
        down = loss(dataclasses.replace(inputs, logprobs=moved)).loss_sum
        slope = float((up.double() - down.double()) / (2 * step))
        assert inputs.logprobs.grad is not None
        assert slope == pytest.approx(float(inputs.logprobs.grad[index]), abs=2e-2, rel=2e-2)


def single(logprob: float, behaviour: float, advantage: float, **options: float) -> tuple[float, float, float]:
    """(loss, gradient, clip_fraction) of one token."""
    leaf = torch.tensor([logprob], requires_grad=True)
    inputs = LossInputs(
        leaf,
        torch.tensor([2.0]),
        torch.tensor([behaviour]),
        torch.tensor([advantage]),
        torch.tensor([True]),
        torch.tensor([0]),
        1,
    )
    out = losses.create("grpo", options)(inputs)
    out.loss_sum.backward()
    assert leaf.grad is not None
    return out.loss_sum.item(), leaf.grad.item(), out.sums["clip_fraction"]


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    assert single(-1.0, -1.0, 0.7) == pytest.approx((-0.7, -0.7, 0.0))


def test_a_ratio_beyond_the_upper_bound_is_cut_for_positive_advantages_only() -> None:
    loss, gradient, cut = single(-0.5, -1.0, 1.0, clip_high=0.28)
    assert (loss, gradient, cut) == pytest.approx((-1.28, 0.0, 1.0))
    loss, gradient, cut = single(-0.5, -1.0, -1.0, clip_high=0.28)
    assert loss == pytest.approx(1.6487, abs=1e-3)
    assert gradient > 0
    assert cut == 0.0


def test_a_ratio_below_the_lower_bound_is_cut_for_negative_advantages_only() -> None:
    assert single(-1.5, -1.0, -1.0, clip_low=0.2) == pytest.approx((0.8, 0.0, 1.0))
    loss, gradient, cut = single(-1.5, -1.0, 1.0, clip_low=0.2)
    assert loss == pytest.approx(-0.6065, abs=1e-3)
    assert gradient < 0
    assert cut == 0.0


def test_dual_clip_bounds_the_loss_of_a_token_left_far_behind() -> None:
    assert single(-0.1, -5.0, -1.0, dual_clip=3.0)[:2] == pytest.approx((3.0, 0.0))
    assert single(-0.1, -5.0, -1.0)[0] > 100


def test_kl_and_entropy_terms_add_their_closed_forms() -> None:
    k3 = 2.718281828**0.5 - 1 - 0.5
    assert single(-1.5, -1.0, 0.0, kl_coef=0.1)[0] == pytest.approx(0.1 * k3, abs=1e-6)
    assert single(-1.0, -1.0, 0.0, entropy_coef=0.5)[0] == pytest.approx(-1.0)


def test_unknown_names_and_options_list_the_choices() -> None:
    with pytest.raises(ConfigError, match="grpo"):
        losses.create("gpro", {})
    with pytest.raises(ConfigError, match="clip_low"):
        losses.create("grpo", {"clip": 0.2})
    with pytest.raises(ConfigError, match="clip_low"):
        losses.create("grpo", {"clip_low": 0.0})


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        losses.LOSSES.register("grpo")(lambda options: losses.create("grpo", options))
