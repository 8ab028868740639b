"""One hash for a set of weights: equal if and only if names, dtypes, shapes and bytes are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over (name, dtype, shape, bytes) in sorted order of names."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        plain = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        whole.update(memoryview(plain.reshape(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()
