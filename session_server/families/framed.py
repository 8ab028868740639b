"""Families whose template puts fixed text around contents: learned once for each sequence of roles, and proved.

Invariant: what is appended is exactly what the model's own template adds, byte for byte and token for token, whatever
the contents and whatever went before. Each frame is shown to hold before it is used: contents appear as they are and
once; what went before stays; the same messages add the same text later in a conversation; the tokens of history and
frame are those of the whole. A sequence of roles for which this does not hold is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from segue.errors import ConfigError, RequestError
from session_server.families.generic import ANSWER, STAND_IN, ChatMessage, Generic
from session_server.model_text import ModelText

_SLOT = re.compile(r"Z([cin])(\d{7})")
_FIELDS = {"c": "content", "i": "tool_call_id", "n": "name"}
_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Tool-call ids that every template takes as they are."""
_ROUGH = " \n\t\"é\u0301{'a': 1}\\n 漢字 👩🏽‍🚀 \n"
"""Content that a template would change if it changed any."""
MAX_FRAMES = 512


@dataclass(frozen=True, slots=True)
class Frame:
    """Text around slots: pieces[0], slot 0, pieces[1] ... A slot is a field of the n-th message."""

    pieces: tuple[str, ...]
    slots: tuple[tuple[int, str], ...]

    def fill(self, messages: Sequence[ChatMessage]) -> str | None:
        """None if a slot's field is missing or is no text that the frame was proved with."""
        parts = [self.pieces[0]]
        for (index, field), piece in zip(self.slots, self.pieces[1:], strict=True):
            value = messages[index].get(field)
            if not isinstance(value, str) or (field == "tool_call_id" and not _ID.fullmatch(value)):
                return None
            parts += (value, piece)
        return "".join(parts)


class Framed(Generic):
    """Raises ConfigError if the tokenizer lacks one of `marks` or the template does not prove to be of this kind."""

    proved = True
    marks: ClassVar[tuple[str, ...]] = ()
    """Each must be one token."""
    required: ClassVar[tuple[tuple[str, ...], ...]] = (("user",),)
    """Sequences of roles that the template must take."""

    def __init__(self, text: ModelText) -> None:
        for mark in self.marks:
            if text.token_id(mark) is None:
                raise ConfigError(f"model.family '{self.name}': the tokenizer has no {mark}")
        super().__init__(text)
        if self.end_id is None:
            raise ConfigError(f"model.family '{self.name}': the template closes a message with {self.closing!r}")
        self._frames: dict[tuple[str, ...], Frame] = {}
        for shape in self.required:
            try:
                self._frame(shape)
            except RequestError as error:
                raise ConfigError(f"model.family '{self.name}': {' + '.join(shape)}: {error.message}") from error

    def suffix(
        self, answer: ChatMessage | None, messages: Sequence[ChatMessage], tools: Sequence[object] | None
    ) -> str:
        if any(message.get("tool_calls") or message.get("reasoning_content") for message in messages):
            return super().suffix(answer, messages, None)
        filled = self._frame(tuple(message["role"] for message in messages)).fill(messages)
        return super().suffix(answer, messages, None) if filled is None else filled

    def _frame(self, shape: tuple[str, ...]) -> Frame:
        frame = self._frames.get(shape)
        if frame is None:
            frame = self._learn(shape)
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            self._frames[shape] = frame
        return frame

    def _learn(self, shape: tuple[str, ...]) -> Frame:
        """Raises RequestError 400 if no frame holds for these roles."""
        before, probes = _history(shape), _probes(shape)
        added = self.after(before, probes, None)
        found = list(_SLOT.finditer(added))
        ends = [0, *(match.end() for match in found)]
        starts = [*(match.start() for match in found), len(added)]
        frame = Frame(
            tuple(added[end:start] for end, start in zip(ends, starts, strict=True)),
            tuple((int(match[2]), _FIELDS[match[1]]) for match in found),
        )
        contents = sorted(index for index, field in frame.slots if field == "content")
        if contents != list(range(len(shape))):
            raise _refused(shape, "does not show each message once")
        self._prove(frame, shape)
        return frame

    def _prove(self, frame: Frame, shape: tuple[str, ...]) -> None:
        before, rough = _history(shape), [{**probe, "content": _ROUGH} for probe in _probes(shape)]
        added = frame.fill(rough)
        if added is None or self.after(before, rough, None) != added:
            raise _refused(shape, "changes the contents of messages")
        later = [*before, *rough, before[-1]]
        if self.after(later, rough, None) != added:
            raise _refused(shape, "shows the same messages differently later in a conversation")
        whole = self.text.render(self.shown([*later, *rough]), None, prompt=True)
        encode = self.text.encode
        stored = whole[: whole.rfind(ANSWER) + len(ANSWER)]
        rest = whole[len(stored) :]
        if not rest.endswith(added) or encode(stored) + encode(rest) != encode(whole):
            raise _refused(shape, "or its tokenizer joins text over the borders of messages")


def _history(shape: tuple[str, ...]) -> list[dict[str, Any]]:
    """A conversation that these roles may follow; the answer calls tools if their results come first."""
    before = [*STAND_IN]
    results = next((index for index, role in enumerate(shape) if role != "tool"), len(shape))
    if results:
        arguments = f'{{"a": "{ANSWER}"}}'
        calls = [
            {"id": f"Zi{index:07d}", "type": "function", "function": {"name": "f", "arguments": arguments}}
            for index in range(results)
        ]
        before[-1] = {**before[-1], "tool_calls": calls}
    return before


def _probes(shape: tuple[str, ...]) -> list[dict[str, Any]]:
    probes = []
    for index, role in enumerate(shape):
        probe = {"role": role, "content": f"Zc{index:07d}"}
        if role == "tool":
            probe |= {"tool_call_id": f"Zi{index:07d}", "name": f"Zn{index:07d}"}
        probes.append(probe)
    return probes


def _refused(shape: tuple[str, ...], why: str) -> RequestError:
    message = f"messages of {', '.join(shape)} cannot follow an answer: the model's chat template {why}"
    return RequestError(400, "invalid_request_error", message, "messages")
