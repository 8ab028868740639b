"""Weights as a model folder on a disk that the engines read: `<folder>/weights_v000007/`, complete and atomic."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from segue.errors import ConfigError
from training.digest import digest_tensors
from training.megatron import hf
from training.weight_sync.protocol import Manifest, Receiver, SyncOptions, SyncReport
from training.weight_sync.session import each, torn_on_error
from training.weight_sync.source import checked


class DiskTransport:
    """`Transport` by folder. The newest `keep` versions stay on disk; older ones go once every receiver has loaded."""

    def __init__(self, options: SyncOptions) -> None:
        if options.folder is None or options.source is None:
            raise ConfigError("weight transport 'disk' needs `folder` and `source`")
        self._options, self._folder, self._source = options, options.folder, options.source

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
        target = self._folder / f"weights_v{version:06d}"
        size = await asyncio.to_thread(self._write, target, weights)
        timeout_s = self._options.load_timeout_s
        async with torn_on_error(version):
            await each(
                receivers,
                lambda receiver: receiver.load_disk(str(target), version=version, flush_cache=flush_cache),
                timeout_s,
            )
        await each(receivers, lambda receiver: receiver.set_version(version), timeout_s)
        await asyncio.to_thread(self._prune)
        return SyncReport(version, digest_tensors(iter(weights)), size, 1, time.monotonic() - started)

    def _write(self, target: Path, weights: list[tuple[str, torch.Tensor]]) -> int:
        """A repeated sync of one version writes again: the folder may come from an attempt with other weights."""
        if target.exists():
            shutil.rmtree(target)
        return hf.write_folder(target, weights, self._source)

    def _prune(self) -> None:
        versions = sorted(self._folder.glob("weights_v[0-9]*"))
        for old in versions[: -self._options.keep]:
            shutil.rmtree(old)
