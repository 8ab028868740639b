"""A configuration as TOML for people: every option with its value and its doc line, loading back to an equal one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Literal, get_origin

from segue.config.options import OPTIONS, SECTIONS
from segue.config.schema import Config

_WIDTH = 110


def print_config(config: Config) -> str:
    """The whole configuration as TOML with comments."""
    return "\n".join(_lines(config)) + "\n"


def _lines(config: Config) -> Iterator[str]:
    for number, (section, doc) in enumerate(SECTIONS.items()):
        if number:
            yield ""
        yield from _comment(doc)
        yield f"[{section}]"
        for key, option in OPTIONS.items():
            if not key.startswith(f"{section}."):
                continue
            name = key.split(".", 1)[1]
            choices = (
                f"{option.expected[0].upper()}{option.expected[1:]}." if get_origin(option.type) is Literal else ""
            )
            yield from _comment(" ".join(filter(None, (option.doc, choices))))
            yield f"{name} = {_value(getattr(getattr(config, section), name))}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # A JSON string is a TOML string, except that TOML wants DEL escaped and no surrogate pairs.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case dict():
            inside = ", ".join(f"{_value(name)} = {_value(entry)}" for name, entry in value.items())
            return f"{{ {inside} }}" if inside else "{}"
    raise TypeError(f"no option has a value like {value!r}")
