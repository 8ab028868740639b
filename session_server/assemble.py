"""From a session to its training samples: one for each leaf that trains. Pure, and run on a snapshot off the loop.

One rollout, one reward, one fact: however many leaves a session has, its samples go into one frame
(`segue.wire.sample.samples_to_bundle`) under one SampleReady. So a rollout is leased, counted, planned and released
once, and the controller knows nothing of leaves; the trainer unpacks the frame. A rollout weighs as one there, because
its reward enters its group once (advantages go by rollout id) and each of its tokens trains in one sample only.

Turns are numbered over the rollout, in the order of their commits, counting those that lie on some kept path. In a
session without branches that is the place along the path; with branches no two turns share a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from segue.errors import BlobError, CodecError, RequestError
from segue.events.sample import RewardRecorded
from segue.events.session import SessionOpened
from segue.wire.mask import SamplingMask
from segue.wire.sample import Sample, samples_to_bundle
from session_server.graph import Graph, Node
from session_server.selection import Draft, Steps


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """samples: those of the rollout, the first leaf's first; turns: the turns on their paths, in commit order."""

    samples: tuple[Sample, ...]
    turns: tuple[Node, ...]

    def frame(self, *, with_mask: bool) -> bytes:
        """Raises CodecError naming the token or row that breaks an invariant."""
        return samples_to_bundle(self.samples, with_mask=with_mask)


def sample_id_of(rollout_id: str) -> str:
    return f"sample-{rollout_id}"


def turn_rewards(rewards: Iterable[RewardRecorded], turns: Sequence[Node]) -> NDArray[np.float32]:
    """float32[turns], NaN without a reward. Rewards number turns by commit; the last one counts."""
    by_order = {reward.turn: reward.value for reward in rewards if reward.turn >= 0}
    return np.array([by_order.get(node.order, math.nan) for node in turns], np.float32)


def total_reward(rewards: Iterable[RewardRecorded]) -> float | None:
    """The rollout's reward: the last one given for the whole, else the mean of those of turns, None without any."""
    found = list(rewards)
    whole = [reward.value for reward in found if reward.turn < 0]
    if whole:
        return whole[-1]
    of_turns = {reward.turn: reward.value for reward in found}
    return sum(of_turns.values()) / len(of_turns) if of_turns else None


def assemble(
    opened: SessionOpened, graph: Graph, rewards: Sequence[RewardRecorded], metadata: Mapping[str, str], *,
    reward: float, max_tokens: int | None = None, steps: Steps | None = None,
) -> Assembled | None:  # fmt: skip
    """The samples of a session that no longer changes; None if no leaf trains.

    max_tokens: keep only whole turns within this length. Raises RequestError 422 saying which token or row makes it
    impossible. Reads rows that have left memory: not for an event loop.
    """
    steps = steps or Steps()
    leaves = steps.leaves(graph)
    if not leaves:
        return None
    paths = [(leaf, _within(leaf.path(), max_tokens)) for leaf in leaves]
    paths = _maximal([(leaf, path) for leaf, path in paths if path])
    if not paths:
        raise RequestError(422, "assembly_error", f"no turn fits into {max_tokens} tokens")
    turns = sorted({node.order: node for _, path in paths for node in path}.values(), key=lambda node: node.order)
    common = _Common(opened, turn_rewards(rewards, turns), reward, {node.order: at for at, node in enumerate(turns)})
    drafts = []
    for index, (leaf, path) in enumerate(paths):
        alone = len(paths) == 1
        own = dict(metadata) if alone else {**metadata, "leaf": leaf.turn_id}
        name = sample_id_of(opened.rollout_id) + ("" if alone else f".{index}")
        try:
            drafts.append(_draft(common, name, own, leaf, path))
        except (CodecError, BlobError) as error:
            raise RequestError(422, "assembly_error", str(error)) from error
    return Assembled(tuple(steps.samples(drafts)), tuple(turns))


def _within(path: Sequence[Node], max_tokens: int | None) -> tuple[Node, ...]:
    return tuple(node for node in path if max_tokens is None or node.total_tokens <= max_tokens)


def _maximal(paths: Sequence[tuple[Node, tuple[Node, ...]]]) -> list[tuple[Node, tuple[Node, ...]]]:
    """Without those that cutting has made a beginning of another, or the same."""
    ends: set[str] = set()
    inner = {node.turn_id for _, path in paths for node in path[:-1]}
    kept = []
    for leaf, path in paths:
        end = path[-1].turn_id
        if end not in inner and end not in ends:
            kept.append((leaf, path))
        ends.add(end)
    return kept


@dataclass(frozen=True, slots=True, eq=False)
class _Common:
    """What the samples of one rollout share. numbers: turn number by commit order."""

    opened: SessionOpened
    turn_rewards: NDArray[np.float32]
    reward: float
    numbers: Mapping[int, int]


def _draft(common: _Common, name: str, metadata: dict[str, str], leaf: Node, path: tuple[Node, ...]) -> Draft:
    """The sample of `path`, in which every output trains. Raises CodecError naming the row or token."""
    n = path[-1].total_tokens
    tokens = np.empty(n, np.int32)
    loss_mask, logprobs, turn_index = np.zeros(n, np.uint8), np.zeros(n, np.float32), np.full(n, -1, np.int32)
    spans: list[tuple[int, int, int]] = []
    places: list[tuple[int, int]] = []
    at = 0
    for node in path:
        own = node.tokens
        begin = at + len(own.prompt)
        end = begin + len(own.output)
        tokens[at:begin], tokens[begin:end] = own.prompt, own.output
        loss_mask[begin:end], logprobs[begin:end] = 1, own.logprobs
        turn_index[begin:end] = common.numbers[node.order]
        spans += [(begin + start, begin + stop, version) for start, stop, version in own.spans]
        places.append((begin, end))
        at = end
    rows = path[-1].rows
    routes, provenance = rows.slice(0, rows.known_rows(n)) if rows is not None else (None, None)
    opened = common.opened
    sample = Sample(
        sample_id=name,
        rollout_id=opened.rollout_id,
        session_id=opened.session_id,
        group_id=f"{opened.purpose}-{opened.group}",
        member=opened.member,
        reward=common.reward,
        temperature=opened.temperature,
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        turn_index=turn_index,
        version_spans=np.array(spans, np.int32).reshape(-1, 3),
        turn_rewards=common.turn_rewards,
        routes=routes,
        routes_provenance=provenance,
        metadata=metadata,
        mask=_mask(path),
    )
    return Draft(leaf, path, tuple(places), sample)


def _mask(path: Sequence[Node]) -> SamplingMask | None:
    """Of all tokens of a path, None if no turn has one. Raises CodecError if only some have."""
    having = [node.tokens.mask is not None for node in path]
    if not any(having):
        return None
    parts: list[SamplingMask] = []
    for node in path:
        if node.tokens.mask is None:
            raise CodecError(f"turn {node.turn_id} has no sampling mask, others of its path have")
        parts += [SamplingMask.forced(node.tokens.prompt), node.tokens.mask]
    return SamplingMask.join(parts)
