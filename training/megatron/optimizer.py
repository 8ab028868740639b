"""The library's data-parallel wrapper and its AdamW, set up for a model that a batch trainer drives by hand."""

from __future__ import annotations

from typing import Any

import torch

from segue.errors import TrainerError
from training.megatron import compat
from training.megatron.model import Policy
from training.protocol import TrainerOptions


class TrainableModel:
    """A policy with gradients and optimizer state.

    Invariants: gradients live in the wrapper's own buffers and are summed there over backward passes until `update`
    or `zero_grad`; learning rate and weight decay are constant, with the library's exemptions (no decay on biases and
    norms) applied, since no scheduler runs here.
    """

    def __init__(self, policy: Policy, options: TrainerOptions) -> None:
        self.policy = policy
        half = options.dtype == "bfloat16"
        with compat.quiet(), compat.device_literals():
            ddp_config = compat.DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
            )
            self.wrapped = compat.DistributedDataParallel(policy.config, ddp_config, policy.module)
            config = compat.OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=options.lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.betas[0],
                adam_beta2=options.betas[1],
                adam_eps=options.adam_eps,
                clip_grad=options.clip_grad,
                bf16=half,
                params_dtype=torch.bfloat16 if half else torch.float32,
                use_distributed_optimizer=False,
            )
            self.optimizer: Any = compat.get_megatron_optimizer(config, [self.wrapped])
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = options.weight_decay * group.get("wd_mult", 1.0)
            # torch's one-kernel Adam: a loop of a dozen small operations per tensor otherwise. Set before any state.
            group["fused"] = True

    def zero_grad(self) -> None:
        """Start a new accumulation."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> float:
        """Clip, apply and return the gradient norm before clipping; raises on a gradient that is not finite."""
        self.wrapped.finish_grad_sync()
        with compat.device_literals():
            ok, norm, _ = self.optimizer.step()
        value = float(norm)
        if not ok or not torch.isfinite(torch.tensor(value)):
            raise TrainerError(f"the gradient norm is {value}: the weights of this process are not usable any more")
        return value

    def reload_masters(self) -> None:
        """After the model's weights were replaced: bring the optimizer's float32 copies (bfloat16 only) in line."""
        with compat.device_literals():
            self.optimizer.reload_model_params()
