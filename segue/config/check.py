"""What is refused when a configuration is read: values out of range, and options that contradict each other.

`check_config` looks at the options alone, so a file can be checked on any machine. `check_start` looks at this machine
and runs just before a start. `segue.config.model` looks at the model once it is there. Each message names the keys and
says what to do.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

from segue.config.capabilities import (
    ADVANTAGES,
    LOSSES,
    MAX_MASK_TOKENS,
    RECOMPUTED,
    realise,
    truncates,
)
from segue.config.options import OPTIONS
from segue.config.schema import Config
from segue.errors import ConfigError
from segue.ports import check_port

AT_LEAST: dict[str, float] = {
    "run.steps": 1, "run.seed": 0, "run.stall_s": 1,
    "log.connect_timeout_s": 0.1,
    "engine.count": 1, "engine.max_total_tokens": 1, "engine.max_running_requests": 1, "engine.context_length": 2,
    "engine.start_deadline_s": 1, "engine.request_deadline_s": 1, "engine.fake_token_s": 0,
    "trainer.lr": 0, "trainer.weight_decay": 0, "trainer.clip_grad": 0, "trainer.epochs": 1, "trainer.minibatches": 1,
    "trainer.clip_low": 0, "trainer.clip_high": 0, "trainer.micro_batch_tokens": 1, "trainer.start_deadline_s": 1,
    "trainer.step_deadline_s": 1, "trainer.fake_step_s": 0, "trainer.beta1": 0, "trainer.beta2": 0,
    "rollout.groups_per_step": 1, "rollout.group_size": 1, "rollout.extra_groups": 0, "rollout.max_turn_tokens": 1,
    "rollout.max_session_tokens": 2, "rollout.drain_s": 0, "rollout.lease_s": 1, "rollout.max_returns": 0,
    "rollout.min_p": 0, "rollout.turn_deadline_s": 1, "rollout.pause_deadline_s": 1, "rollout.max_staleness": 0,
    "rollout.max_open_groups": 0,
    "session_server.count": 1, "session_server.ttl_s": 1, "session_server.max_body_bytes": 1024,
    "session_server.max_session_bytes": 1024, "session_server.max_memory_bytes": 1024,
    "session_server.max_open_sessions": 1, "session_server.max_connections": 1, "session_server.health_port": 0,
    "router.health_interval_s": 0.05,
    "environment.workers": 1, "environment.concurrency": 1,
    "evaluation.every": 0, "evaluation.groups": 0, "evaluation.group_size": 1, "evaluation.temperature": 0,
    "evaluation.stop_at": 0, "retention.blobs_h": 0, "offload.device_gib": 0, "offload.host_gib": 0,
    "checkpoint.every": 1, "checkpoint.keep": 1,
    "weights.bucket_bytes": 1, "weights.deadline_s": 1,
    "ray.num_cpus": 1, "ray.object_store_mb": 76,
}  # fmt: skip
"""Smallest value of each number. Ray refuses an object store of 75 MB or less."""

_BELOW_ONE = ("trainer.beta1", "trainer.beta2", "engine.mem_fraction_static", "rollout.min_p")
RESERVED_ENVIRONMENT = {"SEGUE_BASE_URL", "SEGUE_CONCURRENCY", "SEGUE_WORKER", "SEGUE_WORKER_TOKEN"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_GROUP_ADVANTAGES = ("group_normalised", "group_centred")


def check_config(config: Config) -> tuple[str, ...]:
    """Warnings about what works but has a price. Raises ConfigError for the first thing that cannot work."""
    _check_ranges(config)
    for wrong in _contradictions(config):
        raise ConfigError(wrong)
    return tuple(_warnings(config))


def check_start(config: Config) -> None:
    """Raise ConfigError if this machine cannot start the run: the model is not there, a port is taken."""
    if config.model.path and not Path(config.model.path).is_dir() and not config.model.prepare:
        raise ConfigError(
            f"model.path: there is no folder {config.model.path}; "
            "put the model there or set model.prepare to the command that makes it"
        )
    for key, name in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if name and not Path(name).is_file():
            raise ConfigError(f"{key}: there is no file {name}")
    server = config.session_server
    if server.port:
        for index in range(server.count):
            check_port(server.host, server.port + index, "session_server.port")
    if config.router.port:
        check_port(config.router.host, config.router.port, "router.port")


def _check_ranges(config: Config) -> None:
    for key, option in OPTIONS.items():
        section, name = key.split(".", 1)
        value = getattr(getattr(config, section), name)
        if option.type not in (int, float):
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{key} must be finite, not {value}")
        if value < AT_LEAST.get(key, -math.inf):
            raise ConfigError(f"{key} must be at least {AT_LEAST[key]}, not {value}")
        if key in _BELOW_ONE and value >= 1:
            raise ConfigError(f"{key} must be below 1, not {value}")
    if not _NAME.fullmatch(config.run.name):
        raise ConfigError(
            f"run.name {config.run.name!r} must be letters, digits, '.', '_' or '-' (it names folder and log)"
        )
    if config.log.url and not config.log.url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError("log.url (or REDIS_URL) must start with redis://, rediss:// or unix://")


def _contradictions(config: Config) -> Iterator[str]:
    yield from _sizes(config)
    yield from _training(config)
    yield from _sampling(config)
    yield from _deadlines(config)
    yield from _ports(config)
    for key in ("select_leaves", "finish_samples"):
        value = getattr(config.session_server, key)
        if value and not _FUNCTION.fullmatch(value):
            yield f"session_server.{key} = {value!r} must name a function as package.module:function, or be empty"
    for name in sorted(config.environment.env.keys() & RESERVED_ENVIRONMENT):
        yield f"environment.env.{name} would be overwritten: the supervisor sets {name} for each worker; leave it out"


def _offload(config: Config) -> Iterator[str]:
    offload, rollout = config.offload, config.rollout
    if not offload.level:
        return
    if rollout.mode != "colocated":
        yield (
            f'offload.level is set but rollout.mode = "{rollout.mode}" lets engines and trainer work at the same time: '
            'set rollout.mode = "colocated", or leave offload.level empty'
        )
    how = realise(rollout.pause_mode, partial=rollout.partial, r3=config.r3.enabled)
    if not how.releases_memory:
        yield (
            f'offload.level is set but rollout.pause_mode = "{rollout.pause_mode}" keeps requests in the engine\'s '
            'memory: use "abort" or "retract", or leave offload.level empty'
        )
    if config.engine.device == "cuda" and config.trainer.kind != "fake":
        yield (
            f'offload.level is set but trainer.kind = "{config.trainer.kind}" cannot leave a GPU yet: give engines and '
            "trainer devices of their own, and leave offload.level empty"
        )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.source in ("jsonl", "parquet") and not data.path:
        yield f'data.source = "{data.source}" reads a file: set data.path'
    if data.source == "python" and ":" not in data.entry_point:
        yield 'data.source = "python" calls a function: set data.entry_point to module:function'
    if data.source == "python" and data.eval_path:
        yield 'data.eval_path is a file, which data.source = "python" does not read: leave it out'
    if data.source == "none" and (data.path or data.entry_point):
        yield 'data.path or data.entry_point is set but data.source is "none": set data.source'


def _sizes(config: Config) -> Iterator[str]:
    model, engine, rollout = config.model, config.engine, config.rollout
    if model.prepare and not model.path:
        yield "model.prepare is set but model.path is not: set model.path to the folder that the command makes"
    if not model.path and (engine.kind, config.trainer.kind) != ("fake", "fake"):
        yield (
            f'model.path is empty, but engine.kind = "{engine.kind}" and trainer.kind = "{config.trainer.kind}" need a '
            "model: set model.path to a folder in Hugging Face layout"
        )
    if not rollout.max_turn_tokens < engine.context_length:
        yield (
            f"rollout.max_turn_tokens = {rollout.max_turn_tokens} leaves no room for a prompt in "
            f"engine.context_length = {engine.context_length}: lower the first or raise the second"
        )
    if rollout.max_turn_tokens > rollout.max_session_tokens:
        yield (
            f"rollout.max_turn_tokens = {rollout.max_turn_tokens} is more than rollout.max_session_tokens = "
            f"{rollout.max_session_tokens}: lower the first or raise the second"
        )
    if engine.device == "cpu" and engine.context_length > engine.max_total_tokens:
        yield (
            f"engine.context_length = {engine.context_length} does not fit into engine.max_total_tokens = "
            f"{engine.max_total_tokens}: one long session could never run; lower the first or raise the second"
        )


def _training(config: Config) -> Iterator[str]:
    trainer, rollout, evaluation = config.trainer, config.rollout, config.evaluation
    if not rollout.temperature > 0:
        yield (
            f"rollout.temperature = {rollout.temperature} gives no log-probs to train on: set it above 0 "
            "(evaluation.temperature may be 0)"
        )
    for key, name, known in (("loss", trainer.loss, LOSSES), ("advantage", trainer.advantage, ADVANTAGES)):
        if name not in known:
            yield f"trainer.{key} = {name!r} is not known: choose one of {', '.join(known)}"
    if trainer.advantage in _GROUP_ADVANTAGES and rollout.group_size < 2:
        yield (
            f'trainer.advantage = "{trainer.advantage}" compares the members of a group, but rollout.group_size = '
            f"{rollout.group_size}: set rollout.group_size to 2 or more, or another trainer.advantage"
        )
    if trainer.minibatches > rollout.groups_per_step * rollout.group_size:
        yield (
            f"trainer.minibatches = {trainer.minibatches} is more than the samples of a step (rollout.groups_per_step "
            f"x rollout.group_size = {rollout.groups_per_step * rollout.group_size}): lower it"
        )
    if 0 < rollout.max_open_groups < rollout.groups_per_step:
        yield (
            f"rollout.max_open_groups = {rollout.max_open_groups} is less than rollout.groups_per_step = "
            f"{rollout.groups_per_step}, so no batch would ever be whole: raise the first (0: no bound)"
        )
    if trainer.clip_low >= 1:
        yield f"trainer.clip_low = {trainer.clip_low} allows ratios below 0: set it below 1"
    if config.r3.recomputed not in RECOMPUTED:
        yield (
            f'r3.recomputed = "{config.r3.recomputed}" would route single tokens of a replayed batch freely, which the '
            f"trainer's routers cannot: set it to {' or '.join(map(repr, RECOMPUTED))}"
        )
    if evaluation.every and not evaluation.groups:
        yield (
            f"evaluation.every = {evaluation.every} but evaluation.groups = 0 has nothing to play: "
            "set evaluation.groups to 1 or more, or evaluation.every to 0"
        )


def _sampling(config: Config) -> Iterator[str]:
    """What a run that cuts its sampling needs, so that the trainer can replay it."""
    rollout = config.rollout
    if not 0 < rollout.top_p <= 1:
        yield f"rollout.top_p = {rollout.top_p} keeps nothing or more than there is: set it above 0 and at most to 1"
    if not truncates(rollout):
        return
    if not 1 < rollout.top_k <= MAX_MASK_TOKENS:
        yield (
            f"rollout.top_k = {rollout.top_k} does not bound how many tokens are recorded as kept: with "
            f"rollout.top_p < 1, rollout.min_p > 0 or rollout.top_k set, it must be 2 to {MAX_MASK_TOKENS}"
        )


def _deadlines(config: Config) -> Iterator[str]:
    """A wait inside another one must be the shorter, or its own outcome is never seen."""
    rollout = config.rollout
    chain = [
        ("engine.request_deadline_s", config.engine.request_deadline_s),
        ("rollout.turn_deadline_s", rollout.turn_deadline_s),
        ("rollout.lease_s", rollout.lease_s),
        ("session_server.ttl_s", config.session_server.ttl_s),
    ]
    for (inner, short), (outer, long) in itertools.pairwise(chain):
        if short > long:
            yield f"{inner} = {short} is longer than {outer} = {long}, which contains it: lower one or raise the other"
    drains = realise(rollout.pause_mode, partial=rollout.partial, r3=config.r3.enabled).drain
    if drains and rollout.drain_s >= rollout.pause_deadline_s:
        yield (
            f"rollout.drain_s = {rollout.drain_s} is waited for in each pause, because rollout.partial = false, and is "
            f"not below rollout.pause_deadline_s = {rollout.pause_deadline_s}: lower the first or raise the second"
        )


def _ports(config: Config) -> Iterator[str]:
    server, router = config.session_server, config.router
    last = server.port + server.count - 1 if server.port else 0
    for key, first, end in (("session_server.port", server.port, last), ("router.port", router.port, router.port)):
        if first < 0 or end > 65535:
            yield (
                f"{key} = {first} leaves 1 to 65535 (session_server.count = {server.count}): "
                "take a lower port, or 0 for free ones"
            )
    if router.port and server.port <= router.port <= last:
        yield (
            f"router.port = {router.port} is one of the ports {server.port} to {last} of session_server.port and "
            "session_server.count: choose another"
        )


def _warnings(config: Config) -> Iterator[str]:
    rollout, r3 = config.rollout, config.r3
    warning = realise(rollout.pause_mode, partial=rollout.partial, r3=r3.enabled).warning
    if warning:
        yield warning
    if not rollout.partial and not realise(rollout.pause_mode, partial=False, r3=r3.enabled).cut:
        yield (
            f'rollout.partial = false changes nothing with rollout.pause_mode = "{rollout.pause_mode}": the engine '
            'carries open turns on by itself. With "abort" they would be dropped and generated again'
        )
    if r3.recomputed != type(r3)().recomputed and not r3.enabled:
        yield f'r3.recomputed = "{r3.recomputed}" changes nothing while r3.enabled = false'
