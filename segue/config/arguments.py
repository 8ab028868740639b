"""The command-line options by which every command takes its configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from segue.config.check import check_start
from segue.config.load import load_config
from segue.config.printing import print_config
from segue.config.schema import Config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --config, --set, --print-config and --check."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file; relative paths in it start here, not there"
    )
    group.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one option; the value is TOML, a bare word is a string; may be repeated",
    )
    group.add_argument(
        "--print-config", action="store_true", help="write every option with its meaning as TOML and stop"
    )
    group.add_argument("--check", action="store_true", help="check the configuration and this machine for it, and stop")


def config_from_arguments(arguments: argparse.Namespace) -> Config:
    """The configuration that the parsed arguments ask for.

    Raises ConfigError if it is wrong, and SystemExit(0) after doing what --print-config or --check asked for.
    """
    config = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        sys.stdout.write(print_config(config))
        raise SystemExit(0)
    if arguments.check:
        check_start(config)
        sys.stdout.write("the configuration is good\n")
        raise SystemExit(0)
    return config
