"""OpenAI's chat completions: a request body in, a completion or its chunks out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from segue.errors import RequestError
from session_server.answers import Delta
from session_server.dialect import Head, Terms, TurnBody, event, flag, model_name, parse_object, tool_list, tools_of
from session_server.graph import Node
from session_server.http_errors import error_body
from session_server.messages import invalid, parse_messages
from session_server.model_text import ModelText
from session_server.sampling import parse_sampling, refuse_control_fields


@dataclass(frozen=True, slots=True)
class Chat:
    """A request for a chat completion."""

    turn: TurnBody
    include_usage: bool
    logprobs: bool

    def whole(self, node: Node, text: ModelText) -> bytes:
        """The chat.completion of a committed turn; the same node gives the same answer."""
        choice: dict[str, Any] = {
            "index": 0, "message": node.messages[-1].raw, "finish_reason": node.finish_reason,
            "logprobs": _logprobs(node, text) if self.logprobs else None,
        }  # fmt: skip
        head = {
            "id": answer_id(node.turn_id), "object": "chat.completion", "created": node.created_s,
            "model": self.turn.model,
        }  # fmt: skip
        return orjson.dumps({**head, "choices": [choice], "usage": usage(node)})

    def stream(self, head: Head) -> Chunks:
        return Chunks(self, head)


def parse_chat(data: bytes, terms: Terms) -> Chat:
    """Raises RequestError 400 naming the field; fields that mean nothing here are ignored."""
    body = parse_object(data)
    refuse_control_fields(body)
    sampling = parse_sampling(body, purpose=terms.purpose, temperature=terms.temperature, cuts=terms.cuts)
    tools = _tools(body, terms) if body.get("tools") else None
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid("'stream_options' must be an object", "stream_options")
    turn = TurnBody(
        parse_messages(body.get("messages")), tools, bool(tools) and body.get("tool_choice") != "none",
        model_name(body), flag(body, "stream"), sampling,
    )  # fmt: skip
    return Chat(turn, bool(options and options.get("include_usage")), flag(body, "logprobs"))


def _tools(body: Mapping[str, Any], terms: Terms) -> list[dict[str, Any]] | None:
    tools = tools_of(tool_list(body), terms)
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise invalid("'tool_choice' can be auto or none: the policy is not constrained", "tool_choice")
    return [_shown_tool(tool, index) for index, tool in enumerate(tools or ())]


def _shown_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    """The tool as the model is shown it. `strict` speaks to a constrained sampler, which the policy does not have."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"tools[{index}] must be a function with a name", f"tools[{index}]")
    if "strict" not in function:
        return tool
    return {**tool, "function": {key: value for key, value in function.items() if key != "strict"}}


def usage(node: Node) -> dict[str, int]:
    output = len(node.tokens.output)
    return {
        "prompt_tokens": node.prompt_tokens, "completion_tokens": output, "total_tokens": node.prompt_tokens + output
    }  # fmt: skip


def answer_id(turn_id: str) -> str:
    return "chatcmpl-" + turn_id.removeprefix("turn-")


def _logprobs(node: Node, text: ModelText) -> dict[str, Any]:
    entries = []
    for token_id, logprob in zip(node.tokens.output.tolist(), node.tokens.logprobs.tolist(), strict=True):
        token = text.decode([token_id], skip_special=False)
        entries.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


class Chunks:
    """The chat.completion.chunk events of one answer."""

    def __init__(self, chat: Chat, head: Head) -> None:
        self._chat = chat
        self._head = {
            "id": answer_id(head.turn_id), "object": "chat.completion.chunk", "created": head.created_s,
            "model": chat.turn.model,
        }  # fmt: skip
        self._calls = 0

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        match delta.kind:
            case "content":
                return self._chunk({"content": delta.text})
            case "reasoning":
                return self._chunk({"reasoning_content": delta.text})
            case "call":
                return self._chunk({"tool_calls": [self._call(delta)]})

    def end(self, node: Node, text: ModelText) -> bytes:
        """What follows the commit: finish_reason, usage, [DONE]."""
        logprobs = _logprobs(node, text) if self._chat.logprobs else None
        events = self._chunk({}, node.finish_reason, logprobs)
        if self._chat.include_usage:
            events += event(orjson.dumps({**self._head, "choices": [], "usage": usage(node)}))
        return events + event(b"[DONE]")

    def failed(self, error: RequestError) -> bytes:
        return event(orjson.dumps(error_body(error)))

    def _call(self, delta: Delta) -> dict[str, Any]:
        if delta.number < self._calls:
            return {"index": delta.number, "function": {"arguments": delta.text}}
        self._calls = delta.number + 1
        function = {"name": delta.name, "arguments": delta.text}
        return {"index": delta.number, "id": delta.call_id, "type": "function", "function": function}

    def _chunk(self, delta: Mapping[str, object], finish_reason: str | None = None, logprobs: object = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return event(orjson.dumps({**self._head, "choices": [choice]}))
