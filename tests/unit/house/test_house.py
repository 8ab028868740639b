"""The house itself: commands, lock, packages, names."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from segue.boot import PACKAGES, check_origins

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def test_every_target_is_listed_by_make_help() -> None:
    # Without what an outer make hands down: under `make test` the inner one would also tell its directories.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    said = subprocess.run(
        ["make", "help"], cwd=ROOT, env=outside, check=True, capture_output=True, text=True, timeout=30
    ).stdout
    listed = {line.split()[1] for line in said.splitlines()}
    assert (
        listed
        == targets()
        == {"help", "setup", "demo", "test", "test-quick", "chaos", "soak", "check", "bench", "bench-session"}
    )
    assert all(len(line.split()) > 3 for line in said.splitlines())


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "examples/first_words/README.md", ".ci/run"])
def test_commands_that_documents_name_exist(document: str) -> None:
    named = re.findall(r"\bmake ([a-z][a-z-]*)\b(?= *(?:`|#|$|\)))", (ROOT / document).read_text(), re.MULTILINE)
    assert set(named) <= targets(), document
    assert named, document


def test_ci_runs_the_checks_and_the_readmes_own_test_command() -> None:
    run = (ROOT / ".ci" / "run").read_text()
    assert run.startswith("#!/usr/bin/env bash")
    assert "set -euo pipefail" in run
    assert [line for line in run.splitlines() if line.startswith("make")] == ["make check", "make test"]
    assert re.search(r"^make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_make_demo_runs_the_example_that_the_readme_shows() -> None:
    command = re.search(r"^demo:.*\n\t(.*)$", MAKEFILE, re.MULTILINE)
    assert command is not None
    assert command[1] == ".venv/bin/segue train --config examples/first_words/run.toml"


def test_the_lock_names_the_public_index_and_nothing_else() -> None:
    lock = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r'registry = "([^"]*)"', lock)) == {"https://pypi.org/simple"}
    assert {url.split("/")[2] for url in re.findall(r'url = "([^"]*)"', lock)} == {"files.pythonhosted.org"}


def test_packages_come_from_this_project_and_are_all_shipped() -> None:
    check_origins()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).resolve().parent == ROOT / name
        assert (ROOT / name / "py.typed").is_file()
    declared = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert tuple(declared) == PACKAGES
    assert tuple(PYPROJECT["tool"]["importlinter"]["root_packages"]) == PACKAGES
    assert tuple(PYPROJECT["tool"]["mypy"]["packages"]) == PACKAGES


def test_every_package_says_in_a_docstring_what_it_owns() -> None:
    for init in [path for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")]:
        assert ast.get_docstring(ast.parse(init.read_text())), init


def test_test_files_have_unique_names_and_live_outside_packages() -> None:
    files = list((ROOT / "tests").rglob("*.py"))
    assert not [path for path in files if path.name == "__init__.py"]
    foreign = ROOT / "tests" / "environments"  # programs of their own, each in a folder of its name
    names = [path.name for path in files if path.name != "conftest.py" and foreign not in path.parents]
    assert len(names) == len(set(names))


def test_the_house_rules_hold() -> None:
    done = subprocess.run(
        [sys.executable, "checks/house.py"], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_files_beside_them(tmp_path: Path) -> None:
    uv = shutil.which("uv") or str(ROOT / ".cache" / "uv" / "bin" / "uv")  # where `make setup` puts its own
    command = [uv, "build", "--wheel", "--out-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=55)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    suffixes = {".py", ".lua", ".typed"}
    wanted = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }
    assert wanted <= inside
    assert not [name for name in inside if name.startswith(("tests/", "examples/"))]
