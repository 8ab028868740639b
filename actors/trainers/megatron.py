"""The real trainer in an actor's process: the thread settings it needs, then `training.trainer.MegatronTrainer`."""

from __future__ import annotations

from training.protocol import TrainerOptions, TrainerProtocol


def create_megatron(options: TrainerOptions) -> TrainerProtocol:
    """Import torch and megatron-core (seconds) and build the trainer.

    One intra-op thread on a CPU: the small matrices of models that train there lose more to thread hand-over than they
    gain, engines share the cores, and sums keep their order whatever the machine's core count.
    """
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    from training.trainer import MegatronTrainer

    return MegatronTrainer(options)
