"""Causal attention over packed sequences ("thd"), with rotary positions applied inside.

megatron-core's own local attention refuses packed input, and its rotary embedding loops over the segments of a pack.
This module takes both: segments are gathered into right-padded blocks of similar length (at most twice the tokens),
rotated with one multiplication and attended with one fused call a block.

Invariants:
- Positions restart at 0 in every segment; no token sees another segment.
- Padding lies to the right of every segment, so a causal mask alone keeps it invisible to real tokens.
- The result does not depend on how segments are packed together, up to rounding.
- One `SegmentPlan` serves all layers and all passes of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from segue.errors import TrainerError
from training.megatron.compat import MegatronModule, PackedSeqParams, TransformerConfig


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary embedding: base and, for the "llama3" kind, its four constants (factor, low, high, original length)."""

    theta: float
    llama3: tuple[float, float, float, int] | None = None

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32[head_dim / 2]; the llama3 rule keeps short waves, stretches long ones, blends between."""
        inv = 1.0 / (self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        if self.llama3 is None:
            return inv
        factor, low, high, original = self.llama3
        wavelength = 2 * math.pi / inv
        blend = (original / wavelength - low) / (high - low)
        blended = (1 - blend) * inv / factor + blend * inv
        scaled = torch.where(wavelength > original / low, inv / factor, inv)
        medium = (wavelength >= original / high) & (wavelength <= original / low)
        return torch.where(medium, blended, scaled)


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """Segments of similar length, side by side: `index` int64[count * length] into the pack (padding points anywhere
    inside the segment)."""

    count: int
    length: int
    index: torch.Tensor


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """How a pack of `tokens` tokens is cut into blocks; `restore` int64[tokens] puts the blocks' rows back in order."""

    tokens: int
    blocks: tuple[SegmentBlock, ...]
    restore: torch.Tensor


def plan_segments(lengths: Sequence[int], device: torch.device) -> SegmentPlan:
    """Group segments by the power of two above their length, so that padding at most doubles a block."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length < 1:
            raise TrainerError(f"segment {i} of a pack is empty")
        groups.setdefault((length - 1).bit_length(), []).append(i)
    blocks, restore, base = [], np.empty(int(starts[-1]), np.int64), 0
    for members in groups.values():
        longest = max(lengths[i] for i in members)
        index = np.empty((len(members), longest), np.int64)
        for row, i in enumerate(members):
            index[row] = np.minimum(np.arange(longest), lengths[i] - 1) + starts[i]
            restore[starts[i] : starts[i + 1]] = base + row * longest + np.arange(lengths[i])
        blocks.append(SegmentBlock(len(members), longest, torch.from_numpy(index.reshape(-1)).to(device)))
        base += index.size
    return SegmentPlan(int(starts[-1]), tuple(blocks), torch.from_numpy(restore).to(device))


@dataclass
class PlannedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """The library's packing parameters plus the plan: they are the one thing that reaches the attention core."""

    plan: SegmentPlan | None = None


def packed_params(lengths: Sequence[int], device: torch.device) -> PlannedSeqParams:
    """Packing parameters of one micro-batch of segments with these lengths, in order."""
    cumulative = torch.tensor(np.concatenate(([0], np.cumsum(lengths))), dtype=torch.int32, device=device)
    longest = max(lengths)
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=plan_segments(lengths, device),
    )


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Core attention slot of a layer spec: query [t, heads, d], key and value [t, groups, d] -> [t, heads * d]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        rope: RopeSettings,
        softmax_scale: float | None = None,
        pg_collection: object = None,
        **_unused: object,
    ) -> None:
        super().__init__(config=config)
        del layer_number
        if config.context_parallel_size != 1:
            raise TrainerError("PackedAttention has no context parallelism: set context_parallel_size = 1")
        self.scale = softmax_scale
        self.rope = rope
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PlannedSeqParams | None = None,
        **_unused: object,
    ) -> torch.Tensor:
        if packed_seq_params is None or packed_seq_params.plan is None:
            raise TrainerError("PackedAttention takes packed sequences with a plan (see packed_params)")
        plan = packed_seq_params.plan
        cos, sin = self._rotary_tables(max(block.length for block in plan.blocks), query)
        pieces = []
        for block in plan.blocks:
            q, k, v = (
                x.index_select(0, block.index).view(block.count, block.length, x.shape[1], x.shape[2]).transpose(1, 2)
                for x in (query, key, value)
            )
            q, k = (_rotate(x, cos[: block.length], sin[: block.length]) for x in (q, k))
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            pieces.append(out.transpose(1, 2).reshape(block.count * block.length, -1))
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return rows.index_select(0, plan.restore)

    def _rotary_tables(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [length, d] in the model's dtype, computed in float32 once and grown by doubling."""
        if self._tables is None or self._tables[0].shape[0] < length:
            inverse = self.rope.inverse_frequencies(like.shape[-1]).to(like.device)
            angles = torch.outer(torch.arange(2 * length, device=like.device, dtype=torch.float32), inverse)
            angles = torch.cat((angles, angles), dim=-1)
            self._tables = (angles.cos().to(like.dtype), angles.sin().to(like.dtype))
        return self._tables


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half convention: x [..., length, d]; pairs are (i, i + d/2)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
