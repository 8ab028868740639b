"""From output tokens to the assistant's message: text, stop strings, tool calls. Pure but for fresh tool-call ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from segue.ids import fresh_id
from session_server.model_text import ModelText

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
CALL_MARK = "<tool_call>"


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the stop strings."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def stop_over_seam(text: ModelText, output: Sequence[int], seam: int, stops: Sequence[str]) -> int | None:
    """Number of output tokens after which a stop string is complete that began before token `seam`; None if none is.

    The engine looked at the tokens from `seam` on by themselves, so only such a string can have escaped it.
    """
    if not stops or not 0 < seam < len(output):
        return None
    reach = max(map(len, stops))  # every token after the seam holds a character of the string
    for length in range(seam + 1, min(len(output), seam + reach) + 1):
        shown = text.decode(output[:length])
        if any(stop in shown for stop in stops):
            return length
    return None


def answer_message(
    text: ModelText, output: Sequence[int], stops: Sequence[str], *, tools: bool
) -> tuple[dict[str, Any], bool]:
    """The assistant's message, and whether it calls tools. `tools`: the request offered some."""
    content = cut_at_stop(text.decode(output), stops)
    calls = _tool_calls(content) if tools and CALL_MARK in content else []
    if not calls:
        return {"role": "assistant", "content": content}, False
    before = content[: content.index(CALL_MARK)].strip()
    return {"role": "assistant", "content": before, "tool_calls": calls}, True


def _tool_calls(content: str) -> list[dict[str, Any]]:
    """All calls in `content`, or none if one of them is malformed: half a set of calls would mislead the client."""
    calls: list[dict[str, Any]] = []
    for match in _CALL.finditer(content):
        try:
            call = json.loads(match[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, AttributeError):
            return []
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"id": fresh_id("call"), "type": "function", "function": {"name": name, "arguments": spelled}})
    return calls


class TextStream:
    """Text deltas of a growing output. What could still change is held back: bytes of an unfinished character, and
    text that may turn out to be the beginning of a stop string."""

    def __init__(self, text: ModelText, stops: Sequence[str]) -> None:
        self._text, self._stops = text, stops
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._from = 0
        self._read = 0
        self._shown = ""
        self._sent = 0

    def feed(self, output: Sequence[int]) -> str:
        """The next piece of text; `output` is everything so far."""
        before = self._text.decode(output[self._from : self._read])
        now = self._text.decode(output[self._from :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._shown += now[len(before) :]
            self._from, self._read = self._read, len(output)
        return self._release(len(cut_at_stop(self._shown, self._stops)) - self._hold)

    def rest(self, whole: str) -> str:
        """What is left to send of the final text. Raises ValueError if what was sent is not how it begins."""
        if not whole.startswith(self._shown[: self._sent]):
            raise ValueError("the answer was generated anew after parts of another had been streamed")
        self._shown = whole
        return self._release(len(whole))

    def _release(self, end: int) -> str:
        piece = self._shown[self._sent : max(end, self._sent)]
        self._sent += len(piece)
        return piece
