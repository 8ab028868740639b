"""Route rows: which experts the engine chose for each token it was fed, held once and narrow.

A row belongs to a token *fed* to the model: n tokens have n - 1 rows of [layers, top_k], because the last sampled token
was never fed. Row i is that of token i.

Invariants of the ledger: rows lie without gap or overlap from 0 on; a row that is recorded is never replaced, whatever
the engine sends later, because a later pass chose with other weights than those that gave the log-probs; each row keeps
how it was made (ROW_*). A ledger is a value: `append` gives a new one that is linked to this one, so it costs what
the new rows cost, and branches of a session share their stem. What its rows are is all that is a value: where the rows
of a link lie, in memory or wherever `keep` says that they can be read again, may change under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segue.errors import CodecError
from segue.wire.sample import ROW_ABSENT, ROW_DECODED

type NarrowRows = NDArray[np.uint8] | NDArray[np.uint16]
"""[rows, layers, top_k]; widened to what the trainer needs as late as possible."""


def row_dtype(experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """uint8 up to 256 experts, else uint16. Raises CodecError for a number of experts that has no row dtype."""
    if not 0 < experts <= 65536:
        raise CodecError(f"rows of {experts} experts cannot be stored: there must be 1 to 65536")
    return np.dtype(np.uint8) if experts <= 256 else np.dtype(np.uint16)


def narrow(rows: NDArray[np.int32], experts: int) -> NarrowRows:
    """rows: int32[r, layers, top_k] as the engine sends them. Raises CodecError naming the first bad expert's row."""
    dtype = row_dtype(experts)
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise CodecError(f"route rows are {rows.dtype}{list(rows.shape)}, expected int32[rows, layers, top_k]")
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= experts):
        row, layer, choice = (int(axis[0]) for axis in np.nonzero((rows < 0) | (rows >= experts)))
        bad = int(rows[row, layer, choice])
        raise CodecError(f"route row {row}, layer {layer}: expert {bad} is not one of the model's {experts}")
    return rows.astype(np.uint8) if dtype == np.uint8 else rows.astype(np.uint16)


def increment(rows: NDArray[Any], *, start: int, tokens: int) -> NDArray[Any]:
    """The rows [start, tokens - 1) of an engine's answer that was asked for exactly those.

    tokens: prompt and output together. A full payload from row 0 is cut to what was asked for. Raises CodecError
    with the first row that is missing or too many.
    """
    total = max(0, tokens - 1)
    if len(rows) == total:
        return rows[start:]
    end = start + len(rows)
    if end != total:
        wrong = f"row {end} is missing" if end < total else f"row {total} belongs to no fed token"
        raise CodecError(
            f"the engine sent {len(rows)} route rows, expected {total - start} "
            f"(from row {start} on, for {tokens} tokens): {wrong}"
        )
    return rows


type Chunk = tuple[NarrowRows, NDArray[np.uint8]]
"""Rows [r, layers, top_k] and their provenance uint8[r]."""


@dataclass(slots=True, eq=False)
class _Link:
    """Rows [start, end) and those before. `held`: the rows while they are in memory; `read`: gets them back."""

    before: _Link | None
    start: int
    end: int
    held: Chunk | None
    read: Callable[[], Chunk] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowLedger:
    """The rows of one path through a session. layers, top_k, experts: of the model, the same for every row."""

    layers: int
    top_k: int
    experts: int
    _last: _Link | None = field(default=None, repr=False)

    @property
    def total(self) -> int:
        """Rows recorded, which is also the first row to ask the engine for."""
        return self._last.end if self._last is not None else 0

    def append(self, start: int, rows: NarrowRows, provenance: NDArray[np.uint8] | int = ROW_DECODED) -> RowLedger:
        """This ledger and `rows` from row `start` on, which must be `total`.

        rows: `row_dtype(experts)` [r, layers, top_k], copied; provenance: ROW_*, one for all or uint8[r].
        Raises CodecError for a gap, an overlap, a wrong shape, dtype or count, naming the row.
        """
        if start > self.total:
            raise CodecError(f"route rows {self.total} to {start - 1} are missing: the next ones start at {start}")
        if start < self.total:
            raise CodecError(f"route row {start} is recorded already: {self.total} rows are, and recorded rows stay")
        if rows.dtype != row_dtype(self.experts) or rows.ndim != 3 or rows.shape[1:] != (self.layers, self.top_k):
            expected = f"{row_dtype(self.experts)}[rows, {self.layers}, {self.top_k}]"
            raise CodecError(f"route rows from {start} are {rows.dtype}{list(rows.shape)}, expected {expected}")
        made = np.full(len(rows), provenance, np.uint8) if isinstance(provenance, int) else provenance.copy()
        if made.dtype != np.uint8 or made.shape != (len(rows),):
            raise CodecError(f"{len(rows)} route rows from {start} have the provenance {made.dtype}{list(made.shape)}")
        if (made > ROW_ABSENT).any():
            raise CodecError(f"route row {start + int((made > ROW_ABSENT).argmax())} has an unknown provenance")
        if len(rows) == 0:
            return self
        link = _Link(self._last, start, start + len(rows), (rows.copy(), made))
        return RowLedger(self.layers, self.top_k, self.experts, link)

    def append_absent(self, start: int, count: int) -> RowLedger:
        """This ledger and `count` rows that the engine did not give: zeros, marked ROW_ABSENT. Raises as `append`."""
        return self.append(start, self._zeros(count), ROW_ABSENT)

    def known_rows(self, committed_tokens: int) -> int:
        """Rows that so many committed tokens have. Raises CodecError if the ledger does not hold just these."""
        rows = max(0, committed_tokens - 1)
        if rows != self.total:
            which = f"row {self.total} is missing" if self.total < rows else f"row {rows} belongs to no fed token"
            raise CodecError(
                f"{committed_tokens} committed tokens have {rows} route rows, recorded are {self.total}: {which}"
            )
        return rows

    def slice(self, start: int, end: int) -> Chunk:
        """Rows [start, end) and their provenance, copied together. Reads what is not in memory: not for an event loop.

        Raises CodecError beyond what is recorded or for rows that do not come back as they were, and what their
        reader raises.
        """
        if not 0 <= start <= end <= self.total:
            raise CodecError(f"route rows {start} to {end} are not all there: {self.total} are recorded")
        rows = self._zeros(end - start)
        provenance = np.empty(end - start, np.uint8)
        for link in self._links():
            if link.end <= start:
                break
            if link.start < end:
                begin, stop = max(start, link.start), min(end, link.end)
                found, made = self._read(link)
                rows[begin - start : stop - start] = found[begin - link.start : stop - link.start]
                provenance[begin - start : stop - start] = made[begin - link.start : stop - link.start]
        return rows, provenance

    def joined(self, start: int) -> RowLedger:
        """The same rows, those from `start` on in one link; `start` must be where a link starts. Raises CodecError."""
        if self._last is None or self._last.start == start:
            return self
        stem: _Link | None = self._last
        while stem is not None and stem.end > start:
            stem = stem.before
        ledger = RowLedger(self.layers, self.top_k, self.experts, stem)
        return ledger.append(start, *self.slice(start, self.total))

    def keep(self, read: Callable[[], Chunk]) -> None:
        """The rows of the last `append` can be had from `read` from now on, so `spill` may drop them."""
        if self._last is not None:
            self._last.read = read

    def spill(self) -> int:
        """Drop from memory the rows of the last `append`, if they can be read again; bytes that this gives back."""
        link = self._last
        if link is None or link.read is None or link.held is None:
            return 0
        freed = sum(array.nbytes for array in link.held)
        link.held = None
        return freed

    @property
    def held_bytes(self) -> int:
        """Memory of the rows of the whole path; what branches share counts in each."""
        return sum(array.nbytes for link in self._links() for array in link.held or ())

    def _links(self) -> Iterator[_Link]:
        """The last one first."""
        link = self._last
        while link is not None:
            yield link
            link = link.before

    def _read(self, link: _Link) -> Chunk:
        if link.held is not None:
            return link.held
        assert link.read is not None
        rows, provenance = link.read()
        shape = (link.end - link.start, self.layers, self.top_k)
        if rows.shape != shape or rows.dtype != row_dtype(self.experts) or provenance.shape != shape[:1]:
            raise CodecError(f"route rows {link.start} to {link.end} came back as {rows.dtype}{list(rows.shape)}")
        return rows, provenance

    def _zeros(self, count: int) -> NarrowRows:
        shape = count, self.layers, self.top_k
        return np.zeros(shape, np.uint8) if row_dtype(self.experts) == np.uint8 else np.zeros(shape, np.uint16)
