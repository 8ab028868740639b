"""Anthropic's Messages: a request body in, a message or its events out. Pure.

The conversation is the common one: `system` is its first message, a tool_result block is a message of role tool, a
tool_use block is a call whose arguments are an object. The object of a call that the session itself made is put back
into the model's own spelling, so that the turn is found again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from segue.errors import RequestError
from session_server.answers import Delta
from session_server.dialect import (
    Blocks,
    Head,
    Terms,
    TurnBody,
    flag,
    function_tool,
    model_name,
    named_event,
    parse_object,
    refuse,
    sampling_of,
    text_of,
    tool_list,
    tools_of,
)
from session_server.graph import Graph, Node
from session_server.http_errors import anthropic_error_body
from session_server.messages import check_count, invalid
from session_server.model_text import ModelText
from session_server.sampling import refuse_control_fields

_SPELLED = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "stop": "stop_sequences", "seed": "seed",
}  # fmt: skip
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "output_config": ({},),
    "output_format": (),
    "context_management": (),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NOT_AN_OBJECT = "arguments_text"
"""Key under which arguments are shown that are no JSON object, which `input` has to be."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request for a message."""

    turn: TurnBody

    def whole(self, node: Node, text: ModelText) -> bytes:
        message = node.messages[-1].raw
        reason, sequence = _ending(node, self.turn.sampling.stop, text)
        return orjson.dumps(
            {
                **_head(Head(node.turn_id, node.created_s, node.prompt_tokens), self.turn.model),
                "content": _blocks(message), "stop_reason": reason, "stop_sequence": sequence,
                "usage": _usage(node.prompt_tokens, len(node.tokens.output)),
            }
        )  # fmt: skip

    def stream(self, head: Head) -> MessageEvents:
        return MessageEvents(self, head)


def parse_messages_request(data: bytes, terms: Terms) -> MessagesRequest:
    """Raises RequestError 400 naming the field. Ignored: what only speaks of caching, billing and accounts, and
    `thinking`: reasoning is shown whenever the model's family tells it from the answer."""
    body = parse_object(data)
    refuse_control_fields(body)
    refuse(body, _UNSUPPORTED)
    if body.get("max_tokens") is None:
        raise invalid("'max_tokens' is needed", "max_tokens")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tool_list(body))]
    choice = _tool_choice(body.get("tool_choice"))
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], ("text",), "system")})
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid("'messages' must be a list with at least one message", "messages")
    check_count(given, "messages")
    spellings: dict[str, str] | None = None
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise invalid(f"{where}.role must be user or assistant", f"{where}.role")
        if message["role"] == "user":
            messages += _of_user(message.get("content"), f"{where}.content")
        else:
            if spellings is None:
                spellings = _spellings(terms.graph)
            messages.append(_of_assistant(message.get("content"), spellings, f"{where}.content"))
    if given[-1]["role"] == "assistant":
        raise invalid("the last message must be the user's: an answer cannot be begun for the model", "messages")
    turn = TurnBody(
        messages, tools_of(tools, terms), bool(tools) and choice != "none", model_name(body), flag(body, "stream"),
        sampling_of(body, terms, _SPELLED),
    )  # fmt: skip
    return MessagesRequest(turn)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in (None, "custom"):
        raise invalid(f"{where}.type: only tools that the client runs are supported", f"{where}.type")
    return function_tool(tool, "input_schema", where)


def _tool_choice(choice: object) -> str:
    if choice is None:
        return "auto"
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none"):
        raise invalid("'tool_choice' can be auto or none: the policy is not constrained", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        raise invalid("the policy is not constrained to one call", "tool_choice.disable_parallel_tool_use")
    return str(choice["type"])


def _of_user(content: object, where: str) -> list[dict[str, Any]]:
    """A user's message and the tool results in it, in their order."""
    if not isinstance(content, list):
        return [{"role": "user", "content": text_of(content, ("text",), where)}]
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            if texts:
                found.append({"role": "user", "content": "".join(texts)})
                texts = []
            result = text_of(block.get("content"), ("text",), f"{at}.content")
            found.append({"role": "tool", "tool_call_id": _id(block, "tool_use_id", at), "content": result})
        else:
            texts.append(text_of([block], ("text",), at))
    if texts or not found:
        found.append({"role": "user", "content": "".join(texts)})
    return found


def _of_assistant(content: object, spellings: Mapping[str, str], where: str) -> dict[str, Any]:
    if not isinstance(content, list):
        return {"role": "assistant", "content": text_of(content, ("text",), where)}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block, spellings, at))
        else:
            texts.append(text_of([block], ("text",), at))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], spellings: Mapping[str, str], where: str) -> dict[str, Any]:
    call_id, name, given = _id(block, "id", where), block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise invalid(f"{where} needs a name and an input object", where)
    spelled = spellings.get(call_id)
    arguments = spelled if spelled is not None and _input(spelled) == given else _dumps(given)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _id(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{name} must be a string", f"{where}.{name}")
    return value


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _spellings(graph: Graph) -> dict[str, str]:
    """Arguments as the model spelled them, by call id."""
    return {
        call["id"]: call["function"].get("arguments") or ""
        for node in graph.nodes
        for message in node.messages
        for call in message.raw.get("tool_calls") or ()
        if call.get("id")
    }


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that `input` has to be; what is none is shown as it stands."""
    try:
        value = orjson.loads(arguments) if arguments else {}
        orjson.dumps([[[value]]])
    except (orjson.JSONDecodeError, TypeError):  # TypeError: nested too deeply to be shown
        value = None
    return value if isinstance(value, dict) else {NOT_AN_OBJECT: arguments}


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text, "citations": None})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = _input(function.get("arguments") or "")
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _ending(node: Node, stops: tuple[str, ...], text: ModelText) -> tuple[str, str | None]:
    """stop_reason and stop_sequence. The stop string stands in the tokens though not in the message."""
    if node.finish_reason == "stop" and stops:
        shown = text.decode(node.tokens.output.tolist())
        found = [(at, stop) for stop in stops if (at := shown.find(stop)) >= 0]
        if found:
            return "stop_sequence", min(found)[1]
    return _STOP_REASONS.get(node.finish_reason, "end_turn"), None


def _usage(prompt: int, output: int) -> dict[str, int]:
    return {
        "input_tokens": prompt, "output_tokens": output, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0
    }  # fmt: skip


def _head(head: Head, model: str) -> dict[str, Any]:
    return {"id": f"msg_{head.suffix}", "type": "message", "role": "assistant", "model": model}


class MessageEvents(Blocks):
    """The events of one answer: message_start, blocks, message_delta, message_stop."""

    def __init__(self, request: MessagesRequest, head: Head) -> None:
        super().__init__()
        self._request, self._head = request, head

    def begin(self) -> bytes:
        message = {
            **_head(self._head, self._request.turn.model), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": _usage(self._head.prompt_tokens, 0),
        }  # fmt: skip
        return named_event("message_start", {"type": "message_start", "message": message})

    def opened(self, first: Delta) -> bytes:
        block: dict[str, Any]
        match first.kind:
            case "reasoning":
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case "content":
                block = {"type": "text", "text": "", "citations": None}
            case "call":
                block = {"type": "tool_use", "id": first.call_id, "name": first.name, "input": {}}
        return self._event("content_block_start", content_block=block)

    def piece(self, delta: Delta) -> bytes:
        match delta.kind:
            case "reasoning":
                told = {"type": "thinking_delta", "thinking": delta.text}
            case "content":
                told = {"type": "text_delta", "text": delta.text}
            case "call":
                return b""  # whole at its end: only then is it known to be an object
        return self._event("content_block_delta", delta=told)

    def closed(self, first: Delta, filled: str) -> bytes:
        events = b""
        if first.kind == "call" and filled:
            given = _input(filled)
            spelled = _dumps(given) if NOT_AN_OBJECT in given else filled
            events = self._event("content_block_delta", delta={"type": "input_json_delta", "partial_json": spelled})
        return events + self._event("content_block_stop")

    def end(self, node: Node, text: ModelText) -> bytes:
        reason, sequence = _ending(node, self._request.turn.sampling.stop, text)
        told = {
            "type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": {"output_tokens": len(node.tokens.output)},
        }  # fmt: skip
        return self.close() + named_event("message_delta", told) + named_event("message_stop", {"type": "message_stop"})

    def failed(self, error: RequestError) -> bytes:
        return named_event("error", anthropic_error_body(error))

    def _event(self, name: str, /, **fields: object) -> bytes:
        return named_event(name, {"type": name, "index": self.block, **fields})
