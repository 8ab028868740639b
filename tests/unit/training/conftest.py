"""Fixtures over tests/support/trainer_world.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trainer_world

from segue.wire.sample import Sample


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of its random model, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = trainer_world.write_model(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return get


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return trainer_world.make_sample
