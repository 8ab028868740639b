"""Routing replay (R3): the experts that the engine used while sampling, used again in the training forward.

Invariants:
- Row j of a sample belongs to its token j as an input; the last token was never fed to the engine and has no row.
- Every row handed to the model is valid: positions without a recorded row get experts spread over the pack in turn
  (all on the first experts would pile them up), and what is predicted *from* such a position leaves the loss.
- Rows are per micro-batch and set just before its forward. Whatever happens, the routers are free again afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from segue.errors import ConfigError, TrainerError
from segue.wire.sample import ROW_ABSENT, ROW_RECOMPUTED, Sample

RecomputedPolicy = Literal["mask_loss", "replay"]
"""What becomes of tokens predicted from a row that a later prefill made again, possibly under other weights."""

POLICIES: tuple[RecomputedPolicy, ...] = ("mask_loss", "replay")


@dataclass(frozen=True, slots=True)
class RouteTable:
    """The sparse layers of a model, as replay needs them."""

    layers: tuple[int, ...]
    all_layers: int
    experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class SampleRoutes:
    """`rows` int64[n, sparse layers, top_k], all valid but those where `absent` bool[n]; `kept` bool[n]: tokens whose
    prediction may stay in the loss; counts of this sample's rows by what was done with them."""

    rows: NDArray[np.int64]
    absent: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    replayed: int
    recomputed: int


def sample_routes(sample: Sample, table: RouteTable, policy: RecomputedPolicy) -> SampleRoutes:
    """Check a sample's rows and take the sparse layers' columns; raises TrainerError on rows that do not fit."""
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy {policy!r} for recomputed rows; choices: {', '.join(POLICIES)}")
    count = len(sample.tokens)
    if sample.routes is None or sample.routes_provenance is None:
        raise TrainerError(
            f"sample {sample.sample_id} carries no routes: start the engines with routed experts, or turn replay off"
        )
    expected = (count - 1, table.all_layers, table.top_k)
    if sample.routes.shape != expected or sample.routes_provenance.shape != (count - 1,):
        raise TrainerError(f"sample {sample.sample_id}: routes are {sample.routes.shape}, the model needs {expected}")
    rows = np.zeros((count, len(table.layers), table.top_k), np.int64)
    rows[:-1] = sample.routes[:, list(table.layers)]
    absent = np.ones(count, np.bool_)
    absent[:-1] = sample.routes_provenance == ROW_ABSENT
    _check_rows(sample, rows[~absent], table)
    recomputed = sample.routes_provenance == ROW_RECOMPUTED
    dropped = absent[:-1] | recomputed if policy == "mask_loss" else absent[:-1]
    kept = np.ones(count, np.bool_)
    kept[1:] = ~dropped
    return SampleRoutes(rows, absent, kept, int((~absent).sum()), int(recomputed.sum()))


def _check_rows(sample: Sample, rows: NDArray[np.int64], table: RouteTable) -> None:
    if rows.size and rows.max() >= table.experts:
        raise TrainerError(f"sample {sample.sample_id}: a route names expert {rows.max()} of {table.experts}")
    ordered = np.sort(rows, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise TrainerError(f"sample {sample.sample_id}: a route names one expert twice")


def pack_routes(routes: Sequence[SampleRoutes], table: RouteTable) -> NDArray[np.int64]:
    """int64[sparse layers, tokens, top_k] of a micro-batch; absent rows take experts round robin."""
    rows = np.concatenate([r.rows for r in routes])
    absent = np.flatnonzero(np.concatenate([r.absent for r in routes]))
    filler = np.arange(len(absent) * table.top_k).reshape(-1, 1, table.top_k) % table.experts
    rows[absent] = filler
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


class _Router(Protocol):
    """The part of the library's RouterReplay object that is used here."""

    def set_target_indices(self, topk_indices: Any) -> None: ...

    def set_router_replay_action(self, router_replay_action: Any) -> None: ...

    def clear_router_replay_action(self) -> None: ...

    def clear_indices(self) -> None: ...


class Replayer:
    """Drives one model's routers through forward and backward of a micro-batch.

    With activation recomputation the layers run forward again inside backward and must see the same rows: the library
    keeps them in a queue that only its REPLAY_BACKWARD action reads. Without it the queue is just cleared.
    """

    def __init__(self, routers: Sequence[_Router]) -> None:
        self._routers = routers

    @contextlib.contextmanager
    def forward(self, rows: NDArray[np.int64] | None) -> Iterator[None]:
        """Within the context, router i uses rows[i] int64[tokens, top_k]; with None every router is free."""
        if rows is None:
            yield
            return
        import torch

        from training.megatron import compat

        if len(rows) != len(self._routers):
            raise TrainerError(f"rows for {len(rows)} sparse layers, the model has {len(self._routers)}")
        try:
            for router, layer_rows in zip(self._routers, rows, strict=True):
                router.set_target_indices(torch.from_numpy(layer_rows).to(compat.device()))
                router.set_router_replay_action(compat.RouterReplayAction.REPLAY_FORWARD)
            yield
        except BaseException:
            self.clear()
            raise
        for router in self._routers:
            router.set_router_replay_action(compat.RouterReplayAction.REPLAY_BACKWARD)

    def clear(self) -> None:
        """Free the routers and forget all rows; call after a micro-batch's backward, and after a failure."""
        for router in self._routers:
            router.clear_router_replay_action()
            router.clear_indices()
