from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.config import Config, load_config, resolve
from segue.config.arguments import add_config_arguments, config_from_arguments
from segue.config.check import RESERVED_ENVIRONMENT
from segue.config.load import build
from segue.config.options import OPTIONS
from segue.config.printing import print_config
from segue.errors import ConfigError

FAKE = ("engine.kind=fake", "trainer.kind=fake")
FAKE_TOML = '[engine]\nkind = "fake"\n[trainer]\nkind = "fake"\n'


def load(*overrides: str) -> Config:
    return load_config(None, (*FAKE, *overrides), {})


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_overlays_the_defaults_and_set_overlays_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[run]\nsteps = 3\nname = "file"\n[environment]\ncommand = ["a", "b c"]\nenv = { A = "1" }\n'
    )
    config = load_config(path, [*FAKE, "run.name=set", "environment.env.B=2", "rollout.drain_s=1"], {})
    assert config.run.steps == 3
    assert config.run.name == "set"
    assert config.environment.command == ("a", "b c")
    assert config.environment.env == {"A": "1", "B": "2"}
    assert config.rollout.drain_s == 1.0
    assert config.rollout.group_size == Config().rollout.group_size


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.name=word", "run.name", "word"),
        ('run.name="quoted"', "run.name", "quoted"),
        ("run.name=5", "run.name", "5"),
        ("model.path=/tmp/a b=c", "model.path", "/tmp/a b=c"),
        ("log.url=", "log.url", ""),
        ("run.steps=1_000", "run.steps", 1000),
        ("trainer.lr=1e-4", "trainer.lr", 1e-4),
        ("r3.enabled=true", "r3.enabled", True),
        ("rollout.pause_mode=in_place", "rollout.pause_mode", "in_place"),
        ('engine.extra_args=["--a", "1"]', "engine.extra_args", ("--a", "1")),
        ("environment.env.X=3", "environment.env", {"X": "3"}),
        ("environment.env.x.y=", "environment.env", {"x.y": ""}),
        ('environment.env={ A = "1" }', "environment.env", {"A": "1"}),
        ("environment.baselines.guess=0.3", "environment.baselines", {"guess": 0.3}),
        (" run.steps =4", "run.steps", 4),
    ],
)
def test_a_set_value_is_toml_and_a_bare_word_a_string(override: str, key: str, value: object) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load(override), section), name) == value


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("rollout.goup_size", "rollout.group_size"),
        ("rolout.group_size", "rollout.group_size"),
        ("rollout.steps", "run.steps"),
        ("trainer.group_size", "rollout.group_size"),
        ("steps", "run.steps"),
        ("sesion_server", "session_server"),
        ("session.ttl_s", "session_server.ttl_s"),
        ("Run.seed", "run.seed"),
    ],
)
def test_an_unknown_key_names_the_right_one(key: str, suggestion: str) -> None:
    expected = f"unknown key {re.escape(key)}; did you mean {re.escape(suggestion)}\\?"
    with pytest.raises(ConfigError, match=f"^--set: {expected}"):
        load(f"{key}=1")


def test_an_unknown_key_or_section_of_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run.toml: unknown key trainer.group_size; did you mean rollout.group_size\?"
    ):
        load_config(write(tmp_path, "[trainer]\ngroup_size = 3\n"))
    with pytest.raises(ConfigError, match=r"run.toml: unknown key rolout; did you mean rollout\?"):
        load_config(write(tmp_path, "[rolout]\ngroup_size = 3\n"))
    with pytest.raises(ConfigError, match=r"run.toml: unknown key steps; did you mean run.steps\?"):
        load_config(write(tmp_path, "steps = 3\n"))


def test_a_hopeless_key_lists_the_sections() -> None:
    with pytest.raises(ConfigError, match="unknown key zzzz; there are the sections run, model, log"):
        load("zzzz=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nsteps = 1.5\n", "run.steps must be a whole number, not '1.5'"),
        ('[run]\nsteps = "3"\n', "run.steps must be a whole number, not '3'"),
        ("[run]\nsteps = true\n", "run.steps must be a whole number, not 'True'"),
        ("[run]\nname = 3\n", "run.name must be a string"),
        ("[r3]\nenabled = 1\n", "r3.enabled must be true or false"),
        ("[trainer]\nlr = '0.1'\n", "trainer.lr must be a number"),
        ('[environment]\ncommand = "python x"\n', "environment.command must be a list of strings"),
        ("[environment.env]\nA = 1\n", "environment.env must be a table of strings"),
        ('[rollout]\npause_mode = "stop"\n', 'rollout.pause_mode must be one of "abort", "retract", .*, not \'stop\''),
        ("run = 3\n", r"run is a section, write \[run\]"),
        ("[run\n", "is not TOML: .*line 1"),
    ],
)
def test_a_wrong_value_names_file_key_and_what_is_expected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"run.toml.*{message}"):
        load_config(write(tmp_path, text), (), {})


def test_a_malformed_override_is_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("--set run.steps: write section.key=value")):
        load("run.steps")
    with pytest.raises(ConfigError, match="--set: run.steps must be a whole number, not 'many'"):
        load("run.steps=many")
    with pytest.raises(ConfigError, match=r"--set environment.command=\[x: "):
        load("environment.command=[x")
    with pytest.raises(ConfigError, match="more than one value"):
        load("run.steps=1\nother=2")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml")


def test_the_environment_gives_the_log_url_only_where_the_options_do_not() -> None:
    environ = {"REDIS_URL": "redis://outside:1/0", "RUN_STEPS": "7"}
    assert load_config(None, FAKE, environ).log.url == "redis://outside:1/0"
    assert load_config(None, [*FAKE, "log.url=redis://own/"], environ).log.url == "redis://own/"
    assert load_config(None, FAKE, {}).log.url == ""


def test_a_printed_configuration_explains_every_option_and_loads_back_equal(tmp_path: Path) -> None:
    config = load('environment.env.A=\U0001f600 "x" \\ \x7f\t\n', "rollout.pause_mode=retract", "trainer.lr=1e-05")
    text = print_config(config)
    path = tmp_path / "printed.toml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path, (), {}) == config
    assert "# Upper bound and default of a turn's max_tokens.\nmax_turn_tokens = 256\n" in text
    assert '# One of "megatron", "fake".\nkind = "fake"\n' in text
    for key in OPTIONS:
        assert re.search(rf"^{key.split('.')[1]} = ", text, re.MULTILINE), key
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) <= 110


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "environment.baselines": st.dictionaries(st.text(), st.floats(-1e3, 1e3), max_size=2),
            "environment.env": st.dictionaries(
                st.text().filter(lambda name: name not in RESERVED_ENVIRONMENT), st.text(), max_size=3
            ),
            "environment.command": st.lists(st.text(), max_size=3).map(tuple),
            "run.seed": st.integers(0, 2**62),
            "trainer.lr": st.floats(0, 1e6),
            "rollout.partial": st.booleans(),
        },
    )
)
def test_any_values_survive_printing(tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]) -> None:
    config = build({"engine.kind": "fake", "trainer.kind": "fake", **values})
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(print_config(config), encoding="utf-8", newline="")
    assert load_config(path, (), {}) == config


def test_resolved_bytes_are_equal_for_equal_configurations_and_decode_to_them() -> None:
    first, digest = resolve(load("environment.env.A=1", "environment.env.B=2"))
    second, same = resolve(load("environment.env.B=2", "environment.env.A=1"))
    assert (first, digest) == (second, same)
    assert msgspec.json.decode(first, type=Config) == load("environment.env.A=1", "environment.env.B=2")
    assert resolve(load("run.seed=1"))[1] != digest


def test_every_option_has_a_type_that_can_be_named() -> None:
    assert len(OPTIONS) > 60
    for option in OPTIONS.values():
        assert option.expected


def parse(arguments: Sequence[str]) -> Config:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments))


def test_commands_take_a_file_and_overrides(tmp_path: Path) -> None:
    config = parse(
        [
            "--config",
            str(write(tmp_path, FAKE_TOML + "[run]\nsteps = 2\n")),
            "--set",
            "run.seed=5",
            "--set",
            "run.name=x",
        ]
    )
    assert (config.run.steps, config.run.seed, config.run.name) == (2, 5, "x")


def test_print_config_and_check_stop_after_their_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, FAKE_TOML + "[run]\nsteps = 2\n"))
    with pytest.raises(SystemExit) as stop:
        parse(["--config", path, "--print-config"])
    assert stop.value.code == 0
    assert "steps = 2" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        parse(["--config", path, "--check"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "the configuration is good\n"
    with pytest.raises(ConfigError, match="model.path: there is no folder /nowhere"):
        parse(["--config", path, "--check", "--set", "model.path=/nowhere"])


def test_warnings_are_logged_when_a_configuration_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load("rollout.pause_mode=retract_native", "r3.enabled=true")
    assert [record.message for record in caplog.records if "retract_native" in record.message] != []
    assert len(caplog.records) == 1
