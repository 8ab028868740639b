"""Makes the rig importable by its name and its fixtures known."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from session_server_rig import engine, model, rig_of, slow_engine

__all__ = ["engine", "model", "rig_of", "slow_engine"]
