"""Keeps what a client wrote from becoming control tokens.

A tokenizer turns the spelling of a special token into the token wherever it stands, so a tool result with
`<|im_end|>` in it could end its own message and begin another in a role of its choice. Before a template renders
client text, a veil (a character that does not occur in it) is put into each such spelling; the encoder finds the
template's own control tokens around it, takes the veil out and encodes the client's text as plain text. Invariant:
without a control spelling in it, text goes the ordinary way and costs one search.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

_PRIVATE = range(0xF0000, 0xFFFFD)
T = TypeVar("T")


def any_of(spellings: Sequence[str]) -> re.Pattern[str]:
    """Finds the longest of `spellings` at the leftmost place."""
    ordered = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


@dataclass(frozen=True, slots=True)
class Shield:
    control: re.Pattern[str]

    def over(self, value: T) -> tuple[T, str]:
        """`value` with its strings veiled, and the veil; the same value and "" if there is nothing to veil."""
        search = self.control.search
        if not any(search(text) for text in _strings(value)):
            return value, ""
        used = set().union(*map(set, _strings(value)))
        veil = next(chr(code) for code in _PRIVATE if chr(code) not in used)
        return cast(T, self._veiled(value, veil)), veil

    def _veiled(self, value: object, veil: str) -> object:
        if isinstance(value, str):
            return self.control.sub(lambda found: found[0][0] + veil + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._veiled(key, veil): self._veiled(item, veil) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._veiled(item, veil) for item in value]
        return value


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
