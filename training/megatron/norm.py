"""RMSNorm with the constructor that a layer spec calls and the mark that sequence parallelism looks for."""

from __future__ import annotations

import torch

from training.megatron.compat import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's fused RMSNorm; unlike the library's wrapper it does not refuse sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
