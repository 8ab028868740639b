"""The wire of an inference engine: SGLang's native `/generate`, which every engine of segue speaks.

Session servers send `GenerateRequest` and read `GenerateAnswer`; nothing here does I/O. Weight versions are integers
in segue and decimal strings on the wire.

Invariants of a decoded answer with n output tokens: `logprobs` (if asked for) has n finite entries that belong to
`output_ids`; `spans` cover [0, n) without gap or overlap; `rows` (if there) has exactly
prompt_tokens + n - 1 - start entries, because the last sampled token was never fed to the model. Whatever breaks one
of these raises EngineError here and never reaches a session.
"""

from __future__ import annotations

import binascii
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from segue.errors import CodecError, EngineError, EngineUnavailable
from segue.wire.ids import encode_hook
from segue.wire.mask import SamplingMask
from segue.wire.rows import increment

_pybase64: Any = importlib.import_module("pybase64") if importlib.util.find_spec("pybase64") else None

GENERATE_PATH = "/generate"
ABORT_PATH = "/abort_request"
STREAM_END = b"[DONE]"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample; defaults are the engine's own and are left out of the body.

    `temperature` 0 is greedy. `ignore_eos` makes the engine ignore `stop_token_ids` too.
    """

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn for the engine.

    `rid` must not be a prefix of another request's (the engine aborts by prefix): use ids of one fixed length.
    `routed_experts_start_len`: absolute position of the first token whose routes are wanted, at most len(input_ids).
    `extra_key`: name space of the prefix cache.
    """

    rid: str
    input_ids: Sequence[int]
    sampling_params: SamplingParams
    return_logprob: bool = False
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_sampling_mask: bool = False
    extra_key: str | None = None
    priority: int | None = None


FinishType = Literal["stop", "length", "abort", "unfinished"]


class Finish(msgspec.Struct, frozen=True):
    """Why generation ended; `matched` is the stop id or string, `message` the engine's words for an abort."""

    type: FinishType
    matched: int | str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Routing of the served model: hidden layers (dense ones included) and experts chosen per token."""

    layers: int
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class GenerateAnswer:
    """What the engine made of a request, checked.

    output_ids: the sampled tokens, n of them. logprobs: float32[n], natural log, after temperature and before any
    top-k, top-p or min-p cut, or None if not asked for; with a mask they are those of the sampler, renormalised over
    what each token was chosen from. mask: of the n output tokens, None if not asked for or if the request was aborted
    in the engine's queue. spans: (start, end, weight version) over output tokens. rows:
    int32[prompt_tokens + n - 1 - start, layers, top_k], or None if not asked for, if the answer is an unfinished
    stream chunk, or if the request was aborted in the engine's queue.
    """

    rid: str
    text: str
    output_ids: list[int]
    logprobs: NDArray[np.float32] | None
    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[tuple[int, int, int], ...]
    num_retractions: int
    rows: NDArray[np.int32] | None
    mask: SamplingMask | None

    @property
    def completion_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.output_ids)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a running engine can do, found by asking it."""

    begin_end: bool
    weight_versions: bool
    routed_experts: bool
    release_tags: tuple[str, ...]


def encode_request(request: GenerateRequest) -> bytes:
    """JSON body of POST /generate."""
    return _ENCODER.encode(request)


def encode_abort(rid: str) -> bytes:
    """JSON body of POST /abort_request for one request."""
    if not rid:
        raise EngineError("an abort needs a request id")
    return orjson.dumps({"rid": rid})


def check_vocabulary(input_ids: Sequence[int], vocab_size: int) -> None:
    """Raise EngineError for an id outside [0, vocab_size): one such id kills an engine process."""
    ids = np.asarray(input_ids, np.int64)
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise EngineError(f"input token {bad[0]} is {ids[bad[0]]}, outside the vocabulary of {vocab_size}")


def decode_answer(
    body: bytes | bytearray, request: GenerateRequest, *, routes: RouteShape | None = None, default_version: int = 0
) -> GenerateAnswer:
    """Decode and check a whole answer or one cumulative stream chunk.

    `routes` is needed where the request asks for routed experts. `default_version` stands for the engine's word
    "default", which an engine started without a version uses. Raises EngineError saying what contradicts what.
    """
    try:
        raw = _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise _undecodable(request.rid, body, error) from error
    meta = raw.meta_info
    finish = meta.finish_reason or Finish("unfinished")
    n = len(raw.output_ids)
    if meta.id != request.rid:
        raise EngineError(f"asked for request {request.rid}, got an answer for {meta.id}")
    prompt = len(request.input_ids)
    if meta.prompt_tokens not in (None, prompt):
        raise _broken(request, f"prompt of {prompt} tokens counted as {meta.prompt_tokens}")
    if meta.completion_tokens != n:
        raise _broken(request, f"{n} output ids, completion_tokens {meta.completion_tokens}")
    logprobs = _logprobs(request, raw.output_ids, meta) if request.return_logprob else None
    mask = _mask(request, raw.output_ids, meta, finish) if request.return_sampling_mask else None
    return GenerateAnswer(
        rid=request.rid,
        text=raw.text,
        output_ids=raw.output_ids,
        logprobs=logprobs if mask is None else _sampling_logprobs(request, meta),
        finish=finish,
        prompt_tokens=prompt,
        cached_tokens=meta.cached_tokens,
        spans=_spans(request, meta, n, default_version),
        num_retractions=meta.num_retractions,
        rows=_rows(request, meta, finish, prompt + n - 1, routes) if request.return_routed_experts else None,
        mask=mask,
    )


def decode_version(text: str, default_version: int) -> int:
    """Weight version on the wire -> integer; "default" is what an engine says that was started without one."""
    if text == "default":
        return default_version
    try:
        return int(text)
    except ValueError:
        raise EngineError(f"weight version {text!r} is not a decimal number") from None


def error_of(status: int, body: bytes | bytearray, where: str) -> EngineError:
    """The error that an HTTP answer other than 200 stands for; 502-504 are EngineUnavailable (retryable)."""
    message = _message_of(body)
    kind = EngineUnavailable if status in (502, 503, 504) else EngineError
    return kind(f"{where}: HTTP {status}: {message}")


class EventSplitter:
    """Cuts a byte stream of server-sent events into their data, whatever the chunk borders and event sizes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Events completed by `data`, in order; the last one of a stream is STREAM_END."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        return [event.removeprefix(b"data:").strip() for event in whole if event.startswith(b"data:")]


# --- decoding -------------------------------------------------------------------------------------------------------


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    id: str
    finish_reason: Finish | None
    completion_tokens: int
    weight_version: str = "default"
    weight_versions: list[_Span] | None = None
    prompt_tokens: int | None = None  # absent in an answer aborted from the queue
    cached_tokens: int = 0
    num_retractions: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class _Raw(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta
    text: str = ""


_ENCODER = msgspec.json.Encoder(enc_hook=encode_hook)
_DECODER = msgspec.json.Decoder(_Raw)


def _broken(request: GenerateRequest, what: str) -> EngineError:
    return EngineError(f"engine answer for request {request.rid} contradicts itself: {what}")


def _undecodable(rid: str, body: bytes | bytearray, error: msgspec.DecodeError) -> EngineError:
    if b'"error"' in body[:64]:
        return EngineError(f"request {rid}: {_message_of(body)}")
    return EngineError(f"engine answer for request {rid} does not decode: {error}")


def _message_of(body: bytes | bytearray) -> str:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode("utf-8", "replace").strip() or "(empty body)"
    inner = data.get("error", data) if isinstance(data, dict) else data
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)


def _logprobs(request: GenerateRequest, output_ids: list[int], meta: _Meta) -> NDArray[np.float32]:
    entries = meta.output_token_logprobs or []
    if len(entries) != len(output_ids):
        raise _broken(request, f"{len(output_ids)} output ids, {len(entries)} log-probs")
    if not entries:
        return np.empty(0, np.float32)
    found, ids, _ = zip(*entries, strict=True)
    if list(ids) != output_ids:
        raise _broken(request, "the log-probs belong to other tokens than output_ids")
    values = np.array(found, np.float32)
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise _broken(request, f"the log-prob of output token {where} is {entries[where][0]}")
    return values


def _spans(request: GenerateRequest, meta: _Meta, n: int, default: int) -> tuple[tuple[int, int, int], ...]:
    if meta.weight_versions is None:
        return ((0, n, decode_version(meta.weight_version, default)),) if n else ()
    spans = tuple((s.start, s.end, decode_version(s.version, default)) for s in meta.weight_versions if s.end > s.start)
    borders = [0, *(end for _, end, _ in spans)]
    if [start for start, _, _ in spans] != borders[:-1] or borders[-1] != n:
        raise _broken(request, f"version spans {spans} do not cover {n} output tokens")
    return spans


def _rows(
    request: GenerateRequest, meta: _Meta, finish: Finish, fed: int, routes: RouteShape | None
) -> NDArray[np.int32] | None:
    if meta.routed_experts is None:
        if finish.type in ("abort", "unfinished"):
            return None
        raise _broken(request, "routed experts were asked for and are missing")
    if routes is None:
        raise EngineError(f"request {request.rid} asks for routed experts of a model whose route shape is not known")
    try:
        flat = np.frombuffer(_base64(meta.routed_experts), "<i4")
    except ValueError as error:
        raise _broken(request, f"the route rows do not decode: {error}") from error
    if flat.size % (routes.layers * routes.top_k):
        raise _broken(request, f"{flat.size} experts are no whole route rows of {routes.layers} x {routes.top_k}")
    rows = flat.reshape(-1, routes.layers, routes.top_k)
    try:
        return increment(rows, start=request.routed_experts_start_len, tokens=fed + 1)
    except CodecError as error:
        raise _broken(request, str(error)) from error


def _base64(text: str) -> bytes:
    """Half a megabyte a turn: pybase64, which comes with the engine, takes a twentieth of the standard library's time.
    Raises ValueError."""
    if _pybase64 is None:
        return binascii.a2b_base64(text, strict_mode=True)
    decoded: bytes = _pybase64.b64decode(text, validate=True)
    return decoded


def _mask(request: GenerateRequest, output_ids: list[int], meta: _Meta, finish: Finish) -> SamplingMask | None:
    kept, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if kept is None or logprobs is None:
        if finish.type in ("abort", "unfinished"):
            return None if output_ids else SamplingMask.of(())
        raise _broken(request, "the sampling mask was asked for and is missing")
    if not len(kept) == len(logprobs) == len(output_ids):
        raise _broken(request, f"{len(output_ids)} output ids, {len(kept)} kept sets with {len(logprobs)} log-probs")
    try:
        mask = SamplingMask.of(kept)
        mask.check(np.array(output_ids, np.int32))
    except CodecError as error:
        raise _broken(request, str(error)) from error
    return mask


def _sampling_logprobs(request: GenerateRequest, meta: _Meta) -> NDArray[np.float32]:
    values = np.array(meta.output_token_sampling_logprobs or (), np.float32)
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise _broken(request, f"the sampling log-prob of output token {where} is {values[where]}")
    return values
