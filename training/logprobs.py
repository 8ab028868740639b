"""Log-probabilities and entropies of chosen tokens from logits, chunk by chunk.

The obvious path (whole logits to float32, divide, log_softmax) holds several float32 copies of [t, vocab]. Here each
chunk of rows is upcast to float32, *then* divided by the temperature, then reduced; backward computes the chunk again
instead of keeping it. Extra memory is two chunks, forward and backward.

Invariants:
- Upcast before division: dividing in bfloat16 would round.
- The logits are never written to.
- Values and gradients equal those of the full float32 path within 1e-6, for every chunk size.
- Where a token was chosen from a cut distribution, its log-prob is normalised over what was kept, as the sampler's was;
  the entropy stays that of the full vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_CHUNK = 1024
"""Rows at once: 1024 x 152k x 4 bytes = 0.6 GiB at the largest vocabularies in use."""


def _upcast(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float32 copy of a chunk, divided by its rows' temperatures."""
    return logits.to(torch.float32, copy=True).div_(temperature.unsqueeze(1))


@dataclass(frozen=True, slots=True)
class Support:
    """What each of t tokens was chosen from, CSR: `ids` int64[total] and `offsets` int64[t + 1], both on the CPU; each
    target is in its own set."""

    ids: torch.Tensor
    offsets: torch.Tensor


def _kept(scores: torch.Tensor, support: Support | None, start: int) -> torch.Tensor:
    """The scores of rows from `start` on, -inf for what was not kept; without a support the very same tensor."""
    if support is None:
        return scores
    offsets = support.offsets[start : start + len(scores) + 1]
    rows = torch.repeat_interleave(torch.arange(len(scores)), offsets.diff()).to(scores.device)
    columns = support.ids[int(offsets[0]) : int(offsets[-1])].to(scores.device)
    kept = torch.full_like(scores, float("-inf"))
    kept[rows, columns] = scores[rows, columns]
    return kept


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        chunk: int,
        support: Support | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(logits, targets, temperature)
        ctx.chunk, ctx.support = chunk, support
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            scores = _upcast(logits[rows], temperature[rows])
            norm = scores.logsumexp(dim=1)
            over = norm if support is None else _kept(scores, support, start).logsumexp(dim=1)
            logprobs[rows] = scores.gather(1, targets[rows].unsqueeze(1)).squeeze(1) - over
            # entr(p) = -p log p, and 0 for a forbidden token, where p * log p would be nan.
            entropies[rows] = torch.special.entr(scores.sub_(norm.unsqueeze(1)).exp_()).sum(dim=1)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None, None, None]:
        """With z the tempered scores, p = softmax(z), q that over what was kept, H the entropy:
        d logprob_k / d z_j = [j = k] - q_j and d H / d z_j = -p_j (log p_j + H)."""
        logits, targets, temperature = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        result = torch.empty_like(logits)
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            scores = _upcast(logits[rows], temperature[rows])
            probs = scores.softmax(dim=1)
            kept = probs if ctx.support is None else _kept(scores, ctx.support, start).softmax(dim=1)
            grad = kept * -grad_logprobs[rows].unsqueeze(1)
            grad.scatter_add_(1, targets[rows].unsqueeze(1), grad_logprobs[rows].unsqueeze(1))
            if grad_entropies is not None:
                entropy = torch.special.entr(probs)
                grad += (entropy - probs * entropy.sum(dim=1, keepdim=True)) * grad_entropies[rows].unsqueeze(1)
            result[rows] = grad.div_(temperature[rows].unsqueeze(1)).to(result.dtype)
        return result, None, None, None, None


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | float = 1.0,
    *,
    chunk: int = DEFAULT_CHUNK,
    support: Support | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [t, vocab] of any float dtype, targets int64[t] -> (log-probs float32[t], entropies float32[t]).

    temperature: one number or float32[t]; 0 (greedy sampling) means untempered. Both results carry gradients. The
    log-probs are over the full vocabulary or over `support`, the entropies always over the full vocabulary. `chunk`
    rows are in float32 at once.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(len(targets))
    scale = torch.where(scale > 0, scale, 1.0)
    logprobs, entropies = _ChunkedLogProbs.apply(logits, targets, scale, chunk, support)  # type: ignore[no-untyped-call]
    return logprobs, entropies
