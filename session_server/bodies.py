"""Bodies as the OpenAPI document tells them. A description: the handlers check more than a schema can say.

In all of them a field that is null counts as absent, and fields that mean nothing here are ignored unless a dialect
says that they cannot be honoured.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct


class _Body(Struct, kw_only=True, omit_defaults=True):
    pass


Count = Annotated[int, Meta(ge=1, le=2**31)]
Temperature = Annotated[float, Meta(ge=0, le=10)]
Share = Annotated[float, Meta(ge=1e-6, le=1)]
Seed = Annotated[int, Meta(ge=0, lt=2**31)]
Stop = Annotated[str, Meta(min_length=1)]
JsonObject = dict[str, Any]


class OpenSession(_Body):
    """Opens a session that no lease opened."""

    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")] | None = None
    """Of the caller's choice; opening it again changes nothing."""
    metadata: dict[str, str] | None = None
    purpose: Literal["serve", "train", "eval"] | None = None
    group: Annotated[int, Meta(ge=-1, le=2**53)] | None = None
    member: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    temperature: Temperature | None = None
    token_budget: Count | None = None
    ttl_s: Annotated[float, Meta(ge=1, le=1e9)] | None = None


class Opened(Struct, kw_only=True):
    """`token` is null for a session that was open already."""

    session_id: str
    token: str | None
    base_url: str


class LeaseRequest(_Body):
    """Asks for a rollout to play."""

    wait_s: Annotated[float, Meta(ge=0, le=30)] | None = None
    worker: Annotated[str, Meta(max_length=200)] | None = None


class Lease(Struct, kw_only=True):
    """A rollout and the session to play it in."""

    session_id: str
    token: str
    base_url: str
    rollout_id: str
    purpose: str
    group: int
    member: int
    index: int
    seed: int
    task: JsonObject
    deadline_wall_s: float


MAX_REWARD = 3.4e38
"""About the largest float32, as which rewards of turns travel."""
RewardValue = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]


class Reward(_Body):
    """A reward, of the whole rollout or of one turn; idempotent by key."""

    value: RewardValue
    key: Annotated[str, Meta(min_length=1)] = "reward"
    turn: Annotated[int, Meta(ge=-1, le=2**31)] | None = None


class Finish(_Body):
    """Ends a session; whoever says it again gets the first answer."""

    reward: RewardValue | None = None
    per_turn: list[RewardValue | None] | None = None
    status: Annotated[str, Meta(min_length=1)] = "ok"
    metadata: dict[str, str] | None = None


class Finished(Struct, kw_only=True, omit_defaults=True):
    """`sample_id` is null, and `rejected` says why, where there is no sample."""

    session_id: str
    rollout_id: str
    sample_id: str | None
    rejected: str | None
    reward: float = 0.0
    tokens: int = 0
    trained_tokens: int = 0
    turns: int = 0
    frame_digest: str = ""


class RewardView(Struct, kw_only=True):
    key: str
    value: float
    turn: int


class SessionView(Struct, kw_only=True):
    """What is committed of a session; nothing of turns that are open."""

    session_id: str
    rollout_id: str
    purpose: str
    group: int
    member: int
    seed: int
    metadata: dict[str, str]
    temperature: float
    token_budget: int
    deadline_wall_s: float
    turns: list[JsonObject]
    rewards: list[RewardView]


class SamplesQuery(_Body):
    max_seq_len: Count | None = None
    masks: Literal["true", "false"] | None = None
    """true: with the sampling masks, if the run cuts its sampling."""


class EventsQuery(_Body):
    after: Annotated[int, Meta(ge=0)] | None = None
    """Position after which to begin; the header Last-Event-ID says the same."""
    follow: Literal["true", "false"] = "true"
    """false: end once everything known was told."""


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[JsonObject] | None = None
    reasoning_content: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatRequest(_Body):
    """OpenAI's chat completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=16_384)]
    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stop: Annotated[list[Stop], Meta(max_length=16)] | Stop | None = None
    seed: Seed | None = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Literal["auto", "none"] | None = None


class ChatAnswer(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[JsonObject]
    usage: JsonObject


class ResponseBody(_Body):
    """OpenAI's Responses."""

    input: str | Annotated[list[JsonObject], Meta(min_length=1, max_length=16_384)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Literal["auto", "none"] | None = None


class ResponseAnswer(Struct, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[JsonObject]
    usage: JsonObject


class AnthropicTurn(_Body):
    role: Literal["user", "assistant"]
    content: str | list[JsonObject]


class MessagesBody(_Body):
    """Anthropic's Messages."""

    messages: Annotated[list[AnthropicTurn], Meta(min_length=1, max_length=16_384)]
    max_tokens: Count
    model: str | None = None
    system: str | list[JsonObject] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    stream: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None


class MessagesAnswer(Struct, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[JsonObject]
    stop_reason: str
    stop_sequence: str | None
    usage: JsonObject


class Generate(_Body):
    """A turn whose prompt comes as token ids."""

    input_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    max_new_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stop: Annotated[list[Stop], Meta(max_length=16)] | Stop | None = None
    seed: Seed | None = None


class Generated(Struct, kw_only=True):
    turn_id: str
    output_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    weight_versions: list[list[int]]
    usage: JsonObject


class Health(Struct, kw_only=True):
    """`liveness`: where a thread of its own answers the same, however busy the server is."""

    status: str
    service: str
    loop_lag_s: float
    liveness: str


class Readiness(Struct, kw_only=True):
    """`ready` with status 200, `reason` with 503."""

    status: Literal["ready", "not ready"]
    reason: str
    admission: Literal["open", "closed"]
    sessions: int
    loop_lag_s: float


class ErrorDetail(Struct, kw_only=True):
    type: str
    message: str
    param: str | None
    code: str
    retryable: bool


class Error(Struct, kw_only=True):
    error: ErrorDetail


class AnthropicErrorDetail(Struct, kw_only=True):
    type: str
    message: str
    param: str | None
    retryable: bool


class AnthropicError(Struct, kw_only=True):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


def schemas(types: list[type]) -> tuple[list[JsonObject], dict[str, JsonObject]]:
    """JSON schemas of `types` as references, and the components that they refer to."""
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    return list(found), components
