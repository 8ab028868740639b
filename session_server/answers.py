"""From output tokens to the assistant's message, whole and piece by piece: text, stop strings, reasoning, tool calls.

Invariant: a message is the sum of its deltas, for one parser makes both; what has been told is never taken back, so
whatever could still become markup, the rest of a character or a stop string is held until it is known. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from session_server.model_text import ModelText


class Delta(NamedTuple):
    """A piece of an answer. A call begins with its first piece, which carries `call_id` and `name`."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    number: int = 0
    call_id: str = ""
    name: str = ""


@dataclass(slots=True)
class Shown:
    """How much of an answer has been told."""

    reasoning: str = ""
    content: str = ""
    calls: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> Delta:
        match delta.kind:
            case "reasoning":
                self.reasoning += delta.text
            case "content":
                self.content += delta.text
            case "call":
                if delta.number == len(self.calls):
                    self.calls.append("")
                self.calls[delta.number] += delta.text
        return delta

    def rest(self, message: Mapping[str, Any]) -> Iterator[Delta]:
        """What is left to tell of the final message. Raises ValueError if what was told is not how it begins."""
        calls = message.get("tool_calls") or []
        if len(self.calls) > len(calls):
            raise ValueError("a tool call was told that the answer does not have")
        if reasoning := _left(self.reasoning, message.get("reasoning_content") or ""):
            yield Delta("reasoning", reasoning)
        if content := _left(self.content, message.get("content") or ""):
            yield Delta("content", content)
        for index, call in enumerate(calls):
            known = index < len(self.calls)
            left = _left(self.calls[index] if known else "", call["function"].get("arguments") or "")
            if left or not known:
                yield Delta("call", left, index, call["id"], call["function"]["name"])


def _left(told: str, whole: str) -> str:
    if not whole.startswith(told):
        raise ValueError("the answer was generated anew after parts of another had been streamed")
    return whole[len(told) :]


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


class TextStream:
    """Text deltas of a growing output. What could still change is held back: bytes of an unfinished character, and
    text that may turn out to be the beginning of a stop string. keep: special tokens whose text is shown."""

    def __init__(self, text: ModelText, stops: Sequence[str], keep: frozenset[int] = frozenset()) -> None:
        self._text, self._stops, self._keep = text, stops, keep
        self._hold = max((len(stop) for stop in stops), default=1) - 1
        self._from = 0
        self._read = 0
        self._held = ""

    def feed(self, output: Sequence[int]) -> str:
        """The next piece of text; `output` is everything so far."""
        before = self._text.decode(output[self._from : self._read], keep=self._keep)
        now = self._text.decode(output[self._from :], keep=self._keep)
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._held += now[len(before) :]
            self._from, self._read = self._read, len(output)
        end = max(0, len(cut_at_stop(self._held, self._stops)) - self._hold)
        piece, self._held = self._held[:end], self._held[end:]
        return piece


class Parser(Protocol):
    """Tells one answer's reasoning, content and calls apart. `end` tells what was held back, at the answer's end."""

    def feed(self, text: str) -> list[Delta]: ...
    def end(self) -> list[Delta]: ...


PROMPT_END = 8
"""Tokens of a prompt in which the mark lies that opens reasoning."""
CallIds = Callable[[int], str]
"""The id of an answer's call by its index: the same whenever the answer is parsed."""


def call_ids(turn_id: str) -> CallIds:
    suffix = turn_id.removeprefix("turn-")
    return lambda index: f"call-{suffix}-{index}"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a family's model writes its answers.

    parser: makes one for an answer that begins inside reasoning or not; whether calls are looked for; their ids.
    keep: special tokens that are markup of an answer, where all others are left out of its text. think_open: what a
    prompt ends with if the answer begins inside reasoning, "" if no prompt does.
    """

    text: ModelText
    parser: Callable[[bool, bool, CallIds], Parser]
    keep: frozenset[int] = frozenset()
    think_open: str = ""

    def message(
        self, output: Sequence[int], stops: Sequence[str], *, prompt: Sequence[int], tools: bool, turn_id: str
    ) -> dict[str, Any]:
        """The assistant's message: role and content; reasoning_content and tool_calls if the answer has them.

        prompt: the tokens before the output, of which the last few count. tools: the request offered some. turn_id:
        names the calls, so that streamed and committed ids are the same.
        """
        parser = self.parser(self._begun(prompt), tools, call_ids(turn_id))
        deltas = parser.feed(cut_at_stop(self.text.decode(output, keep=self.keep), stops))
        return as_message([*deltas, *parser.end()])

    def stream(self, stops: Sequence[str], *, prompt: Sequence[int], tools: bool, turn_id: str) -> AnswerStream:
        """The same message piece by piece. What is held back at the end is `Shown.rest` of the message."""
        parser = self.parser(self._begun(prompt), tools, call_ids(turn_id))
        return AnswerStream(TextStream(self.text, stops, self.keep), parser)

    def _begun(self, prompt: Sequence[int]) -> bool:
        if not self.think_open:
            return False
        end = self.text.decode([int(i) for i in prompt[-PROMPT_END:]], skip_special=False)
        return end.rstrip().endswith(self.think_open)


class AnswerStream:
    """Deltas of a growing output, which add up to a beginning of the message that the whole output makes."""

    def __init__(self, text: TextStream, parser: Parser) -> None:
        self._text, self._parser = text, parser

    def feed(self, output: Sequence[int]) -> list[Delta]:
        """The next pieces, often none; `output` is everything so far."""
        piece = self._text.feed(output)
        return self._parser.feed(piece) if piece else []


def as_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message whose pieces these are."""
    shown = Shown()
    named: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        shown.add(delta)
        if delta.kind == "call":
            named.setdefault(delta.number, (delta.call_id, delta.name))
    message: dict[str, Any] = {"role": "assistant", "content": shown.content}
    if shown.reasoning:
        message["reasoning_content"] = shown.reasoning
    if shown.calls:
        message["tool_calls"] = [
            {"id": named[i][0], "type": "function", "function": {"name": named[i][1], "arguments": arguments}}
            for i, arguments in enumerate(shown.calls)
        ]
    return message
