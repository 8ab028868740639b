"""Weights in HTTP-sized buckets, pickled with their bytes inline: the transport between processes without a GPU.

A bucket is SGLang's `flattened_bucket`: {"flattened_tensor": uint8[n], "metadata": [entry, ...]}, each entry with
name, shape, dtype, start_idx, end_idx, numel (in bytes of the flat tensor). The engine reads the entries' attributes
and builds its own objects from them, and its unpickler admits a short list of classes only; `SimpleNamespace` is on it,
so the trainer does not need SGLang. Tensors passed as file descriptors would need the sender's authentication key, and
kill the engine: the pickle is a plain one.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from types import SimpleNamespace

import torch

from training.digest import digest_tensors
from training.weight_sync.protocol import Manifest, Receiver, SyncOptions, SyncReport
from training.weight_sync.session import each, weight_update
from training.weight_sync.source import checked, plan_buckets

LOAD_FORMAT = "flattened_bucket"


def serialise_bucket(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """One bucket as the engine expects it (see the module's docstring)."""
    flat, metadata, start = [], [], 0
    for name, tensor in tensors:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        end = start + raw.numel()
        metadata.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=raw.numel()
            )
        )
        flat.append(raw)
        start = end
    return pickle.dumps({"flattened_tensor": torch.cat(flat), "metadata": metadata}, protocol=pickle.HIGHEST_PROTOCOL)


class TensorTransport:
    """`Transport` over inline buckets; each bucket is serialised once and sent to all receivers at once."""

    def __init__(self, options: SyncOptions) -> None:
        self._options = options

    async def sync(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        receivers: tuple[Receiver, ...],
        *,
        version: int,
        manifest: Manifest,
        flush_cache: bool = True,
    ) -> SyncReport:
        started = time.monotonic()
        weights = checked(tensors, manifest)
        buckets = plan_buckets(weights, self._options.bucket_bytes)
        timeout_s = self._options.load_timeout_s
        async with weight_update(receivers, version, timeout_s):
            for index, bucket in enumerate(buckets):
                payload = serialise_bucket(bucket)
                flush = flush_cache and index == len(buckets) - 1
                await each(
                    receivers,
                    lambda receiver, payload=payload, flush=flush: receiver.load_tensors(  # type: ignore[misc]
                        payload, load_format=LOAD_FORMAT, version=version, flush_cache=flush
                    ),
                    timeout_s,
                )
        await each(receivers, lambda receiver: receiver.set_version(version), timeout_s)
        size = sum(tensor.nbytes for _, tensor in weights)
        return SyncReport(version, digest_tensors(iter(weights)), size, len(buckets), time.monotonic() - started)
