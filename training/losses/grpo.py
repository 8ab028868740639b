"""PPO's clipped surrogate over the engine's own log-probs, token by token (GRPO, DAPO with clip_high > clip_low).

per token: ratio = exp(logprob - behaviour), loss = max(-ratio * A, -clip(ratio, 1 - clip_low, 1 + clip_high) * A),
if `dual_clip` c > 1 and A < 0, at most -c * A (a token the policy has left far behind pulls no harder than that);
plus, if `kl_coef` > 0, kl_coef * (r' - log r' - 1) with r' = behaviour / policy (the k3 estimate of their KL).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segue.errors import ConfigError
from training.losses.contract import LossInputs, LossOutputs, sum_by_datum

LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8: beyond it a ratio only says that the token was all but impossible, and float32 sums would drown."""


@dataclass(frozen=True, slots=True)
class GrpoOptions:
    """Trust region of the ratio; optional: `dual_clip` (0: off, else > 1), weights of the k3 KL and entropy terms."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0:
            raise ConfigError(f"clip_low must lie in (0, 1] and clip_high above 0: {self.clip_low}, {self.clip_high}")
        if self.dual_clip != 0 and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip must be 0 (off) or above 1: {self.dual_clip}")
        if self.kl_coef < 0 or self.entropy_coef < 0:
            raise ConfigError(f"kl_coef and entropy_coef must not be negative: {self.kl_coef}, {self.entropy_coef}")


class GrpoLoss:
    """`Loss` of the module docstring; see `LossOutputs` for what comes back."""

    def __init__(self, options: GrpoOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        mask, o = inputs.mask, self.options
        # Masked tokens get a log-ratio of exactly 0 before exp: their logprobs may be anything, inf included.
        log_ratio = torch.where(mask, inputs.logprobs - inputs.behaviour, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = log_ratio.exp()
        advantages = torch.where(mask, inputs.advantages, 0.0)
        clipped = ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
        losses = torch.maximum(-ratio * advantages, -clipped * advantages)
        cut = (-clipped > -ratio) == (advantages > 0)
        cut &= (clipped != ratio) & (advantages != 0) & mask
        if o.dual_clip > 0:
            losses = torch.where(advantages < 0, torch.minimum(losses, -o.dual_clip * advantages), losses)
        kl = (-log_ratio).exp() - 1 + log_ratio
        if o.kl_coef > 0:
            losses = losses + o.kl_coef * kl
        if o.entropy_coef > 0:
            losses = losses - o.entropy_coef * inputs.entropies
        losses = torch.where(mask, losses, 0.0)
        entropies = torch.where(mask, inputs.entropies, 0.0).detach()
        return LossOutputs(
            loss_sum=losses.sum(),
            tokens=int(mask.sum()),
            sums={
                "clip_fraction": float(cut.sum()),
                "approx_kl": float(kl.detach().sum()),
                "entropy": float(entropies.sum()),
            },
            per_datum={"loss": sum_by_datum(losses, inputs.datum, inputs.datums)},
        )
