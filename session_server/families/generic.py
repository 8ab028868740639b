"""Any chat template, best effort: what is appended is the text difference of two renders of a stand-in history.

Invariants: ids that a session holds stay as they are; appended messages are rendered after a short stand-in
conversation, never after the whole history, so a turn costs what it adds; text of a client never becomes a control
token. The seam: if the stored turn ended with the template's end token, what closes a message goes on after it;
otherwise (cut by length or by a stop string) the whole closing is added, as observation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from segue.errors import RequestError
from session_server.answers import CallIds, OutputFormat
from session_server.families.markup import Marks, MarkupParser, read_json_call
from session_server.model_text import ModelText

ChatMessage = Mapping[str, Any]
ANSWER = "Xq7Vk2"
"""Stands in every stand-in answer: found again in a render, it tells where the answer ends."""
STAND_IN: tuple[dict[str, Any], ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER})


class Generic:
    """The family that takes every template. `proved`: whether append-only was shown on the model's own template."""

    name: ClassVar[str] = "generic"
    proved: ClassVar[bool] = False
    control: ClassVar[tuple[str, ...]] = ()
    """Control tokens that the tokenizer does not call special."""

    def __init__(self, text: ModelText) -> None:
        self.text = text
        self.renders_tools = "tools" in text.template_text
        self._shield = text.shield(self.control)
        self._shows_developer = "developer" in text.template_text
        self._object_arguments = self._takes_object_arguments()
        self._base = text.render(STAND_IN, None, prompt=False)
        cut = self._base.rfind(ANSWER)
        self.closing = self._base[cut + len(ANSWER) :] if cut >= 0 else ""
        closing_ids = text.encode(self.closing) if self.closing else []
        self.end_id: int | None = closing_ids[0] if closing_ids and closing_ids[0] in text.end_ids else None
        asked = text.render(STAND_IN[:1], None, prompt=False)
        begun = text.render(STAND_IN[:1], None, prompt=True)
        self.begin = begun[len(asked) :] if begun.startswith(asked) else ""
        self.format = self.make_format()

    def make_format(self) -> OutputFormat:
        """How answers are parsed: reasoning in `<think>`, calls as JSON in `<tool_call>`."""
        return marked_format(self.text, Marks(read_json_call))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which an answer ends, beside those that the engine knows."""
        return () if self.end_id is None else (self.end_id,)

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[object] | None) -> list[int]:
        """The whole prompt of a first turn."""
        (shielded, shown_tools), veil = self._shield.over((self.shown(messages), tools))
        return self.text.encode(self.text.render(shielded, shown_tools, prompt=True), veil)

    def appended(
        self, last_id: int, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> list[int]:
        """What follows stored ids ending in `last_id`: the closing of `answer`, `messages`, the next answer's begin.

        Raises RequestError 400 for messages that the template does not take there.
        """
        (shielded, shown_tools), veil = self._shield.over((messages, tools))
        ids = self.text.encode(self.closing + self.suffix(answer, shielded, shown_tools), veil)
        return ids[1:] if ids and ids[0] == last_id == self.end_id else ids

    def suffix(
        self, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> str:
        """Text of `messages` and the next answer's begin, after a closed answer. Raises RequestError 400."""
        before = [*STAND_IN]
        if answer is not None and answer.get("tool_calls"):
            before[-1] = {**before[-1], "tool_calls": answer["tool_calls"]}
        return self.after(before, messages, tools)

    def after(
        self, before: Sequence[ChatMessage], messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> str:
        """What the template adds for `messages` and an answer's begin. The template may show `before` differently
        once something follows it (reasoning taken out, say), but not because of what follows."""
        base = self._base if not tools and before == [*STAND_IN] else self._render(before, tools, prompt=False)
        whole = self._render([*before, *messages], tools, prompt=True)
        if whole.startswith(base):
            return whole[len(base) :]
        cut, closing = whole.rfind(ANSWER), base[base.rfind(ANSWER) :]
        results = [message for message in messages if message["role"] == "tool"]
        passed = self._render([*before, *results, {"role": "user", "content": "b"}], tools, prompt=False)
        if cut < 0 or not passed.startswith(whole[:cut]) or not whole[cut:].startswith(closing):
            message = (
                "the model's chat template changes earlier text when these messages are appended, so they cannot "
                "follow tokens that are fixed"
            )
            raise RequestError(400, "invalid_request_error", message, "messages")
        return whole[cut + len(closing) :]

    def shown(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Messages as templates expect them: arguments of calls as objects, developers' messages as the system's if
        the template does not know the role."""
        if not any("tool_calls" in message or message["role"] == "developer" for message in messages):
            return messages
        return [self._shown_one(message) for message in messages]

    def _shown_one(self, message: ChatMessage) -> ChatMessage:
        if message["role"] == "developer" and not self._shows_developer:
            return {**message, "role": "system"}
        if not message.get("tool_calls"):
            return {key: value for key, value in message.items() if key != "tool_calls"}
        if not self._object_arguments:
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[object] | None, *, prompt: bool) -> str:
        return self.text.render(self.shown(messages), tools, prompt=prompt)

    def _takes_object_arguments(self) -> bool:
        call = {"id": "Zi0000000", "type": "function", "function": {"name": "f", "arguments": {}}}
        try:
            self.text.render((STAND_IN[0], {**STAND_IN[1], "tool_calls": [call]}), None, prompt=False)
        except RequestError:
            return False
        return True


def _object(arguments: object) -> object:
    """Arguments as an object; what is none stays the text that it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def marked_format(text: ModelText, marks: Marks) -> OutputFormat:
    """The format of answers with these marks, special tokens or not."""
    named = (marks.call_open, marks.call_close, *marks.wrappers, *marks.inner, marks.think_open, marks.think_close)
    keep = frozenset(i for mark in named if mark and (i := text.token_id(mark)) is not None) & text.special_ids

    def parser(begun: bool, tools: bool, call_id: CallIds) -> MarkupParser:
        return MarkupParser(marks, begun, tools, call_id)

    return OutputFormat(text, parser, keep, marks.think_open)
