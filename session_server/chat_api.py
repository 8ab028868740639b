"""OpenAI's chat completions: a request body in, a completion or its chunks out. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from session_server.graph import Node
from session_server.messages import invalid, parse_messages
from session_server.model_text import ModelText
from session_server.sampling import Sampling, parse_sampling, refuse_control_fields

_NO_TOOLS = "chat"
"""Context of turns without tools."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    use_tools: bool
    """Whether calls in the answer are parsed (`tool_choice` is not "none")."""
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool
    sampling: Sampling

    @property
    def context(self) -> str:
        """What shapes the prompt beside the messages; turns of one path agree in it."""
        if not self.tools:
            return _NO_TOOLS
        return hashlib.sha256(orjson.dumps(self.tools, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises RequestError 400."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def parse_chat(data: bytes, *, purpose: str, temperature: float, renders_tools: bool) -> ChatBody:
    """Raises RequestError 400 naming the field; fields that mean nothing here are ignored."""
    body = parse_object(data)
    refuse_control_fields(body)
    sampling = parse_sampling(body, purpose=purpose, temperature=temperature)
    tools = _tools(body, renders_tools)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid("'stream_options' must be an object", "stream_options")
    return ChatBody(
        parse_messages(body.get("messages")), tools, bool(tools) and body.get("tool_choice") != "none",
        str(body.get("model") or "policy"), _flag(body, "stream"), bool(options and options.get("include_usage")),
        _flag(body, "logprobs"), sampling,
    )  # fmt: skip


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"'{name}' must be true or false", name)
    return bool(value)


def _tools(body: Mapping[str, Any], renders_tools: bool) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid("'tools' must be a list of objects", "tools")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise invalid("'tool_choice' can be auto or none: the policy is not constrained", "tool_choice")
    if not renders_tools:
        raise invalid("this model's chat template does not show tools to the model", "tools")
    return tools


def completion(node: Node, body: ChatBody, text: ModelText) -> bytes:
    """The chat.completion of a committed turn; the same node gives the same answer."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": node.messages[-1].raw,
        "finish_reason": node.finish_reason,
        "logprobs": _logprobs(node, text) if body.logprobs else None,
    }
    return orjson.dumps({**_head(node, body, "chat.completion"), "choices": [choice], "usage": usage(node)})


def usage(node: Node) -> dict[str, int]:
    output = len(node.tokens.output)
    return {
        "prompt_tokens": node.prompt_tokens, "completion_tokens": output, "total_tokens": node.prompt_tokens + output
    }  # fmt: skip


def _head(node: Node, body: ChatBody, kind: str) -> dict[str, Any]:
    return {"id": answer_id(node.turn_id), "object": kind, "created": node.created_s, "model": body.model}


def answer_id(turn_id: str) -> str:
    return "chatcmpl-" + turn_id.removeprefix("turn-")


def _logprobs(node: Node, text: ModelText) -> dict[str, Any]:
    entries = []
    for token_id, logprob in zip(node.tokens.output.tolist(), node.tokens.logprobs.tolist(), strict=True):
        token = text.decode([token_id], skip_special=False)
        entries.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


def delta_chunk(turn_id: str, created_s: int, body: ChatBody, delta: Mapping[str, object]) -> bytes:
    """A provisional piece of a streamed answer, as a server-sent event."""
    chunk = {
        "id": answer_id(turn_id), "object": "chat.completion.chunk", "created": created_s, "model": body.model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}],
    }  # fmt: skip
    return event(orjson.dumps(chunk))


def final_chunks(node: Node, created_s: int, body: ChatBody, rest: str, text: ModelText) -> Iterator[bytes]:
    """What follows the commit of a streamed turn: the rest of the text, tool calls, finish_reason, usage, [DONE]."""
    if rest:
        yield delta_chunk(node.turn_id, created_s, body, {"content": rest})
    calls = node.messages[-1].raw.get("tool_calls")
    if calls:
        numbered = [{"index": index, **call} for index, call in enumerate(calls)]
        yield delta_chunk(node.turn_id, created_s, body, {"tool_calls": numbered})
    head = {**_head(node, body, "chat.completion.chunk"), "created": created_s}
    logprobs = _logprobs(node, text) if body.logprobs else None
    choice = {"index": 0, "delta": {}, "finish_reason": node.finish_reason, "logprobs": logprobs}
    yield event(orjson.dumps({**head, "choices": [choice]}))
    if body.include_usage:
        yield event(orjson.dumps({**head, "choices": [], "usage": usage(node)}))
    yield event(b"[DONE]")


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
