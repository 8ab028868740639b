"""From a finished session to its training sample. Pure; may run in a thread, on a session that no longer changes.

One reward per rollout. For now one sample per rollout, from the deepest leaf that trains; `pick` is the place to
change that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from segue.errors import CodecError, RequestError
from segue.events.sample import RewardRecorded
from segue.events.session import SessionOpened
from segue.wire.sample import Sample
from session_server.graph import Graph, Node


def sample_id_of(rollout_id: str) -> str:
    return f"sample-{rollout_id}"


def pick(graph: Graph) -> Node | None:
    """The leaf that becomes the sample: the deepest that trains, of equals the latest; None if there is none."""
    return max(graph.leaves(), key=lambda node: (node.depth, node.order), default=None)


def turn_rewards(rewards: Iterable[RewardRecorded], path: Sequence[Node]) -> NDArray[np.float32]:
    """float32[turns of the path], NaN without a reward. Rewards number turns by commit; the last one counts."""
    by_order = {reward.turn: reward.value for reward in rewards if reward.turn >= 0}
    return np.array([by_order.get(node.order, math.nan) for node in path], np.float32)


def total_reward(rewards: Iterable[RewardRecorded]) -> float | None:
    """The rollout's reward: the last one given for the whole, else the mean of those of turns, None without any."""
    found = list(rewards)
    whole = [reward.value for reward in found if reward.turn < 0]
    if whole:
        return whole[-1]
    of_turns = {reward.turn: reward.value for reward in found}
    return sum(of_turns.values()) / len(of_turns) if of_turns else None


def assemble(
    opened: SessionOpened,
    leaf: Node,
    rewards: Sequence[RewardRecorded],
    metadata: Mapping[str, str],
    *,
    reward: float,
    max_tokens: int | None = None,
) -> Sample:
    """The sample of root -> `leaf`. max_tokens: keep only whole turns within this length.

    Raises RequestError 422 saying which token or row makes it impossible.
    """
    path = leaf.path()
    if max_tokens is not None:
        path = [node for node in path if node.total_tokens <= max_tokens]
    if not path:
        raise RequestError(422, "assembly_error", f"no turn fits into {max_tokens} tokens")
    n = path[-1].total_tokens
    tokens = np.empty(n, np.int32)
    mask, logprobs, turn_index = np.zeros(n, np.uint8), np.zeros(n, np.float32), np.full(n, -1, np.int32)
    spans: list[tuple[int, int, int]] = []
    at = 0
    for index, node in enumerate(path):
        begin = at + len(node.tokens.prompt)
        end = begin + len(node.tokens.output)
        tokens[at:begin], tokens[begin:end] = node.tokens.prompt, node.tokens.output
        mask[begin:end], logprobs[begin:end], turn_index[begin:end] = 1, node.tokens.logprobs, index
        spans += [(begin + start, begin + stop, version) for start, stop, version in node.tokens.spans]
        at = end
    routes, provenance = None, None
    rows = path[-1].rows
    if rows is not None:
        try:
            routes, provenance = rows.slice(0, rows.known_rows(n))
        except CodecError as error:
            raise RequestError(422, "assembly_error", str(error)) from error
    return Sample(
        sample_id=sample_id_of(opened.rollout_id),
        rollout_id=opened.rollout_id,
        session_id=opened.session_id,
        group_id=f"{opened.purpose}-{opened.group}",
        member=opened.member,
        reward=reward,
        temperature=opened.temperature,
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        turn_index=turn_index,
        version_spans=np.array(spans, np.int32).reshape(-1, 3),
        turn_rewards=turn_rewards(rewards, path),
        routes=routes,
        routes_provenance=provenance,
        metadata=dict(metadata),
    )
