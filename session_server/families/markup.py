"""Answers whose reasoning and calls stand between marks: `<think>` ... `</think>`, `<tool_call>` ... `</tool_call>`.

Invariant: a parser tells text as soon as it cannot be markup and never later than at the answer's end; markup that is
malformed or not complete is content, as the model wrote it, so nothing of an answer is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from session_server.answers import CallIds, Delta


class Call(NamedTuple):
    """A call as the model wrote it. call_id: "" if it gave none."""

    name: str
    arguments: str
    call_id: str = ""


ReadCalls = Callable[[str], list[Call] | None]
"""The calls that a body between call marks makes; None if it is malformed."""


@dataclass(frozen=True, slots=True)
class Marks:
    """call_close: "" if a call ends where the next begins or the answer ends. wrappers: marks around calls, not shown.
    inner: marks inside a call's body."""

    read: ReadCalls
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    wrappers: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    think_open: str = "<think>"
    think_close: str = "</think>"


class MarkupParser:
    """One answer; `begun`: the prompt has opened the reasoning. White space around reasoning and before calls belongs
    to the markup."""

    def __init__(self, marks: Marks, begun: bool, tools: bool, call_id: CallIds) -> None:
        self._marks, self._call_id = marks, call_id
        self._in_content = (marks.call_open, *marks.wrappers) if tools else ()
        self._state: Literal["start", "thought", "answer", "content", "call"] = "start"
        self._held = ""
        self._gap = ""  # white space before a call, shown after all if the call turns out to be none
        self._calls = 0
        self._begun = begun
        if begun:
            self._state = "thought"

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        told: list[Delta] = []
        while self._step(told):
            pass
        return told

    def end(self) -> list[Delta]:
        held, self._held = self._held, ""
        if self._state == "call":
            return self._close(held, "")
        if self._state == "thought" or (self._calls and not held.strip()):
            held = held.rstrip()
        return self._tell("reasoning" if self._state == "thought" else "content", held)

    def _step(self, told: list[Delta]) -> bool:
        """Whether there may be more to tell of what is held."""
        match self._state:
            case "start":
                return self._start()
            case "thought":
                return self._thought(told)
            case "answer":
                self._held = self._held.lstrip()
                self._state = "content" if self._held else "answer"
                return bool(self._held)
            case "content":
                return self._content(told)
            case "call":
                return self._call(told)

    def _start(self) -> bool:
        begun, mark = self._held.lstrip(), self._marks.think_open
        if begun.startswith(mark):
            self._held, self._state = begun[len(mark) :], "thought"
            return True
        if mark.startswith(begun):
            return False
        self._state = "content"
        return True

    def _thought(self, told: list[Delta]) -> bool:
        marks = self._marks
        told_before = self._gap == "thought"
        if not told_before:
            self._held = self._held.lstrip()
            if self._begun and self._held.startswith(marks.think_open):  # said again by the model
                self._held = self._held[len(marks.think_open) :].lstrip()
            if not self._held or (self._begun and marks.think_open.startswith(self._held)):
                return False
        at = self._held.find(marks.think_close)
        if at < 0:
            end = _safe_end(self._held, (marks.think_close,))
            if end:
                self._gap = "thought"
            told += self._tell("reasoning", self._take(end))
            return False
        told += self._tell("reasoning", self._take(at).rstrip())
        self._held, self._state, self._gap = self._held[len(marks.think_close) :], "answer", ""
        return True

    def _content(self, told: list[Delta]) -> bool:
        found = [(at, mark) for mark in self._in_content if (at := self._held.find(mark)) >= 0]
        if not found:
            told += self._tell("content", self._take(_safe_end(self._held, self._in_content)))
            return False
        at, mark = min(found)
        before = self._take(at)
        shown = before.rstrip()
        told += self._tell("content", shown)
        self._held = self._held[len(mark) :]
        if mark == self._marks.call_open:
            self._gap, self._state = before[len(shown) :], "call"
        return True

    def _call(self, told: list[Delta]) -> bool:
        close = self._marks.call_close
        at = self._held.find(close or self._marks.call_open)
        if at < 0:
            return False
        told += self._close(self._take(at), close)
        self._held, self._state = self._held[len(close) :], "content"
        return True

    def _close(self, body: str, close: str) -> list[Delta]:
        """The calls of a body that has ended; text if it makes none."""
        whole = close == self._marks.call_close
        calls = self._marks.read(body) if whole else None
        if calls is None:
            return self._tell("content", f"{self._gap}{self._marks.call_open}{body}{close}")
        told = []
        for call in calls:
            call_id = call.call_id or self._call_id(self._calls)
            told.append(Delta("call", call.arguments, self._calls, call_id, call.name))
            self._calls += 1
        return told

    def _take(self, end: int) -> str:
        piece, self._held = self._held[:end], self._held[end:]
        return piece

    def _tell(self, kind: Literal["reasoning", "content"], text: str) -> list[Delta]:
        return [Delta(kind, text)] if text else []


def _safe_end(text: str, marks: Sequence[str]) -> int:
    """Length of the part of `text` that neither begins a mark nor is white space that a mark may follow."""
    if not marks:
        return len(text)
    end = len(text)
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:size]):
                end = min(end, len(text) - size)
                break
    return len(text[:end].rstrip())


def read_json_call(body: str) -> list[Call] | None:
    """{"name": ..., "arguments": {...}}"""
    try:
        call = _of_object(json.loads(body))
    except ValueError:
        return None
    return [call] if call is not None else None


def _of_object(found: object) -> Call | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments, call_id = found.get("arguments", {}), found.get("id", "")
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(found["name"], spelled, call_id if isinstance(call_id, str) else "")


def read_json_calls(body: str) -> list[Call] | None:
    """A list of calls as JSON objects, or one call as `name[ARGS]{...}`, perhaps with `[CALL_ID]id` after the name."""
    text = body.strip()
    if not text.startswith("["):
        head, sep, arguments = text.partition("[ARGS]")
        name, _, call_id = head.partition("[CALL_ID]")
        return [Call(name.strip(), arguments, call_id.strip())] if sep and name.strip() else None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    calls = [call for item in found if (call := _of_object(item)) is not None]
    return calls if calls and len(calls) == len(found) else None
