"""House rules that no linter knows: sizes, names, and nothing that only holds on one person's machine.

Prints one line per breach and exits 1 if there is any. Sizes have an aim and a limit: beyond the limit is a breach,
between them is counted in the closing line.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = (300, 500)
FUNCTION_LINES = (40, 80)
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
PRIVATE_PATH = re.compile(r"(?<![\w.~}-])/(?:home|Users|root|work|workspace)/\w+")
TEXT = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".lua", ".json", ".html", ".js", ".css", ".Dockerfile", ""}
BINARY_OR_MACHINE_MADE = {"uv.lock", "LICENSE"}


def tracked() -> list[Path]:
    """Files of the work tree that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout
    return sorted(path for name in listing.split("\0") if name and (path := ROOT / name).is_file())


def size_breaches(path: Path, text: str) -> Iterator[tuple[str, bool]]:
    """(what, is over the limit) for the file and each function that is longer than its aim."""
    lines = len(text.splitlines())
    if lines > FILE_LINES[0]:
        yield f"{path}: {lines} lines", lines >= FILE_LINES[1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES[0]:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines", length >= FUNCTION_LINES[1]


def name_breaches(path: Path) -> Iterator[str]:
    for part in path.with_suffix("").parts:
        if part.lower() in EMPTY_NAMES:
            yield f"{path}: '{part}' says nothing about what is inside"


def text_breaches(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := PRIVATE_PATH.search(line):
            yield f"{path}:{number}: '{found[0]}' exists on one machine only"


def main() -> int:
    breaches: list[str] = []
    above_aim = 0
    for file in tracked():
        path = file.relative_to(ROOT)
        breaches += name_breaches(path)
        if file.suffix not in TEXT or path.name in BINARY_OR_MACHINE_MADE:
            continue
        text = file.read_text(encoding="utf-8")
        breaches += text_breaches(path, text)
        if file.suffix == ".py":
            for what, over_limit in size_breaches(path, text):
                above_aim += 1
                if over_limit:
                    breaches.append(f"{what}, the limit is {FILE_LINES[1]} a file and {FUNCTION_LINES[1]} a function")
    print(*breaches, sep="\n", end="\n" if breaches else "")
    print(f"house rules: {len(breaches)} breaches; {above_aim} files or functions longer than aimed")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
