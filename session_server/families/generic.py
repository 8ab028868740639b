"""Any chat template, best effort: what is appended is the text difference of two renders of a stand-in history.

Invariants: ids that a session holds stay as they are; appended messages are rendered after a short stand-in
conversation, never after the whole history, so a turn costs what it adds. The seam: if the stored turn ended with the
template's end token, what closes a message goes on after it; otherwise (cut by length or by a stop string) the whole
closing is added, as observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segue.errors import RequestError
from session_server.answers import CallIds, OutputFormat
from session_server.families.markup import Marks, MarkupParser, read_json_call
from session_server.model_text import ModelText

ChatMessage = Mapping[str, Any]
_ANSWER = "Xq7"
"""Content of the stand-in answer: found again in the render to learn how the template closes a message."""
STAND_IN: tuple[dict[str, str], ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER})


class Generic:
    """The family that takes every template. `proved`: whether append-only was shown on the model's own template."""

    name = "generic"
    proved = False

    def __init__(self, text: ModelText) -> None:
        self.text = text
        self.renders_tools = "tools" in text.template_text
        self._base = text.render(STAND_IN, None, prompt=False)
        cut = self._base.rfind(_ANSWER)
        self.closing = self._base[cut + len(_ANSWER) :] if cut >= 0 else ""
        closing_ids = text.encode(self.closing) if self.closing else []
        self.format = self.make_format()
        self.end_id: int | None = closing_ids[0] if closing_ids and closing_ids[0] in text.end_ids else None

    def make_format(self) -> OutputFormat:
        """How answers are parsed: reasoning in `<think>`, calls as JSON in `<tool_call>`."""
        marks = Marks(read_json_call, begins_in_reasoning=self.begin.rstrip().endswith("<think>"))
        return marked_format(self.text, marks)

    @property
    def begin(self) -> str:
        """What the template puts before an answer."""
        with_begin = self.text.render(STAND_IN[:1], None, prompt=True)
        return with_begin[len(self.text.render(STAND_IN[:1], None, prompt=False)) :]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which an answer ends, beside those that the engine knows."""
        return () if self.end_id is None else (self.end_id,)

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[object] | None) -> list[int]:
        """The whole prompt of a first turn."""
        return self.text.encode(self.text.render(messages, tools, prompt=True))

    def appended(
        self, last_id: int, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> list[int]:
        """What follows stored ids ending in `last_id`: the closing of `answer`, `messages`, the next answer's begin."""
        ids = self.text.encode(self.closing + self.suffix(answer, messages, tools))
        return ids[1:] if ids and ids[0] == last_id == self.end_id else ids

    def suffix(
        self, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> str:
        """Text of `messages` and the next answer's begin, after a closed answer. Raises RequestError 400."""
        before: list[ChatMessage] = list(STAND_IN)
        base = self._base
        if answer is not None and answer.get("tool_calls"):
            before[-1] = {"role": "assistant", "content": _ANSWER, "tool_calls": answer["tool_calls"]}
            base = self.text.render(before, tools, prompt=False)
        elif tools:
            base = self.text.render(before, tools, prompt=False)
        whole = self.text.render([*before, *messages], tools, prompt=True)
        if not whole.startswith(base):
            message = (
                "the model's chat template changes earlier text when these messages are appended, so they cannot "
                "follow tokens that are fixed"
            )
            raise RequestError(400, "invalid_request_error", message, "messages")
        return whole[len(base) :]


def marked_format(text: ModelText, marks: Marks) -> OutputFormat:
    """The format of answers with these marks, special tokens or not."""
    named = (marks.call_open, marks.call_close, *marks.wrappers, marks.think_open, marks.think_close)
    keep = frozenset(i for mark in named if mark and (i := text.token_id(mark)) is not None) & text.special_ids

    def parser(tools: bool, call_id: CallIds) -> MarkupParser:
        return MarkupParser(marks, tools, call_id)

    return OutputFormat(text, parser, keep)
