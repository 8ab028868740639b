"""From a TOML file and `--set` overrides to a checked Config.

Invariants: a key that no option has is an error that names the closest one that exists; a value is never converted to
another type (a whole number for a number aside); what was loaded has passed `check_config`, whose warnings are logged.

Relative paths in a file are relative to the working directory of the process, not to the file: a value means the same
in a file and in `--set`.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_origin

import msgspec

from segue.config.check import check_config
from segue.config.options import OPTIONS, SECTIONS, Option
from segue.config.schema import Config
from segue.errors import ConfigError

_log = logging.getLogger(__name__)
_STRUCTURED = re.compile(r"""\s*["'\[{]""")


def load_config(path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The defaults, overlaid by the TOML file `path` and then by each `section.key=value` in `overrides`.

    environ: only REDIS_URL is read, and only if log.url is empty. Raises ConfigError naming file, key and remedy.
    """
    values: dict[str, object] = {}
    if path is not None:
        values |= _from_file(path)
    for override in overrides:
        _apply(values, override)
    if not values.get("log.url"):
        values["log.url"] = environ.get("REDIS_URL", "")
    config = build(values)
    for warning in check_config(config):
        _log.warning("%s", warning)
    return config


def build(values: Mapping[str, object]) -> Config:
    """The Config with these values by full key; each must have its option's type already."""
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, name = key.split(".", 1)
        sections.setdefault(section, {})[name] = value
    return msgspec.convert(sections, Config)


def resolve(config: Config) -> tuple[bytes, str]:
    """Canonical JSON of every option, and its sha256 hex: what a run records, equal for equal configurations."""
    data = msgspec.json.encode(config, order="deterministic")
    return data, hashlib.sha256(data).hexdigest()


def _from_file(path: Path) -> dict[str, object]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    values: dict[str, object] = {}
    for section, table in document.items():
        if section not in SECTIONS:
            raise _unknown(section, str(path))
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is a section, write [{section}] and its keys below it")
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in OPTIONS:
                raise _unknown(key, str(path))
            values[key] = _checked(OPTIONS[key], value, str(path))
    return values


def _apply(values: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(f"--set {override}: write section.key=value")
    entry = ""
    if key not in OPTIONS:  # an entry of a table, as in environment.env.NAME=value
        section, name, entry = (*key.split(".", 2), "", "")[:3]
        if not entry or f"{section}.{name}" not in OPTIONS or get_origin(OPTIONS[f"{section}.{name}"].type) is not dict:
            raise _unknown(key, "--set")
        key = f"{section}.{name}"
    option = OPTIONS[key]
    value = _parse(f"--set {override}", text, as_text=option.type in (str, dict[str, str]))
    if entry:
        present = values.get(key, {})
        assert isinstance(present, dict)
        value = {**present, entry: value}
    values[key] = _checked(option, value, "--set")


def _parse(where: str, text: str, *, as_text: bool) -> object:
    """`text` as a TOML value; a bare word is a string, and so is anything unquoted for an option that is a string."""
    structured = _STRUCTURED.match(text) is not None
    if as_text and not structured:
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if structured:
            raise ConfigError(f"{where}: {error}") from error
        return text
    if len(document) != 1:
        raise ConfigError(f"{where}: more than one value")
    return document["value"]


def _checked(option: Option, value: object, source: str) -> object:
    try:
        return msgspec.convert(value, option.type, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {option.key} must be {option.expected}, not {str(value)[:80]!r}") from error


def _unknown(key: str, source: str) -> ConfigError:
    """Names the option with the same name in another section, or the closest spelling."""
    name = key.rpartition(".")[2]
    namesakes = [known for known in OPTIONS if known.split(".", 1)[1] == name]
    close = difflib.get_close_matches(key, namesakes, 1, 0) or difflib.get_close_matches(key, [*SECTIONS, *OPTIONS], 1)
    hint = f"did you mean {close[0]}?" if close else f"there are the sections {', '.join(SECTIONS)}"
    return ConfigError(f"{source}: unknown key {key}; {hint}")
