"""Every configuration in the repository loads, and what is run together agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from segue.config import load_config

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted([*ROOT.glob("examples/**/*.toml"), *ROOT.glob("deploy/**/*.toml"), *ROOT.glob("recipes/**/*.toml")])


def test_there_are_configurations_to_check() -> None:
    names = {str(path.relative_to(ROOT)) for path in CONFIGS}
    assert {
        "examples/first_words/run.toml",
        "examples/smollm2_arithmetic/run.toml",
        "deploy/configs/single_node_cpu.toml",
        "deploy/configs/external_log.toml",
        "deploy/configs/gpu_colocated.toml",
    } <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_loads_and_names_programs_that_exist(path: Path) -> None:
    config = load_config(path, environ={})
    for command in (config.model.prepare, config.environment.command):
        for part in command:
            if part.endswith(".py"):
                assert (ROOT / part).is_file(), part
    if config.model.prepare:
        assert config.model.prepare[-1] == config.model.path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_line_of_its_comments_that_shows_a_command_names_the_file(path: Path) -> None:
    shown = [line for line in path.read_text().splitlines() if line.startswith("#   ") and "--config" in line]
    for line in shown:
        assert str(path.relative_to(ROOT)) in line


def test_the_compose_file_runs_the_image_on_the_log_server_it_starts() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"log", "segue"}
    build = services["segue"]["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).resolve().is_file()
    config = services["segue"]["command"][services["segue"]["command"].index("--config") + 1]
    assert (ROOT / config).is_file()
    # Only an empty log.url lets REDIS_URL decide.
    assert load_config(ROOT / config, environ={}).log.url == ""
    assert "@log:" in services["segue"]["environment"]["REDIS_URL"]
    assert services["segue"]["depends_on"] == {"log": {"condition": "service_healthy"}}
    command = " ".join(services["log"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    for service in services.values():
        for mount in service["volumes"]:
            assert mount.split(":")[0] in compose["volumes"]


def test_the_image_installs_from_the_lock_and_starts_segue() -> None:
    lines = (ROOT / "deploy" / "docker" / "cpu.Dockerfile").read_text().replace("\\\n", " ").splitlines()
    syncs = [line for line in lines if "uv sync" in line]
    assert syncs
    for line in syncs:
        assert "--frozen" in line
        assert "--extra engine --extra train" in " ".join(line.split())
    assert 'ENTRYPOINT [".venv/bin/segue"]' in lines
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
