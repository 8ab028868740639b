"""Between a turn in memory and the facts that record it: TurnCommitted and back, the frame of a kept partial.

Invariant: `node(restore)` of a recorded fact equals the node that was made when it was committed, array for array.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from segue.blobs import BlobStore
from segue.errors import CodecError, EngineError
from segue.events.base import Bulk
from segue.events.turn import TurnCommitted
from segue.wire.engine import GenerateAnswer
from segue.wire.frame import Frame, decode_frame, encode_frame
from segue.wire.mask import SamplingMask
from segue.wire.rows import Chunk, NarrowRows, RowLedger, row_dtype
from session_server.attempt import Ask
from session_server.families import Generic
from session_server.graph import Delivered, Graph, Node, TurnTokens
from session_server.messages import Comparison, Message
from session_server.partial import Partial

TOKENS_KIND, ROWS_KIND, KEPT_KIND = "turn_tokens", "turn_rows", "turn_kept"
TOKEN_LEVEL = "tokens"
"""Context of turns whose prompt came as token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """A turn that is complete and about to be recorded."""

    ask: Ask
    turn_id: str
    request_id: str
    messages: tuple[Message, ...]
    tokens: TurnTokens
    rows: RowLedger | None
    rows_start: int
    finish_reason: str
    parts: int
    prompt_tokens: int


def prepare(ask: Ask, turn_id: str, request_id: str, partial: Partial, finish: str, family: Generic) -> Commit:
    """The finished turn. Raises EngineError if its rows or its mask do not match its tokens."""
    output = np.array(partial.output, np.int32)
    tokens = TurnTokens(ask.prompt, output, partial.logprobs(), tuple(partial.spans), partial.mask())
    messages: tuple[Message, ...] = ()
    if ask.context != TOKEN_LEVEL:
        raw = family.format.message(
            partial.output, ask.sampling.stop, prompt=ask.prompt.tolist(), tools=ask.tools, turn_id=turn_id
        )
        messages = (*ask.messages, Message(raw, ask.comparison))
        finish = "tool_calls" if raw.get("tool_calls") and finish == "stop" else finish
    start = ask.parent.rows.total if ask.parent is not None and ask.parent.rows is not None else 0
    rows = partial.rows
    try:
        if rows is not None:
            rows.known_rows(partial.prompt_tokens + len(output))
            rows = rows.joined(start)
        if tokens.mask is not None:
            tokens.mask.check(output)
    except CodecError as error:
        raise EngineError(f"request {request_id}: {error}") from error
    return Commit(ask, turn_id, request_id, messages, tokens, rows, start, finish, partial.parts, partial.prompt_tokens)


async def committed(commit: Commit, blobs: BlobStore) -> TurnCommitted:
    """The fact; bulk bytes are in the blob store when this returns. Raises BlobError if there is no room."""
    tokens, ask = commit.tokens, commit.ask
    arrays: dict[str, NDArray[Any]] = {"prompt": tokens.prompt, "output": tokens.output, "logprobs": tokens.logprobs}
    mask = _mask_arrays(tokens.mask)
    rows: Bulk | None = None
    rows_digest = ""
    if commit.rows is not None:
        new, provenance = commit.rows.slice(commit.rows_start, commit.rows.total)
        rows = await blobs.bulk_async(encode_frame(ROWS_KIND, {}, {"rows": new, "provenance": provenance}))
        rows_digest = _digest(new, provenance)
        _keep(commit.rows, commit.rows_start, rows, blobs)
    return TurnCommitted(
        session_id=ask.session.session_id,
        turn_id=commit.turn_id,
        parent_id=ask.parent.turn_id if ask.parent is not None else "",
        request_id=commit.request_id,
        request_digest=ask.digest,
        messages=await blobs.bulk_async(orjson.dumps([message.raw for message in commit.messages])),
        tokens=await blobs.bulk_async(encode_frame(TOKENS_KIND, {"context": ask.context}, arrays | mask)),
        spans=tokens.spans,
        finish_reason=commit.finish_reason,
        prompt_tokens=commit.prompt_tokens,
        output_tokens=len(tokens.output),
        parts=commit.parts,
        token_digest=_digest(tokens.prompt, tokens.output),
        logprob_digest=_digest(tokens.logprobs, *mask.values()),
        rows_digest=rows_digest,
        rows=rows,
        rows_start=commit.rows_start,
        idempotency_key=ask.idempotency_key,
    )


def node(commit: Commit, created_s: int) -> Node:
    ask = commit.ask
    return Node(
        commit.turn_id, ask.parent, ask.context, commit.messages, commit.tokens, commit.finish_reason, commit.parts,
        ask.digest, ask.idempotency_key, created_s, commit.rows,
    )  # fmt: skip


async def restore(
    fact: TurnCommitted, graph: Graph, blobs: BlobStore, comparison: Comparison, empty_rows: RowLedger | None,
    created_s: int,
) -> Node:  # fmt: skip
    """The node of a recorded turn, its parent taken from `graph`. Raises CodecError or BlobError for damaged bytes."""
    parent = graph.by_id[fact.parent_id] if fact.parent_id else None
    frame = decode_frame(await blobs.read_async(fact.tokens))
    tokens = TurnTokens(
        frame.array("prompt", np.int32),
        frame.array("output", np.int32),
        frame.array("logprobs", np.float32),
        fact.spans,
        _mask_of(frame),
    )
    messages = tuple(Message(raw, comparison) for raw in orjson.loads(await blobs.read_async(fact.messages)))
    rows = parent.rows if parent is not None else empty_rows
    if fact.rows is not None and rows is not None:
        rows = rows.append(fact.rows_start, *_rows_of(await blobs.read_async(fact.rows)))
        _keep(rows, fact.rows_start, fact.rows, blobs)
    return Node(
        fact.turn_id, parent, str(frame.header["context"]), messages, tokens, fact.finish_reason,
        fact.parts, fact.request_digest, fact.idempotency_key, created_s, rows, Delivered.UNKNOWN,
    )  # fmt: skip


async def kept(answer: GenerateAnswer, blobs: BlobStore) -> tuple[Bulk | None, str]:
    """What an interrupted request produced, as a frame, and the digest of its tokens; None if there is nothing."""
    output = np.array(answer.output_ids, np.int32)
    digest = _digest(output)
    if not answer.output_ids:
        return None, digest
    arrays: dict[str, NDArray[Any]] = {"output": output}
    if answer.logprobs is not None:
        arrays["logprobs"] = answer.logprobs
    if answer.rows is not None:
        arrays["rows"] = answer.rows
    arrays |= _mask_arrays(answer.mask)
    return await blobs.bulk_async(encode_frame(KEPT_KIND, {}, arrays)), digest


def node_bytes(found: Node) -> int:
    """What a node holds, about."""
    tokens = found.tokens
    size = tokens.prompt.nbytes + tokens.output.nbytes + tokens.logprobs.nbytes
    size += sum(array.nbytes for array in _mask_arrays(tokens.mask).values())
    size += sum(len(str(message.raw.get("content") or "")) for message in found.messages)
    if found.rows is not None:
        before = found.parent.rows.total if found.parent is not None and found.parent.rows is not None else 0
        width = found.rows.layers * found.rows.top_k * row_dtype(found.rows.experts).itemsize
        size += (found.rows.total - before) * (width + 1)  # with its provenance
    return size


def _mask_arrays(mask: SamplingMask | None) -> dict[str, NDArray[Any]]:
    """What a mask adds to a frame; nothing if there is none, so that frames without one stay what they were."""
    return {} if mask is None else {"mask_ids": mask.ids, "mask_offsets": mask.offsets}


def _mask_of(frame: Frame) -> SamplingMask | None:
    if "mask_ids" not in frame.arrays:
        return None
    return SamplingMask(frame.array("mask_ids", np.int32), frame.array("mask_offsets", np.int64))


def _rows_of(data: bytes) -> Chunk:
    found = decode_frame(data)
    new: NarrowRows = found.arrays["rows"]
    return new, found.array("provenance", np.uint8)


def _keep(rows: RowLedger, start: int, stored: Bulk, blobs: BlobStore) -> None:
    """Rows that went into the blob store may leave memory; those that lie in the event itself are too small to."""
    if stored.inline is None and rows.total > start:
        rows.keep(lambda: _rows_of(blobs.read(stored)))


def _digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
