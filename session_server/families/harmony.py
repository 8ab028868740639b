"""Harmony (gpt-oss): messages `<|start|>role<|channel|>...<|message|>text<|end|>`, several of them in one answer.

An answer ends with `<|return|>`, or with `<|call|>` if it calls a tool. The published template shows `<|end|>` in the
place of both once the conversation goes on, and drops reasoning; a session keeps what was generated. Invariant, proved
at construction: what is appended for questions and tool results is what the model's own template adds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from segue.errors import ConfigError, RequestError
from session_server.answers import CallIds, Delta, OutputFormat
from session_server.families.generic import ANSWER, STAND_IN, ChatMessage, Generic
from session_server.model_text import ModelText

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
_MARKS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
_FUNCTIONS = "functions."
_ROUGH = " \n\"é\u0301{'a': 1}\\n 漢字 👩🏽‍🚀 \n"


class Harmony(Generic):
    """Raises ConfigError if the tokenizer lacks a mark or the template is not harmony's."""

    name = "harmony"
    proved = True
    control = _MARKS

    def __init__(self, text: ModelText) -> None:
        ids = [text.token_id(mark) for mark in _MARKS]
        if None in ids or CHANNEL not in text.template_text:
            raise ConfigError(f"model.family '{self.name}': the tokenizer lacks one of {', '.join(_MARKS)}")
        super().__init__(text)
        self._ends = frozenset(text.token_id(mark) for mark in (END, RETURN, CALL))
        self._json_results = False
        self._prove()

    def make_format(self) -> OutputFormat:
        keep = frozenset(i for mark in _MARKS if (i := self.text.token_id(mark)) is not None)
        return OutputFormat(self.text, HarmonyParser, keep)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(i for mark in (RETURN, CALL) if (i := self.text.token_id(mark)) is not None)

    def appended(
        self, last_id: int, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> list[int]:
        shielded, veil = self._shield.over(messages)
        closing = "" if last_id in self._ends else END
        return self.text.encode(closing + self.suffix(answer, shielded, tools), veil)

    def suffix(
        self, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> str:
        calls = (answer or {}).get("tool_calls") or ()
        names = {call.get("id"): call["function"]["name"] for call in calls}
        parts: list[str] = []
        for message in messages:
            names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
            parts.append(self._block(message, names))
        return "".join(parts) + self.begin

    def shown(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """The template calls reasoning `thinking`."""
        return [
            {**message, "thinking": message["reasoning_content"]} if message.get("reasoning_content") else message
            for message in super().shown(messages)
        ]

    def _block(self, message: ChatMessage, names: dict[Any, str]) -> str:
        role, content = message["role"], message["content"]
        if role == "user":
            return f"{START}user{MESSAGE}{content}{END}"
        if role == "tool":
            name = names.get(message.get("tool_call_id")) or message.get("name")
            if not name:
                raise RequestError(400, "invalid_request_error", "a tool message answers no call", "messages")
            shown = json.dumps(content, ensure_ascii=False) if self._json_results else content
            return f"{START}{_FUNCTIONS}{name} to=assistant{CHANNEL}commentary{MESSAGE}{shown}{END}"
        if role == "assistant":
            said = f"{START}assistant{CHANNEL}final{MESSAGE}{content}{END}" if content else ""
            return said + "".join(
                f"{START}assistant to={_FUNCTIONS}{call['function']['name']}{CHANNEL}commentary json{MESSAGE}"
                f"{call['function'].get('arguments') or ''}{CALL}"
                for call in message.get("tool_calls") or ()
            )
        return f"{START}developer{MESSAGE}# Instructions\n\n{content}{END}"

    def _prove(self) -> None:
        call = {"id": "Zi0000000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        calling = [STAND_IN[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "content": _ROUGH, "tool_call_id": call["id"]}
        question = {"role": "user", "content": _ROUGH}
        try:
            base, whole = (self._render([*calling, *more], None, prompt=bool(more)) for more in ([], [result]))
            self._json_results = json.dumps(_ROUGH, ensure_ascii=False) in whole
            asked = self._render([*STAND_IN, question, STAND_IN[1], question], None, prompt=True)
        except RequestError as error:
            raise ConfigError(f"model.family '{self.name}': {error.message}") from error
        shown = END + self.suffix(None, [question], None)
        stored = asked[: asked.rfind(ANSWER) + len(ANSWER)]
        if asked != stored + shown or stored.count(shown) != 1:
            raise ConfigError(f"model.family '{self.name}': the template shows questions differently")
        if whole != base + self.suffix(calling[1], [result], None):
            raise ConfigError(f"model.family '{self.name}': the template shows tool results differently")
        encode = self.text.encode
        if encode(stored) + encode(shown) != encode(asked):
            raise ConfigError(f"model.family '{self.name}': the tokenizer joins text over the borders of messages")


_RECIPIENT = re.compile(r"to=([^\s<]+)")
_BORDER = re.compile("|".join(map(re.escape, (END, RETURN, CALL, START))))


class HarmonyParser:
    """One answer: analysis is reasoning, final and commentary are content, what goes to a function is a call."""

    def __init__(self, begun: bool, tools: bool, call_id: CallIds) -> None:
        del begun  # every message says its channel itself
        self._tools, self._call_id = tools, call_id
        self._held = ""
        self._kind: Literal["", "reasoning", "content", "call"] = ""  # "": in a header
        self._name = ""
        self._calls = 0
        self._told: set[str] = set()
        self._fresh = False  # nothing told of this message

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        told: list[Delta] = []
        while self._header() if not self._kind else self._body(told):
            pass
        return told

    def end(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._kind == "call":  # not complete, so it is none
            return self._tell("content", held)
        return self._tell(self._kind, held) if self._kind else []

    def _header(self) -> bool:
        head, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            return False
        self._held, self._fresh = rest, True
        recipient = _RECIPIENT.search(head)
        _, _, channel = head.rpartition(CHANNEL)
        if recipient is not None and self._tools:
            self._kind, self._name = "call", recipient[1].removeprefix(_FUNCTIONS)
        else:
            self._kind = "reasoning" if channel.lstrip().startswith("analysis") else "content"
        return True

    def _body(self, told: list[Delta]) -> bool:
        border = _BORDER.search(self._held)
        if border is None:
            if self._kind in ("reasoning", "content"):
                told += self._tell(self._kind, self._held[: (safe := _safe(self._held))])
                self._held = self._held[safe:]
            return False
        body, self._held = self._held[: border.start()], self._held[border.end() :]
        if self._kind == "call":
            told.append(Delta("call", body.strip(), self._calls, self._call_id(self._calls), self._name))
            self._calls += 1
        elif self._kind:
            told += self._tell(self._kind, body)
        self._kind = ""
        return True

    def _tell(self, kind: Literal["reasoning", "content", "call", ""], text: str) -> list[Delta]:
        if not text or kind not in ("reasoning", "content"):
            return []
        if self._fresh and kind in self._told:
            text = "\n" + text
        self._fresh = False
        self._told.add(kind)
        return [Delta(kind, text)]


def _safe(text: str) -> int:
    """Length of the part of `text` that does not begin a mark."""
    at = text.rfind("<|")
    if at >= 0 and "|>" not in text[at:] and len(text) - at < len(RETURN):
        return at
    return len(text) - 1 if text.endswith("<") else len(text)
