"""Token ids as JSON that is made once: a request repeats a session's whole history, and only its end is new.

Invariant: `json()` is the list of exactly these ids; a value never changes, `joined` gives another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

type Ids = Sequence[int] | NDArray[np.int32]


class EncodedIds(Sequence[int]):
    """As a sequence it is for what looks at ids now and then: reading one decodes all."""

    __slots__ = ("_count", "_text")

    def __init__(self, count: int = 0, text: bytes = b"") -> None:
        self._count, self._text = count, text

    @classmethod
    def of(cls, ids: Ids) -> EncodedIds:
        return ids if isinstance(ids, cls) else cls().joined([ids])

    def joined(self, more: Iterable[Ids]) -> EncodedIds:
        """These ids and then all of `more`."""
        count, texts = self._count, [self._text] if self._count else []
        for ids in more:
            if len(ids):
                plain = ids.tolist() if isinstance(ids, np.ndarray) else ids
                count += len(ids)
                texts.append(plain._text if isinstance(plain, EncodedIds) else msgspec.json.encode(plain)[1:-1])
        return EncodedIds(count, b",".join(texts))

    def json(self) -> bytes:
        return b"[%b]" % self._text

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return msgspec.json.decode(self.json(), type=list[int])[index]

    def __iter__(self) -> Any:
        return iter(self[:])


def encode_hook(value: object) -> msgspec.Raw:
    """For an encoder of something that holds EncodedIds."""
    if isinstance(value, EncodedIds):
        return msgspec.Raw(value.json())
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")
