from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from segue.config.capabilities import ADVANTAGES, LOSSES, MODES, RECOMPUTED, TABLE, realise
from segue.config.check import AT_LEAST, check_config, check_start
from segue.config.load import build
from segue.config.model import check_model, read_model_facts
from segue.config.options import OPTIONS
from segue.config.schema import Config
from segue.errors import ConfigError
from segue.ports import check_port, free_port
from training import advantages, losses, replay

FAKE: dict[str, object] = {"engine.kind": "fake", "trainer.kind": "fake"}


def make(**values: object) -> Config:
    return build({**FAKE, **{key.replace("__", "."): value for key, value in values.items()}})


def test_the_defaults_need_nothing_but_a_model() -> None:
    assert check_config(build({"model.path": "m"})) == ()
    with pytest.raises(ConfigError, match='model.path is empty, but engine.kind = "sglang" and trainer.kind'):
        check_config(Config())


def test_every_number_has_a_smallest_value_or_is_checked_otherwise() -> None:
    elsewhere = {
        "engine.mem_fraction_static", "model.route_layers", "rollout.temperature",
        "rollout.top_k", "rollout.top_p", "router.port", "session_server.port",
    }  # fmt: skip
    numbers = {key for key, option in OPTIONS.items() if option.type in (int, float)}
    assert numbers == set(AT_LEAST) | elsewhere


@pytest.mark.parametrize("key", sorted(AT_LEAST))
def test_a_number_below_its_smallest_value_is_refused(key: str) -> None:
    value = int(AT_LEAST[key]) - 1 if OPTIONS[key].type is int else AT_LEAST[key] - 0.01
    with pytest.raises(ConfigError, match=f"{re.escape(key)} must be at least"):
        check_config(build({**FAKE, key: value}))


CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({"run__steps": 0}, "run.steps must be at least 1, not 0"),
    ({"trainer__lr": float("nan")}, "trainer.lr must be finite"),
    ({"trainer__loss": "ppo"}, "trainer.loss = 'ppo' is not known: choose one of grpo"),
    ({"trainer__advantage": "gae"}, "trainer.advantage = 'gae' is not known: choose one of group_centred, group_norm"),
    ({"session_server__select_leaves": "leaves"}, "session_server.select_leaves = 'leaves' must name a function as"),
    ({"r3__recomputed": "free_route"}, 'r3.recomputed = "free_route" would route .* set it to .mask_loss. or .replay.'),
    ({"rollout__top_p": 0.0}, "rollout.top_p = 0.0 keeps nothing .* set it above 0 and at most to 1"),
    ({"rollout__top_p": 0.9}, "rollout.top_k = -1 does not bound .* it must be 2 to 4096"),
    ({"rollout__min_p": 0.1, "rollout__top_k": 5000}, "rollout.top_k = 5000 does not bound .* it must be 2 to 4096"),
    ({"rollout__min_p": 1.0}, "rollout.min_p must be below 1"),
    ({"rollout__lease_s": float("inf")}, "rollout.lease_s must be finite"),
    ({"trainer__beta2": 1.0}, "trainer.beta2 must be below 1"),
    ({"run__name": "a/b"}, "run.name 'a/b' must be"),
    ({"run__name": ".."}, "run.name"),
    ({"log__url": "http://x"}, "log.url .* must start with redis://"),
    (
        {"rollout__max_open_groups": 2, "rollout__groups_per_step": 3},
        "rollout.max_open_groups = 2 is less than rollout.groups_per_step = 3",
    ),
    ({"model__prepare": ("make",)}, "model.prepare is set but model.path is not: set model.path"),
    (
        {"rollout__max_turn_tokens": 4096},
        "max_turn_tokens = 4096 leaves no room .* engine.context_length = 4096: lower",
    ),
    (
        {"rollout__max_session_tokens": 255},
        "max_turn_tokens = 256 is more than rollout.max_session_tokens = 255: lower",
    ),
    (
        {"engine__device": "cpu", "engine__max_total_tokens": 1000},
        "context_length = 4096 does not fit into engine.max_total_tokens = 1000",
    ),
    ({"rollout__temperature": 0.0}, "rollout.temperature = 0.0 gives no log-probs .*evaluation.temperature may be 0"),
    ({"rollout__group_size": 1}, '"group_normalised" compares .* rollout.group_size = 1: set rollout.group_size to 2'),
    ({"trainer__minibatches": 65}, "trainer.minibatches = 65 is more than .* = 64"),
    ({"trainer__clip_low": 1.0}, "trainer.clip_low"),
    ({"evaluation__every": 5}, "evaluation.every = 5 but evaluation.groups = 0 .*: set evaluation.groups"),
    ({"engine__request_deadline_s": 700.0}, "engine.request_deadline_s = 700.0 is longer than rollout.turn_deadline_s"),
    ({"rollout__turn_deadline_s": 601.0}, "rollout.turn_deadline_s = 601.0 is longer than rollout.lease_s = 600"),
    ({"session_server__ttl_s": 60.0}, "rollout.lease_s = 600.0 is longer than session_server.ttl_s = 60"),
    (
        {"rollout__partial": False, "rollout__drain_s": 60.0},
        "rollout.drain_s = 60.0 .* rollout.pause_deadline_s = 60.0",
    ),
    ({"session_server__port": 65535, "session_server__count": 2}, "session_server.port = 65535 leaves 1 to 65535"),
    ({"router__port": 70000}, "router.port = 70000"),
    ({"environment__env": {"SEGUE_WORKER": "x"}}, "environment.env.SEGUE_WORKER would be overwritten: .* leave it out"),
    ({"router__port": -1}, "router.port = -1"),
    (
        {"session_server__port": 9000, "session_server__count": 3, "router__port": 9002},
        "router.port = 9002 is one of the ports 9000 to 9002 of session_server.port",
    ),
]


@pytest.mark.parametrize(("values", "message"), CONTRADICTIONS)
def test_what_cannot_work_is_refused_with_keys_and_remedy(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(make(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"rollout__partial": False},
        {"rollout__drain_s": 60.0},
        {"rollout__group_size": 1, "trainer__advantage": "per_turn"},
        {"evaluation__temperature": 0.0, "evaluation__groups": 4, "evaluation__every": 2},
        {"environment__command": ()},
        {"session_server__port": 9000, "session_server__count": 3, "router__port": 9003},
        {"session_server__count": 3, "router__port": 9002},
        {"trainer__lr": 0.0},
    ],
)
def test_what_works_is_allowed_without_a_word(values: dict[str, object]) -> None:
    assert check_config(make(**values)) == ()


def test_what_has_a_price_is_said_once_each() -> None:
    (native,) = check_config(make(rollout__pause_mode="retract_native", r3__enabled=True))
    assert "rollout.pause_mode" in native
    assert "r3.enabled" in native
    (pointless,) = check_config(make(rollout__pause_mode="in_place", rollout__partial=False))
    assert "rollout.partial = false changes nothing" in pointless
    (unused,) = check_config(make(r3__recomputed="replay"))
    assert "r3.recomputed" in unused


def test_every_combination_of_mode_partial_and_r3_passes_the_check() -> None:
    assert len(TABLE) == 16
    for mode, partial, r3 in TABLE:
        check_config(make(rollout__pause_mode=mode, rollout__partial=partial, r3__enabled=r3))


def test_the_table_of_pauses_keeps_its_promises() -> None:
    for (mode, partial, r3), how in TABLE.items():
        assert how.cut == (how.open_turns != "kept_by_engine")
        assert (how.open_turns == "regenerated") == (how.cut and not partial) == how.drain
        assert how.flush == how.releases_memory == (mode != "in_place")
        assert (how.rows == "none") == (not r3)
        assert bool(how.warning) == (how.rows == "flagged")
    for r3 in (False, True):
        assert realise("abort", partial=True, r3=r3).cut
        assert realise("abort", partial=True, r3=r3).engine_pause == "retract"
        assert not realise("in_place", partial=True, r3=r3).cut
    assert realise("retract", partial=True, r3=True) == realise("abort", partial=True, r3=True)
    assert realise("retract", partial=True, r3=False) == realise("retract_native", partial=True, r3=False)
    assert MODES == ("abort", "retract", "retract_native", "in_place")


def test_a_start_needs_the_model_or_the_command_that_makes_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"model.path: there is no folder {missing}; .*model.prepare"):
        check_start(make(model__path=missing))
    check_start(make(model__path=missing, model__prepare=("true",)))
    check_start(make(model__path=str(tmp_path)))


def test_a_taken_port_is_named_with_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = f"router.port: cannot listen on 127.0.0.1:{port} .*set router.port to a free port"
        with pytest.raises(ConfigError, match=message):
            check_start(make(router__port=port))
        with pytest.raises(ConfigError, match=f"session_server.port: cannot listen on 127.0.0.1:{port}"):
            check_start(make(session_server__port=port))
    check_start(make(router__port=port))


def test_a_free_port_can_be_bound() -> None:
    port = free_port("127.0.0.1")
    check_port("127.0.0.1", port, "x")
    socket.create_server(("127.0.0.1", port)).close()
    with pytest.raises(ConfigError, match=r"x: cannot listen on 203\.0\.113\.7:80"):
        check_port("203.0.113.7", 80, "x")


def model(tmp_path: Path, **fields: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("fields", "experts", "top_k"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, 8, 2),
        ({"num_local_experts": 16, "num_experts_per_tok": 4}, 16, 4),
        ({"n_routed_experts": 64, "num_experts_per_tok": 6}, 64, 6),
        ({"text_config": {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 1}}, 4, 1),
        ({}, 0, 0),
    ],
)
def test_facts_of_the_model_come_from_its_own_file(
    tmp_path: Path, fields: dict[str, object], experts: int, top_k: int
) -> None:
    facts = read_model_facts(Path(model(tmp_path, num_hidden_layers=3, **fields)))
    assert (facts.layers, facts.experts, facts.top_k) == (3, experts, top_k)


def test_options_that_the_model_cannot_honour_are_refused(tmp_path: Path) -> None:
    path = model(tmp_path, num_hidden_layers=2, max_position_embeddings=8192)
    assert check_model(make(model__path=path)).positions == 8192
    with pytest.raises(ConfigError, match=r"r3.enabled = true, but the model at model.path = .* no experts .*: set r3"):
        check_model(make(model__path=path, r3__enabled=True))
    with pytest.raises(ConfigError, match="model.route_layers = 3, but the model has 2 layers"):
        check_model(make(model__path=path, model__route_layers=3))
    with pytest.raises(ConfigError, match="engine.context_length = 9000 is beyond the 8192 positions"):
        check_model(make(model__path=path, engine__context_length=9000))
    moe = model(tmp_path, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2)
    assert check_model(make(model__path=moe, r3__enabled=True)).experts == 8


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "x"}'])
def test_an_unusable_model_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model.path: .*config.json"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json is missing"):
        read_model_facts(tmp_path)


def test_a_run_may_cut_its_sampling_within_what_an_engine_records() -> None:
    assert check_config(make(rollout__top_k=20, rollout__top_p=0.9, rollout__min_p=0.05)) == ()


def test_the_names_that_are_accepted_are_those_of_the_trainer() -> None:
    assert (*LOSSES,) == losses.LOSSES.names()
    assert (*ADVANTAGES,) == advantages.ADVANTAGES.names()
    assert RECOMPUTED == replay.POLICIES
