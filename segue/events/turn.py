"""A turn: one answer of the policy inside a session, which may be cut by pauses and carried on."""

from __future__ import annotations

from segue.events.base import Body, Bulk, command, fact

Span = tuple[int, int, int]
"""(start, end, weight version) over a turn's output tokens, half-open."""


@command("turn.abort", handler="session servers", key=("pause",), follows="TurnInterrupted of every open turn in 30 s")
class AbortTurns(Body, frozen=True):
    """Take every running request off the engines by its id and keep what came back.

    `keep_partial`: carry the turn on from its tokens after the pause; otherwise they are dropped (TurnDiscarded)
    once `drain_s` has passed, and the turn is generated again.
    """

    pause: int
    keep_partial: bool
    drain_s: float


@fact(
    "turn.started",
    emitter="session server",
    key=("request_id",),
    follows="TurnCommitted, TurnInterrupted, TurnDiscarded or TurnFailed by the turn deadline",
)
class TurnStarted(Body, frozen=True):
    """A request for this turn was sent to an engine. A carried-on turn has one request per part."""

    session_id: str
    turn_id: str
    request_id: str
    engine_id: str
    prompt_tokens: int


@fact(
    "turn.committed",
    emitter="session server",
    key=("session_id", "turn_id"),
    identity=("token_digest", "logprob_digest", "rows_digest"),
)
class TurnCommitted(Body, frozen=True):
    """The turn is part of the session for good; the answer goes to the client after this.

    The graph node is `turn_id`, below `parent_id` ("" for a root). `messages`: JSON of the appended request messages
    and the answer. `tokens`: frame with `prompt` int32 (tokens this node adds before its output), `output` int32,
    `logprobs` float32. `rows`: frame with `rows` and `provenance` for route rows [rows_start, rows_start + n).
    """

    session_id: str
    turn_id: str
    parent_id: str
    request_id: str
    request_digest: str
    messages: Bulk
    tokens: Bulk
    spans: tuple[Span, ...]
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    parts: int
    token_digest: str
    logprob_digest: str
    rows_digest: str = ""
    rows: Bulk | None = None
    rows_start: int = 0
    idempotency_key: str = ""


@fact(
    "turn.interrupted",
    emitter="session server",
    key=("request_id",),
    identity=("token_digest",),
    follows="TurnResumed after EngineResumed, or TurnDiscarded",
)
class TurnInterrupted(Body, frozen=True):
    """The request was cut; what it had produced is kept. `tokens`: frame `output`, `logprobs` and rows if any."""

    session_id: str
    turn_id: str
    request_id: str
    engine_id: str
    kept_tokens: int
    tokens: Bulk | None
    token_digest: str
    spans: tuple[Span, ...] = ()
    reason: str = "pause"


@fact("turn.resumed", emitter="session server", key=("request_id",))
class TurnResumed(Body, frozen=True):
    """A cut turn goes on from its kept tokens under a new request id."""

    session_id: str
    turn_id: str
    request_id: str
    engine_id: str
    kept_tokens: int


@fact("turn.discarded", emitter="session server", key=("request_id",))
class TurnDiscarded(Body, frozen=True):
    """The tokens of a cut or orphaned request were dropped; the turn is generated again or retried by its client."""

    session_id: str
    turn_id: str
    request_id: str
    dropped_tokens: int
    reason: str


@fact("turn.failed", emitter="session server", key=("request_id",))
class TurnFailed(Body, frozen=True):
    """The turn ended without an answer; the client got `status`. The session is as it was before."""

    session_id: str
    turn_id: str
    request_id: str
    status: int
    reason: str
