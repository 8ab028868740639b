"""What a loss takes and gives.

Invariants:
- A loss returns a raw sum and counts. The normaliser belongs to the caller, who knows the whole batch; so results do
  not depend on how the batch was cut into micro-batches.
- Per-datum outputs are detached and on the CPU.
- A micro-batch without a supervised token gives an exact zero that hangs on the graph, in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from segue.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Per token of a micro-batch (all [t], same device): `logprobs` and `entropies` float32 with gradient,
    `behaviour` float32 log-probs at sampling time, `advantages` float32, `mask` bool, `datum` int64 (which sample)."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    datum: torch.Tensor
    datums: int


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """`loss_sum` scalar float32 with gradient; `tokens` supervised tokens in it; `sums` metric name -> raw sum over
    those tokens; `per_datum` name -> float32[datums] raw sums, detached, on the CPU."""

    loss_sum: torch.Tensor
    tokens: int
    sums: dict[str, float]
    per_datum: dict[str, torch.Tensor]


class Loss(Protocol):
    """A pure function of its inputs; options were bound at construction."""

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


def read_options[T](kind: type[T], options: Mapping[str, float]) -> T:
    """A loss's frozen options from a plain table; an unknown key raises ConfigError listing the choices."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r} of {kind.__name__}; choices: {', '.join(names)}")
    return kind(**options)


def sum_by_datum(values: torch.Tensor, datum: torch.Tensor, datums: int) -> torch.Tensor:
    """Raw sum of `values` [t] for each datum, float32[datums] on the CPU."""
    total = torch.zeros(datums, dtype=torch.float32, device=values.device)
    return total.index_add_(0, datum, values.detach().float()).cpu()
