"""Chat messages as they come in, and when two of them count as the same.

Each mode compares one normal form. None, "" and [] are equal everywhere; a tool call's position index never counts.
What the policy said of its reasoning may be left out altogether when its message comes back: most clients cannot
send it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from segue.errors import RequestError

ChatMessage = Mapping[str, Any]
Comparison = Literal["strict", "tool_arguments", "role_content"]
MAX_MESSAGES = 16_384
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def parse_messages(given: object, param: str = "messages") -> list[dict[str, Any]]:
    """Validated messages with flat string contents. Raises RequestError 400 naming the field."""
    if not isinstance(given, list) or not given:
        raise invalid("messages must be a list with at least one message", param)
    check_count(given, param)
    return [_parse_one(message, f"{param}[{index}]") for index, message in enumerate(given)]


def check_count(given: list[Any], param: str) -> None:
    """Raise RequestError 400 for more messages than any conversation has."""
    if len(given) > MAX_MESSAGES:
        raise invalid(f"'{param}' may have at most {MAX_MESSAGES} entries", param)


def invalid(message: str, param: str | None = None) -> RequestError:
    return RequestError(400, "invalid_request_error", message, param)


def _parse_one(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"{where} is not an object", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
    calls = message.get("tool_calls")
    if calls:
        _check_calls(calls, f"{where}.tool_calls")
    if len(message) > 2:
        _check_rest(message, where)
    content = message.get("content")
    if isinstance(content, str):
        return message
    return {**message, "content": _flat(content, f"{where}.content")}


def _check_rest(message: Mapping[str, Any], where: str) -> None:
    """The fields beside role and content: texts where they are known, and all of them shallow enough to be stored."""
    for name in ("reasoning_content", "tool_call_id", "name"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{where}.{name} must be a string", f"{where}.{name}")
    try:
        orjson.dumps([message])
    except TypeError as error:  # nested too deeply
        raise invalid(f"{where}: {error}", where) from error


def _flat(content: object, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of parts", where)
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{where}: only parts of type text are supported", where)
        texts.append(part["text"])
    return "".join(texts)


def _check_calls(calls: object, where: str) -> None:
    if not isinstance(calls, list):
        raise invalid(f"{where} must be a list", where)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}: each call needs a function with a name", where)
        if not isinstance(function.get("arguments") or "", str):
            raise invalid(f"{where}: function.arguments must be a JSON string", where)
        if not isinstance(call.get("id") or "", str):
            raise invalid(f"{where}: id must be a string", where)


def normal_form(message: ChatMessage, mode: Comparison) -> tuple[object, ...]:
    """What of a message counts in comparisons, as one comparable value."""
    role, content = message["role"], message.get("content") or ""
    if mode == "role_content":
        return (role, content)
    calls = tuple(_call_form(call, mode) for call in message.get("tool_calls") or ())
    return (
        role, content, message.get("reasoning_content") or "", calls, message.get("tool_call_id") or "",
        message.get("name") or "",
    )  # fmt: skip


def _call_form(call: Mapping[str, Any], mode: Comparison) -> tuple[object, ...]:
    function = call["function"]
    arguments = function.get("arguments") or ""
    if mode == "tool_arguments":
        arguments = _canonical_json(arguments)
    return (call.get("id") or "", function["name"], arguments)


def _canonical_json(text: str) -> str:
    """The same for equal JSON objects whatever their spelling; text that is not one JSON object stays as it is."""
    try:
        value = json.loads(text, parse_float=str, object_pairs_hook=_no_duplicates)
    except ValueError:
        return text
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _no_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _without_reasoning(form: tuple[object, ...]) -> tuple[object, ...]:
    return (*form[:2], "", *form[3:]) if len(form) > 2 else form


class Message:
    """A message of the graph. Holds the last other spelling that a client used for it, so that the next comparison
    of the same history is one comparison of dicts."""

    __slots__ = ("_mode", "_other", "form", "raw")

    def __init__(self, raw: ChatMessage, mode: Comparison) -> None:
        self.raw, self._mode = raw, mode
        self.form = normal_form(raw, mode)
        self._other: ChatMessage | None = None

    def same(self, other: ChatMessage) -> bool:
        if other == self.raw or (self._other is not None and other == self._other):
            return True
        form = normal_form(other, self._mode)
        if form != self.form and ("reasoning_content" in other or form != _without_reasoning(self.form)):
            return False
        self._other = other
        return True
