"""The schema as a flat list of options: full key, type and doc line, read from the schema's own source.

Invariant: `OPTIONS` has every key of Config once, in the order of the schema; loading, checking and printing use it, so
an option is described in one place only.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

import msgspec

from segue.config import schema


@dataclass(frozen=True, slots=True)
class Option:
    """One key. `type` is its annotation; `doc` may be empty."""

    key: str
    type: object
    doc: str

    @property
    def expected(self) -> str:
        """What a value must be, for people."""
        if get_origin(self.type) is Literal:
            return _one_of(self.type)
        if get_origin(self.type) is tuple and get_origin(get_args(self.type)[0]) is Literal:
            return f"a list, each {_one_of(get_args(self.type)[0])}"
        return _EXPECTED[self.type]


def _one_of(kind: object) -> str:
    return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))


_EXPECTED: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple[str, ...]: "a list of strings",
    dict[str, str]: "a table of strings",
    dict[str, float]: "a table of numbers",
}


def _docs() -> dict[tuple[str, str], str]:
    """(class, attribute) to its doc line; the attribute is "" for the class itself."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs[node.name, ""] = ast.get_docstring(node) or ""
        for statement, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match after:
                    case ast.Expr(ast.Constant(str(text))):
                        docs[node.name, statement.target.id] = " ".join(text.split())
    return docs


def _read() -> tuple[dict[str, str], dict[str, Option]]:
    docs = _docs()
    sections: dict[str, str] = {}
    options: dict[str, Option] = {}
    for section in msgspec.structs.fields(schema.Config):
        sections[section.name] = docs[section.type.__name__, ""]
        for field in msgspec.structs.fields(section.type):
            key = f"{section.name}.{field.name}"
            options[key] = Option(key, field.type, docs.get((section.type.__name__, field.name), ""))
    return sections, options


SECTIONS, OPTIONS = _read()
"""Section name to its doc line ("" where it has none), and full key to its option."""
