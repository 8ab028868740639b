"""The sending side's checks and bucket plan, shared by all transports.

Invariants: nothing that failed a check is ever sent; tensors that an engine fuses (`hf.ATOMIC_GROUPS`) share a bucket;
buckets keep the export order, and only a bucket of one atomic group may exceed the size asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from training.megatron.hf import ATOMIC_GROUPS
from training.weight_sync.protocol import Manifest, WeightCheckError

_FUSED = {part: group[0] for group in ATOMIC_GROUPS for part in group}
_PROJECTION = re.compile(r"^(.*\.)([a-z]+_proj)(\.(?:weight|bias))$")


def manifest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The manifest that these tensors fulfil."""
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors}


def checked(tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest) -> list[tuple[str, torch.Tensor]]:
    """The tensors, complete and as promised; raises WeightCheckError naming the first that is not."""
    result: list[tuple[str, torch.Tensor]] = []
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise WeightCheckError(f"{name} comes twice")
        if name not in manifest:
            raise WeightCheckError(f"{name} is not in the manifest")
        dtype, shape = manifest[name]
        if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, tuple(shape)):
            raise WeightCheckError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, promised {dtype} {tuple(shape)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WeightCheckError(f"{name} holds values that are not finite")
        seen.add(name)
        result.append((name, tensor))
    missing = sorted(set(manifest) - seen)
    if missing:
        raise WeightCheckError(f"{missing[0]} is missing ({len(missing)} in all)")
    return result


def atomic_key(name: str) -> str:
    """Equal for tensors that must travel together; the name itself for all others."""
    match = _PROJECTION.match(name)
    if match is None or match[2] not in _FUSED:
        return name
    return f"{match[1]}{_FUSED[match[2]]}{match[3]}"


def plan_buckets(
    tensors: Sequence[tuple[str, torch.Tensor]], bucket_bytes: int
) -> list[list[tuple[str, torch.Tensor]]]:
    """Cut the list into buckets of at most `bucket_bytes`, never inside an atomic group."""
    groups: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        groups.setdefault(atomic_key(name), []).append((name, tensor))
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    room = 0
    for group in groups.values():
        size = sum(tensor.nbytes for _, tensor in group)
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1] += group
        room -= size
    return buckets
