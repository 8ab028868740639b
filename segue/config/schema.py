"""Every option of a run, typed, with its default and its reason. Nothing else in the project reads configuration.

A TOML file fills this structure; unknown keys are errors. What contradicts is refused in segue.config.check, before
anything starts.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


class Run(Section, frozen=True):
    """What is done, and how long."""

    name: str = "run"
    """Prefix of the run id; the id itself is <name>-<date>-<4 hex>."""
    steps: int = 10
    """Optimizer steps (each on `rollout.groups_per_step` groups)."""
    seed: int = 0
    """Seeds tasks, sampling and the trainer."""
    dir: str = "runs"
    """Folder under which runs/<id>/ is made."""
    stall_s: float = 300.0
    """No progress for this long raises an alarm."""


class Model(Section, frozen=True):
    path: str = ""
    """Folder in Hugging Face layout (config.json, safetensors, tokenizer)."""
    prepare: tuple[str, ...] = ()
    """Command that makes `path` if it does not exist; runs once, before anything starts."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """On both sides. auto: float32 on CPUs, which is truly on-policy (engine and trainer agree to about 1e-6), bfloat16
    on accelerators, whose kernels have no other."""
    family: str = "auto"
    """Chat-template family of the session server; "auto" finds it from the tokenizer."""
    route_layers: int = -1
    """Hidden layers in R3 rows; -1 reads it from the model's config."""


class Log(Section, frozen=True):
    url: str = ""
    """redis:// or rediss:// of an external server (or REDIS_URL); empty starts one under the supervisor."""
    fsync: Literal["everysec", "always"] = "everysec"
    connect_timeout_s: float = 10.0


class Engine(Section, frozen=True):
    kind: Literal["sglang", "fake"] = "sglang"
    count: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_total_tokens: int = 16384
    """KV cache size on CPUs; without it the pool takes most of the memory."""
    max_running_requests: int = 32
    mem_fraction_static: float = 0.3
    context_length: int = 4096
    start_deadline_s: float = 180.0
    request_deadline_s: float = 120.0
    """One request part at the engine; longer means the engine is lost to it."""
    extra_args: tuple[str, ...] = ()
    """Passed on to the engine's command as they are."""
    env: dict[str, str] = {}
    """Laid over the engine's environment; PYTHONPATH gives it a site of its own."""
    fake_token_s: float = 0.0
    """Seconds per token of the fake engine."""


class Trainer(Section, frozen=True):
    kind: Literal["megatron", "fake"] = "megatron"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    epochs: int = 1
    """Passes over the batch per step."""
    minibatches: int = 1
    """Optimizer updates per pass."""
    loss: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    advantage: str = "group_normalised"
    micro_batch_tokens: int = 4096
    start_deadline_s: float = 180.0
    step_deadline_s: float = 1800.0
    fake_step_s: float = 0.0


class Rollout(Section, frozen=True):
    mode: Literal["colocated", "one_step_async", "fully_async"] = "colocated"
    """colocated: engines pause while the trainer works. one_step_async: the next batch is sampled meanwhile, by weights
    one step old. fully_async: sampling never waits; samples older than max_staleness are dropped."""
    max_staleness: int = 1
    """fully_async: versions that the oldest token of a sample may lie behind the weights that train on it."""
    max_open_groups: int = 0
    """Training groups that may be admitted and not yet complete or dropped; 0: no bound of its own."""
    drop_uniform: bool = False
    """Drop groups whose members all got the same reward (nothing to learn from), and admit others."""
    groups_per_step: int = 8
    group_size: int = 8
    extra_groups: int = 0
    """Groups admitted beyond groups_per_step; what is open when enough are complete goes on in the next step."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Below 1, or with top_k or min_p set, training sessions sample from a cut distribution, and what each token was
    chosen from is recorded with it. top_k must then be finite, because it bounds what is recorded."""
    top_k: int = -1
    min_p: float = 0.0
    max_turn_tokens: int = 256
    """Upper bound and default of a turn's max_tokens."""
    max_session_tokens: int = 4096
    pause_mode: Literal["abort", "retract", "retract_native", "in_place"] = "abort"
    partial: bool = True
    """Carry cut turns on from their tokens; false drops them after drain_s."""
    drain_s: float = 5.0
    lease_s: float = 600.0
    max_returns: int = 2
    turn_deadline_s: float = 600.0
    pause_deadline_s: float = 60.0


class Offload(Section, frozen=True):
    """Engines and trainer take turns on the same devices (colocated). Sizes are per device, for the prediction."""

    level: tuple[Literal["weights", "kv_cache", "cuda_graph"], ...] = ()
    """What of an engine leaves its device while the trainer works; the trainer then leaves it while engines work.
    Empty: nobody leaves."""
    memory_peak: Literal["host", "device", "auto"] = "auto"
    """Who goes first: "device" saves a host copy, "host" saves device memory, "auto" takes what fits."""
    device_gib: float = 0.0
    """Memory of a device; 0: not checked."""
    host_gib: float = 0.0
    """A device's share of the host's memory; 0: not checked."""
    sizes_gib: dict[str, float] = {}
    """weights, mirror, kv_cache, cuda_graph, params, grads, optimizer, default, activations, backup, pinned, loading,
    contexts, bucket: what each takes; left out: 0."""


class R3(Section, frozen=True):
    enabled: bool = False
    """Record the engine's expert choices and replay them in the trainer."""
    recomputed: Literal["mask_loss", "replay", "free_route"] = "mask_loss"


class SessionServer(Section, frozen=True):
    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    """First port; 0 takes free ones."""
    ttl_s: float = 3600.0
    comparison: Literal["strict", "tool_arguments", "role_content"] = "strict"
    on_length: Literal["extend", "refuse"] = "extend"
    select_leaves: str = ""
    """Function ("module:function") that says which leaves of a session train; empty: all that were delivered and not
    passed over for an extended sibling."""
    finish_samples: str = ""
    """Function that has the last word on what of them trains; empty: what leaves share trains in the first of them.
    "session_server.selection:newest_only" besides leaves out what older weights sampled of a carried-on turn."""
    max_body_bytes: int = 16 * 1024 * 1024
    max_session_bytes: int = 256 * 1024 * 1024
    max_memory_bytes: int = 8 * 1024**3
    """Of each server's committed turns; beyond it route rows move to the blob store, and new sessions wait."""
    max_open_sessions: int = 20_000
    max_connections: int = 32_768
    health_port: int = 0
    """First port of the threads that answer `GET /healthz` while a server is busy; 0 takes free ones, which the
    servers' own `/healthz` names."""


class Router(Section, frozen=True):
    host: str = "127.0.0.1"
    port: int = 0
    policy: Literal["least_load", "round_robin"] = "least_load"
    health_interval_s: float = 2.0


class Environment(Section, frozen=True):
    command: tuple[str, ...] = ()
    """Program that leases rollouts and plays them; empty: environments are started elsewhere."""
    workers: int = 1
    concurrency: int = 16
    """Rollouts that one worker plays at a time (SEGUE_CONCURRENCY in its environment)."""
    env: dict[str, str] = {}
    baselines: dict[str, float] = {}
    """Rewards to compare with, by name: shown beside the curve and as reward_<name> in summary.json."""


class Data(Section, frozen=True):
    """Rows that leases hand to environments (the lease's `task`); without a source they go by index and seed alone."""

    source: Literal["none", "jsonl", "parquet", "python"] = "none"
    path: str = ""
    """File of the training rows (jsonl, parquet)."""
    eval_path: str = ""
    """File of the held-out rows; empty: evaluations get no row."""
    entry_point: str = ""
    """module:function that returns the rows, dicts (python)."""
    shuffle: bool = True
    """Another order each epoch, from run.seed; evaluations are never shuffled."""


class Evaluation(Section, frozen=True):
    every: int = 0
    """Steps between evaluations; 0: only before the first and after the last step, if groups > 0."""
    groups: int = 0
    """Held-out tasks of one evaluation, each played `group_size` times."""
    group_size: int = 1
    temperature: float = 1.0
    stop_at: float = 0.0
    """End the run after the first evaluation whose mean reward reaches this; 0: never."""


class Checkpoint(Section, frozen=True):
    every: int = 10
    keep: int = 2


class Retention(Section, frozen=True):
    """What a run that stays up for weeks need not keep."""

    blobs_h: float = 0.0
    """Hours that bulk bytes are kept after nothing of the run needs them (the debugger shows them); 0: for ever."""


class Weights(Section, frozen=True):
    transport: Literal["tensor", "disk"] = "tensor"
    bucket_bytes: int = 512 * 1024 * 1024
    deadline_s: float = 120.0
    prove: bool = True
    """Compare every tensor's checksum at the engine with the trainer's after each sync."""


class RayOptions(Section, frozen=True):
    address: str = ""
    """Address of a running Ray cluster; empty starts one under the supervisor."""
    num_cpus: int = 4
    """Logical CPUs of the local cluster: slots for actors, not a limit on work."""
    object_store_mb: int = 80


class Config(Section, frozen=True):
    run: Run = Run()
    model: Model = Model()
    log: Log = Log()
    engine: Engine = Engine()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    offload: Offload = Offload()
    r3: R3 = R3()
    session_server: SessionServer = SessionServer()
    router: Router = Router()
    environment: Environment = Environment()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    retention: Retention = Retention()
    weights: Weights = Weights()
    ray: RayOptions = RayOptions()
