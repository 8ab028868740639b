"""MegatronTrainer: one policy, trained on batches of samples in this process.

A step: advantages -> packs -> (score the batch with the step's own weights) -> epochs x minibatches updates -> digest.

Invariants:
- The behaviour log-probs are the engine's; the trainer's own, before the first update, only measure the mismatch.
- The normaliser of an update is the number of its supervised tokens, so results do not depend on packing.
- All input is checked before the first update: a batch that cannot be used raises and changes nothing.
- Order of summation is fixed by (samples, seed), which makes a CPU step bit-reproducible.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segue.errors import TrainerError
from segue.wire.sample import Sample
from training import advantages, checkpoint, losses
from training.digest import digest_tensors
from training.logprobs import Support, token_logprobs
from training.losses.contract import LossInputs
from training.megatron import compat, hf
from training.megatron.attention import PlannedSeqParams, packed_params
from training.megatron.model import Policy, logits_of
from training.megatron.optimizer import TrainableModel
from training.megatron.shape import read_shape
from training.packing import Pack, build_pack, plan_packs
from training.protocol import CheckpointInfo, StepResult, TrainerOptions
from training.replay import Replayer, RouteTable, SampleRoutes, pack_routes, sample_routes
from training.scoring import BatchScore, score_metrics

IMPLEMENTATION = "megatron-local"
"""megatron-core with the local layer spec; written into checkpoints."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A pack on the device, ready for any number of forwards."""

    pack: Pack
    tokens: torch.Tensor
    packing: PlannedSeqParams
    positions: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    datum: torch.Tensor
    routes: NDArray[np.int64] | None
    support: Support | None


def _support(pack: Pack) -> Support | None:
    if pack.kept is None:
        return None
    return Support(torch.from_numpy(pack.kept.ids.astype(np.int64)), torch.from_numpy(pack.kept.offsets.copy()))


class MegatronTrainer:
    """`TrainerProtocol` over megatron-core. One process, one device; see TrainerOptions for every choice."""

    def __init__(self, options: TrainerOptions) -> None:
        self.options = options
        self._loss = losses.create(options.loss, options.loss_options)
        self._advantages = advantages.create(options.advantage)
        compat.init_single_process(options.seed)
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
            # Filling fresh memory only hides reads of unset values, and costs 5 % of a small step.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.shape = read_shape(options.model_path)
        self.policy = Policy(self.shape, options.dtype, routing_replay=options.replay_routes)
        hf.load(dict(self.policy.gpt.named_parameters()), self.shape, hf.read_folder(options.model_path))
        self._model = TrainableModel(self.policy, options)
        self._replayer = Replayer(self.policy.routers)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    # --- stepping -----------------------------------------------------------------------------------------------

    def renumber(self, version: int) -> None:
        self._version = version

    def step(self, samples: Sequence[Sample], *, step: int, version: int, seed: int) -> StepResult:
        """See TrainerProtocol. `version` may run ahead of the last one known here, never back."""
        if version < self._version:
            raise TrainerError(f"step {step} was asked for version {version}; the weights are at {self._version}")
        routes = self._routes(samples)
        minibatches = self._prepare(samples, routes, seed)
        torch.manual_seed(seed)
        score = BatchScore()
        if len(minibatches) > 1:
            self._score_only(minibatches, score)
        totals: dict[str, float] = {}
        updates = tokens = 0
        for epoch in range(self.options.epochs):
            for batches in minibatches:
                count = self._update(batches, totals, score if epoch == 0 and len(minibatches) == 1 else None)
                updates += count > 0
                tokens += count
        self._version = version + 1
        metrics = {name: value / max(tokens, 1) for name, value in totals.items() if name != "grad_norm"}
        metrics["grad_norm"] = totals.get("grad_norm", 0.0) / max(updates, 1)
        metrics |= score_metrics(score, version) | self._batch_metrics(samples, routes, minibatches)
        return StepResult(step, self._version, self.digest(), metrics)

    def _routes(self, samples: Sequence[Sample]) -> list[SampleRoutes] | None:
        moe = self.shape.moe
        if not samples:
            raise TrainerError("a step needs at least one sample")
        if not self.options.replay_routes or moe is None:
            return None
        table = RouteTable(moe.layers, self.shape.layers, moe.experts, moe.top_k)
        return [sample_routes(sample, table, self.options.recomputed) for sample in samples]

    def _prepare(
        self, samples: Sequence[Sample], routes: list[SampleRoutes] | None, seed: int
    ) -> list[tuple[_Batch, ...]]:
        """Minibatches of packs. The split is drawn once and kept for all epochs, so packs are built once."""
        for sample in samples:
            if sample.mask is not None and sample.mask.ids.max(initial=0) >= self.shape.vocab:
                raise TrainerError(f"sample {sample.sample_id}: a kept id lies outside [0, {self.shape.vocab})")
            if sample.tokens.max(initial=0) >= self.shape.vocab or sample.tokens.min(initial=0) < 0:
                raise TrainerError(f"sample {sample.sample_id}: a token id lies outside [0, {self.shape.vocab})")
        values = self._advantages(samples)
        kept = [r.kept for r in routes] if routes else [np.ones(len(s.tokens), np.bool_) for s in samples]
        order = np.arange(len(samples))
        if self.options.minibatches > 1:
            order = np.random.default_rng(seed).permutation(order)
        result = []
        for part in np.array_split(order, min(self.options.minibatches, len(samples))):
            indices = part.tolist()
            plan = plan_packs([len(samples[i].tokens) for i in indices], self.options.micro_batch_tokens)
            packs = [build_pack(samples, values, kept, [indices[i] for i in members]) for members in plan]
            result.append(tuple(self._to_device(pack, routes) for pack in packs))
        return result

    def _to_device(self, pack: Pack, routes: list[SampleRoutes] | None) -> _Batch:
        device, moe = compat.device(), self.shape.moe
        rows = None
        if routes is not None and moe is not None:
            table = RouteTable(moe.layers, self.shape.layers, moe.experts, moe.top_k)
            rows = pack_routes([routes[i] for i in pack.samples], table)

        def put(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return _Batch(
            pack=pack,
            tokens=put(pack.tokens),
            packing=packed_params(pack.lengths, device),
            positions=put(pack.positions),
            targets=put(pack.targets),
            temperatures=put(pack.temperatures),
            behaviour=put(pack.behaviour),
            advantages=put(pack.advantages),
            mask=put(pack.mask),
            datum=put(pack.datum),
            routes=rows,
            support=_support(pack),
        )

    def _forward(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropies) float32[p] of a pack's predictions, with gradients if enabled."""
        with self._replayer.forward(batch.routes):
            logits = logits_of(self._model.wrapped, batch.tokens, batch.packing, half=self.policy.half_precision)
        return token_logprobs(
            logits.index_select(0, batch.positions),
            batch.targets,
            batch.temperatures,
            chunk=self.options.logprob_chunk,
            support=batch.support,
        )

    def _score_only(self, minibatches: Sequence[tuple[_Batch, ...]], score: BatchScore) -> None:
        with torch.no_grad():
            for batches in minibatches:
                for batch in batches:
                    try:
                        logprobs, _ = self._forward(batch)
                        score.add(batch.pack, logprobs.cpu().numpy())
                    finally:
                        self._replayer.clear()

    def _update(self, batches: Sequence[_Batch], totals: dict[str, float], score: BatchScore | None) -> int:
        """One optimizer step over a minibatch; returns its supervised tokens (0: no step is taken)."""
        count = sum(int(batch.pack.mask.sum()) for batch in batches)
        self._model.zero_grad()
        for batch in batches:
            try:
                logprobs, entropies = self._forward(batch)
                if score is not None:
                    score.add(batch.pack, logprobs.detach().cpu().numpy())
                out = self._loss(
                    LossInputs(
                        logprobs,
                        entropies,
                        batch.behaviour,
                        batch.advantages,
                        batch.mask,
                        batch.datum,
                        len(batch.pack.samples),
                    )
                )
                (out.loss_sum / max(count, 1)).backward()  # type: ignore[no-untyped-call]
            finally:
                self._replayer.clear()
            for name, value in ({"loss": out.loss_sum.item()} | out.sums).items():
                totals[name] = totals.get(name, 0.0) + value
        if count:
            totals["grad_norm"] = totals.get("grad_norm", 0.0) + self._model.update()
        return count

    def _batch_metrics(
        self,
        samples: Sequence[Sample],
        routes: list[SampleRoutes] | None,
        minibatches: Sequence[tuple[_Batch, ...]],
    ) -> dict[str, float]:
        rewards = {sample.rollout_id: sample.reward for sample in samples}
        metrics = {
            "reward_mean": float(np.mean(list(rewards.values()))),
            "tokens": float(sum(int(b.pack.mask.sum()) for batches in minibatches for b in batches)),
            "tokens_total": float(sum(len(sample.tokens) for sample in samples)),
            "rows_replayed": 0.0,
            "rows_absent": 0.0,
            "rows_recomputed": 0.0,
        }
        for route in routes or ():
            metrics["rows_replayed"] += route.replayed
            metrics["rows_absent"] += int(route.absent[:-1].sum())
            metrics["rows_recomputed"] += route.recomputed
        return metrics

    # --- weights ------------------------------------------------------------------------------------------------

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Live weights under their Hugging Face names: views where possible, so use them before the next step."""
        return hf.export(dict(self.policy.gpt.named_parameters()), self.shape)

    def digest(self) -> str:
        return digest_tensors(self.named_tensors())

    def write_hf(self, folder: Path) -> int:
        """The weights as a complete Hugging Face folder; returns the weights' bytes."""
        return hf.write_folder(folder, self.named_tensors(), self.options.model_path)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _layout(self) -> checkpoint.Layout:
        table = {name: (str(p.dtype), tuple(p.shape)) for name, p in self.policy.gpt.named_parameters()}
        return checkpoint.Layout(IMPLEMENTATION, checkpoint.parameters_hash(table))

    def save(self, folder: Path, *, step: int, cursor: str) -> CheckpointInfo:
        info = CheckpointInfo(step, self._version, cursor, self.digest())
        state = {
            "model": dict(self.policy.gpt.named_parameters()),
            "optimizer": self._model.optimizer.state_dict(),
            "rng": compat.rng_state(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        checkpoint.write(folder, {"state.pt": buffer.getbuffer()}, self._layout(), info)
        return info

    def load(self, folder: Path) -> CheckpointInfo:
        files, info = checkpoint.read(folder, self._layout())
        state = torch.load(io.BytesIO(files["state.pt"]), map_location=compat.device(), weights_only=True)
        with torch.no_grad():
            for name, parameter in self.policy.gpt.named_parameters():
                parameter.copy_(state["model"][name])
        with compat.device_literals():
            self._model.optimizer.load_state_dict(state["optimizer"])
        compat.set_rng_state({name: value.cpu() for name, value in state["rng"].items()})
        self._version = info.version
        if self.digest() != info.digest:
            raise TrainerError(f"{folder}: the restored weights do not have the recorded digest")
        return info

    def close(self) -> None:
        """Leave the process group that the constructor made."""
        compat.close_process()
