"""Which leaves of a session become samples, and which of their tokens train: two pure, replaceable steps.

The default keeps every leaf that was delivered and not passed over (`Graph.leaves`), and lets a completion that several
leaves share train in the first of them only (`newest_only` besides leaves out what older weights sampled of a turn that
was carried on). A configuration may name others as "module:function"; both get data that nobody else changes, run off
the event loop, and may import anything but must not wait for anything.

Invariants, whoever wrote the steps (`check` proves them, a breach is a 422 that names the step): leaves are nodes of
the session, each once; a sample keeps its tokens, its identity and the rollout's one reward; only what was sampled
trains, and no token trains twice in a rollout.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from segue.errors import ConfigError, RequestError
from segue.wire.mask import SamplingMask
from segue.wire.sample import Sample
from session_server.graph import Graph, Node


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A leaf's sample in which every completion still trains. path: its turns, the root first; places: where the
    output of each lies in the tokens, half-open."""

    leaf: Node
    path: tuple[Node, ...]
    places: tuple[tuple[int, int], ...]
    sample: Sample


Select = Callable[[Graph], Sequence[Node]]
"""The leaves to train on, in the order of their samples."""
Finish = Callable[[Sequence[Draft]], Sequence[Sample]]
"""The samples of a rollout, each one's tokens unchanged and its loss mask no wider than the draft's."""


def delivered_leaves(graph: Graph) -> Sequence[Node]:
    return graph.leaves()


def shared_once(drafts: Sequence[Draft]) -> Sequence[Sample]:
    """A completion that several leaves share trains in the first of them only."""
    owned: set[str] = set()
    samples = []
    for draft in drafts:
        shared = [place for node, place in zip(draft.path, draft.places, strict=True) if node.turn_id in owned]
        samples.append(untrained(draft.sample, shared))
        owned |= {node.turn_id for node in draft.path}
    return samples


def newest_only(drafts: Sequence[Draft]) -> Sequence[Sample]:
    """As `shared_once`; and of a turn that several weight versions sampled, only the last one's tokens train."""
    samples = []
    for draft, sample in zip(drafts, shared_once(drafts), strict=True):
        older = [
            (begin, begin + node.tokens.spans[-1][0])
            for node, (begin, _) in zip(draft.path, draft.places, strict=True)
            if len(node.tokens.spans) > 1
        ]
        samples.append(untrained(sample, older))
    return samples


def untrained(sample: Sample, places: Sequence[tuple[int, int]]) -> Sample:
    """The sample with the tokens of `places` as mere context: mask 0, log-prob 0, no turn, forced."""
    if not places:
        return sample
    drop = np.zeros(len(sample.tokens), np.bool_)
    for start, end in places:
        drop[start:end] = True
    mask = sample.mask
    if mask is not None:
        borders = sorted({0, len(drop), *(at for place in places for at in place)})
        mask = SamplingMask.join(
            [
                SamplingMask.forced(sample.tokens[start:end]) if drop[start] else mask.cut(start, end)
                for start, end in itertools.pairwise(borders)
            ]
        )
    return replace(
        sample, mask=mask, loss_mask=np.where(drop, 0, sample.loss_mask).astype(np.uint8),
        logprobs=np.where(drop, 0, sample.logprobs).astype(np.float32),
        turn_index=np.where(drop, -1, sample.turn_index).astype(np.int32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    select: Select = delivered_leaves
    finish: Finish = shared_once

    @classmethod
    def load(cls, select: str, finish: str) -> Steps:
        """Each "module:function", or "" for the default. Raises ConfigError naming the option."""
        usual = cls()
        return cls(
            entry_point(select, "session_server.select_leaves") if select else usual.select,
            entry_point(finish, "session_server.finish_samples") if finish else usual.finish,
        )

    def leaves(self, graph: Graph) -> list[Node]:
        """Raises RequestError 422."""
        found = _run(self.select, graph)
        if any(not isinstance(node, Node) or graph.by_id.get(node.turn_id) is not node for node in found):
            raise _breach(self.select, "gave something that is no turn of the session")
        if len({node.turn_id for node in found}) != len(found):
            raise _breach(self.select, "gave one leaf twice")
        return found

    def samples(self, drafts: Sequence[Draft]) -> list[Sample]:
        """Those with a token that trains; the first, if none has one. Raises RequestError 422."""
        found = _run(self.finish, drafts)
        if any(not isinstance(sample, Sample) for sample in found):
            raise _breach(self.finish, "gave something that is no sample")
        if wrong := breach(drafts, found):
            raise _breach(self.finish, wrong)
        return [sample for sample in found if sample.loss_mask.any()] or found[:1]


def breach(drafts: Sequence[Draft], samples: Sequence[Sample]) -> str:
    """What of this module's invariants the samples break, "" if they keep all."""
    by_id = {draft.sample.sample_id: draft for draft in drafts}
    trained: dict[str, Any] = {}
    for sample in samples:
        draft = by_id.pop(sample.sample_id, None)
        if draft is None:
            return f"gave the sample {sample.sample_id} twice, or one that was never drafted"
        before = draft.sample
        if _identity(sample) != _identity(before) or not np.array_equal(sample.tokens, before.tokens):
            return f"changed tokens, reward or identity of sample {sample.sample_id}"
        wider = sample.loss_mask > before.loss_mask
        if wider.any():
            return f"trains token {int(wider.argmax())} of sample {sample.sample_id}, which was not sampled"
        for node, (start, end) in zip(draft.path, draft.places, strict=True):
            count = trained.setdefault(node.turn_id, np.zeros(end - start, np.int64))
            count += sample.loss_mask[start:end]
            if (count > 1).any():
                return f"trains token {start + int((count > 1).argmax())} of sample {sample.sample_id} a second time"
    return ""


def _identity(sample: Sample) -> tuple[object, ...]:
    return (
        sample.rollout_id, sample.session_id, sample.group_id, sample.member, sample.reward, sample.temperature,
    )  # fmt: skip


def entry_point(name: str, option: str) -> Callable[..., Any]:
    """The function that "module:function" names. Raises ConfigError naming the option."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} = {name!r} names no function (module:function): {error}") from error
    if not callable(found):
        raise ConfigError(f"{option} = {name!r} cannot be called")
    return found  # type: ignore[no-any-return]


def _run[T](step: Callable[[T], Sequence[Any]], given: T) -> list[Any]:
    try:
        return list(step(given))
    except Exception as error:
        raise _breach(step, f"failed: {type(error).__name__}: {error}") from error


def _breach(step: Callable[..., Any], what: str) -> RequestError:
    name = f"{getattr(step, '__module__', '?')}:{getattr(step, '__qualname__', type(step).__name__)}"
    return RequestError(422, "assembly_error", f"{name} {what}")
