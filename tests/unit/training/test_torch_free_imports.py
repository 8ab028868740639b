"""The light half of `training` stays light: actors import it before they decide to pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = [
    "training",
    "training.advantages",
    "training.advantages.per_turn",
    "training.checkpoint",
    "training.losses",
    "training.megatron",
    "training.megatron.shape",
    "training.packing",
    "training.protocol",
    "training.replay",
    "training.scoring",
    "training.weight_sync",
    "training.weight_sync.protocol",
    "training.weight_sync.session",
    "actors.trainers",
    "actors.trainers.fake",
    "actors.trainers.megatron",
]


@pytest.mark.parametrize("forbidden", ["torch", "ray", "megatron"])
def test_light_modules_import_without(forbidden: str) -> None:
    code = f"import sys; sys.modules[{forbidden!r}] = None\n" + "\n".join(f"import {name}" for name in LIGHT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
