"""OpenAI's Responses: a request body in, a response or its events out. Pure.

The conversation is the common one: reasoning, message and function_call items that follow each other are one message
of the assistant. `previous_response_id` stands for the path of a committed turn; `instructions` is the conversation's
first message, and replaces the one that is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from segue.errors import RequestError
from session_server.answers import Delta, Shown
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
from session_server.messages import ROLES, check_count, invalid
from session_server.model_text import ModelText
from session_server.sampling import refuse_control_fields

_SPELLED = {
    "max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p", "top_logprobs": "top_logprobs",
    "stop": "stop", "seed": "seed",
}  # fmt: skip
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "background": (False,), "conversation": (), "prompt": (), "truncation": ("disabled",), "max_tool_calls": (),
    "include": ([], ["reasoning.encrypted_content"]),
}  # fmt: skip
_INPUT_TEXT = ("input_text", "output_text", "text")
_INCOMPLETE = {"length": "max_output_tokens"}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request for a response. `echoed`: fields of the request that stand in the response again."""

    turn: TurnBody
    echoed: Mapping[str, Any]

    def whole(self, node: Node, text: ModelText) -> bytes:
        return orjson.dumps(self.finished(node))

    def stream(self, head: Head) -> ResponseEvents:
        return ResponseEvents(self, head)

    def finished(self, node: Node) -> dict[str, Any]:
        """The response of a committed turn; the same node gives the same response."""
        head = Head(node.turn_id, node.created_s, node.prompt_tokens)
        reason = _INCOMPLETE.get(node.finish_reason)
        status = "incomplete" if reason else "completed"
        items = [
            _item(head, number, delta, delta.text, status)
            for number, delta in enumerate(Shown().rest(node.messages[-1].raw))
        ]
        return self.response(
            head, status, items, incomplete_details={"reason": reason} if reason else None,
            usage=_usage(node.prompt_tokens, len(node.tokens.output)),
        )  # fmt: skip

    def response(self, head: Head, status: str, output: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
        return {
            "id": f"resp_{head.suffix}", "object": "response", "created_at": head.created_s, "status": status,
            "model": self.turn.model, "error": None, "incomplete_details": None, "output": output, "usage": None,
            **self.echoed, **fields,
        }  # fmt: skip


def parse_response_request(data: bytes, terms: Terms) -> ResponseRequest:
    """Raises RequestError 400 naming the field. Ignored: `store` (every committed turn is kept as long as its session,
    and can be named by its id), what speaks of caching, billing and accounts."""
    body = parse_object(data)
    refuse_control_fields(body)
    refuse(body, _UNSUPPORTED)
    _check_text(body.get("text"))
    _check_reasoning(body.get("reasoning"))
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise invalid("'tool_choice' can be auto or none: the policy is not constrained", "tool_choice")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tool_list(body))]
    after = _previous(body.get("previous_response_id"), terms.graph)
    new = _messages_of(body.get("input"))
    before = [dict(m.raw) for node in after.path() for m in node.messages] if after is not None else []
    messages, followed = _instructed(body.get("instructions"), before, new)
    turn = TurnBody(
        messages, tools_of(tools, terms), bool(tools) and body.get("tool_choice") != "none", model_name(body),
        flag(body, "stream"), sampling_of(body, terms, _SPELLED), after if followed else None,
    )  # fmt: skip
    return ResponseRequest(turn, _echoed(body, turn))


def _check_text(text: object) -> None:
    if text is None:
        return
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(text, dict) or form not in (None, {"type": "text"}):
        raise invalid("'text.format' can be text only: the policy is not constrained", "text.format")


def _check_reasoning(reasoning: object) -> None:
    if reasoning is None:
        return
    if not isinstance(reasoning, dict) or reasoning.get("effort") is not None:
        raise invalid("'reasoning.effort' is not supported: the policy reasons as it was trained", "reasoning.effort")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"{where}.type: only function tools are supported", f"{where}.type")
    return function_tool(tool, "parameters", where)


def _previous(value: object, graph: Graph) -> Node | None:
    """The committed turn that `previous_response_id` names."""
    if value is None:
        return None
    node = graph.by_id.get("turn-" + value.removeprefix("resp_")) if isinstance(value, str) else None
    if node is None or not node.messages:
        raise invalid(f"the session has no response {value!r}", "previous_response_id")
    return node


def _instructed(
    instructions: object, before: list[dict[str, Any]], new: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """The whole conversation, and whether it goes on from the earlier turn as that stands."""
    if instructions is None:
        return before + new, bool(before)
    if not isinstance(instructions, str):
        raise invalid("'instructions' must be a string", "instructions")
    first = {"role": "system", "content": instructions}
    if before and before[0]["role"] == "system":
        same = before[0]["content"] == instructions
        return (before if same else [first, *before[1:]]) + new, same
    return [first, *before, *new], False


def _messages_of(given: object) -> list[dict[str, Any]]:
    """The messages of `input`. Items of one answer that follow each other become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("'input' must be a string or a list with at least one item", "input")
    check_count(given, "input")
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(f"{where} is not an object", where)
        field, value = _part(item, where)
        if field == "message":
            messages.append(value)
            answer = None
            continue
        # reasoning, then content, then calls: anything else begins the next answer
        if answer is None or (
            field != "tool_calls" and ("tool_calls" in answer or field in answer or field == "reasoning_content")
        ):
            answer = {"role": "assistant"}
            messages.append(answer)
        if field == "tool_calls":
            answer.setdefault("tool_calls", []).append(value)
        else:
            answer[field] = value
    for message in messages:
        message.setdefault("content", "")
    return messages


def _part(item: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """A whole message, or (field, value) of an assistant's message."""
    kind = item.get("type", "message")
    match kind:
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ROLES or role == "tool":
                raise invalid(f"{where}.role must be one of user, assistant, system, developer", f"{where}.role")
            content = text_of(item.get("content"), _INPUT_TEXT, f"{where}.content")
            return ("content", content) if role == "assistant" else ("message", {"role": role, "content": content})
        case "function_call":
            function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
            return "tool_calls", {"id": _string(item, "call_id", where), "type": "function", "function": function}
        case "function_call_output":
            output = text_of(item.get("output"), _INPUT_TEXT, f"{where}.output")
            return "message", {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output}
        case "reasoning":
            return "reasoning_content", text_of(item.get("content"), ("reasoning_text",), f"{where}.content")
        case _:
            raise invalid(f"{where}.type: items of type {kind} are not supported", f"{where}.type")


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name} must be a string", f"{where}.{name}")
    return value


def _echoed(body: Mapping[str, Any], turn: TurnBody) -> dict[str, Any]:
    usual: dict[str, object] = {
        "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
        "previous_response_id": None, "store": True, "tool_choice": "auto", "tools": [], "top_p": 1.0,
        "truncation": "disabled", "text": {"format": {"type": "text"}},
    }  # fmt: skip
    told = {name: body[name] if body.get(name) is not None else value for name, value in usual.items()}
    return {**told, "temperature": turn.sampling.temperature}


def _usage(prompt: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + output,
    }  # fmt: skip


def _item(head: Head, number: int, first: Delta, text: str, status: str) -> dict[str, Any]:
    """Output item `number`, which began with `first`, filled with `text`."""
    match first.kind:
        case "reasoning":
            content = [_content("reasoning", text)]
            return {"type": "reasoning", "id": f"rs_{head.suffix}_{number}", "summary": [], "content": content}
        case "content":
            return {
                "type": "message", "id": f"msg_{head.suffix}_{number}", "role": "assistant", "status": status,
                "content": [_content("content", text)],
            }  # fmt: skip
        case "call":
            return {
                "type": "function_call", "id": f"fc_{head.suffix}_{number}", "call_id": first.call_id,
                "name": first.name, "arguments": text, "status": status,
            }  # fmt: skip


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents(Blocks):
    """The events of one response, numbered: created, in_progress, items, completed (or incomplete, failed)."""

    def __init__(self, request: ResponseRequest, head: Head) -> None:
        super().__init__()
        self._request, self._head, self._number = request, head, -1

    def begin(self) -> bytes:
        begun = self._request.response(self._head, "in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def opened(self, first: Delta) -> bytes:
        item = _item(self._head, self.block, first, "", "in_progress")
        if first.kind == "call":
            return self._event("response.output_item.added", output_index=self.block, item=item)
        events = self._event("response.output_item.added", output_index=self.block, item={**item, "content": []})
        return events + self._of_part("response.content_part.added", first, part=_content(first.kind, ""))

    def piece(self, delta: Delta) -> bytes:
        match delta.kind:
            case "reasoning":
                return self._of_part("response.reasoning_text.delta", delta, delta=delta.text)
            case "content":
                return self._of_part("response.output_text.delta", delta, delta=delta.text, logprobs=[])
            case "call":
                return self._of_item("response.function_call_arguments.delta", delta, delta=delta.text)

    def closed(self, first: Delta, filled: str) -> bytes:
        item = _item(self._head, self.block, first, filled, "completed")
        match first.kind:
            case "reasoning":
                events = self._of_part("response.reasoning_text.done", first, text=filled)
            case "content":
                events = self._of_part("response.output_text.done", first, text=filled, logprobs=[])
            case "call":
                events = self._of_item(
                    "response.function_call_arguments.done", first, name=first.name, arguments=filled
                )
        if first.kind != "call":
            events += self._of_part("response.content_part.done", first, part=_content(first.kind, filled))
        return events + self._event("response.output_item.done", output_index=self.block, item=item)

    def end(self, node: Node, text: ModelText) -> bytes:
        whole = self._request.finished(node)
        return self.close() + self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: RequestError) -> bytes:
        told = {"code": error.kind, "message": error.message}
        return self._event("response.failed", response=self._request.response(self._head, "failed", [], error=told))

    def _of_part(self, name: str, first: Delta, /, **fields: object) -> bytes:
        return self._of_item(name, first, content_index=0, **fields)

    def _of_item(self, name: str, first: Delta, /, **fields: object) -> bytes:
        item_id = _item(self._head, self.block, first, "", "")["id"]
        return self._event(name, item_id=item_id, output_index=self.block, **fields)

    def _event(self, name: str, /, **fields: object) -> bytes:
        self._number += 1
        return named_event(name, {"type": name, "sequence_number": self._number, **fields})
