"""What the dialects of a turn have in common: one internal form of a request, one way to tell an answer piece by piece.

A dialect turns a body into a `TurnBody` and a committed node (or its pieces, while it is made) into what its vendor's
client expects. Invariants: the same conversation gives the same messages and tools in every dialect, so a session may
mix them; a dialect never decides about tokens; everything it shows of a committed turn is a function of the node and
the request alone, so a repeated answer is the same answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from segue.errors import RequestError
from session_server.answers import Delta
from session_server.graph import Graph, Node
from session_server.messages import invalid
from session_server.model_text import ModelText
from session_server.sampling import Cuts, Sampling, parse_sampling

_NO_TOOLS = "chat"
"""Context of turns without tools."""
MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session allows its requests. graph: the conversation so far, for what refers to it."""

    purpose: str
    temperature: float
    renders_tools: bool
    graph: Graph
    cuts: Cuts | None = None


@dataclass(frozen=True, slots=True)
class TurnBody:
    """A request for one turn, whatever dialect it came in."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    use_tools: bool
    """Whether calls in the answer are parsed (`tool_choice` is not "none")."""
    model: str
    stream: bool
    sampling: Sampling
    after: Node | None = None
    """The turn that the request names as the one before; its path is the beginning of `messages`."""

    @property
    def context(self) -> str:
        """What shapes the prompt beside the messages; turns of one path agree in it."""
        if not self.tools:
            return _NO_TOOLS
        return hashlib.sha256(orjson.dumps(self.tools, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Head:
    """What of an answer is known before it is made."""

    turn_id: str
    created_s: int
    prompt_tokens: int

    @property
    def suffix(self) -> str:
        """Names the turn inside a vendor's own ids."""
        return self.turn_id.removeprefix("turn-")


class Stream(Protocol):
    """The vendor's events of one streamed answer, in the order of the calls: begin, delta ..., end or failed."""

    def begin(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def end(self, node: Node, text: ModelText) -> bytes: ...
    def failed(self, error: RequestError) -> bytes: ...


class Dialect(Protocol):
    """A parsed request that knows how its answer looks."""

    @property
    def turn(self) -> TurnBody: ...
    def whole(self, node: Node, text: ModelText) -> bytes: ...
    def stream(self, head: Head) -> Stream: ...


class Blocks:
    """A stream whose answer is a sequence of blocks, each opened, filled and closed before the next begins."""

    def __init__(self) -> None:
        self.block = -1
        """Number of the block that is open, or was last."""
        self._open: Delta | None = None
        self._filled = ""

    def delta(self, delta: Delta) -> bytes:
        events = b""
        if self._open is None or (self._open.kind, self._open.number) != (delta.kind, delta.number):
            events += self.close()
            self.block += 1
            self._open, self._filled = delta, ""
            events += self.opened(delta)
        self._filled += delta.text
        return events + self.piece(delta) if delta.text else events

    def close(self) -> bytes:
        """End the block that is open."""
        if self._open is None:
            return b""
        events = self.closed(self._open, self._filled)
        self._open = None
        return events

    def opened(self, first: Delta) -> bytes:
        raise NotImplementedError

    def piece(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def closed(self, first: Delta, filled: str) -> bytes:
        raise NotImplementedError


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises RequestError 400."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"'{name}' must be true or false", name)
    return bool(value)


def model_name(body: Mapping[str, Any]) -> str:
    """What the client calls the model; there is one, so every name is right."""
    value = body.get("model")
    if value is not None and not isinstance(value, str):
        raise invalid("'model' must be a string", "model")
    return value or "policy"


def refuse(body: Mapping[str, Any], fields: Mapping[str, tuple[object, ...]]) -> None:
    """Raise RequestError 400 for a field that is set to something else than its harmless values (or null)."""
    for name, harmless in fields.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise invalid(f"'{name}' is not supported", name)


def sampling_of(body: Mapping[str, Any], terms: Terms, spelled: Mapping[str, str]) -> Sampling:
    """The sampling part of a body. `spelled`: this dialect's name of each field, by the common name."""
    fields = {ours: body.get(theirs) for ours, theirs in spelled.items()}
    try:
        return parse_sampling(fields, purpose=terms.purpose, temperature=terms.temperature, cuts=terms.cuts)
    except RequestError as error:
        ours = error.param or ""
        theirs = spelled.get(ours, ours)
        raise RequestError(
            error.status, error.kind, error.message.replace(f"'{ours}'", f"'{theirs}'"), theirs
        ) from error


def tools_of(tools: Sequence[dict[str, Any]], terms: Terms) -> list[dict[str, Any]] | None:
    """Tools in their common form, None if there are none. Raises RequestError 400 if the model would not see them."""
    if not tools:
        return None
    try:
        orjson.dumps(tools)
    except TypeError as error:  # nested too deeply
        raise invalid(f"'tools': {error}", "tools") from error
    if len(tools) > MAX_TOOLS:
        raise invalid(f"'tools' may have at most {MAX_TOOLS} entries", "tools")
    if not terms.renders_tools:
        raise invalid("this model's chat template does not show tools to the model", "tools")
    return list(tools)


def tool_list(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid("'tools' must be a list of objects", "tools")
    return tools


def function_tool(tool: Mapping[str, Any], parameters: str, where: str) -> dict[str, Any]:
    """A tool of the flat kind (name, description, `parameters`) in its common form: what the model is shown. `strict`
    speaks to a constrained sampler, which the policy does not have."""
    name, description, schema = tool.get("name"), tool.get("description"), tool.get(parameters)
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name must be a string", f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{where}.description must be a string", f"{where}.description")
    if schema is not None and not isinstance(schema, dict):
        raise invalid(f"{where}.{parameters} must be an object", f"{where}.{parameters}")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if schema is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


def text_of(content: object, types: tuple[str, ...], where: str) -> str:
    """A string, or the text of a list of parts, joined. Raises RequestError 400 for any other part."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of parts", where)
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
            raise invalid(f"{where}: only parts of type {' or '.join(types)} are supported", where)
        texts.append(part["text"])
    return "".join(texts)


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
