"""An open turn: what its engine requests have produced so far. Pure.

A turn that a pause cuts is carried on by further requests, each with everything so far as its prompt. Invariants: what
an engine returned is kept once and in order; version spans cover the output; the row ledger holds rows from 0 on
without a gap, each recorded once; a row that an engine had made and lost is recorded when it is made again, marked
ROW_RECOMPUTED. Where sampling is cut, the mask covers the output: a part that came back without its mask (aborted in
the engine's queue) counts as never sent, because its tokens could not be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from segue.errors import CodecError, EngineError
from segue.events.turn import Span
from segue.wire.engine import GenerateAnswer
from segue.wire.mask import SamplingMask
from segue.wire.rows import RowLedger, narrow
from segue.wire.sample import ROW_DECODED, ROW_RECOMPUTED


class Partial:
    """prompt_ids: everything before the turn's output. rows: ledger of the path it follows, None without R3.
    masked: each output token needs the set that it was chosen from."""

    def __init__(self, prompt_ids: Sequence[int], rows: RowLedger | None, *, masked: bool = False) -> None:
        self.prompt_ids = prompt_ids
        self.output: list[int] = []
        self.spans: list[Span] = []
        self.parts = 0
        self.rows = rows
        self._rows_before = rows
        self._logprobs: list[NDArray[np.float32]] = []
        self.masked = masked
        self._masks: list[SamplingMask] = []

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def rows_start(self) -> int:
        """First row that the next request asks for."""
        return self.rows.total if self.rows is not None else 0

    def logprobs(self) -> NDArray[np.float32]:
        """float32[len(output)]"""
        return np.concatenate(self._logprobs) if self._logprobs else np.empty(0, np.float32)

    def mask(self) -> SamplingMask | None:
        """Of the output's tokens; None if sampling is not cut."""
        return SamplingMask.join(self._masks) if self.masked else None

    def add(self, answer: GenerateAnswer) -> GenerateAnswer:
        """Keep what one request produced. Returns what was kept: all of it, or nothing if the mask it needs is lost.

        Raises EngineError (naming the row or token) for what contradicts what is held.
        """
        before = len(self.output)
        if answer.logprobs is None:
            raise EngineError(f"request {answer.rid}: the answer has no log-probs")
        if self.masked:
            if answer.mask is None:
                return replace(answer, output_ids=[], logprobs=answer.logprobs[:0], spans=(), rows=None)
            self._masks.append(answer.mask)
        if self.rows is not None and answer.rows is not None:
            self.rows = self._with_rows(self.rows, answer, before)
        self.output += answer.output_ids
        self._logprobs.append(answer.logprobs)
        for start, end, version in answer.spans:
            self._add_span(before + start, before + end, version)
        self.parts += 1
        return answer

    def drop(self) -> int:
        """Forget all that was produced, as if the turn had never been sent; returns the number of tokens dropped."""
        dropped = len(self.output)
        self.output, self.spans, self._logprobs, self._masks, self.parts = [], [], [], [], 0
        self.rows = self._rows_before
        return dropped

    def truncate(self, length: int) -> None:
        """Cut the output to its first `length` tokens (a stop string that was found over a seam)."""
        logprobs = self.logprobs()[:length]
        if (mask := self.mask()) is not None:
            self._masks = [mask.cut(0, length)]
        self.output = self.output[:length]
        self._logprobs = [logprobs]
        self.spans = [(start, min(end, length), version) for start, end, version in self.spans if start < length]
        end = max(0, self.prompt_tokens + length - 1)
        if self.rows is not None and self._rows_before is not None and self.rows.total > end:
            base = self._rows_before
            self.rows = base.append(base.total, *self.rows.slice(base.total, end))

    def fill_rows(self) -> None:
        """Mark rows that no engine will deliver any more as absent (the last part was cut in the engine's queue)."""
        end = max(0, self.prompt_tokens + len(self.output) - 1)
        if self.rows is not None and self.rows.total < end:
            self.rows = self.rows.append_absent(self.rows.total, end - self.rows.total)

    def _with_rows(self, ledger: RowLedger, answer: GenerateAnswer, before: int) -> RowLedger:
        assert answer.rows is not None
        start = ledger.total
        provenance = np.full(len(answer.rows), ROW_DECODED, np.uint8)
        # A kept token's row that is not held was made and lost: the engine has made it again, by another pass.
        if before:
            provenance[: max(0, self.prompt_tokens + before - 1 - start)] = ROW_RECOMPUTED
        if answer.num_retractions:
            last_span = answer.spans[-1][0] if len(answer.spans) > 1 else answer.completion_tokens
            provenance[: max(0, self.prompt_tokens + before + last_span - start)] = ROW_RECOMPUTED
        try:
            return ledger.append(start, narrow(answer.rows, ledger.experts), provenance)
        except CodecError as error:
            raise EngineError(f"request {answer.rid}: {error}") from error

    def _add_span(self, start: int, end: int, version: int) -> None:
        if self.spans and self.spans[-1][2] == version:
            self.spans[-1] = (self.spans[-1][0], end, version)
        else:
            self.spans.append((start, end, version))
