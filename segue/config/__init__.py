"""The one place where a run's options are read, checked and written down.

It reads TOML files, `--set` overrides and REDIS_URL (the only environment variable), and never starts anything.
"""

from segue.config.load import load_config, resolve
from segue.config.schema import Config

__all__ = ["Config", "load_config", "resolve"]
