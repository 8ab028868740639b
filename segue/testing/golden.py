"""Golden files of the events, and the table of events in the docs. Both come from the classes alone.

    python -m segue.testing.golden            say what is missing or differs; exit 1 if anything does
    python -m segue.testing.golden --write    write what is missing; an existing file is never overwritten
    python -m segue.testing.golden --docs     write docs/events.md and docs/asyncapi.json

A golden file pins one version of one event: its schema, its key and identity, and the bytes, logical key and identity
digest of a canonical example. Runs recorded with that version must stay readable for ever, so a file never changes once
it is released: a changed class needs a new version, an upcaster beside the class, and a new file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path

import msgspec

from segue.events import codec
from segue.events.base import REGISTRY, Body
from segue.testing import asyncapi
from segue.testing.events import example

HOME = Path(__file__).resolve().parent.parent.parent
GOLDEN_DIR = HOME / "tests" / "golden" / "events"
DOCS_FILE = HOME / "docs" / "events.md"
ASYNCAPI_FILE = HOME / "docs" / "asyncapi.json"
WRITE_COMMAND = "python -m segue.testing.golden --write"
DOCS_COMMAND = "python -m segue.testing.golden --docs"


def golden_name(cls: type[Body]) -> str:
    return f"{cls.SPEC.name}.v{cls.SPEC.version}.json"


def golden_text(cls: type[Body]) -> str:
    """What the golden file of this class says."""
    spec, body = cls.SPEC, example(cls)
    record = {
        "name": spec.name,
        "version": spec.version,
        "kind": spec.kind,
        "key": spec.key,
        "identity": spec.identity,
        "schema": _undescribed(msgspec.json.schema(cls)),
        "example": codec.encode_body(body).decode(),
        "logical_key": body.logical_key(),
        "identity_digest": body.identity_digest(),
    }
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def _undescribed(schema: object) -> object:
    """The schema without docstrings: wording may change without a new version."""
    if isinstance(schema, dict):
        return {k: _undescribed(v) for k, v in schema.items() if not (k == "description" and isinstance(v, str))}
    return [_undescribed(item) for item in schema] if isinstance(schema, list) else schema


def classes() -> list[type[Body]]:
    """Every registered version of every event, by name and version."""
    return [REGISTRY[key] for key in sorted(REGISTRY)]


def complaints(folder: Path) -> list[str]:
    """What is wrong with the golden files, one line each, with the remedy."""
    found = []
    for cls in classes():
        path = folder / golden_name(cls)
        if not path.exists():
            found.append(f"{path.name} is missing: {WRITE_COMMAND}")
        elif path.read_text() != golden_text(cls):
            found.append(
                f"{cls.__name__} differs from {path.name}: give it version {cls.SPEC.version + 1} and an upcaster from "
                f"{cls.SPEC.version}, then {WRITE_COMMAND}; if that version was never released, delete the file first"
            )
    return found


def write_missing(folder: Path) -> list[Path]:
    """Write the files that do not exist; returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for cls in classes():
        path = folder / golden_name(cls)
        if not path.exists():
            path.write_text(golden_text(cls))
            written.append(path)
    return written


def docs_text() -> str:
    """docs/events.md: one table per lifecycle, from the newest class of every event."""
    lines = [
        "# Events",
        "",
        f"Every fact and command of a run. This page is generated from the classes: `{DOCS_COMMAND}`.",
        "",
        "A *command* asks and is carried out by its handler; a *fact* reports and is folded into state. The log holds",
        "at most one event of a *key*; a repetition must agree in the *identity* fields, or it is refused. *Follows*",
        "says what must come next, and by when.",
    ]
    lifecycle = ""
    for cls in codec.known_types().values():
        module = sys.modules[cls.__module__]
        if module.__name__ != lifecycle:
            lifecycle = module.__name__
            lines += ["", f"## {lifecycle.rpartition('.')[2]}", "", _cell((module.__doc__ or "").split("\n\n")[0]), ""]
            lines += ["| event | kind | emitter | handler | key | identity | follows | says |", "|" + " --- |" * 8]
        lines.append(_row(cls))
    return "\n".join(lines) + "\n"


def asyncapi_text() -> str:
    return json.dumps(asyncapi.document(), indent=1, ensure_ascii=False) + "\n"


def _row(cls: type[Body]) -> str:
    spec = cls.SPEC
    # A struct without a docstring of its own inherits Body's, which says nothing about it.
    says = _cell(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]) if "__doc__" in vars(cls) else ""
    identity = ", ".join(spec.identity) if spec.kind == "fact" and spec.key else ""
    title = f"`{spec.name}` v{spec.version}<br>{cls.__name__}"
    cells = (title, spec.kind, spec.emitter, spec.handler, ", ".join(spec.key), identity, spec.follows, says)
    return "| " + " | ".join(_cell(c) for c in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m segue.testing.golden", description="Golden files of the events.")
    parser.add_argument("--write", action="store_true", help="write missing golden files")
    parser.add_argument("--docs", action="store_true", help="write docs/events.md and docs/asyncapi.json")
    parser.add_argument("--folder", type=Path, default=GOLDEN_DIR)
    options = parser.parse_args(argv)
    if options.write:
        for path in write_missing(options.folder):
            print(f"wrote {path}")
    if options.docs:
        DOCS_FILE.parent.mkdir(exist_ok=True)
        DOCS_FILE.write_text(docs_text())
        ASYNCAPI_FILE.write_text(asyncapi_text())
        print(f"wrote {DOCS_FILE} and {ASYNCAPI_FILE}")
    found = complaints(options.folder)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
